"""Page formats: the table of csrc/core/formats.def, and the names that users write.

The public name "raw" stands for the raw format of a dtype; all others name one format each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcompress import _C

ALIGN = 64
"""Bytes that pages are aligned to."""
OPEN_RAW = 1 << 31  # of `formats` of the attend ops: pages that are not full are raw

TABLE: tuple[dict, ...] = _C.formats()
"""One dict a format: code, name, bits, group, keys, rotated, calibrated, dim_multiple, about: see formats.def."""

CODES: dict[str, int] = {row["name"]: row["code"] for row in TABLE}
_RAW = {"float32": CODES["raw_f32"], "float16": CODES["raw_f16"], "bfloat16": CODES["raw_bf16"]}

MAX_DIM: int = _C.KVC_MAX_DIM
"""The widest head that pages take."""

CALIBRATED: tuple[str, ...] = tuple(row["name"] for row in TABLE if row["calibrated"])
"""Formats of rows in calibrated coordinates: `KVCache` takes them with `calibration=`."""

NAMES: tuple[str, ...] = ("raw", *(x for x in CODES if not x.startswith("raw_") and x not in CALIBRATED))
"""The names that `key=` and `value=` take as they are."""


def raw(dtype: object) -> int:
    """Code of the raw format that stores `dtype` (a torch or NumPy dtype).

    Raises TypeError for a dtype that no cache has.
    """
    code = _RAW.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}; cast the model or the tensors")
    return code


def resolve(name: str, dtype: object) -> int:
    """Code of the page format `name` in a cache of `dtype`; "raw" gives the raw format of the dtype.

    Raises ValueError, with the valid names, for an unknown one.
    """
    if name == "raw":
        return raw(dtype)
    code = CODES.get(name) if isinstance(name, str) else None
    if code is None or (name.startswith("raw_") and code != raw(dtype)):
        hint = "; what follows a + in a strategy is an argument here: policy=, sinks=, .." if "+" in str(name) else ""
        raise ValueError(f"format: expected one of {', '.join((*NAMES, *CALIBRATED))}, got {name!r}{hint}")
    return code


def bits(name: str) -> int:
    """Bits of a format's codes; of "raw" those of half precision."""
    return TABLE[resolve(name, "float16")]["bits"]


def name_of(code: int) -> str:
    """Public name of a format code."""
    name = TABLE[code]["name"]
    return "raw" if name.startswith("raw_") else name


def entry_of(offset: Any, pair: Any) -> Any:
    """Block table entries (`kvc_entry` in page.h) of pages at `offset` in formats `pair`; integers or arrays."""
    return offset // ALIGN << 16 | pair


def block_of(entry: Any) -> Any:
    """Which blocks of ALIGN bytes entries name; in files, where pages are numbered, which page."""
    return entry >> 16


def offset_of(entry: Any) -> Any:
    """Bytes from the arena's begin to the pages that entries name."""
    return block_of(entry) * ALIGN


def pair_of(entry: Any) -> Any:
    """Codes of K's and V's format in entries: key << 8 | value."""
    return entry & 0xFFFF


def page_bytes(key: int, value: int, key_dim: int, value_dim: int | None = None, page_size: int = 64) -> int:
    """Bytes of a page of one KV head, metadata included."""
    return _C.page_bytes(key, value, key_dim, value_dim or key_dim, page_size)


class Geometry(NamedTuple):
    """A page as an engine's blocks hold it; see `page_geometry`."""

    key: int
    """Format codes of K and V."""
    value: int
    head_bytes: int
    """Of a page of one head."""
    page_bytes: int
    """Of all heads."""
    residual_bytes: int
    """Of a raw page of all heads, where a sequence's newest tokens lie until the page is sealed; 0 for formats that are
    appended to in place."""


def page_geometry(
    format: str, heads: int, head_dim: int, *, dtype: object, value_dim: int | None = None, page_size: int = 64
) -> Geometry:
    """What an engine has to know to give pages room in blocks of its own (`kvcompress.ops.attend_varlen`).

    format: "int8", or "int8/int4" for K and V. Raises ValueError for formats, dims and page sizes that do not exist.
    """
    key, value = (resolve(name, dtype) for name in (format.split("/") * 2)[:2])
    sizes = _C.page_geometry(key, value, raw(dtype), heads, head_dim, value_dim or head_dim, page_size)
    return Geometry(key, value, *sizes)


def effective_bits(code: int, head_dim: int, page_size: int = 64, *, key: bool = True) -> float:
    """Bits per element of K (or of V) in a page, all metadata counted, and what a head dim is filled up with."""
    filled = head_dim + -head_dim % TABLE[code]["dim_multiple"]
    return 8 * _C.side_bytes(code, key, filled, page_size) / (page_size * head_dim)


def metadata(code: int, head_dim: int) -> tuple[int, str]:
    """(elements of metadata of a row, their dtype's name): scales and zero points, group by group."""
    row = TABLE[code]
    groups = head_dim // row["group"] if row["group"] else 1
    return groups * (2 if row["zero_point"] else 1), "uint8" if row["block_scale"] else "float16"


def granularity(code: int) -> str:
    """What shares a scale in a page of this format: of K, then of V where that differs."""
    row = TABLE[code]
    if row["name"].startswith("raw_"):
        return "none"
    token = f"token, head, {row['group']} dims" if row["group"] else "token, head"
    return f"K: page, channel; V: {token}" if row["keys"] == "channel" else token


def movable(code: int) -> bool:
    """True if a token can leave its page as it is; False if K's metadata is over the page (centroid or channels)."""
    return TABLE[code]["keys"] == "token"


def matrix(head_dim: int = 128) -> list[dict]:
    """One dict a format: name, bits, effective bits of K and V at `head_dim`, granularity, head dims that it takes
    (multiples, up to `MAX_DIM`), devices, kernel levels of this CPU, movable, what it is."""
    return [
        {
            "name": row["name"],
            "bits": row["bits"],
            "key_bits": effective_bits(row["code"], head_dim),
            "value_bits": effective_bits(row["code"], head_dim, key=False),
            "granularity": granularity(row["code"]),
            "head_dim_multiple": row["dim_multiple"],
            "devices": ["cpu", "cuda"],
            "levels": list(_C.isa_available()),
            "movable": movable(row["code"]),
            "about": row["about"],
        }
        for row in TABLE
    ]


def support_matrix() -> str:
    """`matrix` at a head dim of 128 as a Markdown table."""
    lines = [
        "| format | bits | effective, K | effective, V | scale per | head dim | on | kernels here | tokens | what |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in matrix():
        cells = (
            f"`{row['name']}`", row["bits"], f"{row['key_bits']:g}", f"{row['value_bits']:g}", row["granularity"],
            f"multiple of {row['head_dim_multiple']}", ", ".join(row["devices"]), ", ".join(row["levels"]),
            "movable" if row["movable"] else "page-bound", row["about"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
