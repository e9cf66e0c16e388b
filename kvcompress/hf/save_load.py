"""Saving and loading caches: a `.kvc` file is a safetensors file; docs/memory.md describes its contents.

Only numbers and JSON, no pickle. Everything read is checked against the options of the cache before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _C, checks, files, policies
from ..layer import PagedKV
from ..quantization.calibration import Calibration
from ..store import serialize
from ..store.page_store import PageStore
from ..store.serialize import Arrays
from .configs import head_dims
from .forward_pass import LayeredCache
from .layer import PagedLayer

KIND, VERSION, CALIBRATED = "kvcompress cache", "1", "2"  # version 2 added calibrations
_NAMES = {
    "uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64", "float16": "F16",
    "bfloat16": "BF16", "bool": "BOOL",
}  # fmt: skip
# Limits for files of any size: Python objects are many times as large as their text.
_HEADER, _VALUES = 1 << 16, 1 << 10
# Caches that are suspended to files, by path, which must not be overwritten.
WAITING: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.float16, torch.bfloat16)}


def options_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of KVCache from JSON (where layer numbers are strings), with names of version 0.1 replaced."""
    options = dict(plain)
    if "recent" in options or "residual" in options:  # 0.1 had two names
        recent, residual = options.pop("recent", 0), options.pop("residual", None)
        options["residual_length"] = (recent or None) if residual is None else residual
    if isinstance(layers := options.get("per_layer"), Mapping):
        options["per_layer"] = {
            int(i) if isinstance(i, str) else i: options_of(x) if isinstance(x, Mapping) else x
            for i, x in layers.items()
        }
    if isinstance(policy := options.get("policy"), Mapping):
        options["policy"] = policies.from_dict(policy)
    if isinstance(spans := options.get("spans"), list):
        options["spans"] = [tuple(span) for span in spans]
    return options


class Part:
    """A tensor to write to a file; `data` returns its bytes when they are written."""

    def __init__(self, dtype: str, shape: tuple[int, ...], size: int, data: Callable[[], np.ndarray]) -> None:
        self.dtype, self.shape, self.size, self.data = dtype, shape, size, data

    @classmethod
    def of(cls, x: Any) -> Part:
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().contiguous()
            name, raw = str(x.dtype).removeprefix("torch."), x.reshape(-1).view(torch.uint8).numpy()
        else:
            x = np.ascontiguousarray(x)
            name, raw = x.dtype.name, x.reshape(-1).view(np.uint8)
        return cls(_NAMES[name], tuple(x.shape), raw.nbytes, lambda: raw)


# ---------------------------------------------------------------- writing


def _write(path: Path, about: dict[str, str], parts: dict[str, Part]) -> None:
    """Writes a safetensors file, atomically."""
    at, header = 0, {"__metadata__": about}
    for name, part in parts.items():
        header[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [at, at + part.size]}  # type: ignore[dict-item]
        at += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # aligns pages to 64 bytes, for mapping the file
    with files.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts.values():
            file.write(part.data())  # type: ignore[call-overload]


