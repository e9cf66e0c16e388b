"""Commands of the command line that need no model, or only a config: info, plan, bench, plot, doctor, demo."""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from ...files import json_text

ROOT = Path(__file__).resolve().parents[3]
NOTHING_FITS = 3
"""Exit status of `plan` if nothing fits."""
_OF_MEASURE = ("out", "window", "windows", "calibration", "steps")  # arguments of `plan --measure` alone


def _print(args: argparse.Namespace, found: Any, text: str) -> None:
    print(json_text(found) if args.json else text)


def info(args: argparse.Namespace) -> int:
    """Shows versions and runs the self-test; 1 if it fails."""
    from . import info as module

    found = module.info()
    _print(args, found, module.show(found))
    return 0 if found["ok"] else 1


def plan(args: argparse.Namespace) -> int:
    """Shows what fits and which format to use, or runs a measured search."""
    if args.list:
        from ..plan import names

        _print(args, names(), "\n".join(names()))
        return 0
    if args.measure:
        return _measure(args)
    if alone := [f"--{name}" for name in _OF_MEASURE if getattr(args, name) is not None]:
        raise ValueError(f"plan: expected {' and '.join(alone)} with --measure MODEL TEXT, got no --measure")
    if args.config is None:
        raise ValueError("plan: expected --config MODEL (a name, a config.json or its folder), got none; see --list")
    from ..plan import plan as make

    options: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("gpu", "context", "batch", "parameters", "prefix", "requests", "workload", "drafts", "reserve",
                     "page_size", "quality")
    }  # fmt: skip
    if args.weights:
        options["weight_bits"] = tuple(args.weights)
    if args.formats:
        options["formats"] = tuple(args.formats)
    found = make(args.config, **options)
    _print(args, found.to_dict(), str(found))
    if args.plot:
        from ..plot import savings

        savings(found, args.plot)
    return 0 if found.fits else NOTHING_FITS


def _measure(args: argparse.Namespace) -> int:
    from transformers import logging

    from ..plan.measure import search
    from ..plan.units import read_tokens

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, text = args.measure
    if not Path(text).is_file():
        raise ValueError(f"plan: --measure MODEL TEXT: expected a file with text, got {text!r}")
    found = search(
        model, Path(text), context=read_tokens(args.context or 4096), quality=args.quality, out=args.out,
        progress=not args.quiet, window=1024 if args.window is None else args.window,
        windows=2 if args.windows is None else args.windows, calibration=args.calibration, steps=args.steps or (),
    )  # fmt: skip
    path = Path(args.out or "results") / "strategy.json"
    if found.chosen:
        found.save(path)
    said = f"\nwrote {path}: KVCache.from_dict(model.config, json.load(open({str(path)!r})))" if found.chosen else ""
    _print(args, found.to_dict(), f"{found}{said}")
    return 0 if found.chosen else NOTHING_FITS


def bench(args: argparse.Namespace) -> int:
    """Times decode steps of one layer on this machine."""
    from .bench import bench as run
    from .bench import show

    found = run(args.formats, args.lengths, heads=args.heads, group=args.group, dim=args.dim, rounds=args.rounds,
                progress=not args.quiet)  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    _print(args, found, show(found))
    return 0


