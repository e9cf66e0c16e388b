"""Fuzzing: `make fuzz SECONDS=60` (per target). C targets use libFuzzer, ASan and UBSan (clang); Python targets
atheris; CUDA's kernels run on the host with random calls.

    python tests/fuzz/fuzz.py run SECONDS [target ...]   continues from corpus/ and build/fuzz; appends to log.jsonl
    python tests/fuzz/fuzz.py keep [target ...]          writes the smallest inputs with the same coverage to corpus/

A corpus is a text file with one input per line, in hexadecimal. Failing inputs are added by hand to
regressions/<target>.txt, below a comment line (#) that says what they found; tests/core/test_core.py replays both
without a fuzzer."""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(HERE), str(ROOT)]
from record import record  # noqa: E402

C_TARGETS = ("pages", "codecs", "table", "args", "prefix", "varlen")
PYTHON_TARGETS = ("strategy", "kvc")
TESTS = ROOT / "tests"
RANDOM = {  # random, no corpus: CUDA's kernels on the host compared with the CPU's; invalid calls under ASan
    "twin": [str(TESTS / "cuda" / "test_cuda_fuzz.py")],
    "aliasing": [str(TESTS / "support" / "hostile.py"), "aliasing"],
    "together": [str(TESTS / "support" / "hostile.py"), "together"],
    "changing": [str(TESTS / "support" / "hostile.py"), "changing"],
    "files": [str(TESTS / "support" / "asked_files.py")],  # sealed files, and the memory they request
}
SANITIZED = ("aliasing", "together", "changing")  # with the extension of build/asan
BUILD = ROOT / "build" / "fuzz"
LOG = HERE / "log.jsonl"
KEPT = 60  # inputs per corpus


def inputs(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [bytes.fromhex(line) for line in path.read_text().splitlines() if not line.startswith("#")]


def spread(target: str) -> Path:
    """Writes the committed inputs as files, next to those of earlier runs."""
    folder = BUILD / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("corpus", "regressions"):
        for i, data in enumerate(inputs(HERE / kind / f"{target}.txt")):
            (folder / f"{kind}{i}").write_bytes(data)
    return folder


def command(target: str) -> list[str]:
    if target in C_TARGETS:
        return [str(BUILD / "clang" / target)]
    if target in RANDOM:
        return [sys.executable, *RANDOM[target]]
    return [sys.executable, str(HERE / "fuzz.py"), "one", target]


def run(target: str, seconds: int) -> dict[str, object]:
    folder, begin = spread(target), resource.getrusage(resource.RUSAGE_CHILDREN)
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=600",
               "-print_final_stats=1", f"-artifact_prefix={BUILD}/found-{target}-", str(folder)]  # fmt: skip
    rooms = [str(TESTS / "support"), str(TESTS / "core")]
    paths = [str(ROOT / "build" / "asan")] if target in SANITIZED else [str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths + rooms)}
    if target in SANITIZED:
        names = "libasan.so", "libstdc++.so.6"
        found = [subprocess.check_output(["cc", f"-print-file-name={x}"], text=True).strip() for x in names]
        env |= {
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=8", "UBSAN_OPTIONS": "halt_on_error=1",
        }  # fmt: skip
    done = subprocess.run([*command(target), *options], capture_output=True, text=True, errors="replace", check=False,
                          env=env)  # fmt: skip
    said = done.stderr + done.stdout
    (BUILD / f"{target}.log").write_text(said)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    count = re.findall(r"stat::number_of_executed_units:\s*(\d+)|^#(\d+)\s+DONE", said, re.M)
    reached = re.findall(r"cov: (\d+)", said)
    return {
        "date": datetime.date.today().isoformat(),
        "target": target,
        "seconds": round(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime),  # CPU time
        "executions": max((int(a or b) for a, b in count), default=0),
        "edges": int(reached[-1]) if reached else 0,
        "failed": done.returncode != 0,
    }


def keep(target: str) -> None:
    folder, small = spread(target), BUILD / "kept" / target
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir(parents=True)
    if target in C_TARGETS:
        merge = ["-merge=1", "-max_len=512", str(small), str(folder)]
        subprocess.run([*command(target), *merge], capture_output=True, check=True)
    else:  # atheris cannot merge
        small = folder
    found = sorted((p.read_bytes() for p in small.iterdir()), key=lambda x: (len(x), x))
    step = max(1, len(found) / KEPT)  # of every size
    (HERE / "corpus").mkdir(exist_ok=True)
    lines = [found[int(i * step)].hex() for i in range(min(KEPT, len(found)))]
    (HERE / "corpus" / f"{target}.txt").write_text("".join(line + "\n" for line in lines))
    print(f"{target}: {len(lines)} of {len(found)} inputs")


def one(target: str) -> None:
    """Turns this process into the fuzzer of a Python target."""
    import atheris

    with atheris.instrument_imports(include=["kvcompress"]):
        import python_targets
    atheris.Setup([sys.argv[0], *sys.argv[3:]], python_targets.TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "one":
        one(rest[0])
        return 0
    every = (*C_TARGETS, *PYTHON_TARGETS, *RANDOM)
    names = [x for x in rest if not x.isdigit()] or every
    if what == "keep":
        for target in set(names) - set(RANDOM):
            keep(target)
        return 0
    failed = 0
    for target in names:
        line = run(target, int(rest[0]))
        failed += bool(line["failed"])
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    record(
        "fuzz",
        "make fuzz",
        targets=len(every),
        hours=round(sum(x["seconds"] for x in lines) / 3600, 2),
        executions=sum(x["executions"] for x in lines),
        failures_found=sum(x["failed"] for x in lines),
        failures_now=failed,
        corpus=sum(len(inputs(HERE / "corpus" / f"{x}.txt")) for x in every),
        **{f"executions_{t}": sum(x["executions"] for x in lines if x["target"] == t) for t in every},
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
