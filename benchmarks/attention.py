"""Attention over paged, quantized K/V, compared with this machine's read bandwidth, torch's SDPA and raw 16-bit
pages: decode, chunks, accumulated attention, heads of 512, latents (MLA), and the whole step of a layer, all in one
run.

Every cold call reads other pages than the previous one (over at least 256 MB, on huge pages like a pool's), so caches
do not help; with --warm, and in "warm" cells, one copy is read repeatedly. Cold decode calls are interleaved, with
arguments prepared in advance, and each is preceded by a read test on the same threads: median, best, and the fraction
of the read bandwidth, both of the first quartile. Cycles are per core, token and KV head: comparable between machines.

Each cell runs in a separate process, because the kernel level and the number of threads are fixed per process. Writes
benchmarks/results/attention/<cpu>.json; cells that were run replace earlier ones. A cell whose read bandwidth varied by
more than 15% between quartiles was disturbed: it is repeated up to twice, and otherwise not written."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys

os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch's tensors on huge pages: the read test, SDPA and the arena alike

import torch
from attention_latent import latent
from common import (
    COLD,
    HERE,
    beside_reads,
    core_ghz,
    disturbed,
    interleave,
    machine,
    machine_name,
    quartile,
    read_function,
    results,
    save,
    spread,
)

from kvcompress import _C, PagedKV, formats, ops

NAMED = ("raw", "int8", "fp8_e4m3", "int4", "int4_asym", "int2")
NONE, NO_SEALS = torch.empty(0), torch.empty(0, 2, dtype=torch.int64)
H, D = 8, 128
KEYS = ("what", "S", "B", "G", "isa", "threads")
# Pairwise over S, B, G, level and threads, plus the cells with targets.
CELLS = [
    ("decode", 32768, 1, 4, "best", 2), ("decode", 8192, 1, 4, "best", 2), ("decode", 32768, 1, 8, "best", 2),
    ("decode", 32768, 1, 4, "avx2", 2), ("decode", 8192, 8, 1, "best", 2), ("decode", 8192, 8, 4, "best", 1),
    ("decode", 8192, 1, 8, "avx2", 1), ("decode", 32768, 8, 4, "best", 2), ("decode", 8192, 1, 1, "avx512", 1),
    ("all formats", 32768, 1, 4, "best", 2), ("chunk", 4096, 1, 4, "best", 2), ("verify", 4096, 1, 4, "best", 2),
    *(("accumulated", S, 1, 4, "best", 2) for S in (2048, 8192, 32768)),
    *(("length", S, 1, 4, "best", 2) for S in (1024, 2048, 4096, 16384, 65536, 131072)),
    ("step", 16, 1, 4, "best", 1), ("path", 8192, 1, 4, "best", 2), ("path", 32768, 1, 4, "best", 2),
    ("few bits", 32768, 1, 4, "best", 2), ("few bits", 32768, 1, 4, "avx2", 2),
    *(("levels", 32768, 1, G, level, 2) for level in ("avx512", "avxvnni", "avx2") for G in (1, 4, 8)),
    ("wide", 32768, 1, 4, "best", 2), ("latent", 8192, 1, 128, "best", 2),
    *(("warm", 1024, 1, G, level, 1) for level in ("best", "avx512", "avx2") for G in (1, 4, 8)),
]  # fmt: skip


def full() -> list[tuple]:
    product = itertools.product((8192, 32768), (1, 8), (1, 4, 8), ("best", "avx512", "avx2"), (1, 2))
    return CELLS + [("decode", *cell) for cell in product if ("decode", *cell) not in CELLS]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def paged(
    name: str, B: int, G: int, S: int, warm: bool = False, T: int = 1, accumulated: bool = False, H: int = H, D: int = D
):
    """(call(i): T queries per sequence over copy i of the pages, bytes it reads)."""
    code = formats.resolve(name, torch.bfloat16)
    pages = ops.pack(random(1, H, S, D), random(1, H, S, D, seed=1), code, code, 64)
    n, size = S // 64, pages.shape[3]
    copies = B if warm else max(B * 2, -(-COLD // (n * H * size)))
    copies = -(-copies // B) * B
    arena = pages.flatten().repeat(copies)
    q, none = random(B, G * H, T, D, seed=2), torch.empty(B, H, 0, D, dtype=torch.bfloat16)
    own = torch.empty(B, H, 0, D, dtype=torch.bfloat16)

    def table(copy: int) -> torch.Tensor:
        return torch.tensor([[-1] + [((copy * n + p) * H * size // 64) << 16 | code << 8 | code for p in range(n)]])

    tables = [torch.stack([table(i + b) for b in range(B)]) for i in range(0, copies, B)]
    rest = (torch.tensor([[[S, 0]]] * B), NONE.int(), NONE.bool(), NONE, NO_SEALS, S, 64, 0, 0, 1 / math.sqrt(D), 0.0,
            S if accumulated else 0)  # fmt: skip

    def call(i: int):
        return ops.attend(q, own, none, arena, tables[i % len(tables)], *rest)

    return call, B * n * H * size


def sdpa(B: int, G: int, S: int, dtype: torch.dtype, warm: bool, folded: bool):
    """torch's attention on dense K/V; folded: query heads of a group as query rows, as a careful user would write
    it."""
    read = 2 * B * H * S * D * dtype.itemsize
    copies = 1 if warm else max(2, -(-COLD // read))
    k, v = (random(1, B, H, S, D, seed=i).to(dtype).repeat(copies, 1, 1, 1, 1) for i in (0, 1))
    q = random(B, G * H, 1, D, seed=2).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(i: int):
        if folded:
            return attend(q.view(B, H, G, D), k[i % copies], v[i % copies])
        return attend(q, k[i % copies], v[i % copies], enable_gqa=True)

    return call, read


def decode(args, S: int, B: int, G: int, names=NAMED, peers: bool = True) -> list[dict]:
    calls, read = {}, {}
    for name in names:
        label = "raw bf16" if name == "raw" else name
        calls[label], read[label] = paged(name, B, G, S, args.warm)
    for label, dtype, folded in (("sdpa bf16", torch.bfloat16, False), ("sdpa bf16 folded", torch.bfloat16, True),
                                 ("sdpa fp32 folded", torch.float32, True)):  # fmt: skip
        if peers and B * S <= 65536:
            calls[label], read[label] = sdpa(B, G, S, dtype, args.warm, folded)
    if args.warm:
        return warm(calls, args.rounds, S * B)
    return against_reads(calls, read, args.rounds, S * B)


def warm(calls: dict, rounds: int, tokens: int) -> list[dict]:
    """Repeated calls of one kind, on data that the previous one has read."""
    cycles = torch.get_num_threads() * core_ghz() * 1e9 / (tokens * H)
    rows = []
    for name, call in calls.items():
        times = interleave({name: call}, max(100, rounds))[name]
        rows.append({"name": name, **spread(times), "cycles": quartile(times) * cycles})
    return rows


def against_reads(calls: dict, read: dict[str, int], rounds: int, tokens: int) -> list[dict]:
    """Rows of cold calls that read `read` bytes each, and of "read" itself."""
    buffer = torch.arange(COLD // 8)  # untouched zero pages share one physical page, and a host may merge equal pages
    reader, threads = read_function(), torch.get_num_threads()
    seconds, reads = beside_reads(calls, lambda: reader(buffer), rounds)
    times, cycles = {name: spread(t) for name, t in seconds.items()}, threads * core_ghz() * 1e9 / (tokens * H)
    rows = []
    for name, t in times.items():
        share = read[name] / quartile(seconds[name]) / (COLD / quartile(reads[name]))
        rows.append({"name": name, **t, "MB": read[name] / 1e6, "GB/s": read[name] / t["ms"] / 1e6, "of read": share,
                     "cycles": quartile(seconds[name]) * cycles})  # fmt: skip
        if "raw bf16" in times:
            rows[-1]["vs raw"] = t["ms"] / times["raw bf16"]["ms"]
        for peer in ("sdpa bf16", "sdpa bf16 folded"):
            if peer in times:
                rows[-1][f"x {peer}"] = times[peer]["ms"] / t["ms"]
    whole = [t for some in reads.values() for t in some]
    t = spread(whole)
    return [*rows, {"name": "read", **t, "MB": COLD / 1e6, "GB/s": COLD / t["ms"] / 1e6, "disturbed": disturbed(whole)}]


def path(args, S: int, B: int, G: int, names=("raw", "int8", "fp8_e4m3", "int4", "int2")) -> list[dict]:
    """The real path: KVCache.update and the attention function, over enough layers to be cold, whose pages grow by a
    token per step, with threads that are not bound; and the op by itself on the same pages."""
    from transformers import LlamaConfig

    from kvcompress import KVCache
    from kvcompress.hf.attention import NAME, kvcompress_attention_forward

    rows, stored = [], random(B, H, S - 1, D, seed=2)
    for row in names:
        name, _, calibrated = row.partition("+")
        code, label = formats.resolve(name, torch.bfloat16), "raw bf16" if row == "raw" else row
        size = ops.pack(random(1, 1, 64, D), random(1, 1, 64, D), code, code, 64).numel() * H * S // 64
        layers = max(2, -(-COLD // size))
        config = LlamaConfig(hidden_size=G * H * D, num_attention_heads=G * H, num_key_value_heads=H,
                             num_hidden_layers=layers)  # fmt: skip
        config._attn_implementation = NAME
        calibration = any_calibration(config) if calibrated or name in formats.CALIBRATED else None
        cache, modules = KVCache(config, name, calibration=calibration), [torch.nn.Module() for _ in range(layers)]
        q, k, empty = random(B, G * H, 1, D), random(B, H, 1, D, seed=1), torch.empty(B, H, 0, D, dtype=torch.bfloat16)
        unmasked = NONE.bool()

        def whole(i: int, q=q, k=k, cache=cache, modules=modules):
            at = i % len(modules)
            kvcompress_attention_forward(modules[at], q, *cache.update(k, k, at), None, scaling=D**-0.5)

        def bare(i: int, q=q, empty=empty, unmasked=unmasked, cache=cache, layers=layers):
            store = cache.layers[(i + layers // 2) % layers].store
            views = store.page_store.views()
            ops.attend(q, empty, empty, *views, unmasked, NONE, NO_SEALS, store.seen, 64, 4, 0, D**-0.5, 0.0)

        with torch.inference_mode():
            for i, module in enumerate(modules):
                module.is_causal, module.layer_idx = True, i
                whole(i)
                cache.layers[i].store.append(stored, stored)
            for i in range(layers):
                whole(i)
            found = against_reads({label: whole, "op": bare}, {label: size, "op": size}, args.rounds, S * B)
        step, op, read = found
        rows += [{**step, "op ms": op["ms"], "path / op": step["ms"] / op["ms"]}, {**read, "name": f"read, {label}"}]
    return rows


def any_calibration(config):
    """Random rotations, which cost the same as measured matrices."""
    from kvcompress.hf.save_load import model_hash
    from kvcompress.quantization.calibration import Calibration

    turn = torch.linalg.qr(random(H, D, D).float())[0].contiguous()
    layers = range(config.num_hidden_layers)
    return Calibration({i: (turn.clone(), turn.clone()) for i in layers}, model_hash(config), dict.fromkeys(layers, ""))


def accumulated(args, S: int, B: int, G: int) -> list[dict]:
    """The cost of accumulated attention in a decode step."""
    calls = {}
    for name in ("raw", "int8", "int4"):
        for wanted in (False, True):
            call, _ = paged(name, B, G, S, accumulated=wanted)
            calls[name, wanted] = call
    times = {key: spread(t) for key, t in interleave(calls, args.rounds).items()}
    return [{"name": name, **times[name, True], "overhead": times[name, True]["ms"] / times[name, False]["ms"] - 1}
            for name in ("raw", "int8", "int4")]  # fmt: skip


def chunk(args, S: int, B: int, G: int, lengths=(512,)) -> list[dict]:
    """T new tokens after S tokens in sealed pages, stored and attended to in one call."""
    rows = []
    for T in lengths:
        calls = {}
        for name in (*NAMED, "int4_g32", "kivi4"):
            kv = PagedKV(H, D, key=name, batch=B, dtype=torch.bfloat16, sinks=0)
            kv.append(random(B, H, S, D), random(B, H, S, D, seed=1))
            q, k, v = random(B, G * H, T, D, seed=2), random(B, H, T, D, seed=3), random(B, H, T, D, seed=4)
            for wanted in (False, True):
                # A clone shares the sealed pages: every call starts from the same state.
                calls[name, wanted] = lambda i, kv=kv, w=wanted, q=q, k=k, v=v: kv.clone().attend(
                    q, k, v, return_attention=w
                )
        calls = {key: calls[key] for key in sorted(calls, key=lambda key: key[1])}  # one must not warm the other
        q = random(B, G * H, T, D, seed=2)
        k, v = (random(B, H, S + T, D, seed=i) for i in (0, 1))
        see = torch.arange(S + T)[None] <= torch.arange(S, S + T)[:, None]
        calls["sdpa bf16", False] = lambda i, q=q, k=k, v=v, see=see: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=see, enable_gqa=True
        )
        times = {key: spread(t) for key, t in interleave(calls, max(5, args.rounds // 4)).items()}
        for (name, wanted), t in times.items():
            row = {"name": name, "T": T, **t, "x sdpa bf16": times["sdpa bf16", False]["ms"] / t["ms"]}
            if wanted:
                row["overhead"] = t["ms"] / times[name, False]["ms"] - 1
                row["name"] += " with accumulated attention"
            rows.append(row)
    return rows


def step(args, S: int, B: int, G: int) -> list[dict]:
    """A layer's step under transformers (update, then the attention function) at S tokens, and the op by itself."""
    import time

    from transformers import LlamaConfig

    from kvcompress import KVCache
    from kvcompress.hf.attention import NAME, kvcompress_attention_forward

    config = LlamaConfig(hidden_size=G * H * D, num_attention_heads=G * H, num_key_value_heads=H, num_hidden_layers=1)
    config._attn_implementation = NAME
    cache, layer = KVCache(config, "int8"), torch.nn.Module()
    layer.is_causal, layer.layer_idx = True, 0
    q, k = random(B, G * H, 1, D), random(B, H, 1, D, seed=1)
    whole, bare, rounds = [], [], 1000

    def one(q: torch.Tensor, k: torch.Tensor) -> None:
        kvcompress_attention_forward(layer, q, *cache.update(k, k, 0), None, scaling=D**-0.5)

    with torch.inference_mode():
        one(q.expand(-1, -1, S, -1).contiguous(), k.expand(-1, -1, S, -1).contiguous())
        store = cache.layers[0].store
        empty, views, unmasked = k[:, :, :0], store.page_store.views(), NONE.bool()
        for i in range(rounds):
            start = time.perf_counter()
            one(q, k)
            middle = time.perf_counter()
            ops.attend(q, empty, empty, *views, unmasked, NONE, NO_SEALS, store.seen, 64, 4, 0, D**-0.5, 0.0)
            bare.append(time.perf_counter() - middle)
            whole.append(middle - start)
            if i % 32 == 31:
                cache.crop(-32)  # so that no page fills up
    whole, bare = spread(whole), spread(bare)
    return [{"name": "step", **whole, "op us": 1e3 * bare["ms"], "overhead us": 1e3 * (whole["ms"] - bare["ms"])}]


