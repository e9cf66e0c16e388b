"""Everything that needs a GPU, in steps that can be run separately: each writes its result to DIR/gpu.json as soon as
it is done, next to those of other runs, so that short runs add up. Files of the steps themselves
(attention-cuda.json, generate-cuda.json) go to DIR, too.

    python benchmarks/gpu.py                               all steps
    python benchmarks/gpu.py --only build,test --out DIR   some
    python benchmarks/gpu.py --merge FILE                  merges another run's gpu.json, and stops
    python benchmarks/gpu.py --rehearse                    without a GPU: tests of the kernels on the host; writes
                                                           rehearsal.json

A step that exceeds --limit, or whose tool is missing, is reported as such. Exit status: 0 if all requested steps
passed.

steps:
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import device

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail", "20",
          "--continue-on-collection-errors"]  # fmt: skip
KERNELS = ["codec", "token", "attend", "prefill", "prompts", "varlen", "layer", "latent", "policies", "mixing"]
GRAPHS = ["cuda_graph", "moving", "copy_stream", "in_place"]
READY = """import pytest, torch, transformers, kvcompress
print(torch.__version__, transformers.__version__, kvcompress.KVCache)"""
THERE = """
print(torch.cuda.get_device_name(), kvcompress._C.cuda_found(torch.cuda.current_device()))"""
LEAST = 20  # seconds: no step is started with less time left


class Step(NamedTuple):
    """Command line of a step for the given arguments; [] if there is nothing to do. host: can be rehearsed."""

    about: str
    command: Callable[[argparse.Namespace], list[str]]
    needs: tuple[str, ...] = ()
    environment: Callable[[argparse.Namespace], dict[str, str]] = lambda args: {}
    rows: Callable[[str], list[dict]] | None = None  # extracts rows from its output
    host: bool = False


def file_of(name: str) -> str:
    """The path of the tests with that file name."""
    (path,) = (ROOT / "tests").glob(f"*/test_{name}.py")
    return str(path.relative_to(ROOT))


def tests(names: Iterable[str], *more: str, workers: bool = True) -> Callable[[argparse.Namespace], list[str]]:
    def command(args: argparse.Namespace) -> list[str]:
        many = ["-n", str(args.workers)] if workers and args.workers > 1 else []
        return [*PYTEST, "-m", "not full and not soak", *many, *(file_of(name) for name in names), *more]

    return command


def on_gpu(args: argparse.Namespace) -> dict[str, str]:
    return {"KVCOMPRESS_TEST_DEVICE": "cpu" if args.rehearse else "cuda", "KVCOMPRESS_POISON": "1"}


def sanitizer(tool: str) -> Step:
    """In one process, so that there is one summary. For tools that check memory, torch's caching allocator is off,
    since it hides ownership (tests that capture a graph need it and are skipped); for race checks it is on."""
    memory = tool in ("memcheck", "initcheck")

    def command(args: argparse.Namespace) -> list[str]:
        some = ["-k", "half_models or pairs or padding or bad or accumulated or life or replay"] if args.quick else []
        names = [*(f"cuda_{name}" for name in KERNELS), *GRAPHS]
        run = tests(names, *some, workers=False)(args)
        return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *run]

    def environment(args: argparse.Namespace) -> dict[str, str]:
        off = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if memory else {}
        bare = {"KVCOMPRESS_TEST_UNWRITTEN": "1"} if tool == "initcheck" else {}
        return {**on_gpu(args), **off, **bare}

    return Step(f"compute-sanitizer --tool {tool} over the kernels' tests and those of graphs", command,
                ("compute-sanitizer",), environment)  # fmt: skip


WAITS = ("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "mio_throttle", "lg_throttle", "barrier",
         "not_selected", "no_instruction", "dispatch_stall", "branch_resolve", "imc_miss")  # fmt: skip
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram MB": "dram__bytes_read.sum",
    "L2 hit %": "lts__t_sector_hit_rate.pct",
    "instructions": "smsp__inst_executed.sum",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps ready": "smsp__warps_eligible.avg.per_cycle_active",
    **{f"waits {why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in WAITS},
    "registers": "launch__registers_per_thread",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "blocks": "launch__grid_size",
}
SCALE = {"us": 1e-3, "dram MB": 1e-6}  # of ns, bytes


def ncu_rows(output: str) -> list[dict]:
    """A row per kernel from ncu's raw CSV. The calls of attention_cuda.once print nothing in between: each starts with
    kvc_pack_kernel, which `call` counts."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows, names, call = [], re.findall(r"^call (.+)$", output, re.MULTILINE), -1
    for found in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        kernel = found.get("Kernel Name", "").split("(")[0]
        if not kernel:  # the row of units
            continue
        call += kernel == "kvc_pack_kernel"
        row: dict = {"call": names[call] if 0 <= call < len(names) else "", "kernel": kernel}
        for name, metric in METRICS.items():
            try:
                row[name] = float(found[metric].replace(",", "")) * SCALE.get(name, 1)
            except (KeyError, ValueError):
                row[name] = None
        rows.append(row)
    return rows


