"""PrefixCache: prompts that begin alike share the pages of what they have in common, and its prefill."""

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
from ..layer import PagedKV
from ..offload.tiers import Tiers
from ..quantization.mixed_precision import Spans
from ..store.device_memory import memory_of
from .prefix_offload import Spill, pinned

_VERSION = "kvcompress prefix 1"


class _Shape(NamedTuple):
    """What is known of the layers of a model with the caches of one kind, from the first commit on."""

    dims: list[tuple[int, int, int, torch.dtype, torch.device]]  # of each layer as it stores it: H, Dk, Dv
    sinks: int
    page: int

    def chain(self) -> tuple[int, int, int, int]:
        """Tokens and entries of the first link, of each later one."""
        n, first = len(self.dims), 2 if self.sinks else 1
        return self.sinks + self.page, self.page, first * n, n

    def lay(self, cache: KVCache, batch: int) -> None:
        """The layers of an empty cache get this shape."""
        for layer, (H, Dk, Dv, dtype, device) in zip(cache.layers, self.dims, strict=True):
            layer.fit(*(torch.empty(batch, H, 0, D, dtype=dtype, device=device) for D in (Dk, Dv)))


class PrefixCache(
    checks.ProcessBound,
    instead="threads share one; for another process save() caches of open(), load(..., pool=prefix.pool) and commit() "
    "them",
):
    """Pages of prompts that were seen, for prompts that begin with the same tokens.

        prefix = kvcompress.PrefixCache(model.config, "int8", salt=tenant)
        cache = prefix.open(input_ids)                       # holds the longest known prefix
        out = model.generate(input_ids, past_key_values=cache)
        prefix.commit(cache, out)                            # what the next turn begins with

    Only full, sealed pages are shared, and only between equals: the key is a chain of SHA-256 over the model's config,
    the cache's options, the salt, extra keys, and the token ids; the tokens themselves are compared on a hit.

    Args:
        config: `model.config`; layers must all be of full attention.
        args, options: of the KVCaches that it opens: formats, policy, page_size, ... Fractional `spans` want
            `span_tokens`.
        salt: who may share with whom. Give each tenant its own, and do not let callers choose it: how fast a prompt is
            answered tells whether somebody with the same salt has sent it.
        model: names the weights, where the config does not (a fine-tune in the same folder).
        max_bytes: of pages that it holds; the least recently used go first. 0: no limit.
        max_entries: pages of tokens, all layers together, that it holds. 0: no limit.
        min_tokens: prefixes that are shorter are not kept.
        pool: the `_C.Pool` of all of its caches; a new one if None.
        tiers: where pages wait that max_bytes has no room for (`kvcompress.Tiers`), instead of being forgotten; they
            come back when a prompt asks for them. A prefix that does not come back as it went is a miss.

    Raises ValueError for models with layers of another kind, and policies that look at attention.
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
        # Where the pages of each layer lie: who holds these holds a device's pages, too.
        self._memories: dict[bytes, list[Any]] = {}
        self._spill = None if tiers is None else Spill(tiers, self.pool, self._prefix, self._memories.__getitem__)
        self.min_tokens = checks.integer("min_tokens", min_tokens, 0)
        self._shapes: dict[bytes, _Shape] = {}
        self._asked = self._asked_tokens = 0
        self._lock = threading.RLock()  # a prefix that was found is still there when it is taken
        self._empty = self._made({})  # a mistake shows here, not later
        self._who = [_VERSION, _model_id(config), model, salt]
        self._digest = self._options_digest(self._empty)

    def new(self, **options: Any) -> KVCache:
        """An empty cache over this pool, whose prompts `commit` can take."""
        return self._made(options) if options else copy.deepcopy(self._empty)

    def _made(self, options: dict[str, Any]) -> KVCache:
        options = {**self.options, **options}
        if options.get("group") is not None:
            raise ValueError("PrefixCache: expected all tokens on this rank, got group=; a rank holds no whole prefix")
        cache = KVCache(self.config, *self.args, pool=self.pool, **options)
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, PagedLayer) or layer.is_sliding:
                raise ValueError(
                    f"PrefixCache: expected full-attention layers, got a {type(layer).__name__} at {index}: what it "
                    "holds of a prefix is freed as the prompt goes on"
                )
            policy, spans = layer.options["policy"], layer.options["spans"]
            if policy is not None and (policy.needs_attention or policy.window):
                raise ValueError(
                    f"PrefixCache: expected no policy that looks at attention, got {policy!r}: a prefix has not been "
                    "attended to by the prompt that goes on with it"
                )
            if spans is not None:
                known = Spans(spans, layer.options["span_tokens"])
                if known.fractions and known.tokens is None:
                    raise ValueError(
                        "PrefixCache: spans: expected tokens, or span_tokens, got fractions of each prompt"
                    )
        return cache

    def _options_digest(self, cache: KVCache) -> Any:
        options = {name: x for name, x in cache.to_dict().items() if name not in ("max_bytes", "max_length", "strict")}
        if cache.forward_pass.calibration:  # not where it lies
            options["calibration"] = cache.forward_pass.calibration.digest()
        return _hashed(hashlib.sha256(), [*self._who, _text(options)])

    def _root(self, cache: KVCache | None, extra: Any) -> bytes:
        """SHA-256 of all but the tokens that pages depend on. cache: whose options, if not those of all."""
        digest = self._digest.copy() if cache is None else self._options_digest(cache)
        return _hashed(digest, extra if isinstance(extra, (list, tuple)) else [extra]).digest()

    # ------------------------------------------------------------------ reading

    def open(self, input_ids: Any, *, extra: Any = (), **options: Any) -> KVCache:
        """A cache that holds the longest known prefix of input_ids; at least one token is left to feed.

        input_ids: int [T] or [B, T], without pads; rows of a batch get as much as the row that has least.
        extra: whatever else K and V depend on, names of adapters, images: str, bytes, a number, an array, a tensor, or
            a list of them.
        options: of this KVCache, in place of those given to the PrefixCache.

        `cache.get_seq_length()` tells what it holds; `model.generate(input_ids, past_key_values=cache)` goes on from
        there by itself. Raises MemoryError (pool) and the errors of KVCache.
        """
        rows = _tokens(input_ids)
        cache = self.new(**options)
        self._asked += 1
        self._asked_tokens += rows.size
        root = self._root(cache if options else None, extra)
        shape = self._shapes.get(root)
        if shape is None or rows.shape[1] < 2:
            return cache
        chain = shape.chain()
        with self._lock:
            asked = [(root, np.ascontiguousarray(row[:-1]), *chain) for row in rows]
            for one in asked if self._spill else ():
                self._spill.bring(one)  # type: ignore[union-attr]
            links, found = self._taken(asked, shape)
            if links:
                self._fill(cache, shape, shape.sinks + links * shape.page, found, not options)
            self._shrink()
        return cache

    def _taken(self, asked: list[tuple[Any, ...]], shape: _Shape) -> tuple[int, NDArray[np.int64]]:
        """Links that all rows have, and their entries, with a reference to each page. A thread that finds the pool full
        may take pages of theirs meanwhile: then again, with fewer."""
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
        """With tiers: down to the limits; without, the index keeps them."""
        if self._spill:
            self._spill.shrink(*self._limits)

    def _fill(self, cache: KVCache, shape: _Shape, tokens: int, found: NDArray[np.int64], usual: bool) -> None:
        """The empty cache takes over pages of so many tokens: entries of each row, with their references. usual: it is
        as `new()` makes it."""
        _, _, entries_first, entries_later = shape.chain()
        head = entries_first // entries_later  # entries of a layer in the first link
        try:
            if usual:  # copies of layers that are made are quicker than new ones
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
                layer.looked = True  # at what the format does to K: by the cache that stored it
                layer.changed()
                found[:, index * head : (index + 1) * head] = found[:, entries_first + index :: entries_later] = -1
        except BaseException:
            self.pool.drop(_offsets(found[found >= 0]))
            raise

    # ------------------------------------------------------------------ writing

    def commit(self, cache: KVCache, input_ids: Any, *, extra: Any = (), pin: bool = False) -> int:
        """Keeps what `cache` (of `open`, or over this pool) holds of input_ids for prompts that begin so.

        input_ids: int [T] or [B, T], the tokens that the cache was fed, from slot 0 on (pads of a left-padded batch
            included); it may end earlier, or go on, as what `generate` returns does.
        pin: it stays until `unpin`, whatever the limits say.

        Returns how many tokens are kept (of the row with fewest): full pages, sealed; none of a row that has evicted
        tokens. Raises ValueError for a cache over another pool, and one whose last pass broke off between layers;
        TypeError for one that is no KVCache; OSError, Damaged (a ValueError) or MemoryError if pages that wait in tiers
        do not come back; rows before one that fails are kept.
        """
        if not isinstance(cache, KVCache):
            raise TypeError(f"PrefixCache: commit: expected a KVCache, got {type(cache).__name__}")
        if cache.pool is not self.pool:
            raise ValueError("PrefixCache: commit: expected a cache of open() or new(), got one over another pool")
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
            raise ValueError("PrefixCache: commit: expected layers with the same sinks and page_size, got others")
        root = self._root(cache, extra)
        if self._shapes.setdefault(root, shape) != shape:
            raise ValueError(f"PrefixCache: commit: expected K and V as before ({self._shapes[root]}), got {shape}")
        self._memories.setdefault(root, [memory_of(store.page_store) for store in stores])
        for store in stores:
            store.onload()
        with self._lock:
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
        with pinned(self._prefix, chain) if pin else nullcontext():  # what is not of `cache` stays until all is pinned
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
        """Lets go what `commit(..., pin=True)` of the same tokens holds."""
        root = self._root(self.new(**options) if options else None, extra)
        shape = self._shapes.get(root)
        with self._lock:  # under which others pin for a while
            for row in _tokens(input_ids) if shape else ():
                self._prefix.pin(root, row, *shape.chain(), -1)  # type: ignore[union-attr]

    def trim(self, max_bytes: int = 0) -> None:
        """Lets the least recently used prefixes go, to the tiers if there are some, until at most max_bytes of the pool
        are held; pinned ones stay."""
        max_bytes = checks.integer("max_bytes", max_bytes, 0)
        with self._lock:
            if self._spill:
                self._spill.shrink(max_bytes, self._limits[1])
            else:
                self._prefix.trim(max_bytes)

    def stats(self) -> dict[str, Any]:
        """entries: pages of tokens, all layers together; bytes: of their pages; pinned: entries; asked, hits: opens,
        and those that found something; hit_rate: tokens found / tokens asked; saved_tokens: whose prefill was saved;
        saved_bytes: of pages that were not stored again; evicted: entries; collisions: of digests.

        With tiers: offloaded: entries there; host, file: their bytes; from_host, from_file: transfers that brought
        some back; failed: that did not (misses)."""
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


def _text(x: Any) -> str:
    return json.dumps(x, sort_keys=True, default=lambda o: o.to_dict() if hasattr(o, "to_dict") else repr(o))


def _model_id(config: Any) -> str:
    known = {name: x for name, x in config.to_dict().items() if name not in ("transformers_version", "use_cache")}
    return _text([known, getattr(config, "_name_or_path", ""), getattr(config, "_commit_hash", None)])


def _flat(x: Any) -> Iterable[Any]:
    return (one for part in x for one in (_flat(part) if isinstance(part, (list, tuple)) else (part,)))


def _tokens(input_ids: Any) -> np.ndarray:
    """int64 [B, T]."""
    try:
        ids = np.asarray(input_ids.detach().cpu() if isinstance(input_ids, torch.Tensor) else input_ids)
    except (TypeError, ValueError, OverflowError) as error:  # rows of several lengths, numbers of no dtype
        raise ValueError(f"PrefixCache: input_ids: expected integers [T] or [B, T], got {error}") from None
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"PrefixCache: input_ids: expected integers [T] or [B, T], got {ids.dtype} {list(ids.shape)}")
    if isinstance(input_ids, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in _flat(input_ids)):
        raise ValueError("PrefixCache: input_ids: expected integers, got True or False among them")  # numpy has 1 and 0
    if int(ids.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"PrefixCache: input_ids: expected integers below 2^63, got {ids.max()}")
    return np.ascontiguousarray(np.atleast_2d(ids), np.int64)


def _offsets(entries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(formats.offset_of(entries))


def _hashed(digest: Any, fields: Iterable[Any]) -> Any:
    """Every field has its type and its length before it; of tensors and arrays all elements count."""
    for field in fields:
        name = type(field).__name__
        if isinstance(field, torch.Tensor):
            raw = field.detach().cpu().clone(memory_format=torch.contiguous_format)
            name, data = f"{name} {raw.dtype} {list(raw.shape)}", raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(field, np.ndarray) and not field.dtype.hasobject:
            name, data = f"{name} {field.dtype.str} {list(field.shape)}", field.tobytes()
        elif isinstance(field, (list, tuple)):
            data = _hashed(hashlib.sha256(), field).digest()
        elif isinstance(field, (str, bytes, int, float, np.number)) or field is None:
            data = field if isinstance(field, bytes) else str(field).encode()
        else:
            raise TypeError(
                "PrefixCache: expected what K and V depend on as str, bytes, numbers, arrays, tensors, or lists of "
                f"them, got {name}"
            )
        digest.update(name.encode() + len(data).to_bytes(8, "little") + data)
    return digest


def _stores(cache: KVCache) -> list[PagedKV]:
    """The layers' stores, staged tokens committed; none if they have seen nothing."""
    for layer in cache.layers:
        layer.commit()  # type: ignore[attr-defined]
    return [layer.store for layer in cache.layers if layer.get_seq_length()]  # type: ignore[attr-defined]