def wide(args, S: int, B: int, G: int) -> list[dict]:
    """Heads of 512 (Gemma 4's global layers) and heads of 128 with the same number of bytes: fractions of read
    bandwidth."""
    calls, read = {}, {}
    for name in ("raw", "int8", "fp8_e4m3", "int4"):
        for heads, dim in ((H, D), (H // 4, 4 * D)):
            calls[f"{name} x {dim}"], read[f"{name} x {dim}"] = paged(name, B, G, S, H=heads, D=dim)
    rows = against_reads(calls, read, args.rounds, S * B)
    share = {row["name"]: row.pop("of read", None) for row in rows}
    for row in rows:
        row.pop("cycles", None)
        if row["name"] in calls:
            row["of read"] = share[row["name"]]
            row["of 128's"] = share[row["name"]] / share[row["name"].split(" x ")[0] + f" x {D}"]
    return rows


def worker(args: argparse.Namespace, what: str, S: int, B: int, G: int) -> list[dict]:
    if what == "all formats":
        return decode(args, S, B, G, formats.NAMES, peers=False)
    if what == "verify":
        return chunk(args, S, B, G, (2, 4, 8, 16))
    if what == "few bits":
        names = "int4 int4_lloyd int4_lloyd+calibration int3 int3+calibration int2 cal2"
        return path(args, S, B, G, names.split())
    if what == "length":
        return decode(args, S, B, G, ("raw", "int8", "fp8_e4m3", "int4", "int2"))
    if what in ("warm", "levels"):
        args.warm = args.warm or what == "warm"
        return decode(args, S, B, G, ("raw", "int8", "fp8_e4m3", "int4", "int2"), peers=False)
    named = (decode, accumulated, chunk, step, path, wide, latent)
    return {f.__name__: f for f in named}[what](args, S, B, G)


def show(cell: dict) -> None:
    print("\n" + ", ".join(f"{key} {cell[key]}" for key in KEYS))
    columns = [key for key in dict.fromkeys(k for row in cell["rows"] for k in row) if key not in ("p10_ms", "p90_ms")]
    print(f"{'':<20}" + "".join(f"{c:>18}" for c in columns[1:]))
    for row in cell["rows"]:
        values = (f"{row[c]:18.3f}" if isinstance(row.get(c), float) else f"{row.get(c, ''):>18}" for c in columns[1:])
        print(f"{row['name']:<20}" + "".join(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--warm", action="store_true", help="one copy of the data, in whatever cache holds it")
    parser.add_argument("--full", action="store_true", help="the whole product of cells")
    parser.add_argument(
        "--only",
        help="cells of this kind: decode, levels, warm, path, 'all formats', ...",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: see attention_cuda.py")
    parser.add_argument("--quick", action="store_true", help="cuda: two shapes")
    parser.add_argument("--resume", action="store_true", help="cuda: keep the cells that the file already has")
    parser.add_argument("--once", action="store_true", help="cuda: each kernel once, for a profiler; nothing is timed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        what, S, B, G, _, threads = json.loads(args.worker)
        torch.set_num_threads(threads)
        print(json.dumps({"machine": machine(), "rows": worker(args, what, S, B, G)}))
        return
    if args.device == "cuda":
        import attention_cuda

        if args.once:
            return attention_cuda.once()
        return attention_cuda.main(args.rounds, args.quick, args.resume)
    best, wanted = _C.isa_available()[-1], full() if args.full else CELLS
    name = f"attention/{machine_name()}{'-warm' if args.warm else ''}"
    kept = results() / f"{name}.json"
    cells = json.loads(kept.read_text())["cells"] if kept.exists() else []
    print(machine())
    for cell in wanted:
        isa = best if cell[4] == "best" else cell[4]
        if args.only not in (None, cell[0]):
            continue
        if isa not in _C.isa_available():
            print("skipped, this machine has no", isa)
            continue
        key = dict(zip(KEYS, (*cell[:4], isa, cell[5]), strict=True))
        for _ in range(3):
            found = {**key, "rounds": args.rounds, **measured(args, cell, isa)}
            show(found)
            if not any(row.get("disturbed") for row in found["rows"]):
                cells = [c for c in cells if any(c[k] != key[k] for k in KEYS)] + [found]
                save(name, {"machine": machine(), "warm": args.warm, "rounds": args.rounds, "cells": cells})
                break
            print("disturbed: the read bandwidth moved by more than 15% between quartiles; not written")
    print("results in", kept)


def measured(args: argparse.Namespace, cell: tuple, isa: str) -> dict:
    """The machine and rows of a cell, from a separate process."""
    options = ["--rounds", str(args.rounds), *(["--warm"] if args.warm else [])]
    env = {**os.environ, "KVCOMPRESS_ISA": isa, "OMP_NUM_THREADS": str(cell[5])}
    if cell[0] != "path":
        env["OMP_PROC_BIND"] = "true"  # only for the worker: it would pin this process and its children to one core
    done = subprocess.run([sys.executable, __file__, "--worker", json.dumps(cell), *options], stdout=subprocess.PIPE,
                          text=True, env=env, check=True, cwd=HERE)  # fmt: skip
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
