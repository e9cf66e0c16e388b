"""inspect(): statistics of a model's keys, values and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ... import checks
from ...hf import latent
from ...hf.backend import attending, evaluating
from ...hf.configs import CACHE_ARGUMENT, text_config
from ...hf.modules import attention_modules
from . import data
from .report import grid


@dataclass
class Inspection:
    """Result of `inspect`.

    Attributes:
        heads: a dict for each layer, KV head and kind ("k_pre": keys before RoPE; "k": keys as cached; "v"). absmax;
            norm: mean L2 norm of a row; outliers: absmax of the largest channel / median over channels; offset: norm of
            the mean row / RMS distance of rows from it, an error that centring removes and rotation does not.
        layers: a dict for each layer. first_attention: attention to the first token, mean over heads and queries;
            first_attention_max: maximum over heads; keys90: fraction of the keys that receive 90% of the
            attention, mean over heads; overlap: Jaccard index of these keys and those of the next layer, by the mean
            attention over heads (not in the last layer).
        channels: {kind: float32 [L, H, D]}, absmax of each channel.
        queries, tokens: numbers of queries and tokens measured.
        latent: whether the model has latent attention (MLA), with one head: "k" is the latent, "v" the rotary part of
            the key, "k_pre" the rotary part before RoPE.
    """

    model: str
    tokens: int
    queries: int
    heads: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    channels: dict[str, np.ndarray]
    latent: bool = False

    def table(self) -> str:
        """A text table with one line per layer, for its worst head."""
        k, v = ("latent", "rotary") if self.latent else ("K", "V")
        head = ["layer", "first-token attention (max)", "keys for 90% of attention", "overlap with next layer",
                f"{k} absmax", f"{k} outlier ratio", f"{k} offset", "pre-RoPE outlier ratio", "pre-RoPE offset",
                f"{v} absmax", f"{v} outlier ratio"]  # fmt: skip
        lines = []
        for row in self.layers:
            worst = {}
            for kind in ("k", "k_pre", "v"):
                some = [h for h in self.heads if h["layer"] == row["layer"] and h["kind"] == kind]
                for name in ("absmax", "outliers", "offset"):
                    worst[kind, name] = f"{max(h[name] for h in some):.1f}" if some else "-"
            lines.append([
                str(row["layer"]), f"{row['first_attention']:.3f} ({row['first_attention_max']:.3f})",
                f"{row['keys90']:.3f}", f"{row['overlap']:.2f}" if "overlap" in row else "-",
                worst["k", "absmax"], worst["k", "outliers"], worst["k", "offset"], worst["k_pre", "outliers"],
                worst["k_pre", "offset"], worst["v", "absmax"], worst["v", "outliers"],
            ])  # fmt: skip
        return grid(head, lines)

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.tokens} tokens, attention of the last {self.queries} queries\n{self.table()}\n"
            "Values of K and V are those of the worst KV head of the layer.\n"
            "  keys for 90% of attention: fraction of the keys that receive 90% of the attention\n"
            "  overlap with next layer: Jaccard index of these keys and those of the next layer\n"
            "  outlier ratio: absmax of the largest channel / median over channels\n"
            "  offset: norm of the mean row / RMS distance of rows from it"
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict, without `channels`."""
        return {"model": self.model, "tokens": self.tokens, "queries": self.queries, "latent": self.latent,
                "heads": self.heads, "layers": self.layers}  # fmt: skip

    def plot(self, path: str | Path) -> None:
        """Plots channels of K before and after RoPE, channels of V, and attention by layer, to `path`. Needs
        matplotlib."""
        from matplotlib.figure import Figure

        names = {"k_pre": "K before RoPE", "k": "K as cached", "v": "V"}
        if self.latent:
            names = {"k_pre": "rotary part before RoPE", "k": "latents", "v": "rotary part as cached"}
        kinds = [kind for kind in names if kind in self.channels]
        figure = Figure(figsize=(4.6 * (len(kinds) + 1), 3.8), layout="constrained")
        axes = figure.subplots(1, len(kinds) + 1)
        for axis, kind in zip(axes, kinds, strict=False):
            L, H, D = self.channels[kind].shape
            image = axis.imshow(np.log10(self.channels[kind].reshape(L * H, D) + 1e-6), aspect="auto", cmap="viridis")
            axis.set(title=f"{names[kind]}: log10 of absmax", xlabel="dim", ylabel="layer and KV head")
            axis.set_yticks(range(0, L * H, H), range(L))
            figure.colorbar(image, ax=axis)
        at = [row["layer"] for row in self.layers]
        axes[-1].plot(at, [row["first_attention"] for row in self.layers], "o-", label="attention on the first token")
        axes[-1].plot(at, [row["keys90"] for row in self.layers], "s-", label="keys for 90% of attention")
        overlap = [row.get("overlap", np.nan) for row in self.layers]
        axes[-1].plot(at, overlap, "^-", label="overlap with the next layer")
        axes[-1].set(ylim=(0, 1), xlabel="layer", title="attention")
        axes[-1].legend(frameon=False, fontsize=8)
        axes[-1].spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130)


