"""Decodes a layer's pages by page.h and `codec_reference`, for the reference of the matrix. Shares no code with the
package and only takes the table's arrays from it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from codec_reference import SPEC, meta_bytes, meta_dtype, meta_values, planes, ref_levels, ref_values, three_bits
from far_kernels import arena_of

from kvcompress import _C

NAMES = {f["code"]: f["name"] for f in _C.formats()}
RAW = {torch.float32: "raw_f32", torch.float16: "raw_f16", torch.bfloat16: "raw_bf16"}


@lru_cache
def places(bits: int, D: int, size: int, key: bool) -> tuple[np.ndarray, ...]:
    """Tile, word, lane and shift of each element [size, D]."""
    t, d = np.meshgrid(np.arange(size), np.arange(D), indexing="ij")
    run, lane, period = (d, t % 16, D) if key else (t % 16, d, 16)
    if bits >= 8:
        per = 32 // bits
        return t // 16, run // per, lane, run % per * bits
    plane, rest = np.divmod(run, period * bits // 8)
    return t // 16, rest // 4, lane, 8 * (rest % 4) + bits * plane


def floats(words: np.ndarray, name: str) -> np.ndarray:
    """float64 of raw elements."""
    if name == "raw_f16":
        return words.astype(np.uint16).view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << np.uint32(16 if name == "raw_bf16" else 0)).view(np.float32).astype(np.float64)


@lru_cache(maxsize=1 << 13)
def decoded(page: bytes, formats: tuple[str, str], dims: tuple[int, int], size: int) -> list[np.ndarray]:
    """K and V of a page, float64 [size, D]."""
    data, at = np.frombuffer(page, np.uint8), 0
    elements, out = [], []
    sides = list(zip(formats, dims, (True, False), strict=True))
    for name, D, key in sides:
        bits = SPEC[name][0]
        section = size * D * bits // 8
        if bits == 3:
            elements.append(three_bits(data[at : at + section], D, key).astype(np.uint64))
        else:
            words = data[at : at + section].view("<u4").reshape(size // 16, -1, 16 if key else D)
            tile, word, lane, shift = places(bits, D, size, key)
            mask = np.uint64((1 << bits) - 1)
            elements.append((words[tile, word, lane].astype(np.uint64) >> shift.astype(np.uint64)) & mask)
        at += -(-section // 64) * 64
    for (name, D, key), codes in zip(sides, elements, strict=True):
        bits, coding, _, over = SPEC[name]
        n = meta_bytes(name, key, D, size)
        meta, at = data[at : at + n], at + -(-n // 64) * 64
        if coding == "raw":
            out.append(floats(codes, name))
        elif key and over == "channel":
            scale, zero = meta.view(np.float16).astype(np.float64).reshape(2, D)
            out.append(ref_levels(codes.astype(np.uint8), name) * scale + zero)
        else:
            rows = planes(name, D) * size
            tokens = meta[: rows * np.dtype(meta_dtype(name)).itemsize].view(meta_dtype(name))
            x = ref_values(codes.astype(np.uint8), np.ascontiguousarray(tokens.reshape(-1, size).T), name)
            if key and over == "centred":
                x = x + meta_values(np.ascontiguousarray(meta[-2 * D :]), name)
            out.append(x)
    return out


class Line:
    """One head of a row: for each stored token its slot, K, V, and the formats of its page."""

    def __init__(
        self, slots: list[int], k: list[np.ndarray], v: list[np.ndarray], kinds: list[tuple[str, str]], full: list[bool]
    ) -> None:
        order = np.argsort(np.array(slots, np.int64), kind="stable")
        self.slots = [slots[i] for i in order]
        self.k = torch.from_numpy(np.stack([k[i] for i in order])) if slots else torch.zeros(0)
        self.v = torch.from_numpy(np.stack([v[i] for i in order])) if slots else torch.zeros(0)
        self.kinds = [kinds[i] for i in order]
        self.full = [full[i] for i in order]  # whether its page is full


def lines_of(store: Any) -> list[list[Line]]:
    """[B][H of the store]: the contents of the layer's pages, decoded from their bytes."""
    table, P, sinks = store.page_store.table, store.page_size, store.sinks
    dims = (store.head_dim + store.page_store.fill[0], store.value_dim + store.page_store.fill[1])
    found: list[list[Line]] = []
    with store.present(), arena_of(store) as arena, np.errstate(invalid="ignore", over="ignore"):
        entries, rows, sidecar = table.entries, table.rows, table.slots
        for b in range(table.batch):
            found.append([])
            for h in range(store.num_kv_heads):
                line = h if rows.shape[1] > 1 else 0
                n, first = (int(x) for x in rows[b, line])
                slots: list[int] = []
                k: list[np.ndarray] = []
                v: list[np.ndarray] = []
                kinds: list[tuple[str, str]] = []
                full: list[bool] = []
                starts = [0] if sinks else []
                starts += list(range(sinks, n, P))
                for start in starts:
                    end = min(n, sinks if start < sinks else start + P)
                    at = [int(sidecar[b, line, i]) if sidecar.size else first + i for i in range(start, end)]
                    if all(slot < 0 for slot in at):
                        continue
                    column = 0 if start < sinks else 1 + (start - sinks) // P
                    entry = int(entries[b, line, column])
                    assert entry >= 0, f"row {b}, head {h}: no page at column {column}, which has tokens {at}"
                    names = NAMES[entry >> 8 & 255], NAMES[entry & 255]
                    size = -(-sinks // 16) * 16 if start < sinks else P
                    many = _C.page_bytes(entry >> 8 & 255, entry & 255, *dims, size)
                    offset = (entry >> 16) * 64 + (h * many if rows.shape[1] == 1 else 0)
                    keys, values = decoded(arena[offset : offset + many].tobytes(), names, dims, size)
                    for i, slot in enumerate(at):
                        if slot >= 0:
                            slots.append(slot)
                            k.append(keys[i, : store.head_dim])
                            v.append(values[i, : store.value_dim])
                            kinds.append(names)
                            full.append(start >= sinks and start + P <= n)
                found[-1].append(Line(slots, k, v, kinds, full))
    return found


def poison(paged: Any) -> None:
    """Fills all places of open pages that hold no token with NaN; new pages are NaN already (conftest)."""
    if not paged.is_initialized:
        return
    with arena_of(paged.store) as arena:
        poison_in(arena, paged.store)


def poison_in(arena: np.ndarray, store: Any) -> None:
    table, P, sinks = store.page_store.table, store.page_size, store.sinks
    dims = (store.head_dim + store.page_store.fill[0], store.value_dim + store.page_store.fill[1])
    for b, lines in enumerate(table.rows[:, :, 0].tolist()):
        for line, n in enumerate(lines):
            c, used = (0, n) if n < sinks else (1 + (n - sinks) // P, (n - sinks) % P)
            size = P if c else -(-sinks // 16) * 16
            entry = int(table.entries[b, line, c]) if used and c < table.entries.shape[2] else -1
            if entry < 0 or not NAMES[entry >> 8 & 255].startswith("raw") or not NAMES[entry & 255].startswith("raw"):
                continue
            at, name = (entry >> 16) * 64, NAMES[entry & 255]
            if store.page_store.pool.refs(at) > 1:
                continue  # another row may have more tokens in this page
            many = _C.page_bytes(entry >> 8 & 255, entry & 255, *dims, size)
            for h in range(store.num_kv_heads if len(lines) == 1 else 1):
                begin = at + h * many
                for D, key in ((dims[0], True), (dims[1], False)):
                    section = size * D * SPEC[name][0] // 8
                    words = arena[begin : begin + section].view("<u4")
                    words = words.reshape(size // 16, -1, 16 if key else D)
                    tile, word, lane, shift = (
                        x[used:] for x in np.broadcast_arrays(*places(SPEC[name][0], D, size, key))
                    )
                    ones = np.left_shift(np.uint64((1 << SPEC[name][0]) - 1), shift.astype(np.uint64))
                    np.bitwise_or.at(words, (tile, word, lane), ones.astype(np.uint32))
                    begin += -(-section // 64) * 64
