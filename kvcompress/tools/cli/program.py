"""The command line: `python -m kvcompress COMMAND`. User errors are printed as one line, without a traceback."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import _C
from ...files import json_text

_ASSETS = Path(__file__).resolve().parents[3] / "assets"
_SHIPPED = ("books-tiny", "books-tiny-bias")
_TEXT = _ASSETS / "text" / "book.txt"


def _models(names: Sequence[str]) -> list[str]:
    """The given models, or those shipped with the repository."""
    if names:
        return list(names)
    found = [str(_ASSETS / name) for name in _SHIPPED if (_ASSETS / name).is_dir()]
    if not found:
        raise ValueError(
            "MODEL: expected a folder or a name on the hub (the shipped models are in the repository only)"
        )
    return found


def _text(name: str | None) -> Path:
    path = _TEXT if name is None else Path(name)
    if not path.is_file():
        raise ValueError(f"--text: expected a file, got {str(path)!r}")
    return path


def _load(name: str) -> tuple[Any, Any]:
    from ..evaluation.suite import load_model

    return load_model(name, None)


def _each_model(args: argparse.Namespace, work: Callable[[Any, Any, Path], dict[str, Any]]) -> int:
    """Runs `work` for each model, with a separate folder; prints JSON if requested."""
    from transformers import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    whole: dict[str, Any] = {}
    names = {name.rstrip("/").rsplit("/", 1)[-1]: name for name in _models(args.models)}
    if len(names) < len(args.models):
        raise ValueError(
            f"MODEL: expected models with different last parts, which name their results, got {args.models}"
        )
    for short, name in names.items():
        model, tokenizer = _load(name)
        whole[short] = work(model, tokenizer, Path(args.out) / short)
    if args.json:
        print(json_text(whole))
    return 0


def _eval(args: argparse.Namespace) -> int:
    from ..evaluation.suite import evaluate

    settings = {name: getattr(args, name) for name in ("context", "scored", "chunk", "prefill", "windows", "samples",
                                                       "steps", "seed")}  # fmt: skip

    def work(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
        common = {"tokenizer": tokenizer, "out": folder, "full": args.full, "progress": not args.quiet, **settings}
        tasks = () if args.tasks == ["none"] else "all" if args.tasks == ["all"] else args.tasks
        result = evaluate(
            model, _text(args.text), args.strategy, tasks=tasks, cost=not args.no_cost, skip_unavailable=args.skip,
            **common,
        )  # fmt: skip
        if not args.json:
            print(f"{result}\nwrote {folder}/results.json, .csv, .png\n")
        return {"about": result.about, "rows": result.rows, "skipped": result.skipped}

    return _each_model(args, work)


def _inspect(args: argparse.Namespace) -> int:
    from ..evaluation.inspection import inspect

    def work(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
        found = inspect(model, _text(args.text), tokenizer=tokenizer, tokens=args.tokens, queries=args.queries)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "inspect.json").write_text(json_text(found.to_dict()))
        found.plot(folder / "inspect.png")
        if not args.json:
            print(f"{found}\nwrote {folder}/inspect.json, .png\n")
        return found.to_dict()

    return _each_model(args, work)


def _calibrate(args: argparse.Namespace) -> int:
    from ...hf.calibrate import calibrate
    from ...hf.configs import text_config
    from ..evaluation import data

    texts = [_text(text) for text in args.text]
    model, tokenizer = _load(args.model)
    ids = [data.load_ids(text, tokenizer, data.vocabulary(model)) for text in texts]
    found = calibrate(model, ids, context=args.context, tokens=args.tokens)
    found.save(args.out)
    part = min(args.context, getattr(text_config(model.config), "max_position_embeddings", None) or args.context)
    read = sum(min(args.tokens // len(ids), len(x)) // part * part for x in ids)  # whole passes only
    said = {"wrote": args.out, "layers": len(found.layers), "tokens": read, "model": found.model}
    note = f'wrote {args.out}: KVCache(model.config, "cal2", calibration={args.out!r})'
    print(json.dumps(said, indent=1) if args.json else note)
    return 0


def _formats(args: argparse.Namespace) -> int:
    from ... import formats

    print(json.dumps(formats.matrix(), indent=1) if args.json else formats.support_matrix())
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "A compressed key/value cache for transformers."
    parser = argparse.ArgumentParser(prog="kvcompress", description=about)
    parser.add_argument("--version", action="version", version=f"kvcompress {_C.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("models", nargs="*", metavar="MODEL", help="folder or hub name (default: the shipped ones)")
    common.add_argument("--text", metavar="FILE", help=".txt, or token ids in .npy (default: the shipped book)")
    common.add_argument("--out", default="results", metavar="DIR", help="results go to DIR/MODEL (default: results)")
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    common.add_argument("--threads", type=int, help="torch threads (default: all cores)")

    ev = commands.add_parser("eval", parents=[common], help="quality, bytes and time of strategies; resumable",
                             description="Measures strategies through the cache. Run the same command again to resume "
                             "an interrupted run.")  # fmt: skip
    ev.add_argument("-s", "--strategy", nargs="+", default=["int8", "fp8_e4m3", "int8/int4", "int4"],
                    help='such as "int4", "int8/int4+residual_length:128", "fake:int8@tensor", "quanto:4"')  # fmt: skip
    ev.add_argument("--tasks", nargs="+", default=["all"], help='"all", "none", or names')
    ev.add_argument("--full", action="store_true", help="use all of the text instead of a few windows")
    ev.add_argument("--no-cost", action="store_true", help="do not measure memory and speed")
    ev.add_argument("--skip", action="store_true", help="skip unavailable strategies instead of failing")
    ev.add_argument("--quiet", action="store_true", help="no progress bar")
    for name, usual, what in (
        ("context", 2048, "tokens to compress, per window"), ("scored", 256, "tokens to score after them"),
        ("chunk", 32, "tokens per call while scoring"), ("prefill", 0, "tokens per call of the context; 0: one call"),
        ("windows", 4, "windows of the text"), ("samples", 4, "contexts per task"),
        ("steps", 64, "decode steps to time"), ("seed", 0, "seed of windows and tasks"),
    ):  # fmt: skip
        ev.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{what} (default: {usual})")
    ev.set_defaults(run=_eval)

    ins = commands.add_parser("inspect", parents=[common], help="statistics of K, V and attention")
    ins.add_argument("--tokens", type=int, default=2048, metavar="N", help="tokens to read (default: 2048)")
    ins.add_argument("--queries", type=int, default=64, metavar="N", help="last queries to measure (default: 64)")
    ins.set_defaults(run=_inspect)

    cal = commands.add_parser("calibrate", help="measure a model's K and V for calibrated formats; minutes on a CPU")
    cal.add_argument("model", metavar="MODEL", help="folder or hub name")
    cal.add_argument("--text", metavar="FILE", required=True, action="append",
                     help=".txt similar to what will be cached, or ids in .npy; may be repeated")  # fmt: skip
    cal.add_argument("-o", "--out", metavar="FILE", default="model.kvcal", help="(default: model.kvcal)")
    cal.add_argument("--context", type=int, default=2048, metavar="N", help="tokens per forward pass (default: 2048)")
    cal.add_argument("--tokens", type=int, default=16384, metavar="N", help="maximum to read (default: 16384)")
    cal.add_argument("--json", action="store_true", help="print JSON instead of a line")
    cal.add_argument("--threads", type=int, help="torch threads (default: all cores)")
    cal.set_defaults(run=_calibrate)

    from . import commands as others

    others.add(commands)
    table = commands.add_parser("formats", help="sizes of all page formats, and where they run; needs no torch")
    table.add_argument("--json", action="store_true", help="print JSON instead of a table")
    table.set_defaults(run=_formats)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 1 with an error on stderr (2: wrong usage, from argparse)."""
    args = _parser().parse_args(argv)
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # one line for each missing font
    try:
        if "threads" in args:
            import torch

            torch.set_num_threads(args.threads or os.cpu_count() or 1)
        return args.run(args)
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, KeyError, ImportError, OSError, RuntimeError, MemoryError) as error:
        if os.environ.get("KVCOMPRESS_TRACEBACK"):
            raise
        print(f"kvcompress: {error}", file=sys.stderr)
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
            print(f"kvcompress: this command needs {error.name}: pip install {error.name}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        goes_on = args.command == "eval" or (args.command == "plan" and args.measure and args.out)
        print(f"kvcompress: interrupted{'; run the same command again to resume' if goes_on else ''}", file=sys.stderr)
        return 130
