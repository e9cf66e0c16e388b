"""Inputs and intermediate tensors on a device (support/far.py) that rejects host tensors."""

import pytest
import torch
import torch.distributed as dist
from far import FAR
from far_kernels import a_device
from test_attend import error

from kvcompress import KVCache, PagedKV, ops
from kvcompress.hf.save_load import tokens_hash
from kvcompress.parallel import ShardedKV


def rows(*heads, T=20, D=32):
    return [torch.randn(1, h, T, D) for h in heads]


def test_sinks_of_a_model_wait_for_nothing():
    q, k, v = rows(4, 2, 2)
    one = [x[:, :, :1] for x in (q, k, v)]
    s_aux = torch.randn(4).bfloat16()
    here = PagedKV(2, 32)
    here.attend(q, k, v, s_aux=s_aux)
    with a_device() as device:
        far, aux = PagedKV(2, 32, device=FAR), s_aux.to(FAR)
        far.attend(*(x.to(FAR) for x in (q, k, v)), s_aux=aux)
        given, waits = [x.to(FAR) for x in one], device.waits
        got = far.attend(*given, s_aux=aux)[0]
        assert device.waits == waits
        assert error(got.cpu(), here.attend(*one, s_aux=s_aux)[0].double()) <= 1e-3


def test_ranks_that_share_a_layer(tmp_path):
    q, k, v = rows(4, 2, 2)
    mask = torch.arange(20)[None] >= 3
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        want = PagedKV(2, 32, page_size=16).attend(q, k, v, mask=mask)[0]
        with a_device():
            far = ShardedKV(2, 32, page_size=16, device=FAR)
            got = far.attend(*(x.to(FAR) for x in (q, k, v)), mask=mask)[0]
            assert error(got.cpu(), want.double()) <= 1e-3
            for x in far.dense():
                assert x.device == FAR
    finally:
        dist.destroy_process_group()


def test_ids_and_scores_on_the_device(tmp_path):
    ids = torch.arange(30)[None]
    scores, slots = torch.rand(1, 2, 9), torch.arange(9, dtype=torch.int32).expand(1, 2, 9).contiguous()
    budget = torch.full((1, 2), 4)
    want = ops.select(scores, slots, None, budget)
    with a_device():
        assert tokens_hash(ids.to(FAR)) == tokens_hash(ids)
        assert torch.equal(ops.select(*(x.to(FAR) for x in (scores, slots)), None, budget.to(FAR)).cpu(), want)


def test_format_check_on_the_device():
    """Whether K suits the format is checked on the device's tensors."""
    from models import model

    k = torch.randn(1, 2, 80, 32)
    with a_device():
        cache = KVCache(model("llama").config, "int4", strict=True)
        cache.update(k.to(FAR), k.to(FAR), 0)
        layer = cache.layers[0]
        layer.commit()
        assert layer.format_checked and layer.store.device == FAR


def test_what_kernels_find_is_raised_where_the_host_waits(tmp_path):
    """NaN in K raises at the next synchronization, once, not in the call itself; nothing is lost."""
    from models import model

    config = model("llama").config
    acts = {
        "check": lambda cache: cache.check(),
        "save": lambda cache: cache.save(tmp_path / "x.kvc"),
        "suspend": lambda cache: cache.suspend(),
        "suspend to a file": lambda cache: cache.suspend(tmp_path / "y.kvc"),
        "to": lambda cache: cache.to("cpu"),
        "a layer's to": lambda cache: cache.layers[0].store.to("cpu"),
    }
    with a_device():
        for name, act in acts.items():
            k = torch.randn(1, 2, 20, 32)
            cache = KVCache(config, "int8", page_size=16)
            for T, bad in ((20, False), (1, True)):
                k[0, 1, 0, 3] = torch.nan if bad else 1.0
                for i in range(len(cache.layers)):
                    cache.update(k[:, :, :T].to(FAR), k[:, :, :T].to(FAR), i)
                    cache.layers[i].commit()
            stats = cache.stats()
            with pytest.raises(ValueError, match="NaN or Inf in k or v.*since the last check"):
                act(cache)
            assert cache.stats() == stats and cache.layers[0].store.device == FAR, name
            act(cache)
            if "suspend" in name:
                cache.resume()
            assert cache.get_seq_length() == 21, name
            assert cache.layers[0].store.dense()[0].cpu().isfinite().all()
