"""`model.generate` end to end: time to first token, time per token, bytes of the cache. Writes
benchmarks/results/generate.json, or generate-cuda.json.

    python benchmarks/generate.py [--device cuda [--compile]] [--prompt N] [--batch N] [--tokens N] [--layers N]

cpu: the shipped model, float32. cuda: a model of Llama 3.1 8B's shape with random bf16 weights (only times matter).
DynamicCache with SDPA, and KVCache; medians over the tokens, with interleaved caches, without the first turn.
--compile: caches have a max_length (compared with transformers' StaticCache), so that `generate` compiles its decode
steps to CUDA graphs; writes generate-compiled-cuda.json."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import device as gpu
import torch
import transformers as hf
from common import machine, save, spread

from kvcompress import KVCache
from kvcompress.tools.evaluation.caches import attention_for, held_bytes, open_cache
from kvcompress.tools.strategy import Strategy

MODEL = Path(__file__).parents[1] / "assets" / "books-tiny"


class Clock(hf.StoppingCriteria):
    """Records the time of each token."""

    def __init__(self, device: str) -> None:
        self.at, self.wait = [], torch.cuda.synchronize if device == "cuda" else lambda: None
        self.wait()
        self.at.append(time.perf_counter())

    def __call__(self, ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.wait()
        self.at.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def load(device: str, layers: int) -> Any:
    if device == "cpu":
        return hf.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = hf.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1 << 17, rope_parameters=rope,
    )  # fmt: skip
    with torch.device(device):
        return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def begin(model: Any, name: str, length: int | None) -> Any:
    """An empty cache; with a length, one that graphs support."""
    if length is None:
        return open_cache(model, Strategy(name))
    if name == "dynamic":
        return hf.StaticCache(model.config, max_cache_len=length)
    return KVCache(model.config, name, max_length=length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompt", type=int, help="tokens; 2048 on cpu, 32768 on cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32, help="cuda: of the model")
    parser.add_argument("--turns", type=int, default=3, help="that count")
    parser.add_argument("--caches", default="dynamic,raw,int8,fp8_e4m3,int4", help="formats of KVCache, and dynamic")
    parser.add_argument("--compile", action="store_true", help="cuda: decode steps as CUDA graphs")
    args = parser.parse_args()
    prompt = args.prompt or (2048 if args.device == "cpu" else 32768)
    hf.logging.set_verbosity_error()
    model = load(args.device, args.layers)
    size, device = model.config.vocab_size, args.device
    before = gpu.state() if device == "cuda" else {}
    ids = torch.randint(2, size, (args.batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    seconds: dict[str, list[list[float]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for turn in range(args.turns + 1):
        for name in args.caches.split(","):
            with torch.inference_mode(), attention_for(model, Strategy(name)):
                cache, clock = begin(model, name, prompt + args.tokens if args.compile else None), Clock(device)
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=args.tokens,
                    do_sample=False, eos_token_id=None, pad_token_id=0, stopping_criteria=[clock],
                )  # fmt: skip
            if turn:
                seconds.setdefault(name, []).append([b - a for a, b in zip(clock.at, clock.at[1:], strict=False)])
            rows[name] = {"MB": held_bytes(cache) / 1e6}
            del cache
    for name, turns in seconds.items():
        rows[name] |= {"first ms": 1e3 * statistics.median(turn[0] for turn in turns)}
        rows[name] |= spread([x for turn in turns for x in turn[1:]])
        rows[name]["of dynamic"] = rows[name]["ms"] / rows["dynamic"]["ms"]
        print(f"{name:14}" + "".join(f"  {key} {x:.3f}" for key, x in rows[name].items()))
    where = torch.cuda.get_device_name() if device == "cuda" else machine()
    run = {
        "torch": torch.__version__,
        "layers": model.config.num_hidden_layers,
        "tokens": args.tokens,
        "turns": args.turns,
    }
    if device == "cuda":
        run |= {"before": before, "after": gpu.state()}
    result = {"machine": where, **run, "prompt": prompt, "batch": args.batch, "rows": rows}
    print(save(f"generate{'-compiled' * args.compile}{'-cuda' * (device == 'cuda')}", result))


if __name__ == "__main__":
    main()
