"""PrefixCache: prompts with a common prefix share its pages and skip its prefill."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C, checks, formats
from ..hf.cache import KVCache
from ..hf.layer import PagedLayer
from ..hf.save_load import model_hash
from ..layer import PagedKV
from ..offload.tiers import Tiers
from ..quantization.mixed_precision import Spans
from ..store.device_memory import memory_of
from .prefix_offload import Spill, pinned

_VERSION = "kvcompress prefix 1"
_NAMES = ("_name_or_path", "_commit_hash", "dtype")  # of a config: not in `model_hash`


class _Shape(NamedTuple):
    """Shape of the layers of a committed cache."""

    dims: list[tuple[int, int, int, torch.dtype, torch.device]]  # of each layer: H, Dk, Dv as stored
    sinks: int
    page: int

    def chain(self) -> tuple[int, int, int, int]:
        """(tokens of the first link, of later ones; entries of the first link, of later ones)."""
        n, first = len(self.dims), 2 if self.sinks else 1
        return self.sinks + self.page, self.page, first * n, n

    def lay(self, cache: KVCache, batch: int) -> None:
        """Initializes the layers of an empty cache with this shape."""
        for layer, (H, Dk, Dv, dtype, device) in zip(cache.layers, self.dims, strict=True):
            layer.fit(*(torch.empty(batch, H, 0, D, dtype=dtype, device=device) for D in (Dk, Dv)))


class PrefixCache(
    checks.ProcessBound,
    instead="threads can share one; for another process, save() caches from open(), then load(..., pool=prefix.pool) "
    "and commit() them there",
):
    """Prefix cache (automatic prefix caching): reuses the pages of earlier prompts for prompts that begin with the same
    tokens.

        prefix = kvcompress.PrefixCache(model.config, "int8", salt=tenant)
        cache = prefix.open(input_ids)                       # contains the longest known prefix
        out = model.generate(input_ids, past_key_values=cache)
        prefix.commit(cache, out)                            # for the next turn

    Only full, sealed pages are shared. The key is a SHA-256 hash chain over the model's config, the cache options, the
    salt, extra keys and the token ids; on a hit the token ids are compared as well. Thread-safe.

    Args:
        config: `model.config`; all layers must use full attention.
        args, options: arguments of the KVCaches: formats, policy, page_size, ... Fractional `spans` require
            `span_tokens`.
        salt: only callers with the same salt share pages. Use one per tenant, and do not let clients choose it:
            response times reveal whether a prompt was sent before with the same salt.
        model: identifies the weights if the config does not (such as a fine-tuned model in the same folder).
        max_bytes: limit in bytes for the pages; the least recently used are evicted first. 0: no limit.
        max_entries: limit in pages of tokens, counted once for all layers. 0: no limit.
        min_tokens: minimum length of a prefix to keep.
        pool: the `_C.Pool` of all caches. Default: a new one.
        tiers: `kvcompress.Tiers` to offload pages to instead of evicting them; they are fetched when a prompt needs
            them. A prefix that cannot be fetched intact is a miss.

    Raises ValueError for models with other kinds of layers, and for policies that use attention.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        salt: str | bytes = "",
        model: str | bytes = "",
        max_bytes: int = 0,
        max_entries: int = 0,
        min_tokens: int = 0,
        pool: Any = None,
        tiers: Tiers | None = None,
        **options: Any,
    ) -> None:
        self.config, self.args, self.options = config, args, options
        self.pool = _C.Pool() if pool is None else checks.pool(pool)
        if tiers is not None and not isinstance(tiers, Tiers):
            raise TypeError(f"PrefixCache: tiers: expected kvcompress.Tiers or None, got {type(tiers).__name__}")
        limits = checks.integer("max_bytes", max_bytes, 0), checks.integer("max_entries", max_entries, 0)
        self._prefix = _C.Prefix(self.pool, *(limits if tiers is None else ()))
        self._limits = [x or 1 << 62 for x in limits]
        self._shapes: list[_Shape] = []  # different ones, usually one; a root ends with an index into them
        # For each shape the memory of each layer's pages; references to it keep pages on a device alive, too.
        memories = self._memories = list[list[Any]]()
        self._spill = (
            None
            if tiers is None
            else Spill(tiers, self.pool, self._prefix, lambda root: memories[int.from_bytes(root[-4:], "little")])
        )
        self.min_tokens = checks.integer("min_tokens", min_tokens, 0)
        self._asked = self._asked_tokens = 0
        self._lock = threading.RLock()  # between finding a prefix and taking references to its pages
        self._empty = self._made({})  # raises for invalid options now
        self._who = [_VERSION, model_hash(config), *(str(getattr(config, x, "")) for x in _NAMES), model, salt]
        self._options = self._described(self._empty)
        self._roots(self._options, ())  # raises for an invalid salt now

    def new(self, **options: Any) -> KVCache:
        """An empty KVCache in the pool of this PrefixCache, for `commit`."""
        return self._made(options) if options else copy.deepcopy(self._empty)

    def _made(self, options: dict[str, Any]) -> KVCache:
        args, options = (() if {"key", "value"} <= options.keys() else self.args), {**self.options, **options}
        if options.get("group") is not None:
            raise ValueError("PrefixCache: expected all tokens on this rank, got group=, which shards them")
        cache = KVCache(self.config, *args, pool=self.pool, **options)
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, PagedLayer) or layer.is_sliding:
                raise ValueError(
                    f"PrefixCache: expected full-attention layers, got a {type(layer).__name__} at {index}, which "
                    "frees the prefix as the sequence grows"
                )
            policy, spans = layer.options["policy"], layer.options["spans"]
            if policy is not None and (policy.needs_attention or policy.window):
                raise ValueError(
                    f"PrefixCache: expected a policy that does not use attention, got {policy!r}: the attention to a "
                    "shared prefix depends on what follows it"
                )
            if spans is not None:
                known = Spans(spans, layer.options["span_tokens"])
                if known.fractions and known.tokens is None:
                    raise ValueError(
                        "PrefixCache: spans: expected token positions, or span_tokens, got fractions of each prompt"
                    )
        return cache

    def _described(self, cache: KVCache) -> str:
        """The options of `cache` that its pages depend on."""
        options = {name: x for name, x in cache.to_dict().items() if name not in ("max_bytes", "max_length", "strict")}
        if cache.forward_pass.calibration:  # its contents, not its path
            options["calibration"] = cache.forward_pass.calibration.digest()
        return json.dumps(options, sort_keys=True, default=lambda o: o.to_dict() if hasattr(o, "to_dict") else repr(o))

    def _roots(self, options: str, extra: Any) -> list[tuple[bytes, _Shape]]:
        """(root, shape) for each shape: a root is a hash of everything that pages of a cache with these options depend
        on except tokens, and the index of the shape. No table of roots is kept, as it would grow with every `extra`."""
        digest = _hashed([*self._who, options, *(extra if isinstance(extra, (list, tuple)) else [extra])])
        return [(digest[:-4] + i.to_bytes(4, "little"), shape) for i, shape in enumerate(self._shapes)]

    # ------------------------------------------------------------------ reading

    def open(self, input_ids: Any, *, extra: Any = (), **options: Any) -> KVCache:
        """A KVCache that contains the longest known prefix of input_ids; at least one token is left for the prefill.

        input_ids: int [T] or [B, T], without padding; all rows get the shortest prefix found for any of them.
        extra: other inputs that K and V depend on, such as adapter names or images: str, bytes, numbers, arrays,
            tensors, or lists of them.
        options: arguments of this KVCache, instead of those of the PrefixCache.

        `cache.get_seq_length()` is the length of the prefix; `model.generate(input_ids, past_key_values=cache)`
        continues after it. Raises MemoryError if the pool is full, and the errors of KVCache.
        """
        rows = _tokens(input_ids)
        cache = self.new(**options)
        self._asked += 1
        self._asked_tokens += rows.size
        roots = self._roots(self._described(cache) if options else self._options, extra)
        with self._lock:
            for root, shape in roots if rows.shape[1] > 1 else ():
                asked = [(root, np.ascontiguousarray(row[:-1]), *shape.chain()) for row in rows]
                for one in asked if self._spill else ():
                    self._spill.bring(one)  # type: ignore[union-attr]
                links, found = self._taken(asked, shape)
                if links:
                    self._fill(cache, shape, shape.sinks + links * shape.page, found, not options)
                    break
            self._shrink()
        return cache

    def _taken(self, asked: list[tuple[Any, ...]], shape: _Shape) -> tuple[int, NDArray[np.int64]]:
        """Number of links found for all rows, and their entries, with a reference to each page. Repeated with fewer
        links if another thread finds the pool full meanwhile and evicts some."""
        chain = shape.chain()
        while True:
            links = min(self._prefix.find(*one) for one in asked)
            tokens = shape.sinks + links * shape.page
            if not links or tokens < self.min_tokens:
                return 0, np.empty(0, np.int64)
            found = np.full((len(asked), chain[2] + (links - 1) * chain[3]), -1, np.int64)
            took = 0
            try:
                took = min(
                    self._prefix.take(root, row[:tokens], *chain, to)
                    for (root, row, *_), to in zip(asked, found, strict=True)
                )
            finally:
                if took < links:
                    self.pool.drop(_offsets(found[found >= 0]))
            if took == links:
                return links, found

    def _shrink(self) -> None:
        """Enforces the limits by offloading, with tiers; without tiers the index enforces them itself."""
        if self._spill:
            self._spill.shrink(*self._limits)

    def _fill(self, cache: KVCache, shape: _Shape, tokens: int, found: NDArray[np.int64], usual: bool) -> None:
        """Fills an empty cache with pages of `tokens` tokens; takes over the references of `found`, the entries of each
        row. usual: the cache has the default options, as from `new()`."""
        _, _, entries_first, entries_later = shape.chain()
        head = entries_first // entries_later  # entries of a layer in the first link
        try:
            if usual:  # cloning an initialized layer is faster than creating one
                shape.lay(self._empty, 1)
            shape.lay(cache, len(found))
            for index, layer in enumerate(cache.layers):
                pages = [found[:, index * head : (index + 1) * head], found[:, entries_first + index :: entries_later]]
                if not shape.sinks:
                    pages.insert(0, np.full((len(found), 1), -1))
                entries = np.ascontiguousarray(np.concatenate(pages, 1)[:, None])
                lengths = np.zeros((len(found), 1, 2), np.int64)
                lengths[:, :, 0] = tokens
                layer.store.take_over(entries, lengths, None, None, tokens)
                layer.format_checked = True  # the cache that stored these pages has checked their format
                layer.changed()
                found[:, index * head : (index + 1) * head] = found[:, entries_first + index :: entries_later] = -1
        except BaseException:
            self.pool.drop(_offsets(found[found >= 0]))
            raise

    # ------------------------------------------------------------------ writing

    def commit(self, cache: KVCache, input_ids: Any, *, extra: Any = (), pin: bool = False) -> int:
        """Adds the pages of `cache` (from `open` or `new`) to the index, for later prompts with the same prefix.

        input_ids: int [T] or [B, T], the tokens of the cache from slot 0 on, left padding included. May be shorter or
            longer than the cache, as the output of `generate` is.
        extra: as in `open`.
        pin: keep these pages until `unpin`, regardless of the limits.

        Returns the number of tokens kept (of the row with the fewest): only full, sealed pages, and none of rows that
        have evicted tokens. Raises ValueError for a cache of another pool and for one whose last forward pass stopped
        between layers; TypeError if it is not a KVCache; OSError, Damaged (a ValueError) or MemoryError if its
        offloaded pages cannot be fetched. Rows before the failing one are kept.
        """
        if not isinstance(cache, KVCache):
            raise TypeError(f"PrefixCache: commit: expected a KVCache, got {type(cache).__name__}")
        if cache.pool is not self.pool:
            raise ValueError("PrefixCache: commit: expected a cache from open() or new(), got one of another pool")
        cache.forward_pass.check_there()
        cache.forward_pass.check_even()
        rows = _tokens(input_ids)
        stores = _stores(cache)
        if not stores:
            return 0
        if len(rows) != stores[0].batch:
            raise ValueError(f"PrefixCache: commit: expected {stores[0].batch} rows of tokens, got {len(rows)}")
        shape = _Shape(
            [(s.num_kv_heads, s.head_dim, s.value_dim, s.dtype, s.device) for s in stores],
            stores[0].sinks,
            stores[0].page_size,
        )
        if any((s.sinks, s.page_size) != (shape.sinks, shape.page) for s in stores):
            raise ValueError("PrefixCache: commit: expected layers with equal sinks and page_size, got different ones")
        described = self._described(cache)
        for store in stores:
            store.onload()
        with self._lock:
            if shape not in self._shapes:
                self._memories.append([memory_of(store.page_store) for store in stores])
                self._shapes.append(shape)
            root = self._roots(described, extra)[self._shapes.index(shape)][0]
            return min(self._commit_row(stores, shape, root, b, row, pin) for b, row in enumerate(rows))

    def _commit_row(self, stores: list[PagedKV], shape: _Shape, root: bytes, b: int, row: np.ndarray, pin: bool) -> int:
        ends = [store.page_store.plain_row(b) for store in stores]
        if None in ends or len(set(ends)) > 1:
            return 0
        start, n = ends[0]  # type: ignore[misc]
        tokens = row[start : start + n]
        links = min(store.page_store.sealed_columns(b) for store in stores)
        links = min(links, (len(tokens) - shape.sinks) // shape.page)
        kept = shape.sinks + links * shape.page
        if links < 1 or kept < self.min_tokens:
            return 0
        tokens = np.ascontiguousarray(tokens[:kept])
        entries = np.stack([store.page_store.table.entries[b, 0, : links + 1] for store in stores])  # [layers, columns]
        first = entries[:, :2] if shape.sinks else entries[:, 1:2]
        flat = np.concatenate([first.ravel(), entries[:, 2:].T.ravel()])
        chain = (root, tokens, *shape.chain())
        offloaded = self._prefix.offloaded(*chain) if self._spill else None
        with pinned(self._prefix, chain) if pin else nullcontext():  # other caches' links stay until all are pinned
            try:
                links = self._prefix.put(*chain, flat)
            finally:
                if self._spill:
                    self._spill.filled(offloaded, chain)  # type: ignore[arg-type]
            if pin:
                self._prefix.pin(*chain, 1)
        if self._spill:
            self._shrink()
            links = self._prefix.find(*chain) + self._spill.waits(chain)
        return shape.sinks + links * shape.page if links else 0

    def unpin(self, input_ids: Any, *, extra: Any = (), **options: Any) -> None:
        """Reverts `commit(..., pin=True)` of the same tokens; arguments as of `open`."""
        described, rows = self._described(self.new(**options)) if options else self._options, _tokens(input_ids)
        with self._lock:  # `pinned` runs under it, too
            for root, shape in self._roots(described, extra):
                for row in rows:
                    self._prefix.pin(root, row, *shape.chain(), -1)

    def trim(self, max_bytes: int = 0) -> None:
        """Evicts the least recently used prefixes, or offloads them to the tiers, until at most max_bytes of the pool
        are used. Pinned ones stay."""
        max_bytes = checks.integer("max_bytes", max_bytes, 0)
        with self._lock:
            if self._spill:
                self._spill.shrink(max_bytes, self._limits[1])
            else:
                self._prefix.trim(max_bytes)

    def stats(self) -> dict[str, Any]:
        """Counters since creation. entries: pages of tokens, counted once for all layers; bytes: size of their pages;
        pinned: pinned entries; asked: calls of `open`; hits: calls that found a prefix; hit_rate: tokens found / tokens
        requested; saved_tokens: tokens whose prefill was skipped; saved_bytes: bytes of reused pages; evicted: evicted
        entries; collisions: hash collisions.

        With tiers: offloaded: entries there; host, file: their bytes; from_host, from_file: fetches; failed: failed
        fetches (misses)."""
        with self._lock:
            s, tiers = self._prefix.stats(), self._spill.stats() if self._spill else {}
        tokens, saved = s.pop("hit_tokens"), s.pop("hit_bytes")
        return {
            **s, "asked": self._asked, "hit_rate": tokens / self._asked_tokens if self._asked_tokens else 0.0,
            "saved_tokens": tokens, "saved_bytes": saved, **tiers,
        }  # fmt: skip

    def __repr__(self) -> str:
        s = self.stats()
        return f"PrefixCache({s['entries']} pages of tokens, {s['bytes']:,} bytes, hit rate {s['hit_rate']:.2f})"


def _flat(x: Any) -> Iterable[Any]:
    return (one for part in x for one in (_flat(part) if isinstance(part, (list, tuple)) else (part,)))


def _tokens(input_ids: Any) -> np.ndarray:
    """int64 [B, T]."""
    try:
        ids = np.asarray(input_ids.detach().cpu() if isinstance(input_ids, torch.Tensor) else input_ids)
    except (TypeError, ValueError, OverflowError) as error:  # rows of different lengths, numbers without a dtype
        raise ValueError(f"PrefixCache: input_ids: expected integers [T] or [B, T], got {error}") from None
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"PrefixCache: input_ids: expected integers [T] or [B, T], got {ids.dtype} {list(ids.shape)}")
    if isinstance(input_ids, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in _flat(input_ids)):
        raise ValueError("PrefixCache: input_ids: expected integers, got a bool among them")  # 1 or 0 in numpy
    if int(ids.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"PrefixCache: input_ids: expected integers below 2^63, got {ids.max()}")
    return np.ascontiguousarray(np.atleast_2d(ids), np.int64)


