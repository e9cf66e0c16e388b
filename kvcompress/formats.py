"""Page formats: the table of csrc/core/formats.def and the public names.

"raw" is the raw format of the cache's dtype; every other name is one format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcompress import _C

ALIGN = 64
"""Alignment of pages in bytes."""
OPEN_RAW = 1 << 31  # flag in the argument `formats` of the attend ops: pages that are not full are raw

TABLE: tuple[dict, ...] = _C.formats()
"""One dict per format: code, name, bits, group, keys, rotated, calibrated, dim_multiple, about; see formats.def."""

CODES: dict[str, int] = {row["name"]: row["code"] for row in TABLE}
_RAW = {"float32": CODES["raw_f32"], "float16": CODES["raw_f16"], "bfloat16": CODES["raw_bf16"]}

MAX_DIM: int = _C.KVC_MAX_DIM
"""The largest head dim that pages support."""

CALIBRATED: tuple[str, ...] = tuple(row["name"] for row in TABLE if row["calibrated"])
"""Formats for calibrated K and V: `KVCache` accepts them with `calibration=`."""

NAMES: tuple[str, ...] = ("raw", *(x for x in CODES if not x.startswith("raw_") and x not in CALIBRATED))
"""The names that `key=` and `value=` accept without a calibration."""


def raw(dtype: object) -> int:
    """Code of the raw format for `dtype` (a torch or NumPy dtype).

    Raises TypeError for a dtype that caches do not support.
    """
    code = _RAW.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}; cast the model or the tensors")
    return code


def resolve(name: str, dtype: object) -> int:
    """Code of the page format `name` in a cache of `dtype`; "raw" is the raw format of the dtype.

    Raises ValueError for an unknown name.
    """
    if name == "raw":
        return raw(dtype)
    code = CODES.get(name) if isinstance(name, str) else None
    if code is None or (name.startswith("raw_") and code != raw(dtype)):
        hint = "; what follows a + in a strategy is an argument here: policy=, sinks=, .." if "+" in str(name) else ""
        raise ValueError(f"format: expected one of {', '.join((*NAMES, *CALIBRATED))}, got {name!r}{hint}")
    return code


def bits(name: str) -> int:
    """Bits per code of a format; 16 for "raw"."""
    return TABLE[resolve(name, "float16")]["bits"]


def name_of(code: int) -> str:
    """Public name of a format code."""
    name = TABLE[code]["name"]
    return "raw" if name.startswith("raw_") else name


def entry_of(offset: Any, pair: Any) -> Any:
    """Block table entries (`kvc_entry` in page.h) for pages at `offset` in formats `pair`; integers or arrays."""
    return offset // ALIGN << 16 | pair


def block_of(entry: Any) -> Any:
    """Page offset of entries in blocks of ALIGN bytes; in files, the page number."""
    return entry >> 16


def offset_of(entry: Any) -> Any:
    """Offset of the pages of entries in the arena, in bytes."""
    return block_of(entry) * ALIGN


def pair_of(entry: Any) -> Any:
    """Formats of K and V in entries, as key << 8 | value."""
    return entry & 0xFFFF


def page_bytes(key: int, value: int, key_dim: int, value_dim: int | None = None, page_size: int = 64) -> int:
    """Size in bytes of a page of one KV head, metadata included."""
    return _C.page_bytes(key, value, key_dim, value_dim or key_dim, page_size)


class Geometry(NamedTuple):
    """Layout of a page in the blocks of an engine; see `page_geometry`."""

    key: int
    """Format codes of K and V."""
    value: int
    head_bytes: int
    """Bytes of a page of one head."""
    page_bytes: int
    """Bytes of a page of all heads."""
    residual_bytes: int
    """Bytes of a raw page of all heads for the newest tokens of a sequence (residual tokens), until the page is sealed;
    0 for formats that are appended to in place."""


def page_geometry(
    format: str, heads: int, head_dim: int, *, dtype: object, value_dim: int | None = None, page_size: int = 64
) -> Geometry:
    """Formats and sizes in bytes for an engine that stores pages in its own blocks (`kvcompress.ops.attend_varlen`).

    format: "int8", or "int8/int4" for K and V. Raises ValueError for unsupported formats, dims and page sizes.
    """
    key, value = (resolve(name, dtype) for name in (format.split("/") * 2)[:2])
    sizes = _C.page_geometry(key, value, raw(dtype), heads, head_dim, value_dim or head_dim, page_size)
    return Geometry(key, value, *sizes)


def effective_bits(code: int, head_dim: int, page_size: int = 64, *, key: bool = True) -> float:
    """Bits per element of K (or of V) in a page, including metadata and the padding of the head dim."""
    filled = head_dim + -head_dim % TABLE[code]["dim_multiple"]
    return 8 * _C.side_bytes(code, key, filled, page_size) / (page_size * head_dim)


def metadata(code: int, head_dim: int) -> tuple[int, str]:
    """(number of metadata elements per row, name of their dtype): scales and zero points, group by group."""
    row = TABLE[code]
    groups = head_dim // row["group"] if row["group"] else 1
    return groups * (2 if row["zero_point"] else 1), "uint8" if row["block_scale"] else "float16"


def granularity(code: int) -> str:
    """The elements that share a scale in this format: of K, then of V if that differs."""
    row = TABLE[code]
    if row["name"].startswith("raw_"):
        return "none"
    token = f"token, head, {row['group']} dims" if row["group"] else "token, head"
    return f"K: page, channel; V: {token}" if row["keys"] == "channel" else token


def movable(code: int) -> bool:
    """True if tokens can move to another page without requantization; False if metadata of K is shared by the page
    (centroid or channel scales)."""
    return TABLE[code]["keys"] == "token"


def matrix(head_dim: int = 128) -> list[dict]:
    """One dict per format: name, bits, effective bits of K and V at `head_dim`, granularity, supported head dims
    (multiples, up to `MAX_DIM`), devices, kernel levels of this CPU, movable, description."""
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
        "| format | bits | effective, K | effective, V | scale per | head dim | on | tokens | what |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in matrix():
        cells = (
            f"`{row['name']}`", row["bits"], f"{row['key_bits']:g}", f"{row['value_bits']:g}", row["granularity"],
            f"multiple of {row['head_dim_multiple']}", ", ".join(row["devices"]),
            "movable" if row["movable"] else "page-bound", row["about"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
