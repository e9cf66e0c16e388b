"""The parsers written in Python: `.kvc` files and strategies. Each target takes bytes, like LLVMFuzzerTestOneInput."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from kvcompress.hf import save_load
from kvcompress.tools.strategy import Strategy, expand

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "0.1.0" / "cache.kvc"


def strategy(data: bytes) -> None:
    """A text is rejected with a reason, or has the same meaning after it is formatted and parsed again."""
    text = data.decode("utf-8", "replace")
    try:
        for one in expand(text):
            read = Strategy(one)
            assert Strategy(str(read)) == read and Strategy(str(read)).options == read.options
    except ValueError as error:
        assert str(error)


@cache
def _golden() -> tuple[dict, dict[str, tuple[str, list[int], bytes]]]:
    saved = GOLDEN.read_bytes()
    size = int.from_bytes(saved[:8], "little")
    header = json.loads(saved[8 : 8 + size])
    about, body = header.pop("__metadata__"), saved[8 + size :]
    return about, {name: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for name, x in header.items()}


def _forge(data: bytes) -> bytes:
    """The golden file with changes from `data`, three bytes per change (part, place, value), and a valid digest."""
    about, known = _golden()
    about, parts = dict(about), dict(known)
    parts.pop("seal")
    names = sorted(parts)
    for part, place, value in zip(data[0::3], data[1::3], data[2::3], strict=False):
        if part < 32:  # a character of the metadata
            key = ("layers", "options", "version")[part % 3]
            text = bytearray(about[key].encode())
            at = (place * 37 + part // 3) % len(text)
            text[at] = 32 + value % 95
            about[key] = text.decode("ascii", "replace")
            continue
        name = names[part % len(names)]
        dtype, shape, raw = parts[name]
        if place == 255:
            parts[name] = (dtype, [*shape[:-1], value], raw)
        elif raw:
            changed = bytearray(raw)
            changed[place * (1 + part % 5) % len(changed)] = value
            parts[name] = (dtype, shape, bytes(changed))
    small = ((name, parts[name][2]) for name in names if not name.endswith(".pages"))
    parts["seal"] = ("U8", [32], save_load._digest(about, small))
    header, at = {"__metadata__": about}, 0
    for name, (dtype, shape, raw) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(raw for *_, raw in parts.values())


def kvc(data: bytes) -> None:
    """A file is rejected with a reason, or is a cache that can be read and freed. The first byte selects whether the
    input is the file, or describes changes of a valid one, whose digest is then updated."""
    from golden.cache import config

    from kvcompress import KVCache

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kvc"
        path.write_bytes(data[1:] if data[:1] < b"\x20" else _forge(data[1:]))
        try:
            made = KVCache.load(path, config("cache"))
        except ValueError as error:
            assert "expected a file that save() wrote, got" in str(error) or "KVCache.load" in str(error), error
            return
        for layer in made.layers:
            if layer.is_initialized:
                layer.store.dense()
        pool = made.pool
        del made
        pool.check()


TARGETS = {"strategy": strategy, "kvc": kvc}
