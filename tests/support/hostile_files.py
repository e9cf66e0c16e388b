"""`.kvc` files with a valid seal and invalid numbers, as anyone who can write a file can make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcompress.hf import save_load

Options, Layers, Parts = dict[str, Any], list[dict[str, Any]], dict[str, save_load.Part]
Change = Callable[[Options, Layers, Parts], None]


def part(dtype: str, shape: tuple[int, ...], data: bytes = b"") -> save_load.Part:
    """A tensor of a file, which may have fewer bytes than its shape requires."""
    raw = np.frombuffer(data, np.uint8)
    return save_load.Part(dtype, shape, len(raw), lambda: raw)


def edited(source: Path, path: Path, change: Change) -> None:
    """Writes `source` to `path` with `change(options, layers, parts)` applied, and a valid seal."""
    reader = save_load.Reader(source)
    options, layers, about = reader.options, reader.layers, dict(reader.about)
    parts: Parts = {name: save_load.Part.of(x) for name, x in reader.parts.items()}
    change(options, layers, parts)
    about["options"], about["layers"] = json.dumps(options), json.dumps(layers)
    parts.pop("seal", None)
    small = sorted(x for x in parts if not x.endswith(".pages"))
    seal = save_load._digest(about, ((name, parts[name].data().tobytes()) for name in small))
    parts["seal"] = save_load.Part.of(np.frombuffer(seal, np.uint8))
    save_load._write(path, about, parts)


NUMBERS = (0, -1, 1, 63, 65, 1 << 16, 1 << 20, (1 << 24) - 1, 1 << 24, 2**31 - 1, 2**31, 2**53, 1e308, -1e308)


def leaves(x: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every number and None in JSON."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    found = []
    for key, value in items:
        found += leaves(value) if isinstance(value, (dict, list)) else []
        found += [(x, key)] if not isinstance(value, (dict, str)) else []
    return found


def drawn(rng: np.random.Generator) -> Change:
    """Random edits: some numbers changed, a shape without data, an array of large numbers, a long list."""

    def change(options: Options, layers: Layers, parts: Parts) -> None:
        for _ in range(int(rng.integers(1, 4))):
            what = int(rng.integers(5))
            names = sorted(parts)
            name = names[rng.integers(len(names))]
            old = parts[name]
            raw = old.data()
            if what < 2:
                where = leaves(options if what else layers)
                to, key = where[rng.integers(len(where))]
                to[key] = NUMBERS[rng.integers(len(NUMBERS))]
                if rng.random() < 0.1:
                    to[key] = [[]] * int(rng.choice([10, 3000, 100_000]))
            elif what == 2:
                shape = [int(rng.choice([0, 1, n, 1 << 20, 1 << 24])) for n in old.shape]
                if len(shape) > 1:
                    shape[rng.integers(len(shape))] = 0
                parts[name] = part(old.dtype, tuple(shape)) if 0 in shape else old
            elif what == 3 and len(raw) >= 8:
                words = raw[: len(raw) // 8 * 8].view(np.int64).copy()
                words[rng.integers(len(words))] = int(rng.choice([0, 1 << 16, 1 << 20, 1 << 31, 1 << 46, -1]))
                parts[name] = part(old.dtype, old.shape, words.tobytes() + raw[len(words) * 8 :].tobytes())
            elif what == 4:
                for i in range(int(rng.choice([1, 30, 3000]))):
                    parts[f"{i}.other"] = part("U8", (0,))

    return change
