"""Tables of common tutorials, with their claims next to what is measured here.

A row is data: a label, a strategy, a claim. Rows whose strategy this version does not support (policies, formats) are
left out and listed below the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcompress.tools.evaluation import data
from kvcompress.tools.evaluation.report import Evaluation, grid
from kvcompress.tools.evaluation.suite import Settings, evaluate
from kvcompress.tools.strategy import Strategy

ARENA = 256 * 2**20
"""Bytes that sequences have to fit in, for the capacity table."""


@dataclass(frozen=True)
class Row:
    """A row of a table. settings: of `evaluate`, if different from the table's."""

    label: str
    strategy: str
    claimed: str = "-"
    settings: dict[str, Any] = field(default_factory=dict)


Measured = Callable[[dict[str, Any], dict[str, Any], Evaluation], str]  # row, uncompressed row, evaluation


def _ppl(row: dict[str, Any], base: dict[str, Any], _: Evaluation) -> str:
    return f"PPL {row['ppl']:.2f} ({row['ppl'] - base['ppl']:+.3f}), KL {row['kl']:.1e}"


def _combined(row: dict[str, Any], base: dict[str, Any], _: Evaluation) -> str:
    return f"{row['ratio']:.2f}x, PPL {row['ppl'] - base['ppl']:+.3f}, KL {row['kl']:.1e}"


def _cost(row: dict[str, Any], base: dict[str, Any], _: Evaluation) -> str:
    return f"{1 / row['decode_ratio']:.2f}x decode, {row['ratio']:.2f}x smaller, KL {row['kl']:.1e}"


def _capacity(row: dict[str, Any], base: dict[str, Any], evaluation: Evaluation) -> str:
    fit, plain = (int(ARENA // r["bytes"]) for r in (row, base))
    tokens, rate = evaluation.about["context"], row["tokens_per_second"]
    return f"{fit} sequences of {tokens} tokens ({fit / plain:.2f}x), {rate:.0f} tokens/s each"


@dataclass(frozen=True)
class Table:
    """A table of the tutorials. why: reason for the difference between claim and measurement."""

    name: str
    title: str
    rows: tuple[Row, ...]
    measured: Measured
    why: str
    cost: bool = False


_TOY = "A toy model of 5 M parameters on another text, not a 70 B model: compare direction and order, not size."

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "formats", "Perplexity by format and scale granularity", (
                Row("no compression", "dynamic", "PPL 3.32"),
                Row("FP8 per token", "fp8_e4m3", "+0.01"),
                Row("INT8 per token", "int8", "+0.02"),
                Row("INT8 per tensor", "fake:int8@tensor", "+0.09"),
                Row("INT4 per token", "fake:int4@token", "+0.16"),
                Row("INT4 group 32", "fake:int4@group32", "+0.10"),
                Row("INT4 per tensor", "fake:int4@tensor", "+0.89"),
                Row("INT4 rotated, centred (int4)", "int4"),
            ), _ppl, f"{_TOY} Claimed FP8 beats INT8; with a scale per token it is the reverse (3 bits of mantissa).",
        ),
        Table(
            "length", "INT4 against context length", tuple(
                Row(f"INT4 at {n} tokens", "int4", claimed, {"context": n})
                for n, claimed in ((512, "+0.05"), (1024, "-"), (2048, "-"), (4096, "-"), (8192, "-"), (16384, "+0.52"))
            ), _ppl, f"{_TOY} The claim's int4 is per token, not rotated; lengths beyond the model's are left out.",
        ),
        Table(
            "h2o-budget", "H2O's budget against random eviction", tuple(
                Row(f"{name} {share}%", f"raw+{policy}:{share}%", claimed)
                for name, policy, claims in (
                    ("H2O", "h2o", ("12.8", "7.2", "5.8", "5.3", "5.05", "4.98", "4.95")),
                    ("random", "random", ("45.2", "18.5", "9.8", "7.2", "5.6", "5.1", "-")),
                )
                for share, claimed in zip((5, 10, 20, 30, 50, 75, 100), claims, strict=True)
            ), _ppl, f"{_TOY} The claimed curve has no source and is too smooth to be measured.",
        ),
        Table(
            "sinks", "Sinks before a window of 1,024 tokens", tuple(
                Row(f"{n} sinks", f"raw+window:1024+sinks:{n}", claimed)
                for n, claimed in ((0, "15.8"), (1, "6.2"), (2, "-"), (4, "5.6"), (8, "-"), (16, "5.5"), (32, "-"))
            ), _ppl, f"{_TOY} StreamingLLM's own figures without sinks are in the thousands (2309.17453, table 2).",
        ),
        Table(
            "kv-sensitivity", "Which of K and V is the more sensitive", (
                Row("K int4, V raw", "int4/raw"),
                Row("K raw, V int4", "raw/int4"),
                Row("K int4, V int8", "int4/int8"),
                Row("K int8, V int4", "int8/int4", "better than the reverse"),
                Row("K fp8, V int4", "fp8_e4m3/int4"),
                Row("both per token int4, not rotated", "fake:int4@token"),
                Row("both per channel int4, not rotated", "fake:int4@channel", "K: better, V: worse than per token"),
            ), _combined, f"{_TOY} Rotation and centring remove most of K's outliers, so K and V come closer.",
        ),
        Table(
            "combined", "Combined recipes", (
                Row("FP8 + H2O 50%", "fp8_e4m3+h2o:50%", "4.0x, +0.12"),
                Row("sinks + H2O 30% + FP8", "fp8_e4m3+h2o:30%+sinks:4", "6.6x, +0.25"),
                Row("sinks + window 4K", "raw+window:4096+sinks:4", "32x"),
                Row(
                    "sinks 4 + recent 32 + heavy 28 + INT8", "int8+h2o:28+sinks:4+residual_length:32",
                    "31.2x at 1,000 tokens",
                ),
                Row("K int8, V int4, 8 sinks, 128 recent", "int8/int4+sinks:8+residual_length:128"),
            ), _combined, f"{_TOY} 31.2x is 1000/64 x 2: most of it is forgetting, and scales are not counted.",
        ),
        Table(
            "throughput", "Memory, quality, throughput", (
                Row("no compression", "dynamic", "1x"),
                Row("FP8", "fp8_e4m3", "2.0x; dequantization < 2%"),
                Row("INT8", "int8", "1.94x"),
                Row("INT4", "int4", "3.6x"),
            ), _cost, "Claims are ratios of bytes against a 16-bit cache; here it is time (1 sequence, fp32 base).",
            cost=True,
        ),
        Table(
            "capacity", f"What fits in {ARENA >> 20} MiB", tuple(
                Row(name, strategy)
                for name, strategy in (("no compression", "dynamic"), ("FP8", "fp8_e4m3"), ("INT8", "int8"),
                                       ("INT4", "int4"), ("K int8, V int4", "int8/int4"))
            ), _capacity, "Sequences by the bytes that one holds, slack included; speed is that of one sequence alone.",
            cost=True,
        ),
    )
}  # fmt: skip