def ncu(args: argparse.Namespace) -> list[str]:
    tool = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--kernel-name"]
    names = ["regex:kvc_", "--metrics", ",".join(METRICS.values())]
    return [*tool, *names, sys.executable, "benchmarks/attention.py", "--device", "cuda", "--once"]


def bench(args: argparse.Namespace) -> list[str]:
    more = [*(["--quick"] if args.quick else []), *(["--resume"] if args.resume else [])]
    return [sys.executable, "benchmarks/attention.py", "--device", "cuda", *more]


def generate(args: argparse.Namespace) -> list[str]:
    less = ["--layers", "4", "--turns", "1"] if args.quick else []
    return [sys.executable, "benchmarks/generate.py", "--device", "cuda", *less]


def build(args: argparse.Namespace) -> list[str]:
    if args.prebuilt:
        libraries = [str(args.prebuilt.resolve() / name) for name in ("_C.abi3.so", "libkvcompress_cuda.so")]
        return ["cp", *libraries, "kvcompress/"]
    return [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]


def build_for(args: argparse.Namespace) -> dict[str, str]:
    found = device.state().get("compute_cap", "").replace(".", "")
    return {"KVCOMPRESS_CUDA": args.arch or found or ("90" if args.rehearse else "all")}


STEPS: dict[str, Step] = {
    "build": Step("the extension, and the CUDA library for this GPU (--arch for another; --prebuilt: both)",
                  build, ("nvcc",), build_for, host=True),
    "ready": Step("is there what the others want? imports",
                  lambda args: [sys.executable, "-c", READY + ("" if args.rehearse else THERE)], host=True),
    "test": Step("the kernels' tests on the GPU", tests([f"cuda_{name}" for name in KERNELS]), (), on_gpu, host=True),
    "models": Step("families of models and ways to generate", tests(["cuda_generate"]), (), on_gpu, host=True),
    "graphs": Step("CUDA graphs, streams, moves between devices", tests([*GRAPHS, "cuda_streams", "stepping"]), (),
                   on_gpu, host=True),
    **{tool: sanitizer(tool) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")},
    "fuzz": Step("random calls against the CPU op, for --seconds", tests(["cuda_fuzz"]), (),
                 lambda args: {**on_gpu(args), "KVCOMPRESS_SOAK": str(int(min(args.seconds, .7 * args.limit)))},
                 host=True),
    "bench": Step("attention.py --device cuda (--resume: but for the cells that are in DIR)", bench),
    "generate": Step("generate.py --device cuda", generate),
    "compiled": Step("generate.py --device cuda --compile", lambda args: [*generate(args), "--compile"]),
    "ncu": Step("each main kernel: time, throughput of DRAM and of the multiprocessors, registers, occupancy", ncu,
                ("ncu",), rows=ncu_rows),
}  # fmt: skip


def run(command: list[str], limit: float, environment: dict[str, str]) -> tuple[str, int, str]:
    """(passed, failed or cut; exit status; output). A step over its limit is interrupted, then killed with its
    children."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        state = ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            for number in (signal.SIGINT, signal.SIGKILL) if process.returncode is None else ():
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
        out.seek(0)
        return state or ("failed" if process.returncode else "passed"), process.returncode, out.read()


def do(step: Step, args: argparse.Namespace, left: float) -> dict:
    """The result of a step, as written to the JSON file."""
    needs = [tool for tool in step.needs if not (args.prebuilt and tool == "nvcc")]
    missing = [tool for tool in needs if not shutil.which(tool, path=args.path)]
    if args.rehearse and not step.host:
        missing = ["a GPU"]
    if missing:
        return {"state": "missing", "missing": missing}
    command, limit, start = step.command(args), min(args.limit, left), time.time()
    found = os.environ.get("PYTHONPATH")  # location of packages on a machine without a network
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *([found] if found else [])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "KVCOMPRESS_RESULTS": str(args.out.resolve()),
                   "PATH": args.path, **step.environment(args)}  # fmt: skip
    state, code, output = run(command, limit, environment)
    said = " ".join("python" if word == sys.executable else word for word in command)
    result = {"state": state, "rc": code, "seconds": round(time.time() - start, 1), "command": said,
              "environment": step.environment(args), "at": time.strftime("%Y-%m-%d %H:%M")}  # fmt: skip
    if state == "cut":
        result["cut after"] = round(limit)
    last = re.findall(r"^.*\b(?:passed|failed|errors?)\b.* in [\d.]+s.*$", output, re.MULTILINE)[-1:]
    result |= {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", "".join(last))}
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if summaries:
        result["found"] = sum(map(int, summaries))
    if step.rows:
        result["rows"] = step.rows(output)
    nothing = (step.rows and not result["rows"]) or ("pytest" in command and not result.get("passed"))
    if nothing and state == "passed":
        result["state"] = "failed"  # it exited normally, but without results
    return {**result, "tail": output[-3000 if state == "passed" else -20000 :]}


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def merge(path: Path, found: dict) -> None:
    """Merges new results with existing ones; written atomically."""
    before = read(path)
    steps = {**before.get("steps", {}), **found.get("steps", {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**before, **found, "steps": steps}, indent=1) + "\n")
    new.replace(path)


def chosen(text: str, steps: dict[str, Step], parse: argparse.ArgumentParser, option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in steps]
    if unknown:
        parse.error(f"{option}: expected some of {', '.join(steps)}; got {', '.join(unknown)}")
    return names


def main(argv: list[str] | None = None, steps: dict[str, Step] = STEPS) -> int:
    about = (__doc__ or "") + "\n".join(f"  {name:10} {step.about}" for name, step in steps.items())
    parse = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = min(8, (os.cpu_count() or 2) // 2) if importlib.util.find_spec("xdist") else 1
    parse.add_argument("--only", default="", metavar="STEP,..", help="these steps; all unless given")
    parse.add_argument("--skip", default="", metavar="STEP,..", help="all but these")
    parse.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parse.add_argument("--limit", type=float, default=540, help="seconds of a step")
    parse.add_argument("--total", type=float, default=float("inf"), help="seconds of all; what is not begun is not run")
    parse.add_argument("--seconds", type=int, default=300, help="of fuzzing")
    parse.add_argument("--workers", type=int, default=cores, help="processes of a step of tests")
    parse.add_argument("--arch", default="", help="build: 90, or 80,90, or all; this GPU's unless given")
    parse.add_argument("--quick", action="store_true", help="few tests under sanitizers, few shapes and layers")
    parse.add_argument("--resume", action="store_true", help="bench: keep the cells that are in DIR")
    parse.add_argument("--rehearse", action="store_true", help="without a GPU: the kernels on the host")
    parse.add_argument("--prebuilt", type=Path, metavar="DIR", help="build: take _C.abi3.so and libkvcompress_cuda.so")
    parse.add_argument("--merge", type=Path, metavar="FILE", help="take in another run's gpu.json, and stop")
    args = parse.parse_args(argv)
    args.path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    path, start, bad = args.out / ("rehearsal.json" if args.rehearse else "gpu.json"), time.time(), 0
    if args.merge:
        merge(path, read(args.merge))
        return 0
    skip = chosen(args.skip, steps, parse, "--skip")
    names = [name for name in chosen(args.only, steps, parse, "--only") or steps if name not in skip]
    for name in names:
        left = args.total - (time.time() - start)
        if left < LEAST:
            print(f"{name}: not begun, --total is over", flush=True)
            bad += 1
            continue
        before, result = device.state(), do(steps[name], args, left)
        merge(path, {"device": before, "steps": {name: {**result, "device before": before,
                                                        "device after": device.state()}}})  # fmt: skip
        bad += result["state"] != "passed"
        short = {key: value for key, value in result.items() if key not in ("rows", "tail")}
        print(result.get("tail", "")[-600:], json.dumps({name: short}), sep="\n", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
