"""Demo: one model, one long passage, the same generation with the uncompressed cache and with compressed caches.

Prints a table (bytes, speed, quality, peak memory) and writes demo.png and demo.json. No network, no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteria, logging

import kvcompress

ASSETS = Path(__file__).parent.parent / "assets"
FORMATS = ("int8", "fp8_e4m3", "int4")
PROMPT, NEW, ROUND = 3900, 128, 16  # tokens: of the passage, to generate, per turn of each cache
PREFIX, SCORED, CHUNK = (
    3072,
    512,
    64,
)  # quality: tokens compressed, tokens scored after them through the cache, tokens per chunk


def load(dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "books-tiny", dtype=dtype).eval()


def passage(n: int) -> torch.Tensor:
    """[1, n] token ids from the middle of a book; text starts with token 0, as in training."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "books-tiny")
    text = (ASSETS / "text" / "book.txt").read_text(encoding="utf-8")
    return torch.tensor([[0, *tokenizer(text[20_000:60_000])["input_ids"][: n - 1]]])


def new_cache(model: torch.nn.Module, kind: str) -> object:
    """A cache of this kind; sets the model's attention for it."""
    if kind == "DynamicCache":
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config)
    model.set_attn_implementation("kvcompress")
    return kvcompress.KVCache(model.config, kind)


def switch(model: torch.nn.Module, kind: str) -> None:
    model.set_attn_implementation("sdpa" if kind == "DynamicCache" else "kvcompress")


