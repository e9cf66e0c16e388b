"""Quantization schemes and granularities of the standalone ops, from csrc/core/schemes.def. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from kvcompress import _C

TABLE: tuple[dict, ...] = _C.schemes()
"""One dict per scheme: code, name, bits, group, zero_point, block_scale, about (see csrc/core/schemes.def)."""

CODES: dict[str, int] = {row["name"]: row["code"] for row in TABLE}

ALIASES: dict[str, tuple[str, str]] = {
    "int4_token": ("int4_sym", "token_head"),
    "int4_g32": ("int4_asym", "group:32"),
    "kivi4": ("int4_asym", "token_head"),
    "kivi2": ("int2_asym", "token_head"),
}
"""Page formats that equal a scheme at one granularity (`kivi4`, `kivi2`: that of V; K is "channel" of a page)."""

ROTATED: tuple[str, ...] = ("int4", "int3", "int2", "int4_lloyd")
"""Page formats with rotated rows and a least-squares scale; their granularity is "token_head"."""

NAMES: tuple[str, ...] = (*CODES, *ROTATED, *ALIASES)
"""The format names of `kvcompress.quantize`."""

GRANULARITIES = ("tensor", "head", "token", "token_head", "channel", "group")
PACKINGS = ("planes", "low_first", "high_first")
_KEPT = {  # the dims of B, H, T with separate scales
    "tensor": (False, False, False),
    "head": (False, True, False),
    "token": (True, False, True),
    "token_head": (True, True, True),
    "channel": (False, True, False),
    "group": (True, True, True),
}


class Grain(NamedTuple):
    """A scheme and its granularity; `scheme` may be a rotated page format."""

    scheme: str
    granularity: str  # one of GRANULARITIES
    group: int  # dims per scale if the granularity is "group", else 0
    packing: str

    @property
    def label(self) -> str:
        """The granularity as written by users, such as "group:32"."""
        return f"group:{self.group}" if self.granularity == "group" else self.granularity

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.scheme[3]) if self.scheme in ROTATED else TABLE[CODES[self.scheme]]["bits"]

    @property
    def zero_point(self) -> bool:
        """Whether zero points are stored next to scales."""
        return self.scheme not in ROTATED and TABLE[CODES[self.scheme]]["zero_point"]

    @property
    def block_scale(self) -> bool:
        """Whether scales are one byte (e4m3, e8m0) instead of float16."""
        return self.scheme not in ROTATED and TABLE[CODES[self.scheme]]["block_scale"]

    @property
    def codes(self) -> tuple[int, int, int, int]:
        """Arguments of the op `quantize_by`: scheme, granularity, group, packing. Raises ValueError for a rotated
        format, which has a separate op."""
        if self.scheme in ROTATED:
            raise ValueError(
                f"schemes: expected one of {', '.join(CODES)}, got {self.scheme}, whose rows are rotated: use "
                f"_C.quantize(rows, formats.CODES[{self.scheme!r}])"
            )
        granularity = GRANULARITIES.index(self.granularity)
        return CODES[self.scheme], granularity, self.group, PACKINGS.index(self.packing)

    def scale_shape(self, B: int, H: int, T: int, D: int) -> tuple[int, int, int, int]:
        """Shape of the scales for x [B, H, T, D]: 1 for reduced dims; the last dim is the number of scales per row."""
        b, h, t = _KEPT[self.granularity]
        groups = {"channel": D, "group": D // (self.group or 1)}.get(self.granularity, 1)
        return B if b else 1, H if h else 1, T if t else 1, groups


def grain(name: str, granularity: str | None = None, packing: str = "planes") -> Grain:
    """The Grain for the arguments of `kvcompress.quantize`.

    Raises ValueError for an unknown name, granularity or packing, and for unsupported combinations.
    """
    if name not in NAMES:
        raise ValueError(f"format: expected one of {', '.join(NAMES)}, got {name!r}")
    if packing not in PACKINGS:
        raise ValueError(f"packing: expected one of {', '.join(PACKINGS)}, got {packing!r}")
    scheme, own = ALIASES.get(name, (name, None))
    if scheme in ROTATED:
        own = "token_head"
    elif fixed := TABLE[CODES[scheme]]["group"]:
        own = f"group:{fixed}"
    chosen = granularity or own or "token_head"
    if chosen == "block":
        chosen = own if own and own.startswith("group:") else "group:32"
    kind, colon, number = chosen.partition(":") if isinstance(chosen, str) else ("", "", "")
    group = int(number) if number.isdecimal() else 0
    if kind not in GRANULARITIES or (kind == "group") != (group > 0) or bool(colon) != (kind == "group"):
        known = ", ".join(GRANULARITIES[:-1])
        raise ValueError(f"granularity: expected one of {known}, group:N or block, got {granularity!r}")
    if own and chosen != own:
        other = scheme if name in ALIASES else f"{scheme[:4]}_sym" if scheme in ROTATED else None
        hint = f"; {other} takes any" if other else ""
        raise ValueError(f"granularity: {name}: expected {own}, the only one of this format, got {granularity!r}{hint}")
    found = Grain(scheme, kind, group, packing)
    if packing != "planes" and (found.bits not in (2, 4) or scheme in ROTATED):
        raise ValueError(f"packing: {name}: expected planes, got {packing!r}; others are for schemes of 4 and 2 bits")
    return found
