"""A small server on the shipped model: python examples/serve --format int8 --arena 64 (docs/serving.md)."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import torch
import transformers
import uvicorn
from engine import Engine
from metrics import Meter
from web import app

BOOKS = Path(__file__).parents[2] / "assets" / "books-tiny"


def serve(args: argparse.Namespace) -> tuple[Engine, uvicorn.Server]:
    """An engine and a server for it, both not yet started."""
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    ends = model.generation_config.eos_token_id
    engine = Engine(
        model, args.arena << 20, *args.format.split("/"), meter=Meter(), chunk=args.chunk,
        ends=() if args.no_end else [ends] if isinstance(ends, int) else ends or (),
    )  # fmt: skip
    config = uvicorn.Config(app(engine, tokenizer), log_level="warning", timeout_graceful_shutdown=2)
    return engine, uvicorn.Server(config)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    parser.add_argument("--model", default=str(BOOKS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--format", default="int8", help="of pages: raw, int8, int8/int4, ...")
    parser.add_argument("--arena", type=int, default=64, help="MiB of pages")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of prompts in a pass")
    parser.add_argument("--no-end", action="store_true", help="go on to max_tokens behind an end of text")
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1; 0: any that is free")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as torch likes")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", args.port))
        listening.listen(1000)
        engine, server = serve(args)
        engine.start()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        try:
            server.run(sockets=[listening])
        finally:
            engine.stop()
