"""Random lives of a KVCache against a float64 model that has no cache: it reads all tokens of each row anew at every
step. Written from docs/ alone: what a cache may go through, and that nothing of it shows in the logits."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from models import ids, model

from kvcompress import KVCache, Tiers, enable

# Root mean square of a call's errors over that of its logits; tokens of another row, or place, give 1 and more.
BOUNDS = {"raw": 1e-4, "int8": 0.05, "kivi4": 0.6, "int4": 0.6}


class Row:
    """Tokens of a row, and which slots are pads."""

    def __init__(self, tokens: list[int], real: list[bool]) -> None:
        self.tokens, self.real = tokens, real

    def clone(self) -> Row:
        return Row(list(self.tokens), list(self.real))


def exact(m: torch.nn.Module, rows: list[Row], T: int) -> torch.Tensor:
    """Logits [B, T, vocab] of the last T slots, each row by itself, without its pads; NaN at pads."""
    found = torch.full((len(rows), T, m.config.vocab_size), torch.nan, dtype=torch.float64)
    for b, row in enumerate(rows):
        kept = [i for i, real in enumerate(row.real) if real]
        logits = m(torch.tensor([[row.tokens[i] for i in kept]]), use_cache=False).logits[0]
        for at, i in enumerate(kept):
            if i >= len(row.tokens) - T:
                found[b, i - (len(row.tokens) - T)] = logits[at]
    return found


def life(seed: int, folder: Path, steps: int = 14) -> None:
    rng = np.random.default_rng(seed)
    ours, oracle = copy.deepcopy(model("llama")), copy.deepcopy(model("llama")).double()
    enable(ours, verbose=False)
    name = str(rng.choice(list(BOUNDS)))
    cache = KVCache(ours.config, name, page_size=int(rng.choice([16, 64])), sinks=int(rng.choice([0, 4])))
    rows = [Row([], []) for _ in range(int(rng.integers(1, 4)))]
    padded = len(rows) > 1 and rng.random() < 0.5
    for step in range(steps):
        what = int(rng.integers(9)) if step else 0
        seen = len(rows[0].tokens)
        where = f"life {seed} ({name}), step {step}, act {what}"
        if what <= 2 or seen < 8:
            T = int(rng.choice([1, 1, 5, 33, 90])) if step else int(rng.choice([20, 100]))
            new = ids(len(rows), T, seed=1000 * seed + step)
            pads = [int(rng.integers(0, 9)) if padded and not step else 0 for _ in rows]
            for row, tokens, pad in zip(rows, new.tolist(), pads, strict=True):
                row.tokens += tokens
                row.real += [i >= pad for i in range(T)]
            mask = torch.tensor([row.real for row in rows]).long()
            with torch.no_grad():
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -T:]
                got = ours(new, attention_mask=mask, position_ids=positions, past_key_values=cache).logits.double()
                want = exact(oracle, rows, T)
            real = ~want.isnan()
            error = float((got - want)[real].square().mean().sqrt() / want[real].square().mean().sqrt())
            assert error <= BOUNDS[name], f"{where}: {error}"
        elif what == 3:  # drafts that are refused
            n = int(rng.integers(1, 6))
            cache.crop(-n)
            for row in rows:
                del row.tokens[-n:], row.real[-n:]
        elif what == 4:  # beams
            index = rng.integers(0, len(rows), len(rows)).tolist()
            cache.reorder_cache(torch.tensor(index))
            rows = [rows[i].clone() for i in index]
        elif what == 5:
            index = rng.integers(0, len(rows), int(rng.integers(1, 4))).tolist()
            cache.batch_select_indices(torch.tensor(index))
            rows = [rows[i].clone() for i in index]
        elif what == 6:  # a copy goes on; what becomes of the other does not show
            twin = copy.deepcopy(cache)
            cache.crop(-2)
            cache = twin
        elif what == 7:
            if rng.random() < 0.5:
                cache.save(folder / "a.kvc")
                cache = KVCache.load(folder / "a.kvc", ours.config)
            else:
                cache.suspend(folder / "b.kvc" if rng.random() < 0.5 else None)
                cache.resume()
        else:
            cache.use_tiers(None if rng.random() < 0.3 else Tiers(host_bytes=1 << 14, file_bytes=None), 16, 1)
        assert cache.get_seq_length() == len(rows[0].tokens), where
        cache.pool.check()


@pytest.mark.parametrize("lives", [3, pytest.param(int(os.environ.get("KVCOMPRESS_SOAK", 60)), marks=pytest.mark.full)])
def test_random_lives(lives: int, tmp_path: Path) -> None:
    for seed in range(lives):
        life(seed, tmp_path)
