"""Everything that wants a GPU, in one go: builds the library for the device, runs the kernels' tests on it,
compute-sanitizer's four tools, a fuzz against the CPU op, and the benchmarks. Leaves benchmarks/results/gpu.json
(and attention-cuda.json, generate-cuda.json).

    python benchmarks/gpu.py [--quick] [--seconds 300] [--skip sanitize,...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_cuda_codec.py", "tests/test_cuda_attend.py", "tests/test_cuda_layer.py",
         "tests/test_cuda_policies.py"]  # fmt: skip
GRAPHS = ["tests/test_cuda_graph.py", "tests/test_moving.py", "tests/test_lanes.py", "tests/test_beside.py"]
ON_GPU = {"KVCOMPRESS_TEST_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}


def run(command: list[str], seconds: int, **environment: str) -> dict:
    start = time.time()
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
                              timeout=seconds, check=False)  # fmt: skip
        code, out = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, out = -1, str(error)
    result = {"command": " ".join(command), "rc": code, "seconds": round(time.time() - start), "tail": out[-3000:]}
    print(json.dumps({**result, "tail": out[-300:]}), flush=True)
    return result


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--quick", action="store_true")
    parse.add_argument("--seconds", type=int, default=300, help="of fuzzing")
    parse.add_argument("--skip", default="", help="build, test, sanitize, fuzz, bench")
    args = parse.parse_args()
    skip, results, python = args.skip.split(","), {}, sys.executable
    major, minor = torch.cuda.get_device_capability()
    results["device"] = torch.cuda.get_device_name()
    clocks = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv"]
    results["clocks"] = run(clocks, 60)
    if "build" not in skip:
        results["build"] = run([python, "build_cuda.py", f"{major}{minor}"], 900)
    if "test" not in skip:
        results["test"] = run([python, "-m", "pytest", "-q", "-x", *TESTS], 900, **ON_GPU)
        caching = {name: x for name, x in ON_GPU.items() if "CACHING" not in name}  # captures want an allocator
        results["graphs"] = run([python, "-m", "pytest", "-q", "-x", *GRAPHS], 900, **caching)
    if "sanitize" not in skip and shutil.which("compute-sanitizer"):
        some = ["-k", "half_models or pairs or padding or bad or mass or life"] if args.quick else []
        for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
            command = [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                "9",
                "--target-processes",
                "all",
                python,
            ]
            results[tool] = run([*command, "-m", "pytest", "-q", "-x", *TESTS[1:], *some], 1200, **ON_GPU)
    if "fuzz" not in skip:
        results["fuzz"] = run([python, "-m", "pytest", "-q", "tests/test_cuda_fuzz.py"], args.seconds + 120, **ON_GPU,
                              KVCOMPRESS_SOAK=str(args.seconds))  # fmt: skip
    if "bench" not in skip:
        command = [python, "benchmarks/attention.py", "--device", "cuda", *(["--quick"] if args.quick else [])]
        results["bench"] = run(command, 1800, PYTHONPATH=str(ROOT))
        command = [python, "benchmarks/generate.py", "--device", "cuda", *(["--layers", "4"] if args.quick else [])]
        results["generate"] = run(command, 900, PYTHONPATH=str(ROOT))
    out = ROOT / "benchmarks" / "results" / "gpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(step.get("rc") for step in results.values() if isinstance(step, dict)))


if __name__ == "__main__":
    sys.exit(main())
