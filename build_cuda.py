"""Builds kvcompress/libkvcompress_cuda.so: csrc/cuda with nvcc, no torch, no Python. `python build_cuda.py [which]`.

Which architectures: "all" (what a wheel holds, with PTX for families between and after), or numbers such as "90" or
"80,90" (a developer's build takes one: a minute or two). `setup.py` calls this when KVCOMPRESS_CUDA says which.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

ALL = ("80", "86", "89", "90", "100", "120")
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/core", "-Werror", "all-warnings", "-Xcompiler",
         "-fPIC,-Wall,-Wextra",
         "-Xcompiler", "-Wno-missing-field-initializers"]  # fmt: skip
LIBRARY = "kvcompress/libkvcompress_cuda.so"


def nvcc() -> str | None:
    """Path of nvcc: $NVCC, $CUDA_HOME/bin, PATH, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = os.environ.get("NVCC") or shutil.which("nvcc")
    return found or shutil.which("nvcc", path=os.path.join(home, "bin"))


def known(compiler: str) -> tuple[str, list[str]]:
    """An nvcc's release, and the architectures that it makes machine code for: CUDA 12.4's end at 90, 13's at 121."""
    said = [
        subprocess.run([compiler, option], capture_output=True, text=True, check=True).stdout
        for option in ("--version", "--list-gpu-code")
    ]
    return re.findall(r"release ([0-9.]+)", said[0])[0], re.findall(r"^sm_(\d+)$", said[1], re.MULTILINE)


def targets(wanted: str, known: Sequence[str] = ALL) -> tuple[list[str], list[str]]:
    """For "all" or a list of numbers: what gets machine code, of what nvcc knows, and what PTX: the last, and each
    before a family without code (sm_110 runs sm_100's), so that nothing from the first on is left out."""
    if wanted in ("all", "1"):
        names = [name for name in ALL if name in known]
    else:
        names = sorted(set(wanted.split(",")), key=lambda x: (len(x), x))
    if not names or any(name not in known or int(name) < 80 for name in names):
        raise SystemExit(
            "kvcompress: KVCOMPRESS_CUDA: expected all, off, or numbers from 80 such as 80,90 that this nvcc knows "
            f"({', '.join(name for name in known if int(name) >= 80)}); got {wanted}"
        )
    families = [int(name) // 10 for name in names]
    return names, [name for i, name in enumerate(names) if name == names[-1] or families[i + 1] > families[i] + 1]


def version() -> str:
    """As setup.py has it: the library belongs to a kvcompress of the same one."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "setup.py")) as file:
        return re.findall(r'^VERSION = "(.+)"$', file.read(), re.MULTILINE)[0]


def options(code: list[str], ptx: list[str]) -> list[str]:
    """nvcc's, with the library's own word about what it was built for."""
    said = " ".join([*(f"sm_{name}" for name in code), *(f"compute_{name}" for name in ptx)])
    kinds = [(name, "sm") for name in code] + [(name, "compute") for name in ptx]
    return [f"-gencode=arch=compute_{name},code={kind}_{name}" for name, kind in kinds] + [f'-DKVC_BUILT_FOR="{said}"']


def build(wanted: str, temporary: str = "build/cuda") -> str | None:
    """Compiles what is out of date and links. The library's path, or None (and a line) where it is not built."""
    if wanted in ("", "0", "off"):
        print("kvcompress: CUDA kernels left out (KVCOMPRESS_CUDA=all builds them, KVCOMPRESS_CUDA=90 for one GPU)")
        return None
    compiler = nvcc()
    if not compiler:
        print("kvcompress: CUDA kernels left out: no nvcc found (install CUDA 12.4 or later, or set NVCC or CUDA_HOME)")
        return None
    (release, code), start = known(compiler), time.time()
    flags = [*options(*targets(wanted, code)), f'-DKVC_VERSION="{version()}"']
    folder = os.path.join(temporary, f"{wanted.replace(',', '-')}-cuda{release}")
    os.makedirs(folder, exist_ok=True)
    headers = max(
        os.path.getmtime(p)
        for p in [*glob.glob("csrc/cuda/*h"), *glob.glob("csrc/core/**/*.[hd]*", recursive=True), __file__]
    )

    def compile_one(source: str) -> str:
        out = os.path.join(folder, os.path.basename(source).replace(".cu", ".o"))
        if not os.path.exists(out) or os.path.getmtime(out) < max(headers, os.path.getmtime(source)):
            done = subprocess.run([compiler, *FLAGS, *flags, "-c", source, "-o", f"{out}.new"], check=False)
            if done.returncode:
                raise SystemExit(f"kvcompress: nvcc failed on {source}")
            os.replace(f"{out}.new", out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the longest first
        sources = sorted(glob.glob("csrc/cuda/*.cu"), key=lambda p: ("256" not in p, "128" not in p, "64" not in p, p))
        objects = list(pool.map(compile_one, sources))
    subprocess.run([compiler, "-shared", "-cudart", "static", *flags[:1], "-o", LIBRARY, *objects], check=True)
    size = os.path.getsize(LIBRARY) / 2**20
    print(f"kvcompress: {LIBRARY}: {size:.1f} MiB for {wanted} with CUDA {release}, {time.time() - start:.0f} s")
    return LIBRARY


if __name__ == "__main__":
    build(sys.argv[1] if len(sys.argv) > 1 else "all")
