"""Lines and branches of csrc/core covered by the C harness and the fuzz corpora, by gcov without optimization: `make
coverage`. For kernels of one instruction set, lines are counted but not branches: most branch on template constants
(always inlined functions), so that no instance can take both directions. amx is included only on CPUs that have it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "fuzz")]
from fuzz import C_TARGETS, HERE, inputs  # noqa: E402
from record import record  # noqa: E402

OUT = ROOT / "build" / "coverage"
# required CPU features; for avxvnni see tests/c/Makefile
LEVELS = {"avx2": "avx2", "avxvnni": "avx512_vnni", "avx512": "avx512f", "avx512bf16": "avx512_bf16"}
OPTIONS = "OPTIONS=-O0 --coverage -fprofile-update=atomic"


def call(*command: object) -> None:
    subprocess.run([str(x) for x in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main() -> int:
    for old in OUT.rglob("*.gcda"):
        old.unlink()
    call("make", "-s", "-j2", "-f", "tests/c/Makefile", f"OUT={OUT}/harness", OPTIONS, "TEST_OPTIONS=")
    call("make", "-s", "-j2", "-f", "tests/fuzz/Makefile", f"OUT={OUT}/fuzz", OPTIONS)
    call(OUT / "harness" / "harness")
    for target in C_TARGETS:
        folder = OUT / "inputs" / target
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for kind in ("corpus", "regressions"):
            for i, data in enumerate(inputs(HERE / kind / f"{target}.txt")):
                (folder / f"{kind}{i:03}").write_bytes(data)
        call(OUT / "fuzz" / target, *sorted(folder.iterdir()))
    found = OUT / "summary.json"
    call(sys.executable, "-m", "gcovr", "-r", ROOT, OUT, "--filter", "csrc/core/", "--json-summary", found, "--txt",
         OUT / "summary.txt", "--merge-mode-functions=separate",
         "--gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file")  # fmt: skip
    files = json.loads(found.read_text())["files"]
    kernels = [f for f in files if "/kernels/" in f["filename"]]
    amx = [f for f in kernels if "/amx" in f["filename"]]
    core = [f for f in files if f not in kernels]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    lacks = [level for level, flag in LEVELS.items() if flag not in flags]
    if lacks:
        print(f"not counted, this CPU has none of it: {', '.join(lacks)}")
    run = [f for f in kernels if f not in amx and not re.search(rf"/({'|'.join(lacks) or 'none'})[._]", f["filename"])]

    def percent(part: list[dict], what: str) -> float:
        return round(100 * sum(f[f"{what}_covered"] for f in part) / max(1, sum(f[f"{what}_total"] for f in part)), 1)

    for f in sorted(core, key=lambda f: f["branch_percent"] or 0):
        print(
            f"{f['filename']:40} {f['line_percent']:5}% of {f['line_total']} lines, {f['branch_percent']}% of branches"
        )
    lines, branches = percent(core, "line"), percent(core, "branch")
    inner = percent(run, "line")
    record("coverage", "make coverage", lines_percent=lines, branches_percent=branches,
           lines=sum(f["line_total"] for f in core), branches=sum(f["branch_total"] for f in core),
           kernels_lines_percent=inner,
           kernels_branches_percent=percent(run, "branch"),
           amx_lines_percent=percent(amx, "line"))  # fmt: skip
    return int(lines < 95 or branches < 85 or (bool(run) and inner < 95))


if __name__ == "__main__":
    sys.exit(main())
