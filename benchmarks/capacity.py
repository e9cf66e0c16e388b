"""The number of sequences that fit an arena, and their total throughput. benchmarks/results/capacity.json,
docs/capacity.png.

    python benchmarks/capacity.py [--arena MiB] [--tokens N] [--budget N] [--only NAMES]

For each recipe, sequences of N random tokens (prompts in chunks of 256) are added until the pool is full; then all
decode together (kvcompress.Batch, the shipped model, bfloat16), and the last one leaves when a step finds no page.
`admitted` is the number left after --steps steps. It is compared with the planner (pages of a sequence, as in
`kvcompress plan`) and with the tutorials' formula (2 B L H D S bytes).

Throughput: tokens per second over all sequences, median over steps, by the number of sequences; it saturates where
doubling the sequences gives less than 1.15 times as much. With `make vllm`, the same in vLLM, with its own caches and
with kvcompress: requests of N tokens that decode at once, and total tokens per second, by CPU time of one thread."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from common import machine, save
from vllm_common import ENGINES, apart, arguments, start

from kvcompress import _C, H2O, Batch, KVCache, StreamingLLM, enable
from kvcompress.tools import plan

ROOT = Path(__file__).parents[1]
CHUNK, SINKS = 256, 4
COLOURS = {"raw": "#30323d", "fp8_e4m3": "#d1622b", "int8": "#1f6fb2", "int4": "#2a9d8f", "h2o": "#7b4fa3",
           "streaming": "#b8901f", "combined": "#c0396b"}  # fmt: skip


def recipes(budget: int) -> dict[str, tuple[str, Any, float, int]]:
    """name: (format, policy, nominal bits per element, tokens kept; 0: all)."""
    return {
        "raw": ("raw", None, 16, 0),
        "fp8_e4m3": ("fp8_e4m3", None, 8, 0),
        "int8": ("int8", None, 8, 0),
        "int4": ("int4", None, 4, 0),
        "h2o": ("raw", H2O(budget, sinks=SINKS), 16, budget),
        "streaming": ("raw", StreamingLLM(SINKS, budget - SINKS), 16, budget),
        "combined": ("int4", H2O(budget, sinks=SINKS), 4, budget),
    }


class Arena:
    """Sequences in one pool."""

    def __init__(self, model: Any, bytes: int, key: str, policy: Any) -> None:
        self.model, self.key, self.policy, self.pool = model, key, policy, _C.Pool(bytes)
        self.caches: list[KVCache] = []

    def admit(self, tokens: int, seed: int) -> bool:
        """Adds a sequence; returns False, and leaves nothing of it, if the pool is full."""
        cache = KVCache(self.model.config, self.key, policy=self.policy, pool=self.pool)
        ids = torch.randint(self.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))
        try:
            with torch.inference_mode():
                for part in ids.split(CHUNK, dim=1):
                    self.model(part, past_key_values=cache, logits_to_keep=1)
        except MemoryError:
            return False
        self.caches.append(cache)
        return True

    def step(self, n: int) -> float:
        """Seconds of a step of the first n sequences; MemoryError if one finds no page."""
        batch = Batch(self.caches[:n])
        ids = torch.full((1, n), 7)
        start = time.perf_counter()
        with torch.inference_mode():
            logits = self.model(
                ids, position_ids=batch.positions, past_key_values=batch, logits_to_keep=batch.last
            ).logits
            logits.argmax(-1)
        return time.perf_counter() - start

    def fill(self, tokens: int, steps: int) -> int:
        """Adds sequences until the pool is full, and decodes; returns the number left."""
        while self.admit(tokens, len(self.caches)):
            pass
        for _ in range(steps):
            self.sure(len(self.caches))
        return len(self.caches)

    def sure(self, n: int) -> float:
        """Seconds of a step; the last sequences leave until the first n find their pages."""
        while True:
            try:
                return self.step(min(n, len(self.caches)))
            except MemoryError:
                self.caches.pop()

    def curve(self, steps: int) -> dict[int, dict[str, float]]:
        """Throughput by number of sequences."""
        most = len(self.caches)
        points = sorted({*(2**i for i in range(12) if 2**i < most), most})
        found = {}
        for n in points:
            for cache in self.caches[:n]:  # all points at the same length
                if (over := cache.get_seq_length() - self.length) > 0 and self.policy is None:
                    cache.crop(-over)
            self.sure(n)
            times = [self.sure(n) for _ in range(steps)]
            found[n] = {"tokens_per_s": n / statistics.median(times), "low": n / max(times), "high": n / min(times)}
        return found

    length = 0


def binds(curve: dict[int, dict[str, float]]) -> int | None:
    """The number of sequences from which doubling gives less than 1.15 times as much; None if there is none."""
    for a, b in itertools.pairwise(curve):
        if b == 2 * a and curve[b]["tokens_per_s"] < 1.15 * curve[a]["tokens_per_s"]:
            return a
    return None


def measure(model: Any, name: str, recipe: tuple, options: argparse.Namespace) -> dict[str, Any]:
    key, policy, bits, budget = recipe
    shape, bytes = plan.read(model), options.arena << 20
    arena = Arena(model, bytes, key, policy)
    arena.fill(options.tokens, options.steps)
    arena.length = options.tokens + options.steps
    for cache in arena.caches[1:]:
        assert cache.get_seq_length() == arena.length
    scores = bool(policy and policy.needs_attention)
    counted = plan.Recipe(key, budget=budget, scores=scores, ragged=scores)
    parts = plan.exact(shape, counted, options.tokens + options.steps, prompt=CHUNK if budget == 0 else None).parts
    pages = parts["sealed"] + parts["open"] + parts["sinks"]
    kept = min(options.tokens, budget or options.tokens)
    result = {
        "format": key, "policy": repr(policy) if policy else "", "admitted": len(arena.caches),
        "planner": bytes // pages, "formula": int(bytes // plan.formula(shape, kept, element=bits / 8)),
        "curve": arena.curve(options.rounds), "used": arena.pool.stats()["used"],
    }  # fmt: skip
    result["binds"] = binds(result["curve"])
    return result


def in_vllm(name: str, arena: int, tokens: int, steps: int) -> dict[str, Any]:
    """Requests that decode at once, and the curve; in a separate process."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm_engine import steps as decode

    llm = start(name, arena, max_num_seqs=256, max_num_batched_tokens=32768)
    engine = llm.llm_engine
    blocks = engine.engine_core.engine_core.scheduler.kv_cache_config
    engine.vllm_config.model_config.max_model_len = tokens + steps + 20
    usable = 1 - 1 / blocks.num_blocks  # its null block counts, too; with one request too many it thrashes
    fit, found = int(get_max_concurrency_for_kv_cache_config(engine.vllm_config, blocks) * usable), {}
    for n in sorted({*(2**i for i in range(8) if 2**i < fit), fit}):
        _, times, decoded = decode(llm, n, tokens, steps)
        rates = [n / seconds for n, seconds in zip(decoded, times, strict=True)]
        found[n] = {"tokens_per_s": statistics.median(rates), "low": min(rates), "high": max(rates)}
    return {"admitted": max(decoded), "curve": found}


