"""What the ranks of tests/serving/test_parallel.py do; one process each: parallel_ranks.py CASE FOLDER."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from kvcompress import PagedKV
from kvcompress.parallel import ShardedKV

OPTIONS = {"page_size": 16, "sinks": 4}


def calls(seed: int = 0, B: int = 2, H: int = 2, G: int = 3, D: int = 32):
    """(q, k, v, mask) of a left-padded prompt, decode steps, and a chunk."""
    g = torch.Generator().manual_seed(seed)
    for T in (150, 1, 1, 70, 1):
        q, k, v = (torch.randn(B, n, T, D, generator=g) for n in (G * H, H, H))
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[B - 1, : 30 if T == 150 else 0] = False
        yield q, k, v, mask


def layer(folder: Path) -> None:
    """Every call of a sharded layer equals that of a layer with all tokens."""
    share(folder)
    for key, bound in (("raw", 1e-5), ("int8", 2e-2)):
        one, ours = PagedKV(2, 32, key=key, batch=2, **OPTIONS), ShardedKV(2, 32, key=key, batch=2, **OPTIONS)
        aux = torch.randn(6, generator=torch.Generator().manual_seed(9))
        for i, (q, k, v, mask) in enumerate(calls()):
            options = {
                "mask": mask,
                "softcap": 20.0 * (i == 3),
                "window": 100 * (i == 4),
                "s_aux": aux if i > 2 else None,
            }
            want, want_lse = one.attend(q, k, v, **options)
            out, lse = ours.attend(q, k, v, **options)
            assert (out - want).abs().max() <= bound * want.abs().max(), (key, i)
            real = want_lse > -torch.inf
            assert torch.equal(lse > -torch.inf, real)
            assert (lse[real] - want_lse[real]).abs().max() <= bound
        assert torch.equal(ours.real(), one.real())
        if key == "raw":
            assert all(torch.equal(a, b) for a, b in zip(ours.dense(), one.dense(), strict=True))
        ours.crop(130), one.crop(130)
        ours.select([1, 0, 1]), one.select([1, 0, 1])
        q = torch.randn(3, 6, 1, 32, generator=torch.Generator().manual_seed(5))
        assert (ours.attend(q)[0] - one.attend(q)[0]).abs().max() <= bound
        tokens = torch.tensor(ours.page_store.kept_tokens)
        dist.all_reduce(tokens)
        assert int(tokens) == one.page_store.kept_tokens
    from kvcompress import SnapKV, StreamingLLM

    for bad, text in ((lambda: ShardedKV(2, 32, policy=SnapKV(64)), "accumulated"),
                      (lambda: ShardedKV(2, 32, policy=StreamingLLM(4, 60, positions="cache")), "accumulated"),
                      (lambda: ShardedKV(2, 32, stripe=0), "stripe")):  # fmt: skip
        try:
            bad()
        except ValueError as error:
            assert text in str(error)
        else:
            raise AssertionError(text)


def accumulated(folder: Path) -> None:
    """The accumulated attention of each rank's tokens equals that on one process."""
    one, ours = PagedKV(2, 32, key="raw", batch=2, **OPTIONS), ShardedKV(2, 32, key="raw", batch=2, **OPTIONS)
    for q, k, v, mask in calls():
        want = one.attend(q, k, v, mask=mask, return_attention=True)[2]
        got = ours.attend(q, k, v, mask=mask, return_attention=True)[2]
        compare(ours, got, one, want)
    q = torch.randn(2, 6, 1, 32, generator=torch.Generator().manual_seed(5))
    compare(ours, ours.attend(q, return_attention=True)[2], one, one.attend(q, return_attention=True)[2])


def by_slot(kv: PagedKV, x: torch.Tensor) -> torch.Tensor:
    """x [B, H, N] by index -> [B, H, seen] by slot."""
    from kvcompress.store.sequence import slots_of

    slots = slots_of(kv.page_store.table).expand(*x.shape[:2], -1).long()
    wide = x.new_zeros(*x.shape[:2], kv.seen + 1)
    return wide.scatter(2, slots.where(slots >= 0, kv.seen), x[:, :, : slots.shape[2]])[:, :, :-1].contiguous()


def compare(ours: PagedKV, got: torch.Tensor, one: PagedKV, want: torch.Tensor, bound: float = 1e-5) -> None:
    total = by_slot(ours, got)
    dist.all_reduce(total)
    want = by_slot(one, want)
    assert (total - want).abs().max() <= bound * max(1.0, float(want.max())), (total - want).abs().max()