def _rows_of(layer: int, kind: str, x: torch.Tensor) -> list[dict[str, Any]]:
    """Statistics of x [H, T, D], one dict per head."""
    x = x.float()
    channels, mean = x.abs().amax(1), x.mean(1, keepdim=True)
    spread = (x - mean).square().sum(-1).mean(-1).sqrt()
    offset = mean[:, 0].norm(dim=-1) / spread.clamp_min(1e-12)
    return [
        {
            "layer": layer,
            "head": h,
            "kind": kind,
            "absmax": float(channels[h].max()),
            "norm": float(x[h].norm(dim=-1).mean()),
            "outliers": float(channels[h].max() / channels[h].median().clamp_min(1e-12)),
            "offset": float(offset[h]),
        }
        for h in range(len(x))
    ]


def _heavy(weights: torch.Tensor) -> torch.Tensor:
    """The smallest set of keys that have 90% of the weights [..., n]: bool [..., n]."""
    ordered, index = weights.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    chosen = before < 0.9 * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(chosen).scatter_(-1, index, chosen)


def _attention_rows(attentions: tuple[torch.Tensor, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    sets = []
    for layer, weights in enumerate(attentions):  # [1, Hq, queries, n]
        by_head = weights[0].float().mean(1)
        sets.append(_heavy(by_head.mean(0)))
        rows.append({
            "layer": layer,
            "first_attention": float(by_head[:, 0].mean()),
            "first_attention_max": float(by_head[:, 0].max()),
            "keys90": float(_heavy(by_head).float().mean()),
        })  # fmt: skip
    for row, a, b in zip(rows, sets, sets[1:], strict=False):
        row["overlap"] = float((a & b).sum() / (a | b).sum()) if a.shape == b.shape else float("nan")
    return rows


def _parts(model: PreTrainedModel) -> tuple[bool, dict[int, tuple[torch.nn.Module, Callable]]]:
    """(whether the model has latent attention; for each layer the module whose output contains keys before RoPE, and a
    function that returns them, for H heads, as rows [H, T, D])."""
    found: dict[int, tuple[torch.nn.Module, Callable]] = {}
    for module in latent.layers(model):
        if isinstance(part := getattr(module, "kv_a_proj_with_mqa", None), torch.nn.Module):
            rope = module.qk_rope_head_dim
            found[module.layer_idx] = part, lambda out, H, rope=rope: out[None, :, -rope:]
    if found:
        return True, found

    def by_head(rows: torch.Tensor, H: int) -> torch.Tensor:
        if rows.dim() == 2:  # [T, H * D]
            rows = rows.unflatten(1, (H, -1))
        return rows if rows.shape[0] == H else rows.transpose(0, 1)  # some norms return [H, T, D]

    for index, module in attention_modules(model):
        found[index] = getattr(module, "k_norm", None) or module.k_proj, by_head
    return False, found


@torch.inference_mode()
def inspect(
    model: PreTrainedModel,
    text: data.Text,
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    tokens: int = 2048,
    queries: int = 64,
) -> Inspection:
    """Measures statistics of K (before and after RoPE) and V for each layer and KV head, and the concentration of
    attention.

    Args:
        model: a causal LM with separate q_proj, k_proj, v_proj, or with latent attention.
        text, tokenizer: as in `evaluate`.
        tokens: number of tokens to read from the start of the text.
        queries: number of last queries to measure attention of.

    Returns an `Inspection`. Raises ValueError for `tokens` or `queries` below 1, a text of fewer than `queries` + 1
    tokens, or a model with fused projections.
    """
    config, queries = text_config(model.config), checks.integer("inspect: queries", queries, 1)
    tokens = checks.integer("inspect: tokens", tokens, 1)
    reader = data.load_tokenizer(tokenizer)
    ids = data.load_ids(text, reader, data.vocabulary(model))
    ids = (data.bos_of(model, reader) + ids)[:tokens]
    if len(ids) <= queries:
        raise ValueError(f"inspect: text: expected more than {queries} tokens, got {len(ids)}")
    is_latent, parts = _parts(model)
    before: dict[int, list[torch.Tensor]] = {index: [] for index in parts}
    hooks = []
    for index, (part, _) in parts.items():

        def note(_: Any, __: Any, out: torch.Tensor, index: int = index) -> None:
            before[index].append(out[0])

        hooks.append(part.register_forward_hook(note))
    batch, cache = data.as_batch(ids, model.device), DynamicCache(config=model.config)
    try:
        with attending(model, "eager"), evaluating(model):
            model(batch[:, :-queries], **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
            out = model(batch[:, -queries:], **{CACHE_ARGUMENT: cache}, logits_to_keep=1, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    heads, channels = [], {}
    for kind in ("k_pre", "k", "v"):
        by_layer = []
        for index, (_, to_heads) in parts.items():
            layer: Any = cache.layers[index]
            x = (layer.keys if kind == "k" else layer.values)[0]
            if kind == "k_pre":
                x = torch.cat([to_heads(rows, len(x)) for rows in before[index]], 1)
            heads += _rows_of(index, kind, x)
            by_layer.append(x.float().abs().amax(1).cpu().numpy())
        if len({x.shape for x in by_layer}) == 1:
            channels[kind] = np.stack(by_layer)
    name = config.name_or_path or type(model).__name__
    return Inspection(name, len(ids), queries, heads, _attention_rows(out.attentions), channels, is_latent)