@dataclass
class Comparison:
    """A finished table: rows of (label, strategy, claimed, measured)."""

    name: str
    title: str
    lines: list[tuple[str, str, str, str]]
    left_out: dict[str, str]
    why: str
    about: dict[str, Any]

    def __str__(self) -> str:
        body = grid(["", "strategy", "claimed", "measured here"], self.lines)
        waiting = [f"left out: {label}: {reason}" for label, reason in self.left_out.items()]
        return "\n".join([f"{self.title} ({self.about['model']})", body, *waiting, f"Why they differ: {self.why}"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_table(
    name: str, model: PreTrainedModel, text: data.Text, *, out: str | Path | None = None, **options: Any
) -> Comparison:
    """Measures the rows of a table. model, text, options as in `evaluate`; resumable in `out` like it.

    Raises ValueError for an unknown table.
    """
    if name not in TABLES:
        raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {name!r}")
    table = TABLES[name]
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
    usual = {name: value for name, value in options.items() if name in asdict(Settings())}
    others = {name: value for name, value in options.items() if name not in usual}
    lines: list[tuple[str, str, str, str]] = []
    left_out: dict[str, str] = {}
    about: dict[str, Any] = {}
    for settings, rows in _by_settings(table.rows):
        chosen = {**usual, **settings, "cost": table.cost or table.measured is _combined, "tasks": ()}
        need = chosen.get("context", Settings.context) + chosen.get("scored", Settings.scored)
        if "context" in settings and need > longest:
            left_out |= {row.label: f"the model ends at {longest} tokens" for row in rows}
            continue
        evaluation = evaluate(
            model, text, [row.strategy for row in rows], out=out, skip_unavailable=True, **chosen, **others
        )
        found = {row["strategy"]: row for row in evaluation.rows}
        about = evaluation.about
        for row in rows:
            if row.strategy in evaluation.skipped:
                left_out[row.label] = evaluation.skipped[row.strategy]
                continue
            measured = table.measured(found[str(Strategy(row.strategy))], evaluation.rows[0], evaluation)
            lines.append((row.label, row.strategy, row.claimed, measured))
    about = about or {"model": model.config.name_or_path or type(model).__name__}
    return Comparison(table.name, table.title, lines, left_out, table.why, about)


def _by_settings(rows: Iterable[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    groups: list[tuple[dict[str, Any], list[Row]]] = []
    for row in rows:
        for settings, some in groups:
            if settings == row.settings:
                some.append(row)
                break
        else:
            groups.append((row.settings, [row]))
    return groups
