"""Builds kvcompress/libkvcompress_cuda.so: csrc/cuda with nvcc, no torch, no Python. `python build_cuda.py [which]`.

Which architectures: "all" (what a wheel holds, and PTX for what comes after), or numbers such as "90" or "80,90" (a
developer's build takes one: a minute or two). `setup.py` calls this when KVCOMPRESS_CUDA says which.
"""

import glob
import os
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


def targets(wanted: str) -> list[str]:
    """nvcc's options for "all" or a list of numbers: machine code for each, PTX for the last."""
    names = ALL if wanted in ("all", "1") else tuple(wanted.split(","))
    unknown = [name for name in names if not name.isdigit() or int(name) < 80]
    if unknown:
        raise SystemExit(
            f"kvcompress: KVCOMPRESS_CUDA: expected all, off, or numbers from 80 such as 80,90; got {wanted}"
        )
    out = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return [*out, f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}"]


def build(wanted: str, temporary: str = "build/cuda") -> str | None:
    """Compiles what is out of date and links. The library's path, or None (and a line) where it is not built."""
    if wanted in ("", "0", "off"):
        print("kvcompress: CUDA kernels left out (KVCOMPRESS_CUDA=all builds them, KVCOMPRESS_CUDA=90 for one GPU)")
        return None
    compiler = nvcc()
    if not compiler:
        print("kvcompress: CUDA kernels left out: no nvcc found (install CUDA 13, or set NVCC or CUDA_HOME)")
        return None
    options, start = targets(wanted), time.time()
    folder = os.path.join(temporary, wanted.replace(",", "-"))
    os.makedirs(folder, exist_ok=True)
    headers = max(
        os.path.getmtime(p)
        for p in [*glob.glob("csrc/cuda/*h"), *glob.glob("csrc/core/**/*.[hd]*", recursive=True), __file__]
    )

    def compile_one(source: str) -> str:
        out = os.path.join(folder, os.path.basename(source).replace(".cu", ".o"))
        if not os.path.exists(out) or os.path.getmtime(out) < max(headers, os.path.getmtime(source)):
            done = subprocess.run([compiler, *FLAGS, *options, "-c", source, "-o", f"{out}.new"], check=False)
            if done.returncode:
                raise SystemExit(f"kvcompress: nvcc failed on {source}")
            os.replace(f"{out}.new", out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the longest first
        sources = sorted(glob.glob("csrc/cuda/*.cu"), key=lambda p: ("256" not in p, "128" not in p, "64" not in p, p))
        objects = list(pool.map(compile_one, sources))
    subprocess.run([compiler, "-shared", "-cudart", "static", *options[:1], "-o", LIBRARY, *objects], check=True)
    size = os.path.getsize(LIBRARY) / 2**20
    print(f"kvcompress: {LIBRARY}: {size:.1f} MiB for {wanted}, {time.time() - start:.0f} s")
    return LIBRARY


if __name__ == "__main__":
    build(sys.argv[1] if len(sys.argv) > 1 else "all")
