"""The plots of docs/eviction.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import kvcompress
from kvcompress import KVCache
from kvcompress.policies import H2O, AdaKV, Demote, SnapKV, StreamingLLM
from kvcompress.tools.evaluation.data import as_batch, bos_of, load_ids
from kvcompress.tools.evaluation.suite import load_model

COLOURS = {
    "h2o": "#1f6fb2", "snapkv": "#2a9d8f", "ada_h2o": "#7b4fa3", "expected": "#b8901f", "keydiff": "#c0396b",
    "random": "#8a8a8a", "window": "#d1622b", "oracle": "#30323d",
}  # fmt: skip
CHUNK = 128


def _clean(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def budget_curves(result: dict[str, Any], path: Path, names: dict[str, str]) -> None:
    """KL against budget, one panel per model."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (model, found) in zip(figure.subplots(1, 2, sharey=True), result["models"].items(), strict=True):
        for name, colour in COLOURS.items():
            rows = [r for r in found["budgets"] if r["policy"] == name and r["budget"] < 100]
            style = "--" if name == "oracle" else "o-"
            label = names[name].strip("*")
            axis.plot([r["budget"] for r in rows], [r["kl"] for r in rows], style, color=colour, label=label, ms=4)
            if "kl_low" in rows[0] and name in ("h2o", "window", "random"):
                low, high = ([r[k] for r in rows] for k in ("kl_low", "kl_high"))
                axis.fill_between([r["budget"] for r in rows], low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set(yscale="log", xlabel="budget, % of the tokens", ylabel="KL, nats", title=f"{model}: book text")
        axis.legend(frameon=False, fontsize=8)
        _clean(axis)
    figure.savefig(path, dpi=120)


@torch.no_grad()
def weights_of(model: Any, cache: KVCache, ids: torch.Tensor, queries: int) -> torch.Tensor:
    """[Hq, queries, T]: attention of the last `queries` of ids in layer 3, zero for evicted tokens."""
    T = ids.shape[1]
    for at in range(0, T - queries, CHUNK):
        model(ids[:, at : min(at + CHUNK, T - queries)], past_key_values=cache, logits_to_keep=1)
    out = model(ids[:, T - queries :], past_key_values=cache, output_attentions=True, logits_to_keep=1)
    return out.attentions[3][0]


@torch.no_grad()
def over_time(model: Any, policy: Any, key: str, ids: torch.Tensor) -> list[int]:
    """Bytes after every chunk."""
    cache, sizes = KVCache(model.config, key, policy=policy), []
    for part in ids.split(CHUNK, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
        sizes.append(cache.stats()["bytes"])
    return sizes


def heads(root: Path, path: Path) -> None:
    """Attention: exact, quantized, evicted; kept tokens; size over time; budgets of heads."""
    model, tokenizer = load_model(root / "assets" / "books-tiny", None)
    kvcompress.enable(model, verbose=False)
    ids = as_batch(bos_of(model, tokenizer) + load_ids(root / "assets/text/book.txt", tokenizer, 4096), model.device)
    text, queries = ids[:, 3000:3384], 48
    kinds = {
        "raw": ("raw", None), "int4": ("int4", None), "H2O(96)": ("raw", H2O(96)),
        "StreamingLLM(4, 92)": ("raw", StreamingLLM(4, 92)),
    }  # fmt: skip
    figure = Figure(figsize=(15, 11), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 4, height_ratios=(1.3, 0.9, 1.2))
    shown = None
    for i, (name, (key, policy)) in enumerate(kinds.items()):
        cache = KVCache(model.config, key, policy=policy, page_size=16)
        x = weights_of(model, cache, text, queries)[0]
        axis = figure.add_subplot(grid[0, i])
        shown = axis.imshow((x + 1e-5).log10(), aspect="auto", cmap="magma", vmin=-5, vmax=0, interpolation="nearest")
        axis.set(title=f"{name}: layer 3, head 0", xlabel="token", ylabel="query")
        axis = figure.add_subplot(grid[1, i])
        kept = torch.zeros(6 * 2, text.shape[1])
        for layer in range(6):
            for h, slots in enumerate(cache.kept(layer).slots[0]):
                kept[2 * layer + h, slots] = 1
        axis.imshow(kept, aspect="auto", cmap="Greys", vmin=0, vmax=1.3, interpolation="nearest")
        axis.set(title=f"kept tokens ({100 * float(kept.mean()):.0f}%)", xlabel="token", ylabel="layer")
        axis.set_yticks(range(0, 12, 2), range(6))
    figure.colorbar(shown, ax=figure.axes[0:7:2], label="log10 of the weight", shrink=0.8)
    axis = figure.add_subplot(grid[2, :2])
    long = ids[:, :2560]
    for name, (key, policy) in {
        "raw": ("raw", None), "int8": ("int8", None), "int4": ("int4", None), "int8, H2O(512)": ("int8", H2O(512)),
        "raw, Demote(H2O(1024))": ("raw", Demote(H2O(1024))), "int8, window": ("int8", StreamingLLM(4, 508)),
    }.items():  # fmt: skip
        sizes = over_time(model, policy, key, long)
        axis.plot([CHUNK * (i + 1) for i in range(len(sizes))], [x / 2**20 for x in sizes], label=name)
    axis.set(xlabel="tokens seen, in chunks of 128", ylabel="MiB held (fp32 model)", title="size over time")
    axis.legend(frameon=False, fontsize=8)
    _clean(axis)
    axis = figure.add_subplot(grid[2, 2:])
    for i, policy in enumerate((AdaKV(H2O(256)), AdaKV(SnapKV(256)))):
        cache = KVCache(model.config, "int8", policy=policy)
        with torch.no_grad():
            model(ids[:, :2048], past_key_values=cache, logits_to_keep=1)
        lengths = [len(s) for layer in range(6) for s in cache.kept(layer).slots[0]]
        axis.bar([x + 0.4 * i for x in range(12)], lengths, 0.4, label=repr(policy), color=("#7b4fa3", "#2a9d8f")[i])
    axis.axhline(256, color="black", linewidth=0.8)
    axis.set_xticks([x + 0.2 for x in range(12)], [f"{x // 2}.{x % 2}" for x in range(12)])
    axis.set(xlabel="layer.head", ylabel="tokens kept of 2,048", title="budgets of heads")
    axis.legend(frameon=False, fontsize=8)
    _clean(axis)
    figure.savefig(path, dpi=110)


def draw(result: dict[str, Any], root: Path, names: dict[str, str]) -> None:
    """Draws both plots; names: of the policies."""
    budget_curves(result, root / "docs" / "eviction.png", names)
    heads(root, root / "docs" / "eviction-heads.png")