def cache_bytes(cache: object) -> int:
    if isinstance(cache, DynamicCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return cache.stats()["bytes"]


class Clock(StoppingCriteria):
    """Records the time of every generated token; never stops the generation."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def generate(model: torch.nn.Module, ids: torch.Tensor, kinds: list[str], bar: tqdm) -> dict[str, dict]:
    """Each cache processes the passage; then all generate in turns of ROUND tokens, so that noise affects all."""
    caches = {kind: new_cache(model, kind) for kind in kinds}
    texts = dict.fromkeys(kinds, ids)
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    prefill = {}
    for turn in range(NEW // ROUND):
        for kind in kinds if turn % 2 else reversed(kinds):
            switch(model, kind)
            clock, start = Clock(), time.perf_counter()
            texts[kind] = model.generate(
                texts[kind], attention_mask=torch.ones_like(texts[kind]), past_key_values=caches[kind],
                max_new_tokens=ROUND, do_sample=False, eos_token_id=None, stopping_criteria=[clock],
            )  # fmt: skip
            prefill.setdefault(kind, clock.at[0] - start)
            steps[kind] += [1e3 * (b - a) for a, b in zip(clock.at, clock.at[1:], strict=False)]
            bar.update(ROUND)
    return {
        kind: {
            "tokens": texts[kind][0, ids.shape[1] :].tolist(),
            "ms": statistics.median(steps[kind]),
            "ms_spread": statistics.quantiles(steps[kind], n=10)[::8],
            "prefill_s": prefill[kind],
            "bytes": cache_bytes(caches[kind]),
            "seen": caches[kind].get_seq_length(),
        }
        for kind in kinds
    }


@torch.inference_mode()
def through_cache(model: torch.nn.Module, ids: torch.Tensor, kind: str, bar: tqdm) -> torch.Tensor:
    """Log-probabilities at the SCORED positions, computed through a cache with the compressed PREFIX."""
    cache = new_cache(model, kind)
    model(ids[:, :PREFIX], past_key_values=cache, logits_to_keep=1)
    parts = []
    for at in range(PREFIX, PREFIX + SCORED, CHUNK):
        parts.append(model(ids[:, at : at + CHUNK], past_key_values=cache).logits.double())
        bar.update(1)
    return torch.cat(parts, 1).log_softmax(-1)


def quality(model: torch.nn.Module, ids: torch.Tensor, kinds: list[str], bar: tqdm) -> dict[str, dict]:
    """KL divergence and top-1 agreement with the model without a cache (one forward pass)."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(ids[:, : PREFIX + SCORED], use_cache=False, logits_to_keep=SCORED).logits
    want = logits.double().log_softmax(-1)
    rows = {}
    for kind in kinds:
        got = through_cache(model, ids, kind, bar)
        kl = (want.exp() * (want - got)).sum(-1)
        same = (want.argmax(-1) == got.argmax(-1)).double()
        rows[kind] = {"kl": max(kl.mean().item(), 0.0), "top1": same.mean().item()}
    return rows


@torch.inference_mode()
def bytes_in_bf16(ids: torch.Tensor, kinds: list[str], bar: tqdm) -> dict[str, int]:
    """Size of each cache of a bfloat16 model after the passage, in bytes."""
    model, sizes = load(torch.bfloat16), {}
    for kind in kinds:
        cache = new_cache(model, kind)
        model(ids, past_key_values=cache, logits_to_keep=1)
        sizes[kind] = cache_bytes(cache)
        bar.update(1)
    return sizes


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def print_peak(kind: str) -> None:
    """Peak growth of memory by the passage and some decoding; run in a separate process."""
    model, ids = load(torch.float32), passage(PROMPT)
    with torch.inference_mode():
        model(ids[:, :64])  # libraries, threads
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        cache = new_cache(model, kind)
        for at in range(0, PROMPT, 256):
            model(ids[:, at : at + 256], past_key_values=cache, logits_to_keep=1)
        for _ in range(8):
            model(ids[:, :1], past_key_values=cache)
    print(json.dumps(status("VmHWM") - before))


def peaks(kinds: list[str], bar: tqdm) -> dict[str, int | None]:
    rows: dict[str, int | None] = {}
    for kind in kinds:
        done = subprocess.run([sys.executable, __file__, "--peak", kind], capture_output=True, text=True, check=False)
        rows[kind] = json.loads(done.stdout) if done.returncode == 0 else None
        bar.update(1)
    return rows


def draw(rows: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(rows)
    ours = [k for k in kinds if k != "DynamicCache"]
    colours = dict(zip(kinds, ["#8a8a8a", "#1f6fb2", "#2a9d8f", "#d1622b"], strict=False))
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for axis, field, title in (
        (axes[0], "per_token", "cache, bytes per token"),
        (axes[1], "ms", "decode, ms per token"),
    ):
        bars = axis.bar(kinds, [rows[k][field] for k in kinds], color=[colours[k] for k in kinds])
        axis.bar_label(bars, fmt="%.3g" if field == "ms" else "%.0f", label_type="center", color="white", weight="bold")
        axis.set_title(title)
        axis.tick_params(axis="x", labelrotation=15)
    low, high = zip(*(rows[k]["ms_spread"] for k in kinds), strict=True)
    middle = [rows[k]["ms"] for k in kinds]
    below = [m - a for m, a in zip(middle, low, strict=True)]
    above = [b - m for b, m in zip(high, middle, strict=True)]
    axes[1].errorbar(range(len(kinds)), middle, [below, above], fmt="none", ecolor="black", capsize=3)
    for k in ours:
        axes[2].scatter(rows[k]["per_token"], rows[k]["kl"], s=60, color=colours[k])
        axes[2].annotate(k, (rows[k]["per_token"], rows[k]["kl"]), textcoords="offset points", xytext=(6, 6))
    axes[2].set(yscale="log", xlabel="bytes per token", ylabel="KL, nats a token", title="KL from the original")
    axes[2].margins(0.25)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo.png and demo.json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()
    torch.set_num_threads(min(os.cpu_count() or 1, 8))
    if args.peak:
        kvcompress.KVCache  # noqa: B018  registers the attention
        print_peak(args.peak)
        return
    start = time.perf_counter()
    model, ids = load(torch.float32), passage(PROMPT)
    print(kvcompress.enable(model, verbose=False))
    kinds = ["DynamicCache", *FORMATS]
    with tqdm(total=NEW * len(kinds), desc="generate", unit="token") as bar:
        rows = generate(model, ids, kinds, bar)
    with tqdm(total=SCORED // CHUNK * len(kinds), desc="quality ", unit="chunk") as bar:
        measured = quality(model, ids, kinds, bar)
    with tqdm(total=len(kinds), desc="bfloat16", unit="cache") as bar:
        bf16 = bytes_in_bf16(ids, kinds, bar)
    with tqdm(total=len(kinds), desc="peak    ", unit="cache") as bar:
        peak = peaks(kinds, bar)
    base = rows["DynamicCache"]
    for kind, row in rows.items():
        row |= measured[kind] | {"peak": peak[kind], "bytes_bf16": bf16[kind]}
        row["per_token"] = row["bytes"] / row["seen"]
        row["ratio"], row["ratio_bf16"] = base["bytes"] / row["bytes"], bf16["DynamicCache"] / bf16[kind]
        same = [a == b for a, b in zip(row["tokens"], base["tokens"], strict=True)]
        row["same_tokens"] = same.index(False) if False in same else NEW

    print(f"\n{ids.shape[1]} tokens of a book, {NEW} generated; kernels {kvcompress._C.isa()}, "
          f"{torch.get_num_threads()} threads, model and open pages float32")  # fmt: skip
    head = (
        "cache",
        "B/token",
        "ratio fp32",
        "ratio bf16",
        "ms/token (10-90%)",
        "KL",
        "top-1",
        "same tokens",
        "peak MB",
    )
    line = "{:<13} {:>8} {:>10} {:>10} {:>20} {:>9} {:>7} {:>11} {:>8}"
    print(line.format(*head))
    for kind, r in rows.items():
        ms = f"{r['ms']:.2f} ({r['ms_spread'][0]:.2f}-{r['ms_spread'][1]:.2f})"
        most = f"{r['peak'] / 1e6:.1f}" if r["peak"] else "-"
        shown = (f"{r['per_token']:.0f}", f"{r['ratio']:.2f}x", f"{r['ratio_bf16']:.2f}x", ms, f"{r['kl']:.1e}",
                 f"{r['top1']:.3f}", f"{r['same_tokens']}/{NEW}", most)  # fmt: skip
        print(line.format(kind, *shown))
    draw(rows, args.out / "demo.png")
    (args.out / "demo.json").write_text(json.dumps(rows, indent=1))
    int8, int4 = rows["int8"], rows["int4"]
    print(f"\nwrote demo.png, demo.json in {time.perf_counter() - start:.0f} s: int8 is {int8['ratio']:.2f}x smaller "
          f"at {int8['ms'] / base['ms']:.2f}x the time per token and KL {int8['kl']:.1e}; int4 {int4['ratio']:.2f}x, "
          f"{int4['ms'] / base['ms']:.2f}x, {int4['kl']:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
