"""Builds an sdist and the wheel from it, and tries the wheel in a new environment without a compiler: `make wheel`.
The environment has only NumPy at first: kvcompress._C works without torch. Then this environment's torch is added.
Other Pythons from 3.10 on, in PATH or of pyenv, must load the wheel and give the same codes (stable ABI, abi3audit).

`make wheel CUDA=all` (or 90) includes the CUDA library, which the trial loads without needing a GPU.

`make wheels`: manylinux wheels (CPU only) for x86_64 and aarch64, compiled by zig cc against glibc 2.17, in
build/wheels; the aarch64 wheel is tried with qemu-user in the environment of aarch64.sh."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from record import record  # noqa: E402

OUT = ROOT / "build" / "wheel"
GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")
AARCH64 = ROOT / "build" / "aarch64" / "python"
WITHOUT_TORCH = """
import os, sys, numpy as np
sys.modules["torch"] = None
from kvcompress import _C, formats
import kvcompress
codes, scales = _C.quantize(np.ones((2, 32), np.float32), formats.CODES["int8"])
assert (codes == 255).all() and "site-packages" in _C.__file__
assert _C.isa() == os.environ.get("EXPECTED", _C.isa()), _C.isa()
print(kvcompress.__version__, _C.__version__, _C.isa())
"""
SAME_CODES = """
import hashlib, sys, numpy as np
sys.modules["torch"] = None
from kvcompress import _C, formats
rows, found = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32), hashlib.sha256()
for name in ("int8", "fp8_e4m3", "int4", "int3", "int2"):
    for part in _C.quantize(rows, formats.CODES[name]):
        found.update(np.asarray(part).tobytes())
print(found.hexdigest())
"""
CUDA = """
import ctypes, pathlib, kvcompress
library = ctypes.CDLL(str(pathlib.Path(kvcompress.__file__).with_name("libkvcompress_cuda.so")))
library.kvc_cuda_text.restype = ctypes.c_char_p
print(library.kvc_cuda_text(0).decode())
"""
WITH_TORCH = """
import torch, kvcompress
from kvcompress import ops

codes, scales = torch.ops.kvcompress.quantize(torch.ones(2, 32), 3)[:2]
print(torch.__version__, codes.shape)
"""


def call(*command: object, **options: object) -> str:
    return subprocess.run([str(x) for x in command], check=True, capture_output=True, text=True, **options).stdout  # type: ignore[call-overload,no-any-return]


def build(machine: str | None = None) -> Path:
    """The wheel of this machine, or a manylinux wheel for `machine`, built from an sdist."""
    shutil.rmtree(OUT, ignore_errors=True)
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", OUT, cwd=ROOT)
    (sdist,) = OUT.glob("*.tar.gz")
    env = os.environ | {"LDFLAGS": "-s"}  # without symbols, which are most of its size
    if machine:
        cc = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
        env |= {"CC": cc, "LDSHARED": f"{cc} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", OUT, sdist, cwd=OUT,
         env=env)  # fmt: skip
    (wheel,) = OUT.glob("*.whl")
    if not machine:
        return wheel
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    assert tag(wheel) == plat, tag(wheel)  # links only the C library, so there is nothing to repair
    name = call(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", plat, wheel).strip()
    return OUT / name


def tag(wheel: Path) -> str:
    said = call(sys.executable, "-m", "auditwheel", "show", wheel)
    return re.findall(r'following platform tag: "([^"]+)"', " ".join(said.split()))[0]


def linked(wheel: Path) -> dict[str, list[str]]:
    """The system libraries that each library of the wheel links."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in (x for x in archive.namelist() if x.endswith(".so")):
            said = call("readelf", "-d", archive.extract(name, OUT / "unpacked"))
            found[Path(name).name] = re.findall(r"NEEDED.*\[(.*)\]", said)
    return found