def evict(folder: Path) -> None:
    """With policies, all ranks together keep the same tokens as one process, at every eviction; results and scores are
    equal."""
    from kvcompress import H2O, AdaKV, KNorm, ScoreOnly, StreamingLLM

    g = torch.Generator().manual_seed(3)
    for policy in (H2O(48, sinks=4), H2O(48, sinks=4, heads="shared", score="sum"), H2O(0.3, score="ema"),
                   ScoreOnly(40), AdaKV(H2O(48)), StreamingLLM(4, 44), KNorm(48)):  # fmt: skip
        one, ours = (kind(2, 32, key="raw", policy=policy, page_size=16) for kind in (PagedKV, ShardedKV))
        for T in (150, *[1] * 40, 70, *[1] * 40):
            q, k, v = (torch.randn(1, h, T, 32, generator=g) for h in (6, 2, 2))
            want, _ = one.attend(q, k, v)
            out, _ = ours.attend(q, k, v)
            assert (out - want).abs().max() <= 1e-5 * want.abs().max(), policy
            own = one.eviction.not_evicted()
            assert (own is None) == (ours.eviction.not_evicted() is None), (policy, one.seen)
            if own is not None:
                assert torch.equal(ours.eviction.not_evicted(), own.expand(-1, 2, -1)), (policy, one.seen)
        assert one.eviction.count == ours.eviction.count > 1
        if policy.needs_attention:
            compare(ours, ours.eviction.scores(), one, one.eviction.scores(), 1e-4)
        assert torch.equal(ours.eviction.live(), one.eviction.live())
        twin = ours.clone()
        assert torch.equal(twin.attend(q)[0], ours.attend(q)[0])
        ours.crop(200), one.crop(200)
        assert (ours.attend(q[:, :, :1])[0] - one.attend(q[:, :, :1])[0]).abs().max() <= 1e-5
    padded(H2O(48, sinks=4))


def padded(policy) -> None:
    """Left padding: the first token of a row may be on another rank; up to `sinks` more tokens are kept."""
    one, ours = (kind(2, 32, key="raw", policy=policy, page_size=16, batch=2) for kind in (PagedKV, ShardedKV))
    for q, k, v, mask in calls():
        one.attend(q, k, v, mask=mask), ours.attend(q, k, v, mask=mask)
    there, want = ours.eviction.not_evicted(), one.eviction.not_evicted().expand(-1, 2, -1)
    assert torch.equal(there[0], want[0]) and bool((there | ~want).all())
    assert int((there & ~want).sum(-1).max()) <= 4


def share(folder: Path) -> None:
    """A rank holds its share of the sealed bytes."""
    x = torch.randn(1, 2, 64 * 64, 32)
    one, ours = PagedKV(2, 32), ShardedKV(2, 32)
    for kv in (one, ours):
        kv.append(x, x)
    part, n = ours.page_store.parts()["sealed"] / one.page_store.parts()["sealed"], dist.get_world_size()
    assert 1 / n - 0.05 <= part <= 1 / n + 0.01, part


def cache(folder: Path) -> None:
    """generate() with a KVCache over the group gives the same tokens as on one process."""
    from generation import generate
    from models import ids, left_pads, model

    from kvcompress import KVCache, enable

    m = model("llama")
    tokens, mask = left_pads(ids(2, 90), [0, 13])
    options = {"mask": mask, "max_new_tokens": 12}
    enable(m, verbose=False)
    for implementation in ("kvcompress", "sdpa"):
        m.set_attn_implementation(implementation)
        want = generate(m, tokens, None, **options).sequences
        ours = KVCache(m.config, "raw", group=dist.group.WORLD, **OPTIONS)
        got = generate(m, tokens, ours, **options).sequences
        assert torch.equal(got, want), implementation
    from kvcompress import H2O

    enable(m, verbose=False)
    caches = [KVCache(m.config, "raw", policy=H2O(40), page_size=16, group=group) for group in (None, dist.group.WORLD)]
    want, got = (generate(m, tokens[:1], cache, max_new_tokens=60).sequences for cache in caches)
    assert torch.equal(got, want)
    slots = [torch.tensor([len(x) for x in cache.kept(1).slots[0]]) for cache in caches]
    dist.all_reduce(slots[1])
    assert torch.equal(*slots) and int(slots[0][0]) < 60