def plot(found: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # vLLM's environment has no matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    names = list(found["recipes"])
    for y, name in enumerate(names):
        r = found["recipes"][name]
        left.barh(y, r["admitted"], color=COLOURS[name])
        for source, line in (("planner", "-"), ("formula", ":")):
            label = source if y == 0 else None
            left.plot([r[source]] * 2, [y - 0.4, y + 0.4], color="black", linestyle=line, label=label)
        points = [int(n) for n in r["curve"]]
        middle, low, high = ([p[what] for p in r["curve"].values()] for what in ("tokens_per_s", "low", "high"))
        right.plot(points, middle, color=COLOURS[name], marker="o", markersize=3, label=name)
        right.fill_between(points, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel(f"sequences of {found['tokens']} tokens in {found['arena_mib']} MiB")
    right.set_xscale("log", base=2)
    right.set_xlabel("sequences that decode at once")
    right.set_ylabel("tokens a second, together")
    for axis in (left, right):
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arena", type=int, default=256, help="MiB")
    parser.add_argument("--tokens", type=int, default=2020)
    parser.add_argument("--budget", type=int, default=512, help="tokens that H2O, StreamingLLM and combined keep")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=None)
    options = arguments(parser, in_vllm)
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = hf.AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "books-tiny", dtype=torch.bfloat16).eval()
    enable(model, verbose=False)
    found: dict[str, Any] = {"machine": machine(), "arena_mib": options.arena, "tokens": options.tokens,
                             "budget": options.budget, "recipes": {}}  # fmt: skip
    print(f"{'recipe':10} admitted   x raw  planner  formula  tokens/s  x raw  at 1  binds from")
    for name, recipe in recipes(options.budget).items():
        if name not in (options.only or [name]):
            continue
        r = found["recipes"][name] = measure(model, name, recipe, options)
        gc.collect()
        raw = found["recipes"].get("raw", r)
        yields, base = (list(x["curve"].values())[-1]["tokens_per_s"] for x in (r, raw))
        one = r["curve"][1]["tokens_per_s"]
        print(f"{name:10} {r['admitted']:8} {r['admitted'] / raw['admitted']:7.2f} {r['planner']:8} {r['formula']:8} "
              f"{yields:9.0f} {yields / base:6.2f} {one:5.0f}  {r['binds']}", flush=True)  # fmt: skip
    engines = [x for x in ENGINES if x in (options.only or ENGINES)] if (ROOT / ".venv-vllm").exists() else []
    print(f"{'in vLLM':10} admitted x bf16  tokens/s x bf16  at 1" if engines else "")
    for name in engines:
        r = found.setdefault("vllm", {})[name] = apart(in_vllm, name, options.arena, options.tokens, options.steps)
        first = found["vllm"][engines[0]]
        yields, base = (list(x["curve"].values())[-1]["tokens_per_s"] for x in (r, first))
        print(f"{name:10} {r['admitted']:8} {r['admitted'] / first['admitted']:6.2f} {yields:9.0f} "
              f"{yields / base:6.2f} {r['curve']['1']['tokens_per_s']:5.0f}", flush=True)  # fmt: skip
    if not options.only:
        save("capacity", found)
        plot(found, ROOT / "docs" / "capacity.png")


if __name__ == "__main__":
    main()
