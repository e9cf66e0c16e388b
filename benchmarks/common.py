"""Shared by the benchmarks: the machine's memory bandwidth, interleaved timing, location of results."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcompress import _C

HERE = Path(__file__).parent
COLD = 256 << 20  # amount of data to cycle through, so that caches do not help


def _native(name: str) -> ctypes.CDLL:
    """<name>.c of this folder, compiled for this machine."""
    library = Path(tempfile.mkdtemp()) / f"{name}.so"
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(HERE / f"{name}.c"), "-o",
                    str(library)], check=True)  # fmt: skip
    return ctypes.CDLL(str(library))


def read_function() -> Callable[[torch.Tensor], int]:
    """Function that reads a tensor's bytes with torch's threads (read_bandwidth.c)."""
    function = _native("read_bandwidth").read_all
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int64
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    run = ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
    return lambda data: function(data.data_ptr(), data.nbytes, run)


def core_ghz() -> float:
    """The clock of this thread's core, measured."""
    function = _native("read_bandwidth").core_ghz
    function.restype = ctypes.c_double
    return function()


def multiply_adds_function() -> Callable[[bool, int], float]:
    """Multiply-adds per second of n threads, in bf16 or in 8-bit integers (multiply_adds.c)."""
    function = _native("multiply_adds").multiply_adds
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_double
    return lambda halves, threads: function(int(halves), threads)


def copy_function() -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """copy(to, from, n): memcpy of a tensor's bytes with n threads (copy_bandwidth.c)."""
    function = _native("copy_bandwidth").copy_all
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], None
    return lambda to, data, threads: function(to.data_ptr(), data.data_ptr(), data.nbytes, threads)


def interleave(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, called in turn for `rounds` rounds; calls get the number of the round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        calls[name](0)
    for i in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            times[name].append(time.perf_counter() - start)
    return times


def beside_reads(calls: dict[str, Callable[[int], object]], read: Callable[[], object], rounds: int):
    """Like `interleave`, with a read test right before every call: (seconds of each call, of the reads before it). The
    read test uses the threads of the call, which are then awake, as they are after a model's projections."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    reads: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    for i in range(1, rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            read()
            middle = time.perf_counter()
            call(i)
            times[name].append(time.perf_counter() - middle)
            reads[name].append(middle - start)
    return times, reads


def quartile(seconds: list[float], which: int = 1) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[which - 1]


def disturbed(reads: list[float]) -> bool:
    """Whether the bandwidth varied by more than 15% between quartiles, which means that other processes used the
    memory."""
    return quartile(reads, 3) / quartile(reads, 1) > 1.15


def spread(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "p10_ms": 1e3 * tenths[0],
        "p90_ms": 1e3 * tenths[-1],
    }


def _cpu_info(*keys: str) -> str | None:
    """The first line of /proc/cpuinfo with one of `keys`."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), None)


def machine() -> dict[str, object]:
    return {"cpu": _cpu_info("model name") or platform.processor(), "family": _cpu_info("cpu family", "CPU part") or "",
            "model": _cpu_info("model") or "", "threads": torch.get_num_threads(), "isa": _C.isa(),
            "torch": torch.__version__, "kvcompress": _C.__version__}  # fmt: skip


def machine_name() -> str:
    """File name for results of this CPU model."""
    found = machine()
    model = f" model {found['model']}" if found["family"] == "6" else ""  # the family of Intel's CPUs for twenty years
    return re.sub(r"[^a-z0-9]+", "-", f"{found['cpu']} family {found['family']}{model}".lower()).strip("-")


def results() -> Path:
    """Folder of results: benchmarks/results, or $KVCOMPRESS_RESULTS."""
    return Path(os.environ.get("KVCOMPRESS_RESULTS") or HERE / "results")


def save(name: str, result: object) -> Path:
    path = results() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