def _digest(about: dict[str, str], parts: Iterator[tuple[str, bytes]]) -> bytes:
    """SHA-256 of everything except pages, whose checksums are included."""
    digest = hashlib.sha256()
    for name, data in [("", json.dumps(about, sort_keys=True).encode()), *parts]:
        digest.update(len(name).to_bytes(8, "little") + name.encode() + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def tokens_hash(tokens: Any) -> str:
    """SHA-256 of token ids as little-endian int64, row by row."""
    ids = torch.atleast_2d(checks.as_tensor(tokens)).cpu()
    return hashlib.sha256(str(list(ids.shape)).encode() + ids.numpy().astype("<i8").tobytes()).hexdigest()


def model_hash(config: Any) -> str:
    """SHA-256 of a model's config, without its path."""
    left_out = ("transformers_version", "use_cache", "_name_or_path", "dtype", "architectures")
    known = {name: x for name, x in config.to_dict().items() if name not in left_out}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()


def of_model(calibration: Any, config: Any) -> Calibration:
    """The `Calibration`, or that of a file. Raises ValueError unless it was measured on a model with this (decoder)
    config."""
    measured = Calibration.of(calibration)
    if measured.model != model_hash(config):
        raise ValueError(
            f"KVCache: calibration: expected one of this model, got {measured.path or 'one'} of another model (its "
            "config differs); run `kvcompress calibrate` for this model"
        )
    return measured


def _about(cache: LayeredCache, layers: list[dict[str, Any]], tokens: Any) -> dict[str, str]:
    """A file's metadata."""
    options = {name: x for name, x in cache.to_dict().items() if name not in ("max_bytes", "calibration")}
    calibration = cache.forward_pass.calibration
    return {
        "kind": KIND, "version": CALIBRATED if calibration else VERSION, "kvcompress": _C.__version__,
        "model": model_hash(cache.forward_pass.config),
        "tokens": "" if tokens is None else tokens_hash(tokens),
        **({} if calibration is None else {"calibration": calibration.digest()}),
        "options": json.dumps(options, default=lambda x: x.to_dict()), "layers": json.dumps(layers),
    }  # fmt: skip


def _check_unchanged(surveys: list[tuple[PageStore, np.ndarray, np.ndarray]]) -> None:
    """Raises ValueError if another thread has changed the rows or pages of a store since the survey."""
    for store, rows, pieces in surveys:
        arrays, now = serialize.survey(store)
        if not (np.array_equal(arrays.rows, rows) and np.array_equal(now, pieces)):
            raise ValueError(
                "KVCache: save: expected a cache that no other thread uses meanwhile, got one that changed; save it "
                "between two calls of the model"
            )


def save(
    cache: LayeredCache, path: str | os.PathLike[str], tokens: Any = None, accepting: LayeredCache | None = None
) -> bytes:
    """See KVCache.save, for layers without staged tokens. Returns the digest of the file. accepting: the cache or a
    copy, whose policies accept the last call; default: the cache."""
    path = checks.path("KVCache: save", path)
    waits = WAITING.get(os.path.realpath(path))
    if waits is not None and waits.suspended is not None:
        raise ValueError(f"KVCache: save: expected another path, got {path}, which a suspended cache uses")
    if tokens is not None and (ids := checks.as_tensor(tokens)).shape[-1:] != (seen := cache.get_seq_length(),):
        raise ValueError(f"KVCache: save: tokens: expected the {seen} tokens of the cache, got {list(ids.shape)}")
    pages: dict[str, Part] = {}
    small: dict[str, Part] = {}
    layers: list[dict[str, Any]] = []
    surveys: list[tuple[PageStore, np.ndarray, np.ndarray]] = []
    sums: dict[int, np.ndarray] = {}  # checksums of pages, known once the pages are written, before the other parts
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PagedLayer):
            layers.append(_save_other(index, layer, small))
            continue
        if layer.options.get("group") is not None:
            raise ValueError(
                "KVCache: save: expected all tokens on this rank, got a sharded cache (group=); save dense K, V"
            )
        if not layer.has_drafts():  # then also the loaded cache evicts in its next call
            layer.evict_deferred()
        layers.append({"kind": "paged"})
        if not layer.is_initialized or not layer.store.seen:
            continue
        store = layer.store
        store.onload()
        state, tensors = (accepting or cache).layers[index].store.state()  # may add to the scores
        arrays, pieces = serialize.survey(store.page_store)
        surveys.append((store.page_store, arrays.rows, pieces))
        layers[-1] |= {
            "heads": store.num_kv_heads, "key_dim": store.head_dim, "value_dim": store.value_dim,
            "dtype": str(store.dtype).removeprefix("torch."), "seen": arrays.seen,
            "spans": store.page_store.table.spans, "eviction": state,
        }  # fmt: skip
        pages[f"{index}.pages"] = Part(
            "U8", (n := int(pieces[:, 1].sum()),), n, _pages(store.page_store, pieces, index, sums)
        )
        named = {"entries": arrays.entries, "rows": arrays.rows, "slots": arrays.slots, "scores": arrays.scores}
        small |= {f"{index}.{name}": Part.of(x) for name, x in {**named, **tensors}.items() if x is not None}
        small[f"{index}.checksum"] = Part("I64", (1,), 8, lambda i=index: sums[i])  # type: ignore[misc]
    about = _about(cache, layers, tokens)
    digests = []

    def seal() -> np.ndarray:
        _check_unchanged(surveys)
        digests.append(_digest(about, ((name, small[name].data().tobytes()) for name in sorted(small))))
        return np.frombuffer(digests[0], np.uint8)

    _write(path, about, {**pages, **small, "seal": Part("U8", (32,), 32, seal)})
    return digests[0]


def _pages(store: PageStore, pieces: np.ndarray, index: int, sums: dict[int, np.ndarray]) -> Callable[[], np.ndarray]:
    """A function that gathers a layer's pages when they are written (so that only one layer is in memory twice), and
    records their checksum."""

    def gathered() -> np.ndarray:
        memory, checksum = serialize.gather(store, pieces)
        sums[index] = np.array([checksum], np.uint64).view(np.uint8)
        return memory

    return gathered


