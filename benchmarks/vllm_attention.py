"""Attention of a decode step by itself, with vLLM's CPU kernel and `ops.attend_varlen` alternating:
benchmarks/vllm_attention.py

One request of 4,096 and of 16,384 tokens, 32 query and 8 KV heads of 128, bfloat16; its newest token is stored, then
attended to. Blocks of 128 tokens are in random order, and every call uses another of as many layers as fill 256 MiB in
bfloat16, so caches do not help. Milliseconds: median, quartiles, and the median of each ratio to vLLM's bfloat16 in the
same round; the error is that of the output compared with float64 over vLLM's bfloat16 cache."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm_common import apart, arguments

HEADS, KV_HEADS, DIM, BLOCK, PAGE = 32, 8, 128, 128, 64
FORMATS = ("raw", "int8", "fp8_e4m3", "int8/int4", "int4")
BYTES = 256 << 20
Call = Callable[[int], Any]


def vllm_calls(k: Any, v: Any, q: Any, table: Any, layers: int, dtype: str) -> Call:
    """A step of layer i with vLLM's own kernels, for the last tokens of each request: q [B, new tokens, Hq, D]. Every
    layer's cache holds k and v [B, tokens, H, D] in the blocks of table [B, blocks]."""
    import torch
    from vllm import _custom_ops as vllm_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    (B, new, heads, dim), (_, tokens, kv_heads, _) = q.shape, k.shape
    isa = _get_attn_isa(torch.bfloat16, BLOCK, dim)
    kind = torch.bfloat16 if dtype == "auto" else torch.uint8
    caches = [torch.zeros(table.numel(), kv_heads, 2 * BLOCK, dim, dtype=kind).chunk(2, dim=2) for _ in range(layers)]
    slots = (table.long()[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)[:, :tokens]
    for cache in caches:
        vllm_ops.cpu_attn_reshape_and_cache(
            k.flatten(0, 1), v.flatten(0, 1), *cache, slots.flatten(), isa, 1.0, 1.0, dtype
        )
    starts, lengths = new * torch.arange(B + 1, dtype=torch.int32), torch.full((B,), tokens, dtype=torch.int32)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=B, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=lengths, dtype=torch.bfloat16,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
        kv_cache_dtype=dtype,
    )  # fmt: skip
    q, own_k, own_v = q.flatten(0, 1), k[:, -new:].flatten(0, 1), v[:, -new:].flatten(0, 1)
    own, out = slots[:, -new:].flatten(), torch.empty_like(q)

    def call(i: int) -> Any:
        key, value = caches[i]
        vllm_ops.cpu_attn_reshape_and_cache(own_k, own_v, key, value, own, isa, 1.0, 1.0, dtype)
        vllm_ops.cpu_attention_with_kv_cache(
            query=q, key_cache=key, value_cache=value, output=out, query_start_loc=starts, seq_lens=lengths,
            scale=dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0,
            scheduler_metadata=plan, s_aux=None, kv_cache_dtype=dtype,
        )  # fmt: skip
        return out

    return call


def our_calls(k: Any, v: Any, q: Any, table: Any, layers: int, name: str) -> Call:
    """The same with `ops.attend_varlen`."""
    import torch

    from kvcompress import formats, ops

    tokens, blocks = len(k), len(table)
    shape = formats.page_geometry(name, KV_HEADS, DIM, dtype=torch.bfloat16, page_size=PAGE)
    caches = [torch.zeros(blocks, BLOCK // PAGE * shape.page_bytes, dtype=torch.uint8) for _ in range(layers)]
    residual = torch.zeros(layers, min(1, shape.residual_bytes), shape.residual_bytes, dtype=torch.uint8)
    none, ints, flags = torch.empty(0), torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    own = torch.zeros(1, 1, dtype=torch.int32) if shape.residual_bytes else ints

    def attend(i: int, query: Any, key: Any, value: Any, length: int, window: int, out: Any) -> None:
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, len(key)], [length]))
        ops.attend_varlen(
            query, key, value, caches[i], table[None], residual[i], own, starts, lengths, ints,
            ints, none, out, none, flags, shape.key << 8 | shape.value, BLOCK, PAGE, PAGE, window, DIM**-0.5, 0.0,
        )  # fmt: skip

    many = torch.empty(tokens - 1, HEADS, DIM, dtype=q.dtype)
    for i in range(layers):  # with a window, so that filling is fast
        attend(i, torch.zeros_like(many), k[:-1], v[:-1], tokens - 1, 1, many)
    out = torch.empty_like(q)

    def call(i: int) -> Any:
        attend(i, q, k[-1:], v[-1:], tokens, 0, out)
        return out

    return call


def measure(tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of every round, and the error, by name."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    import torch
    from common import machine
    from vllm.platforms import current_platform

    torch.set_num_threads(threads)
    current_platform.import_kernels()
    torch.manual_seed(0)
    k, v = torch.randn(2, tokens - PAGE // 2, KV_HEADS, DIM).bfloat16()  # the newest page is not full
    q = torch.randn(1, HEADS, DIM).bfloat16()
    table = torch.randperm(tokens // BLOCK).int()
    layers = max(2, BYTES // (k.nbytes + v.nbytes))
    theirs = k[None], v[None], q[None], table[None], layers
    calls = {f"vLLM {x}": vllm_calls(*theirs, y) for x, y in (("bf16", "auto"), ("fp8", "fp8_e4m3"))}
    calls |= {x: our_calls(k, v, q, table, layers, x) for x in FORMATS}
    wide = q[0].double().view(KV_HEADS, HEADS // KV_HEADS, DIM)
    weights = (torch.einsum("hgd,thd->hgt", wide, k.double()) * DIM**-0.5).softmax(-1)
    want = torch.einsum("hgt,thd->hgd", weights, v.double()).reshape(HEADS, DIM)
    found: dict[str, Any] = {"cpu": machine()["cpu"]}
    for name, call in calls.items():
        error = (call(0)[0].double() - want).norm() / want.norm()
        found[name] = {"error": float(error), "ms": []}
    for i in range(rounds):
        for name in sorted(calls, reverse=bool(i % 2)):
            begin = time.perf_counter()
            calls[name](i % layers)
            found[name]["ms"].append(1e3 * (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    options = arguments(parser, measure)
    for tokens in options.tokens:
        found = apart(measure, tokens, options.threads, options.rounds)
        print(f"{found.pop('cpu')}, {options.threads} threads, {tokens:,} tokens")
        print("| | ms | quartiles | of vLLM's bf16 | error |\n|---|---|---|---|---|")
        base = found["vLLM bf16"]["ms"]
        for name, x in found.items():
            low, middle, high = statistics.quantiles(x["ms"])
            ratio = statistics.median(a / b for a, b in zip(x["ms"], base, strict=True))
            print(f"| {name} | {middle:.2f} | {low:.2f}-{high:.2f} | {ratio:.2f} | {x['error']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