def trial(wheel: Path) -> str:
    """What the wheel reports in an environment without a compiler in PATH."""
    venv, tools = OUT / "venv", OUT / "bin"
    call(sys.executable, "-m", "venv", venv)
    tools.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC")} | {"PATH": str(tools)}
    level = call(sys.executable, "-c", "from kvcompress import _C; print(_C.isa())", cwd=ROOT).strip()
    env["EXPECTED"] = level  # other compilers must detect the same CPU features
    assert not any(shutil.which(cc, path=str(tools)) for cc in ("cc", "gcc", "clang"))
    call(venv / "bin/pip", "install", "-q", "--disable-pip-version-check", "numpy", env=env)
    call(venv / "bin/pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wheel, env=env)
    said = call(venv / "bin/python", "-c", WITHOUT_TORCH, env=env, cwd=OUT)
    if (OUT / "unpacked/kvcompress/libkvcompress_cuda.so").exists():
        call(venv / "bin/python", "-c", CUDA, env=env, cwd=OUT)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return said.strip() + "; " + call(venv / "bin/python", "-c", WITH_TORCH, env=env, cwd=OUT).strip()


def pythons() -> dict[str, str]:
    """Version and path of this Python and of each other minor version from 3.10 on."""
    found = {platform.python_version(): sys.executable}
    for minor in range(10, 20):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
        for path in filter(None, (shutil.which(f"python3.{minor}"), *map(str, pyenv))):
            said = subprocess.run([path, "-c", "import platform; print(platform.python_version())"],
                                  capture_output=True, text=True, check=False)  # fmt: skip
            if not said.returncode and said.stdout.split(".")[1] not in {x.split(".")[1] for x in found}:
                found[said.stdout.strip()] = path
    return found


def trial_pythons(wheel: Path) -> str:
    """The versions under which the wheel was tried; all give the same codes."""
    codes = {}
    for version, path in pythons().items():
        venv = OUT / f"python{version}"
        call(path, "-m", "venv", venv)
        call(venv / "bin/pip", "install", "-q", "--disable-pip-version-check", "numpy")
        call(venv / "bin/pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wheel)
        codes[version] = call(venv / "bin/python", "-c", SAME_CODES, cwd=OUT)
    assert len(set(codes.values())) == 1, codes
    return " ".join(codes)


def trial_aarch64(wheel: Path) -> str:
    """The same with qemu-user, without an installer."""
    if not AARCH64.exists():
        return "not run"
    folder = OUT / "site-packages"
    call(sys.executable, "-m", "zipfile", "-e", wheel, folder)
    env = os.environ | {"PYTHONPATH": str(folder), "EXPECTED": "i8mm"}
    return "; ".join(call(AARCH64, "-c", code, env=env, cwd=OUT).strip() for code in (WITHOUT_TORCH, WITH_TORCH))


def checked(wheel: Path, cuda: str) -> dict[str, list[str]]:
    """Checks the linked libraries: none of torch or C++."""
    needs = linked(wheel)
    assert ("libkvcompress_cuda.so" in needs) == (cuda != "off"), needs
    assert not [x for some in needs.values() for x in some if "torch" in x or "c10" in x or "cudart" in x], needs
    assert not [x for x in needs["_C.abi3.so"] if "stdc++" in x], needs
    call(sys.executable, "-m", "abi3audit", "--strict", wheel)
    return needs


def many() -> None:
    os.environ["KVCOMPRESS_CUDA"] = "off"
    kept = ROOT / "build" / "wheels"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for machine in MACHINES:
        wheel = build(machine)
        checked(wheel, "off")
        native = machine == platform.machine()
        said = trial(wheel) if native else trial_aarch64(wheel) if machine == "aarch64" else "not run"
        record(f"wheel_{machine}", "make wheels", wheel=wheel.name, kilobytes=wheel.stat().st_size // 1024, trial=said)
        shutil.copy(wheel, kept)
        print(wheel.name, "tried:", said)


def main() -> None:
    for module in ("build", "auditwheel", "abi3audit"):
        if subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, check=False).returncode:
            sys.exit(f"make wheel needs {module}: pip install -r requirements-tools.txt")
    if sys.argv[1:] == ["many"]:
        return many()
    wheel, cuda = build(), os.environ.get("KVCOMPRESS_CUDA", "off")
    needs = checked(wheel, cuda)
    name = "wheel" if cuda == "off" else "wheel_cuda"
    record(name, f"make wheel{'' if cuda == 'off' else f' CUDA={cuda}'}", wheel=wheel.name,
           kilobytes=wheel.stat().st_size // 1024, auditwheel_tag=tag(wheel),
           links="; ".join(f"{x}: {' '.join(y)}" for x, y in needs.items()), trial=trial(wheel),
           pythons=trial_pythons(wheel))  # fmt: skip


if __name__ == "__main__":
    main()
