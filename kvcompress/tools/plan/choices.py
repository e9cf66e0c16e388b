"""Recommendations of formats and policies with reasons, by rules over this project's measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from . import evidence
from .fit import held
from .models import OURS, Model
from .size import recipe_of
from .units import show_gb

LADDER = ("int8", "int8/int4", "int4", "int4/int2", "int2")
"""Candidates, largest first. fp8_e4m3 has the size of int8 and a larger error; other formats are for comparison."""

FLOORS = {"lossless": 1e-4, "high": 2e-3, "medium": 5e-2}
"""Quality floors: maximum KL in nats per token, on the worse of the two shipped models."""

WORKLOADS = ("auto", "chat", "multi-turn", "retrieval", "reasoning", "streaming")
_STEP = 0.12  # a smaller format must save at least this share at the context in question


@dataclass
class Choice:
    """A recommended strategy, its bytes for one request, and the reasons. role: "recommended", "safer" or "smaller".
    options: arguments for `KVCache.from_dict`; strategy: the same as a string."""

    role: str
    strategy: str
    options: dict[str, Any]
    bytes: int
    ratio: float
    kl: float
    why: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def regime(tokens: int) -> str:
    """ "short" (below 4K tokens), "medium" (to 32K), "long" (to 128K) or "very long"."""
    return ("short", "medium", "long", "very long")[(tokens >= 4096) + (tokens > 32_768) + (tokens > 131_072)]


def floor_of(quality: str | float) -> float:
    """Maximum KL in nats per token of a quality: a name in `FLOORS`, or a number. Raises ValueError for others."""
    try:
        limit = FLOORS[quality] if quality in FLOORS else float(quality)
    except (TypeError, ValueError):
        limit = 0.0
    if not limit > 0:
        raise ValueError(f"quality: expected {', '.join(FLOORS)} or a KL above 0, got {quality!r}")
    return limit


def _speed(name: str, tokens: int, isa: str) -> str:
    cell = evidence.decode(tokens, isa)
    if name not in cell["ms"]:
        return ""
    times = cell["ms"]["raw bf16"] / cell["ms"][name]
    return (
        f"attention over {cell['S']:,} tokens (32 query, 8 KV heads of 128) took {cell['ms'][name]:.2f} ms, "
        f"{times:.1f}x faster than raw ({cell['isa']}, {cell['threads']} threads; {evidence.COMMANDS['decode']})"
    )


def _quality(name: str, latent: bool) -> str:
    if latent:
        row = evidence.measured()["latents"][name.partition("/")[0]]
        return (
            f"KL {row['kl']:.1e} on the shipped model with latent attention; same top token {100 * row['top1']:.1f}% "
            f"({evidence.COMMANDS['latents']}; a toy model: measure yours with --measure)"
        )
    rows = evidence.measured()["formats"][name]
    plain, biased = rows["plain"], rows["biased"]
    return (
        f"KL {plain['kl']:.1e} on the shipped model with plain keys, {biased['kl']:.1e} with biased ones; same "
        f"top token {100 * plain['top1']:.1f}% and {100 * biased['top1']:.1f}% ({evidence.COMMANDS['formats']}; toy "
        "models: measure yours with --measure)"
    )


def _drafts(name: str) -> tuple[float, float]:
    """(worst measured change of accepted tokens per step, its spread); of K and V formats the worse one."""
    known = evidence.measured()["drafts"]
    found = [(known[part]["change"], known[part]["spread"]) for part in name.split("/") if part in known]
    return min(found, default=(0.0, 0.0))


def _choose(model: Model, tokens: int, limit: float, drafts: bool) -> tuple[str, list[str]]:
    """(the smallest candidate that meets the floor and saves enough, reasons against the others)."""
    chosen, why = "", []
    for name in LADDER:
        loss = evidence.kl(name, model.latent)
        if loss > limit:
            why.append(f"not {name}: KL {loss:.1e} is above the floor of {limit:.0e}")
            break
        change, spread = _drafts(name)
        if drafts and change + spread < 0:
            why.append(f"not {name}: with drafts {change:+.2f} accepted tokens a step ({evidence.COMMANDS['drafts']})")
            break
        if chosen and model.latent and held(model, chosen, tokens) == held(model, name, tokens):
            continue
        if chosen:
            before, after = (held(model, x, tokens) for x in (chosen, name))
            if after > before * (1 - _STEP):
                why.append(
                    f"not {name}: at {tokens:,} tokens it saves {1 - after / before:.0%} of {chosen} (raw open pages)"
                )
                continue
        chosen = name
    return chosen, why


def _workload(
    model: Model, tokens: int, workload: str, drafts: bool, name: str
) -> tuple[list[str], dict[str, Any], str]:
    """(reasons, further options, suffix of the strategy string) of a workload."""
    why: list[str] = []
    if workload == "streaming":
        window = min(4096, model.trained or 4096) - 4
        positions = "cache" if model.trained and tokens > model.trained else "original"
        text = f"positions {positions!r}: " + (
            f"{tokens:,} tokens are beyond the {model.trained:,} that the model was trained for"
            if positions == "cache" else "within the trained length"
        )  # fmt: skip
        why.append(
            f"streaming: 4 sinks and a window of {window:,}: bytes stop growing; nothing older can be found again"
        )
        why.append(text)
        policy = {"policy": "StreamingLLM", "args": [4, window], "options": {"positions": positions}}
        return why, {"policy": policy}, f"+window:{window}"
    no = evidence.budget("H2O", 30)
    full = evidence.budget("all tokens", 100)
    window_row = evidence.budget("sinks and window", 30)
    if workload == "retrieval" and no and full and window_row:
        why.append(
            f"no eviction: at 30% of the tokens H2O finds {no['accuracy_outside']:.0%} of what all tokens find "
            f"({full['accuracy_outside']:.0%}), a window {window_row['accuracy_outside']:.0%} "
            f"({evidence.COMMANDS['budgets']})"
        )
    if workload == "multi-turn":
        why.append("no eviction: what the next turn asks for is not known when tokens are dropped")
        why.append(
            "turns go on with the same cache; conversations with one system prompt share its pages (copy.deepcopy)"
        )
    if workload == "reasoning":
        why.append(
            "long generations: formats first, all tokens stay; if that does not fit, "
            f"policy=H2O({max(1024, tokens // 4)}, score='mean') on an 8-bit format (movable tokens)"
            + (f": KL {no['kl']:.2f} at 30% of the tokens on the shipped model" if no else "")
        )
    if drafts:
        why.append("drafts: an open page is raw, so that what is rejected leaves no trace in any format")
        change, spread = _drafts(name)
        if name in evidence.measured()["drafts"]:
            why.append(
                f"drafts: {change:+.2f} +- {spread:.2f} accepted tokens a step in the worst setting, within the noise "
                f"({evidence.COMMANDS['drafts']})"
            )
    return why, {}, ""


def recommend(
    model: Model, tokens: int, *, workload: str = "auto", quality: str | float = "high", drafts: bool = False,
    isa: str = "avx512bf16",
) -> list[Choice]:  # fmt: skip
    """Up to three choices for sequences of `tokens` tokens of `model`, best first, each with reasons and measurements.

    workload: one of `WORKLOADS`; quality: a floor, see `floor_of`; drafts: whether speculative decoding is used; isa:
    kernel level of the CPU. Sizes are in bytes. Raises ValueError for unknown values.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(WORKLOADS)}, got {workload!r}")
    limit = floor_of(quality)
    name, against = _choose(model, tokens, limit, drafts)
    if not name:
        name, against = "raw", [f"every format is above the floor of {limit:.0e}", *against]
    if not any(layer.kind in OURS or layer.paged(tokens) for layer in model.layers):
        name, against = "raw", ["the model has no full, sliding or chunked attention: nothing is compressed"]
        if topk := max(layer.topk for layer in model.layers):
            against = [f"a KVCache supports up to {topk:,} slots (index_topk), all attended; beyond: DynamicCache"]
    why, options, tail = _workload(model, tokens, workload, drafts, name)
    raw = held(model, "raw", tokens)
    choices: list[Choice] = []
    rungs = [
        x
        for i, x in enumerate(LADDER)
        if not model.latent or i == 0 or held(model, x, tokens) < held(model, LADDER[i - 1], tokens)
    ]
    at = rungs.index(name) if name in rungs else -1
    picks = [("recommended", name)]
    if at > 0:
        picks.append(("safer", rungs[at - 1]))
    if 0 <= at < len(rungs) - 1:
        picks.append(("smaller", rungs[at + 1]))
    for role, one in picks:
        kept = options.get("policy", {}).get("args", (0, 0))[1]
        recipe = recipe_of(one, budget=kept + 4 if kept else 0)
        bytes_ = held(model, recipe, tokens)
        key, _, value = one.partition("/")
        dropped = ", most of it tokens that are dropped" if 0 < kept < tokens // 2 else ""
        reasons = [f"{show_gb(bytes_)} a request, {raw / bytes_:.2f}x smaller than raw at {tokens:,} tokens{dropped}"]
        if one != "raw":
            reasons.append(_quality(one, model.latent))
            reasons += [said] if not model.latent and (said := _speed(one, kept + 4 if kept else tokens, isa)) else []
        if role == "recommended":
            reasons += [*why, *against]
        if model.biased and one.startswith("int4"):
            reasons.append(
                "K has a bias: int4 takes each page's mean out of K; int4_token, nvfp4 and mxfp4 do not, and break"
            )
        if model.latent:
            reasons.append("latent attention: the rotated part of K gets 8 bits whatever the format")
        chosen = {"key": key, "value": value or key, **options}
        choices.append(Choice(role, one + tail, chosen, bytes_, raw / bytes_,
                              evidence.kl(one, model.latent) if one != "raw" else 0.0, reasons))  # fmt: skip
    return choices