def _offsets(entries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(formats.offset_of(entries))


def _hashed(fields: Iterable[Any]) -> bytes:
    """SHA-256 of all fields, each preceded by its type and length; of tensors and arrays with all elements."""
    digest = hashlib.sha256()
    for field in fields:
        name = type(field).__name__
        if isinstance(field, torch.Tensor):
            raw = field.detach().cpu().clone(memory_format=torch.contiguous_format)
            name, data = f"{name} {raw.dtype} {list(raw.shape)}", raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(field, np.ndarray) and not field.dtype.hasobject:
            name, data = f"{name} {field.dtype.str} {list(field.shape)}", field.tobytes()
        elif isinstance(field, (list, tuple)):
            data = _hashed(field)
        elif isinstance(field, (str, bytes, int, float, np.number)) or field is None:
            data = field if isinstance(field, bytes) else str(field).encode()
        else:
            raise TypeError(
                f"PrefixCache: salt or extra: expected str, bytes, numbers, arrays, tensors, or lists, got {name}"
            )
        digest.update(name.encode() + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _stores(cache: KVCache) -> list[PagedKV]:
    """The stores of all layers, after committing staged tokens; empty if the cache is."""
    for layer in cache.layers:
        layer.commit()  # type: ignore[attr-defined]
    return [layer.store for layer in cache.layers if layer.get_seq_length()]  # type: ignore[attr-defined]
