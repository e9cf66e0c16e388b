"""Random operations on a KVCache, compared with a float64 model without a cache, which processes all tokens of each
row at every step. Written from docs/ only: none of the operations may affect the logits. Then the same with
eviction policies, where the model uses the K and V that the cache decodes, and the kept tokens are checked."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from models import ids, model
from policy_model import Rule, State, check_kept, policy, remember

from kvcompress import H2O, KVCache, SnapKV, Tiers, enable

# Root mean square error of a call relative to its logits; tokens of another row or position give 1 and more.
BOUNDS = {"raw": 1e-4, "int8": 0.05, "kivi4": 0.6, "int4": 0.6}


class Row:
    """Tokens of a row, and which slots are padding."""

    def __init__(self, tokens: list[int], real: list[bool]) -> None:
        self.tokens, self.real = tokens, real

    def clone(self) -> Row:
        return Row(list(self.tokens), list(self.real))


def exact(m: torch.nn.Module, rows: list[Row], T: int) -> torch.Tensor:
    """Logits [B, T, vocab] of the last T slots, each row by itself without its padding; NaN at padding."""
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
        elif what == 3:  # rejected drafts
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
        elif what == 6:  # continue with a copy; changes of the original must not show
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


def drawn(rng: np.random.Generator, seed: int) -> list[Rule]:
    """A policy, or a chain of two, of which one may use attention."""

    chained = rng.random() < 0.3
    wholes = ["each"] if chained else ["each", "shared"]

    def one(kinds: list[str]) -> Rule:
        kind = str(rng.choice(kinds))
        sinks, slack = int(rng.choice([0, 4])), [None, 1, 7][int(rng.integers(3))]
        budget: int | float = int(rng.integers(40, 90))
        if kind in ("streaming", "window"):
            return Rule(kind, budget, 0 if kind == "window" else sinks, 0, slack)
        options, recent = {}, int(rng.choice([0, 8]))
        if kind == "h2o":
            options = {"score": str(rng.choice(["mean", "sum", "ema"])), "heads": str(rng.choice(wholes))}
            recent = [None, recent][int(rng.integers(2))]
        elif kind == "tova":
            options, recent = {"heads": str(rng.choice(wholes))}, 0
        elif kind == "snapkv":
            recent = int(rng.choice([1, 8, 16]))
            options = {"window": recent, "kernel": int(rng.choice([1, 5]))}
        spans = ((10, 14), (20, 21)) if rng.random() < 0.3 else ()
        return Rule(
            kind, float(rng.uniform(0.3, 0.8)) if rng.random() < 0.3 else budget, sinks, recent, slack, options, spans
        )

    looking, blind = ["h2o", "tova", "snapkv"], ["streaming", "window", "knorm", "keydiff"]
    if chained:
        return sorted([one(blind), one([*looking, *blind])], key=lambda _: rng.random())
    return [one([[*looking, *blind][seed % 7]])]


# Largest error of a decoded token's K or V, relative to its norm; another token's is 1.4.
READ = {"raw": 1e-5, "int8": 0.03, "kivi4": 0.5, "int4": 0.5}
EXACT = 2e-3  # like BOUNDS, compared with float64 over the stored values, for any format: rounding in kernels


class Sequence:
    """A row: the length of its padding, and the tokens that each layer keeps."""

    def __init__(self, pads: int, raw: bool) -> None:
        self.pads, self.states = pads, [State(2, raw), State(2, raw)]


def fed(m: torch.nn.Module, cache: KVCache, rows: list[Sequence], new: torch.Tensor, past: int) -> torch.Tensor:
    """Logits of a call that appends new [B, T] at slot `past`."""
    mask = (torch.arange(past + new.shape[1]) >= torch.tensor([[row.pads] for row in rows])).long()
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
    return m(new, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def read_back(m: torch.nn.Module, cache: KVCache, rows: list[Sequence], new: torch.Tensor, past: int) -> None:
    """Decoded contents as a call of `new` sees them (pages are sealed at its start), as its policy sees them (recorded
    calls evict later), and as the next call would; from copies of the cache."""
    T = new.shape[1]
    for names, calls in ((["attended"], [1]), (["stored", "sealed"], [T, 1])):
        twin, at = copy.deepcopy(cache), past
        twin.activate_past_recording()
        for name, n in zip(names, calls, strict=True):
            fed(m, twin, rows, new[:, :n] if at else new, at)
            at += n
            for layer in range(2):
                dense = twin.layers[layer].store.dense()
                for b, row in enumerate(rows):
                    setattr(row.states[layer], name, [x[b, :, row.pads : past + T].double() for x in dense])
    for state in (state for row in rows for state in row.states):  # the next call evicts
        both = zip(state.sealed, state.stored, strict=True)
        state.sealed = [torch.where(x.any(-1, keepdim=True), x, y) for x, y in both]


def call(oracle: torch.nn.Module, rows: list[Sequence], new: torch.Tensor, past: int) -> torch.Tensor:
    """Logits [B, T, vocab] of the float64 model over the remaining tokens, NaN at padding."""
    T, found = new.shape[1], []
    for b, row in enumerate(rows):
        skip = 0 if past else row.pads
        at = torch.arange(past + skip, past + T)[None] - row.pads
        logits = oracle(new[b : b + 1, skip:], position_ids=at, use_cache=False, states=row.states).logits[0]
        found.append(torch.nn.functional.pad(logits, (0, 0, skip, 0), value=torch.nan))
    return torch.stack(found)


def follow(cache: KVCache, rows: list[Sequence], rules: list[Rule], page: int, sinks: int, where: str) -> int:
    """The cache keeps the tokens that the policy says; the model continues with these. Returns the number of
    unambiguous evictions."""
    told = 0
    for layer in range(2):
        kept = cache.kept(layer)
        for b, row in enumerate(rows):
            state = row.states[layer]
            theirs = torch.zeros_like(state.alive)
            for h in range(2):
                theirs[h, kept.positions[b][h]] = True
            try:
                told += check_kept(theirs, rules, state, page, sinks)
            except AssertionError as error:
                raise AssertionError(f"{where}: layer {layer}, row {b}: {error}") from None
            state.alive = theirs
    return told


def life_of_policy(seed: int, folder: Path, steps: int = 14) -> int:
    rng = np.random.default_rng([seed, 26])
    ours, oracle = copy.deepcopy(model("llama")), copy.deepcopy(model("llama")).double()
    enable(ours, verbose=False)
    oracle.set_attn_implementation("kept_float64")
    name, page, rules = str(rng.choice(list(READ), p=[0.4, 0.2, 0.2, 0.2])), int(rng.choice([16, 32])), drawn(rng, seed)
    sinks = max(rule.sinks for rule in rules) + int(rng.choice([0, 4]))
    if rules[-1].slack is not None:  # more than the sinks, which a policy does not count: see docs/eviction.md
        rules[-1].slack += sinks - min(rule.sinks for rule in rules)
    # shares of few tokens are smaller than the protected tokens
    few = all(isinstance(rule.budget, int) for rule in rules)
    first = int(rng.choice([20, 120])) if few else 120
    cache = KVCache(ours.config, name, policy=policy(rules), page_size=page, sinks=sinks)
    plain = copy.deepcopy(cache)  # the same operations, without tiers and files
    rows: list[Sequence] = []
    seen = told = 0
    for step in range(steps):
        what = int(rng.integers(11)) if step else 0
        where = f"life {seed} ({name}, page {page}, sinks {sinks}, {rules}), step {step}, act {what}, seen {seen}"
        if what <= 4 or seen < 12:
            T = int(rng.choice([1, 1, 5, 17, 40, 60])) if step else first
            if not step:
                n = int(rng.integers(1, 4))
                rows = [Sequence(int(rng.integers(0, 9)) if n > 1 else 0, name == "raw") for _ in range(n)]
            new = ids(len(rows), T, seed=1000 * seed + step)
            with torch.no_grad():
                # in a sequence's first call a policy evicts layer by layer: a cache without one shows what it found
                read_back(
                    ours, plain if seen else KVCache(ours.config, name, page_size=page, sinks=sinks), rows, new, seen
                )
                want = call(oracle, rows, new, seen)
                got = [fed(ours, x, rows, new, seen) for x in (cache, plain)]
            assert torch.equal(*got), f"{where}: not what it is without tiers and files"
            seen, real = seen + T, ~want.isnan()
            error = float((got[0].double() - want)[real].square().mean().sqrt() / want[real].square().mean().sqrt())
            assert error <= (BOUNDS["raw"] if name == "raw" else EXACT), f"{where}: {error}"
            for row in rows:
                for state in row.states:
                    remember(rules, state)
                    for read, exact in zip(state.stored, state.exact, strict=True):
                        off = ((read - exact).norm(dim=-1) / exact.norm(dim=-1))[state.alive].max()
                        assert off <= READ[name], f"{where}: {off}"
            told += follow(cache, rows, rules, page, sinks, where)
        elif what == 5:
            n = int(rng.integers(1, 6))
            for x in (cache, plain):
                x.crop(-n)
            seen -= n
            for row in rows:
                for state in row.states:
                    state.crop(n)
        elif what in (6, 7):
            index = rng.integers(0, len(rows), len(rows) if what == 6 else int(rng.integers(1, 4))).tolist()
            for x in (cache, plain):
                (x.reorder_cache if what == 6 else x.batch_select_indices)(torch.tensor(index))
            rows = [copy.deepcopy(rows[i]) for i in index]
        elif what == 8:
            twin = copy.deepcopy(cache)
            cache.crop(-2)
            cache = twin
        elif what == 9:
            if rng.random() < 0.5:
                cache.save(folder / "a.kvc")
                cache = KVCache.load(folder / "a.kvc", ours.config, max_slots=2000)
            else:
                cache.suspend(folder / "b.kvc" if rng.random() < 0.5 else None)
                cache.resume()
        else:
            cache.use_tiers(None if rng.random() < 0.3 else Tiers(host_bytes=1 << 14, file_bytes=None), 16, 1)
        assert cache.get_seq_length() == seen, where
        cache.pool.check()
    return told


@pytest.mark.parametrize(
    "lives", [14, pytest.param(int(os.environ.get("KVCOMPRESS_SOAK", 60)), marks=pytest.mark.full)]
)
def test_random_lives_of_policies(lives: int, tmp_path: Path) -> None:
    assert sum(life_of_policy(seed, tmp_path) for seed in range(lives)) >= 2 * lives


def test_rows_that_all_begin_with_pads() -> None:
    """H2O's sums are as wide as the longest row without padding: such a batch once raised."""
    ours = copy.deepcopy(model("llama"))
    enable(ours, verbose=False)
    tokens = ids(2, 20)
    padded, alone = (KVCache(ours.config, "raw", policy=H2O(10, sinks=2), page_size=16) for _ in range(2))
    with torch.no_grad():
        fed(ours, padded, [Sequence(8, True), Sequence(7, True)], tokens, 0)
        ours(tokens[1:, 7:], past_key_values=alone)
    for layer in range(2):
        pairs = zip(padded.kept(layer).positions[1], alone.kept(layer).positions[0], strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("tail", [[15, -1, 1, 5], [14, -1, 7], [10, 1, 1, 1, -2, 1, 1, 7], [10, 5, -5, 10]])
@pytest.mark.parametrize("stored", [False, True], ids=["", "file"])
def test_cropped_queries_do_not_look(tail: list[int], stored: bool, tmp_path: Path) -> None:
    """SnapKV uses the last queries that remain, at their own positions, as in one call without crops. Cropped ones
    once stayed in its window and shifted those before them."""
    ours = copy.deepcopy(model("llama"))
    enable(ours, verbose=False)
    tokens, kept = ids(1, 100), []
    for calls in ([80, *tail], [100]):
        cache, at = KVCache(ours.config, "raw", policy=SnapKV(60, 8, 1, slack=40), page_size=16), 0
        for n in calls:
            if n < 0:
                if stored:
                    cache.save(tmp_path / "a.kvc")
                    cache = KVCache.load(tmp_path / "a.kvc", ours.config)
                cache.crop(n)
            else:
                with torch.no_grad():
                    ours(tokens[:, at : at + n], past_key_values=cache)
            at += n
        assert at == 100
        kept.append([heads.tolist() for heads in cache.kept(0).positions[0]])
    assert kept[0] == kept[1]
    assert len(kept[0][0]) == 60