def heads(folder: Path) -> None:
    """Tensor parallel: each rank has its own KV heads and evicts by its own scores; the model's output equals that of
    one process."""
    from kvcompress import H2O
    from kvcompress.parallel import join_heads, split_heads

    g, n = torch.Generator().manual_seed(1), dist.get_world_size()
    one = PagedKV(4, 32, key="int8", policy=H2O(64, recent=16, sinks=4), page_size=16)
    ours = PagedKV(4 // n, 32, key="int8", policy=H2O(64, recent=16, sinks=4), page_size=16)
    for T in (200, *[1] * 40):
        q, k, v = (torch.randn(1, h, T, 32, generator=g) for h in (8, 4, 4))
        want = one.attend(q, k, v)[0]
        assert torch.equal(join_heads(ours.attend(*split_heads(q, k, v))[0]), want)
    assert ours.page_store.kept_tokens == one.page_store.kept_tokens
    try:
        split_heads(q, k[:, :3])
    except ValueError as error:
        assert "tensor 1: expected [B, H, ...] with H a multiple of the 2 ranks, got [1, 3, 1, 32]" in str(error)
    else:
        raise AssertionError("3 heads over 2 ranks")


def plan(folder: Path) -> None:
    """transformers' tensor parallel: the cache holds this rank's heads, and the generated tokens are those without a
    cache."""
    import transformers as hf

    from kvcompress import KVCache, enable

    books = Path(__file__).parents[2] / "assets" / "books-tiny"
    m = hf.AutoModelForCausalLM.from_pretrained(books, dtype=torch.float32, tp_plan="auto")
    tokens = torch.randint(1, 4000, (1, 90), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = m.generate(tokens, **options)
    enable(m, verbose=False)
    ours = KVCache(m.config, "raw")
    assert torch.equal(m.generate(tokens, past_key_values=ours, **options), want)
    assert ours.layers[0].store.num_kv_heads * dist.get_world_size() == m.config.num_key_value_heads


def dead(folder: Path) -> None:
    """The last rank dies: the others soon get an error, and have stored nothing."""
    kv = ShardedKV(2, 32, **OPTIONS)
    for i, (q, k, v, _) in enumerate(calls(B=1)):
        if i == 1:
            if dist.get_rank() == dist.get_world_size() - 1:
                os._exit(0)
            before = kv.seen, kv.page_store.kept_tokens, [x.clone() for x in PagedKV.dense(kv)]
            try:
                kv.attend(q, k, v)
            except RuntimeError:
                assert (kv.seen, kv.page_store.kept_tokens) == before[:2]
                assert all(torch.equal(a, b) for a, b in zip(PagedKV.dense(kv), before[2], strict=True))
                (folder / f"error{dist.get_rank()}").touch()
                os._exit(0)
        kv.attend(q, k, v)


def full(folder: Path) -> None:
    """One rank is out of memory, or has NaN in its tokens: all ranks raise, nothing is stored, and afterwards all
    continue."""
    from kvcompress import _C, H2O

    rank, ends = dist.get_rank(), []
    for policy in (None, H2O(96, sinks=4)):
        options = {"key": "int8", "page_size": 16, "batch": 2, "policy": policy}
        one, ours = PagedKV(2, 32, **options), ShardedKV(2, 32, **options)
        failed = 0
        for q, k, v, mask in calls():
            with_nan = k.clone()
            with_nan[0, 0, 0, 0] = torch.nan  # held by one rank
            for n, own in enumerate((with_nan, *[k] * 99)):
                before = ours.seen, [x.clone() for x in PagedKV.dense(ours)] if policy is None else ()
                _C.alloc_fail_at(n if rank == 1 else 0)
                try:
                    out, _ = ours.attend(q, own, v, mask=mask)
                    break
                except (MemoryError, ValueError):
                    failed += 1
                    assert ours.seen == before[0], n  # a deferred eviction may have taken place
                    assert all(torch.equal(a, b) for a, b in zip(PagedKV.dense(ours), before[1], strict=False)), n
                finally:
                    _C.alloc_fail_at(0)
            want, _ = one.attend(q, k, v, mask=mask)
            if policy is None:
                assert (out - want).abs().max() <= 2e-2 * want.abs().max()
            same = torch.cat([out.flatten(), -out.flatten()])
            dist.all_reduce(same, dist.ReduceOp.MAX)
            assert torch.equal(same[: out.numel()], -same[out.numel() :])  # the maximum equals the minimum
        ends.append(failed)
    assert min(ends) >= 10, ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group(
        "gloo",
        f"file://{folder}.rendezvous",
        datetime.timedelta(seconds=30),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["RANK"]),
    )
    globals()[case](folder)
    dist.destroy_process_group()
    # Gloo's threads may still release tensors, and abort if the interpreter is shutting down (pytorch#179291).
    os._exit(0)
