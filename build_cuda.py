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


def targets(wanted: str) -> tuple[list[str], list[str]]:
    """For "all" or a list of numbers: what gets machine code, and what PTX: the last, and each before a family without
    code (sm_110 runs sm_100's), so that nothing from the first on is left out."""
    names = ALL if wanted in ("all", "1") else tuple(sorted(set(wanted.split(",")), key=lambda x: (len(x), x)))
    unknown = [name for name in names if not name.isdigit() or int(name) < 80]
    if unknown:
        raise SystemExit(
            f"kvcompress: KVCOMPRESS_CUDA: expected all, off, or numbers from 80 such as 80,90; got {wanted}"
        )
    families = [int(name) // 10 for name in names]
    return list(names), [name for i, name in enumerate(names) if name == names[-1] or families[i + 1] > families[i] + 1]


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
        print("kvcompress: CUDA kernels left out: no nvcc found (install CUDA 13, or set NVCC or CUDA_HOME)")
        return None
    flags, start = [*options(*targets(wanted)), f'-DKVC_VERSION="{version()}"'], time.time()
    folder = os.path.join(temporary, wanted.replace(",", "-"))
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
    print(f"kvcompress: {LIBRARY}: {size:.1f} MiB for {wanted}, {time.time() - start:.0f} s")
    return LIBRARY


if __name__ == "__main__":
    build(sys.argv[1] if len(sys.argv) > 1 else "all")
