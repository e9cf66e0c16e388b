"""Times kvcompress, torch, ggml, OpenVINO, ONNX Runtime and vLLM on the same shapes, alternating, in several rounds of
one run; each system in its own virtual environment and process (created by `make bench-peers`, for vLLM by `make
vllm`). Lowest of the rounds' medians, ratios to kvcompress. Writes benchmarks/results/peers/, a file per CPU; with
--shapes, its cells of other shapes are kept. Latents, which few systems support, go to peers_latent.json."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from timing import SHAPES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from common import machine_name, results, save  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=str(HERE.parent.parent / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--vllm", default=str(HERE.parent.parent / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    scripts = {"ours.py": sys.executable, "ggml.py": args.peers, "openvino_pa.py": args.peers,
               "onnx_gqa.py": args.peers, "vllm_cpu.py": args.vllm}  # fmt: skip
    for script, python in list(scripts.items()):
        if not Path(python).exists():
            print(f"{script}: there is no {python}, left out", file=sys.stderr)
            del scripts[script]
    best: dict[str, dict[tuple[str, str], dict]] = {shape: {} for shape in args.shapes}
    for _ in range(args.rounds):
        for shape in args.shapes:
            for script, python in scripts.items():
                if shape == "latent" and script not in ("ours.py", "ggml.py"):
                    continue  # no attention over latents in these systems
                done = subprocess.run([python, str(HERE / script), shape, str(args.threads)], stdout=subprocess.PIPE,
                                      text=True, check=False, cwd=HERE)  # fmt: skip
                if done.returncode:
                    print(f"{script} {shape}: failed, left out", file=sys.stderr)
                for line in done.stdout.splitlines():
                    if not line.startswith("{"):
                        continue
                    row = json.loads(line)
                    key = row["system"], row["config"]
                    if key not in best[shape] or row["ms"] < best[shape][key]["ms"]:
                        best[shape][key] = row
    cells = []
    for shape, rows in best.items():
        ours = {name: rows["kvcompress", name]["ms"] for name in ("int8", "int4", "raw")}
        print(f"\n{shape}: B, Hq, H, D, S, T = {SHAPES[shape]}")
        print(f"{'':<32}{'ms':>9}{'min':>9}{'MB':>9}{'int8 is':>9}{'int4 is':>9}{'raw is':>9} times as fast")
        for row in rows.values():
            ratios = {f"{name} is": row["ms"] / ms for name, ms in ours.items()}
            cells.append({"shape": shape, "sizes": SHAPES[shape], **row, **ratios})
            print(f"{row['system'] + ' ' + row['config']:<32}{row['ms']:9.3f}{row['min_ms']:9.3f}{row['MB']:9.1f}"
                  + "".join(f"{x:9.2f}" for x in ratios.values()))  # fmt: skip
    run = {"machine": machine_name(), "threads": args.threads, "rounds": args.rounds}
    latents, cells = ([c for c in cells if (c["shape"] == "latent") is which] for which in (True, False))
    if latents:
        print("wrote", save("peers_latent", {**run, "cells": latents}))
    if cells:
        path = results() / "peers" / f"{run['machine']}.json"
        before = json.loads(path.read_text())["cells"] if path.exists() else []
        cells += [c for c in before if c["shape"] not in best]
        cells.sort(key=lambda cell: list(SHAPES).index(cell["shape"]))
        print("wrote", save(f"peers/{run['machine']}", {**run, "cells": cells}))


if __name__ == "__main__":
    main()