def plot(args: argparse.Namespace) -> int:
    """Plots results."""
    from .. import plot as module

    out = Path(args.out or f"{args.kind}.png")
    if args.results is not None and not Path(args.results).is_file():
        raise ValueError(f"--results: expected a file, got {args.results!r}")
    try:
        results = None if args.results is None else json.loads(Path(args.results).read_text())
    except ValueError as error:  # not UTF-8 either
        raise ValueError(f"--results: expected JSON in {args.results!r}: {error}") from None
    if args.results is not None and results is None:  # for None `draw` would use the shipped results
        raise ValueError(f"--results: expected results in {args.results!r}, got null")
    module.draw(args.kind, out, results=results, config=args.config, context=args.context)
    _print(args, {"kind": args.kind, "wrote": str(out)}, f"wrote {out}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Shows the cache and attention of each layer, from the config; loads no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    from ...hf.backend import enable
    from ...hf.doctor import doctor as diagnose
    from ...hf.hub import from_hub

    logging.set_verbosity_error()
    config = from_hub(AutoConfig, args.model)
    if args.vllm:
        from ...vllm.doctor import doctor as in_vllm

        said = in_vllm(config, args.format)
        lines = [
            f"vLLM {said['vllm'] or 'is not here'}: vllm serve {args.model} {said['arguments']}",
            f"a layer's block of {said['block_size']} tokens: {said['block_bytes']:,} bytes; "
            f"vLLM's own: {said['own_block_bytes']:,}",
            *(f"- {problem}" for problem in said["problems"]),
        ]
        _print(args, said, "\n".join(lines))
        return int(bool(said["problems"]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    report = enable(model, verbose=False)
    notes = [note for note in report.notes if "meta" not in note]
    found = diagnose(model, args.format, verbose=False)
    rows = [vars(row) for row in found.rows]
    _print(args, {"model": found.model, "fused": report.fused, "layers": rows, "notes": notes},
           "\n".join(["after kvcompress.enable(model):", str(found), *(f"- {note}" for note in notes)]))  # fmt: skip
    return 0


def demo(args: argparse.Namespace) -> int:
    """Runs the demonstration of the repository."""
    script = ROOT / "examples" / "demo.py"
    if not script.is_file():
        raise ValueError("demo: expected the repository, as the package has no model and text; run `make demo` there")
    sys.argv = [str(script), *(["--out", args.out] if args.out else [])]
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        runpy.run_path(str(script), run_name="__main__")
    if args.json:
        print((Path(args.out or ".") / "demo.json").read_text())
    return 0


def _add_plan(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser(
        "plan", parents=[common], help="size of a model's cache, what fits, which format; needs no torch",
        description="Exit status 3: nothing fits (with --measure: nothing meets the quality floor).",
    )  # fmt: skip
    p.add_argument("--config", metavar="MODEL", help="a well-known name (--list), a config.json or its folder")
    p.add_argument("--gpu", metavar="MEMORY", help="80GB (10^9 bytes each), 80GiB (2^30), or a name such as h100")
    p.add_argument(
        "--context", metavar="TOKENS", help="4096, or 32k = 32 x 1024 (default: what the model was trained for)"
    )
    p.add_argument("--batch", type=int, default=1, metavar="N", help="requests that must fit at once (default: 1)")
    p.add_argument("--weights", type=float, nargs="+", metavar="BITS", help="bits per parameter (default: 16 8 4)")
    p.add_argument("--formats", nargs="+", metavar="FORMAT", help='cache formats, such as int8 or "int8/int4" (K/V)')
    p.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="number of parameters, such as 70.6e9, if the config does not contain it",
    )
    p.add_argument(
        "--prefix", default=0, metavar="TOKENS", help="length of the prefix shared by all requests, such as 512 or 1k"
    )
    p.add_argument(
        "--requests", type=int, default=16, metavar="N", help="number of requests that share the prefix (default: 16)"
    )
    p.add_argument(
        "--workload", default="auto", metavar="WORD", help="chat, multi-turn, retrieval, reasoning, streaming"
    )
    p.add_argument("--quality", default="high", metavar="FLOOR", help="lossless, high, medium, or KL in nats per token")
    p.add_argument("--drafts", action="store_true", help="speculative decoding is used")
    p.add_argument(
        "--reserve", type=float, default=0.1, metavar="SHARE", help="share of memory for everything else (default: 0.1)"
    )
    p.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens per page (default: 64)")
    p.add_argument("--plot", metavar="FILE", help="also plot the savings to FILE")
    p.add_argument("--list", action="store_true", help="well-known models")
    p.add_argument("--measure", nargs=2, metavar=("MODEL", "TEXT"), help="search per-layer formats and budgets")
    p.add_argument("--out", metavar="DIR", help="for --measure: writes strategy.json, and data to resume")
    p.add_argument("--window", type=int, metavar="N", help="for --measure: compressed tokens per window (1024)")
    p.add_argument("--windows", type=int, metavar="N", help="for --measure: number of windows (2)")
    p.add_argument("--calibration", metavar="FILE", help="for --measure: calibration from `calibrate`")
    p.add_argument(
        "--steps",
        nargs="+",
        metavar="K/V",
        help="for --measure: formats to try for each layer, the largest first",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.set_defaults(run=plan)


def add(commands: Any) -> None:
    """Adds the parsers of these commands to `commands`."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of text")

    p = commands.add_parser("info", parents=[common], help="versions, kernels, self-test of all codecs; needs no torch")
    p.set_defaults(run=info)

    _add_plan(commands, common)
    p = commands.add_parser("bench", parents=[common], help="time of a decode step on this machine for each format")
    p.add_argument("--formats", nargs="+", default=["raw", "int8", "fp8_e4m3", "int4", "int2"], metavar="FORMAT",
                   help="default: raw int8 fp8_e4m3 int4 int2")  # fmt: skip
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="TOKENS",
                   help="context lengths (default: 1024 4096 16384)")  # fmt: skip
    for name, usual, what in (
        ("heads", 8, "KV heads"), ("group", 4, "query heads per KV head"), ("dim", 128, "head dim"),
        ("rounds", 21, "timed calls per format and length"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{what} (default: {usual})")
    p.add_argument("--out", metavar="FILE", help="also write JSON to FILE, for `plot latency --results FILE`")
    p.add_argument("--threads", type=int, help="torch threads (default: all cores)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.set_defaults(run=bench)

    p = commands.add_parser("plot", parents=[common], help="plots of shipped or your own results; needs matplotlib")
    p.add_argument("kind", metavar="KIND", help="pareto, budget, latency, savings, roofline")
    p.add_argument("--results", metavar="FILE", help="JSON of `eval` or `bench` (default: shipped results)")
    p.add_argument("--config", default="llama-3-70b", metavar="MODEL", help="for savings (default: llama-3-70b)")
    p.add_argument("--context", default="32k", metavar="TOKENS", help="for savings (default: 32k)")
    p.add_argument("--out", metavar="FILE", help="(default: KIND.png)")
    p.set_defaults(run=plot)

    p = commands.add_parser(
        "doctor", parents=[common], help="cache and attention of each layer, and why; loads no weights"
    )
    p.add_argument("model", metavar="MODEL", help="folder or hub name")
    p.add_argument("--format", default="int8", metavar="FORMAT", help="cache format (default: int8)")
    p.add_argument(
        "--vllm",
        action="store_true",
        help="check whether vLLM would use it here, and show arguments; exit status 1 if not",
    )
    p.set_defaults(run=doctor)

    p = commands.add_parser("demo", parents=[common], help="generate with every format and compare (in the repository)")
    p.add_argument("--out", metavar="DIR", help="folder for demo.png and demo.json (default: .)")
    p.set_defaults(run=demo)