def _save_other(index: int, layer: Any, small: dict[str, Part]) -> dict[str, Any]:
    """A layer of transformers: its tensors K and V, and its numbers."""
    kind = type(layer).__name__
    empty = getattr(layer, "keys", None) is None and not getattr(layer, "is_initialized", False)
    if empty or kind == "DummyLayer":  # by name: older transformers do not have this class
        return {"kind": kind}
    if not isinstance(getattr(layer, "keys", None), torch.Tensor) or not hasattr(layer, "cumulative_length"):
        raise ValueError(f"KVCache: save: expected paged or sliding layers, got a {kind} at {index}")
    small |= {f"{index}.{name}": Part.of(getattr(layer, name)) for name in ("keys", "values")}
    return {"kind": kind, "seen": int(layer.cumulative_length)}


# ---------------------------------------------------------------- reading


class Reader:
    """A `.kvc` file. Everything except pages is copied before it is checked, so that it cannot change afterwards; pages
    stay mapped until they are copied to a pool and their checksum is verified. Raises OSError if the file cannot be
    read, ValueError if it is invalid or damaged."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path = checks.path("KVCache: load", path)
        with open(path, "rb") as whole:
            self.size = size = os.fstat(whole.fileno()).st_size
            header = int.from_bytes(whole.read(8), "little")
        if _HEADER + size // 8 < header <= size:  # the parsed header is several times as large
            raise self.refuse(f"a header of {header} bytes in a file of {size}")
        with files.safetensors(path, self.refuse) as file:
            self.about: dict[str, str] = file.metadata() or {}
            if self.about.get("kind") != KIND:
                raise self.refuse("a file of another kind")
            if self.about.get("version") not in (VERSION, CALIBRATED):
                raise self.refuse(f"version {self.about.get('version')}; this kvcompress reads up to {CALIBRATED}")
            values = sum(x.count(mark) for x in self.about.values() for mark in "[{,")
            if values > _VALUES + size // 64 or len(file.keys()) > _VALUES + size // 1024:
                raise self.refuse(f"{len(file.keys())} parts and {values} values in a file of {size} bytes")
            self.parts = {
                name: file.get_tensor(name) if name.endswith(".pages") else file.get_tensor(name).clone()
                for name in file.keys()  # noqa: SIM118
            }
        seal = self.parts.pop("seal", torch.empty(0, dtype=torch.float32, device="cpu"))
        small = ((name, self.parts[name]) for name in sorted(self.parts) if not name.endswith(".pages"))
        data = ((name, x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, x in small)
        self.seal = _digest(self.about, data)
        if seal.dtype != torch.uint8 or seal.numpy().tobytes() != self.seal:
            raise self.refuse("a damaged file (wrong digest)")
        with self._reading("damaged metadata", RecursionError):
            self.options: dict[str, Any] = json.loads(self.about["options"])
            self.layers: list[dict[str, Any]] = json.loads(self.about["layers"])
            if not isinstance(self.options, dict) or not all(isinstance(x, dict) for x in self.layers):
                raise TypeError("options and layers")

    def check_slots(self, most: int, max_length: int | None) -> None:
        """Raises ValueError if the file claims more than `most` slots but stores fewer tokens: a small file could
        otherwise cause large allocations."""
        with self._reading("damaged metadata", RuntimeError):
            stored = [i for i, about in enumerate(self.layers) if "heads" in about]  # `fill` checks their rows
            longest = max((int(self.parts[f"{i}.rows"][..., 0].max()) for i in stored), default=0)
            said = max([int(max_length or 0), *(int(about.get("seen", 0)) for about in self.layers)])
        if said > max(most, longest):
            raise self.refuse(f"{said} slots where {longest} tokens are stored and {most} are allowed; see max_slots=")

    @contextlib.contextmanager
    def _reading(self, what: str, more: type[Exception] = ValueError) -> Iterator[None]:
        """Context manager: errors while reading become `refuse(what)`."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, more) as error:
            raise self.refuse(f"{what} ({type(error).__name__}: {error})") from None

    def refuse(self, got: str) -> ValueError:
        return ValueError(f"KVCache.load: {self.path}: expected a file that save() wrote, got {got}")

    def place(self, index: int, store: PagedKV) -> None:
        """Fills the empty `store` with the pages of layer `index`. Raises MemoryError, or ValueError if they are
        damaged or do not match the layer."""
        with self._reading(f"a damaged layer {index}"):
            about, parts = self.layers[index], self.parts
            fields = [parts.get(f"{index}.{name}") for name in ("entries", "rows", "slots", "scores")]
            expected = (torch.int64, torch.int64, torch.int32, torch.float32)
            for x, dtype in zip(fields, expected, strict=True):
                if x is not None and (x.dtype != dtype or x.dim() != 3):
                    raise ValueError(f"arrays of {x.dtype} {list(x.shape)}")
            # Tensors after an odd number of smaller elements are not aligned.
            entries, rows, slots, scores = (
                None if x is None else np.require(x.numpy(), None, ["C", "A"]) for x in fields
            )
            if entries is None or rows is None:
                raise KeyError("entries, rows")
            pages, checksum = parts[f"{index}.pages"], parts[f"{index}.checksum"]
            if pages.dtype != torch.uint8 or pages.dim() != 1 or checksum.shape != (1,):
                raise ValueError(f"pages of {pages.dtype} {list(pages.shape)}")
            store.page_store.table.spans = [(int(a), int(b), int(c)) for a, b, c in about["spans"]]
            serialize.place(
                store.page_store, Arrays(entries, rows, slots, scores, int(about["seen"])), pages.numpy(),
                int(checksum.view(torch.uint8).numpy().view(np.uint64)[0]),
            )  # fmt: skip

    def fill(self, index: int, layer: PagedLayer) -> None:
        """Fills the empty layer `index` of a new cache."""
        about = self.layers[index]
        if "heads" not in about:
            return
        with self._reading(f"a damaged layer {index}"):
            H, Dk, Dv = (int(about[name]) for name in ("heads", "key_dim", "value_dim"))
            entries, rows = (self.parts[f"{index}.{name}"] for name in ("entries", "rows"))
            B, dtype = int(entries.shape[0]), _DTYPES[about["dtype"]]
            if not (0 < H <= 1 << 16 and 0 < Dk <= 1 << 12 and 0 < Dv <= 1 << 12 and 0 < B <= 1 << 24):
                raise ValueError(f"{B} rows of {H} heads of {Dk} and {Dv}")
            # A file that claims this many rows must contain as many lengths and pages.
            if not entries.numel() or rows.shape[0] != B or rows.numel() < 2 * B:
                raise ValueError(f"entries {list(entries.shape)} and rows {list(rows.shape)}")
            if max(dims := head_dims(layer.forward_pass.config.per_layer_config[index])) > max(256, Dk, Dv):
                raise ValueError(f"heads of {dims} that an older version has split into {H} of {Dk} and {Dv}")
            k, v = (torch.empty(B, H, 0, D, dtype=dtype, device="cpu") for D in (Dk, Dv))
            if (layer.options.get("policy") or layer.is_sliding) and len(about["eviction"]["pads"]) != B:
                raise ValueError(f"pads of {len(about['eviction']['pads'])} rows, pages of {B}")
            if 256 + self.size // 1024 < B:  # each row needs Python objects
                raise ValueError(f"{B} rows in {self.size} bytes")
            if 8 * B * (layer.slots // layer.options["page_size"]) > 2 * self.size + (1 << 19):  # table entries
                raise ValueError(f"{B} rows of {layer.slots} slots")
            layer.lazy_initialization(k, v)
        self.place(index, layer.store)
        state = {name.split(".", 1)[1]: x for name, x in self.parts.items() if name.startswith(f"{index}.")}
        with self._reading(f"a damaged layer {index}"):
            layer.store.restore_state(about["eviction"], state)
        layer.format_checked = True
        layer.changed()

    def fill_other(self, index: int, layer: Any) -> None:
        """Fills layer `index`, a layer of transformers."""
        about = self.layers[index]
        if about.get("kind") != type(layer).__name__:
            raise self.refuse(
                f"a layer {index} of kind {about.get('kind')} where the model has a {type(layer).__name__}"
            )
        if "seen" not in about:
            return
        with self._reading(f"a damaged layer {index}"):
            keys, values = (self.parts[f"{index}.{name}"].clone() for name in ("keys", "values"))
            if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
                raise ValueError(f"K and V {list(keys.shape)}, {list(values.shape)}")
            if not keys.numel() or not keys.shape[2] <= int(about["seen"]) <= 2**31:
                raise ValueError(f"{keys.shape[2]} of {about['seen']} tokens")
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, int(about["seen"])
