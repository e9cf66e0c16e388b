"""Runs launches of the host twin as machine code: a kernel is compiled alone (a minute at most, cached in
build/sass), and runs on the memory of the call."""

import collections
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (Path(__file__).resolve().parent, ROOT / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import cuda_twin  # noqa: E402
import program  # noqa: E402
from cuda_twin import LAUNCHER  # noqa: E402
from machine import Block, Fault  # noqa: E402

FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-lineinfo", "-Icsrc", "-Icsrc/core", "-Icsrc/cuda", "-cubin"]


def missing() -> str | None:
    """The first missing tool, if any."""
    return next((f"needs {name}" for name in ("nvcc", "nvdisasm") if program.tool(name) is None), None)


def sets() -> list[str]:
    return re.findall(r"^\s*SET\((\w+),", (ROOT / "csrc/cuda/attend.cuh").read_text(), re.MULTILINE)


def _source(kernel: str) -> tuple[str, str]:
    """The source to compile, and its name: a single attention kernel, or the file with the kernel."""
    if m := re.fullmatch(r"kvc_attend_(\w+)_(\d+)", kernel):
        others = "".join(f"#define SET_{name}(name, per, kinds)\n" for name in sets() if name != m[1])
        one = f"#define SET_{m[1]}(name, per, kinds) KVC_ATTEND_KERNEL(name, kinds, {m[2]}, per)\n"
        choose = "#define SET(name, per, kinds) SET_##name(name, per, kinds)\nKVC_SETS(SET)\n"
        return kernel, f'#include "accumulated.cuh"\n{others}{one}{choose}'
    if m := re.fullmatch(r"kvc_accumulate_any_(\d+)", kernel):
        return kernel, f'#include "accumulated.cuh"\nKVC_ACCUMULATE_KERNEL(any, (1u << KVC_KINDS) - 1, {m[1]})\n'
    for path in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        if re.search(rf"KVC_KERNEL\({kernel},|^#define \w+ {kernel}$", path.read_text(), re.MULTILINE):
            return path.stem, f'#include "{path.name}"\n'
    raise ValueError(f"no source has the kernel {kernel}")


@functools.cache
def _version() -> str:
    return subprocess.run([program.tool("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout


def cubin(kernel: str, arch: str) -> Path:
    (name, text), digest = _source(kernel), hashlib.sha256()
    read = [*(ROOT / "csrc/cuda").iterdir(), *(ROOT / "csrc/core").rglob("*.[hd]*")]
    for data in (repr((text, FLAGS, _version())).encode(), *(path.read_bytes() for path in sorted(read))):
        digest.update(data)
    folder = ROOT / "build" / "sass"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name}-{arch}-{digest.hexdigest()[:16]}.cubin"
    with open(folder / f"{name}-{arch}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may compile the same kernel
        if not out.exists():
            _compile(text, arch, out)
    return out


def _compile(text: str, arch: str, out: Path) -> None:
    source, made = out.with_suffix(".cu"), out.with_suffix(".new")
    source.write_text(text)
    done = subprocess.run([program.tool("nvcc"), *FLAGS, f"-arch=sm_{arch}", str(source), "-o", str(made)],
                          cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip
    source.unlink()
    if done.returncode:
        raise RuntimeError(f"nvcc: {out.stem}: {done.stderr}")
    os.replace(made, out)


@functools.lru_cache(6)
def _load(path: Path, name: str, arch: int) -> program.Kernel:
    return program.load(path, name, arch)


class Machine:
    """Runs kernels whose names match `kernels`, on all blocks or the first `most`, in reverse order if `backwards`.
    blocks: those that ran; counts: warp instructions by (kernel, index)."""

    def __init__(self, kernels=".*", arch="90", most: int | None = None, traced=False, backwards=False, **options):
        self.kernels, self.arch, self.most, self.traced = re.compile(kernels), arch, most, traced
        self.backwards = backwards
        self.launcher = LAUNCHER(self._launch)
        self.twin = cuda_twin.Twin(launcher=self.launcher, **options)
        self.loaded, self.blocks, self.launches, self.fault = {}, [], [], None

    def kernel(self, name: str) -> program.Kernel:
        if name not in self.loaded:
            self.loaded[name] = _load(cubin(name, self.arch), name, int(self.arch))
        return self.loaded[name]

    def _launch(self, name, argument, size, grid, threads, shared) -> int:
        name = name.decode()
        self.launches.append((name, tuple(grid[:3])))
        if not self.kernels.fullmatch(name) or self.fault:
            return 0
        try:
            self._run(name, ctypes.string_at(argument, size), tuple(grid[:3]), threads, shared)
        except Exception as fault:  # exceptions cannot pass through C
            self.fault = fault
        return 1

    def _run(self, name, argument, grid, threads, shared):
        x, y, z = grid
        places = [(i % x, i // x % y, i // (x * y)) for i in range(x * y * z)]
        for at in (places[::-1] if self.backwards else places)[: self.most]:
            block = Block(self.kernel(name), argument, at, grid, threads, shared, self.twin.memory, self.traced)
            self.blocks.append(block.run())

    def __getattr__(self, name: str):
        """Attributes of the host twin; its calls run kernels here."""
        found = getattr(self.__dict__["twin"], name)
        return functools.partial(self.call, name) if callable(found) else found

    def call(self, function: str, *args, **options):
        """A call of the host twin with kernels run here; raises their faults."""
        result = getattr(self.twin, function)(*args, **options)
        if self.fault:
            raise self.fault
        return result


def counts(blocks: list[Block], name: str = "") -> collections.Counter:
    """Warp instructions by index, of kernels whose names start with `name`."""
    total: collections.Counter = collections.Counter()
    for block in blocks:
        if block.kernel.name.startswith(name):
            for warp in block.warps:
                total.update(warp.counts)
    return total


__all__ = ["Block", "Fault", "Machine", "counts", "cubin", "missing", "sets"]
