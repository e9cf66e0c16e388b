"""The C library as engines use it: built by make, used by the example, without Python."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_library_and_its_examples(tmp_path):
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    run("make", "-s", "install-lib", f"PREFIX={tmp_path}")
    exported = [line.split()[-1] for line in
                run("nm", "-D", "--defined-only", f"{tmp_path}/lib/libkvcompress.so").splitlines()]  # fmt: skip
    installed = sorted((tmp_path / "include/kvcompress").glob("*.h"))
    declared = "".join(header.read_text() for header in installed)
    assert exported and [name for name in exported if name + "(" not in declared] == []
    for library in ("libkvcompress.a", "libkvcompress.so"):
        for example, said in (("decode", ("blocks left 0", "kept  256")), ("engine", ("19 of them mixed", "18 of 18"))):
            program = f"{tmp_path}/{library}.{example}"
            run("cc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"examples/c/{example}.c",
                f"-I{tmp_path}/include", f"{tmp_path}/lib/{library}", f"-Wl,-rpath,{tmp_path}/lib", "-lm", "-lpthread",
                "-o", program)  # fmt: skip
            out = run(program)
            assert all(text in out for text in said)
    plain = tmp_path / "plain.cpp"
    headers = "".join(f"#include <kvcompress/{header.name}>\n" for header in installed)
    plain.write_text(headers + "int main() { return kvc_isa_available(0) == nullptr; }\n")
    run("c++", str(plain), f"-I{tmp_path}/include", f"{tmp_path}/lib/libkvcompress.a", "-lm", "-lpthread", "-o",
        str(tmp_path / "plain"))  # fmt: skip
    run(str(tmp_path / "plain"))
