"""Attention on a GPU: `benchmarks/attention.py --device cuda`.

Decode over pages of every tuned format, S x B, compared with the device's read bandwidth in the same run, torch's SDPA
backends and FlexAttention in bf16; appends, accumulated attention. Calls are captured in CUDA graphs, each over other
pages than the previous one (four times the L2 in total, or the same pages if these exceed eight times the L2), and
timed with events, interleaved; medians. Writes benchmarks/results/attention-cuda.json. Long calls of a whole layer
(`layer int8 cudnn`: by which kernels) are timed without graphs."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable

import device
import torch
from common import results, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from kvcompress import PagedKV, formats, ops, sdpa
from kvcompress.cuda_graph import CUDAGraphLayer, steps

NAMES = (
    ("raw", "raw"),
    ("int8", "int8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("int8", "int4"),
    ("int4", "int4"),
    ("int2", "int2"),
)
NO_SEALS = torch.empty(0, 2, dtype=torch.int64)
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "flex": None}  # in bf16
H, G, PAGE, REPEAT = 8, 4, 64, 20


class Captured:
    """REPEAT calls in one graph; seconds of one."""

    def __init__(self, call: Callable[[int], object]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                call(i)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(REPEAT):
                call(i)

    def seconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / REPEAT


def copies_of(read: int) -> int:
    """Enough copies that little is in L2 when a copy is used again; a single one if it exceeds eight times L2."""
    L2 = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if read > 8 * L2 else max(2, -(-4 * L2 // read))


def paged(key: str, value: str, B: int, S: int, D: int, T: int = 1, accumulated: bool = False, new: bool = False):
    """(call(i), bytes it reads): T queries per sequence over copy i of S stored tokens. new: a decode step, which also
    writes a token to an open page with five tokens."""
    k_code, v_code = (formats.resolve(name, torch.bfloat16) for name in (key, value))
    x = torch.randn(1, H, S, D, dtype=torch.bfloat16, device="cuda")
    pages = ops.pack(x, x.flip(2), k_code, v_code, PAGE)
    n, size = S // PAGE, pages.shape[3]
    read = B * n * H * size
    copies = copies_of(read)
    arena = pages.flatten().repeat(copies * B)
    q = torch.randn(B, G * H, T, D, dtype=torch.bfloat16, device="cuda")
    own = torch.randn(B, H, int(new), D, dtype=torch.bfloat16, device="cuda")
    at = torch.arange(copies * B, device="cuda")[:, None] * n + torch.arange(n, device="cuda")
    entries = (at * H * size // 64) << 16 | k_code << 8 | v_code
    tables = torch.cat([torch.full_like(entries[:, :1], -1), entries], 1).view(copies, B, 1, n + 1)
    empty, seals, seen = torch.empty(0, device="cuda"), NO_SEALS.cuda(), S + 5 * new
    used = 1 << k_code | 1 << v_code | formats.OPEN_RAW
    if new:
        raw = formats.resolve("raw", torch.bfloat16)
        open_pages = ops.pack(x[:, :, :PAGE], x[:, :, :PAGE], raw, raw, PAGE).flatten().repeat(copies * B)
        entry = (len(arena) + torch.arange(copies * B, device="cuda") * (len(open_pages) // (copies * B))) // 64 << 16
        tables = torch.cat([tables, (entry | raw << 8 | raw).view(copies, B, 1, 1)], 3)
        arena, used = torch.cat([arena, open_pages]), used | 1 << raw
    rows = torch.tensor([[[seen, 0]]] * B, device="cuda")

    def call(i: int):
        return ops.attend(q, own, own, arena, tables[i % copies], rows, empty.int(), empty.bool(), empty, seals, seen,
                          PAGE, 0, 0, 1 / math.sqrt(D), 0.0, S if accumulated else 0, used)  # fmt: skip

    return call, read


def append(key: str, B: int, D: int):
    """(call, bytes): one token per sequence to an open page, without attention."""
    raw, code = formats.resolve("raw", torch.bfloat16), formats.resolve(key, torch.bfloat16)
    size = ops.pack(*[torch.zeros(1, 1, PAGE, D, dtype=torch.bfloat16, device="cuda")] * 2, raw, raw, PAGE).shape[3]
    arena = torch.zeros(B * H * size, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[[-1, (b * H * size // 64) << 16 | raw << 8 | raw]] for b in range(B)], device="cuda")
    rows = torch.tensor([[[5, 0]]] * B, device="cuda")
    q, k = (torch.randn(B, h, t, D, dtype=torch.bfloat16, device="cuda") for h, t in ((G * H, 0), (H, 1)))
    empty, seals = torch.empty(0, device="cuda"), NO_SEALS.cuda()
    used = 1 << raw | 1 << code | formats.OPEN_RAW

    def call(i: int):
        return ops.attend(q, k, k, arena, table, rows, empty.int(), empty.bool(), empty, seals, 5, PAGE, 0, 0, 1.0,
                          0.0, 0, used)  # fmt: skip

    return call, B * H * 4 * D


def dense(k: torch.Tensor, v: torch.Tensor, backend: SDPBackend | None, T: int = 1):
    """(call, bytes) of torch's SDPA with a backend over k, v [copies, B, H, S, D]; FlexAttention if None."""
    copies, B, _, _, D = k.shape
    read = 2 * k[0].nbytes
    q = torch.randn(B, G * H, T, D, dtype=torch.bfloat16, device="cuda")
    if backend is None:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        return lambda i: flex(q, k[i % copies], v[i % copies], enable_gqa=True), read

    def call(i: int):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k[i % copies], v[i % copies], enable_gqa=True)

    return call, read


def flashinfer(B: int, S: int, D: int, dtype: torch.dtype):
    """(call, bytes) of FlashInfer's decode over pages of `dtype`, if installed; q is bf16."""
    try:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    except ImportError as error:
        raise RuntimeError(str(error)) from None
    read, n = B * S * 2 * H * D * dtype.itemsize, S // PAGE
    copies = copies_of(read)
    some = torch.randn(B * n, 2, H, PAGE, D, dtype=torch.bfloat16, device="cuda").to(dtype)
    pages = torch.stack([some] * copies)
    q = torch.randn(B, G * H, D, dtype=torch.bfloat16, device="cuda")
    out, room = torch.empty_like(q), torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True, backend="fa2")
    ends, indices = torch.arange(B + 1, dtype=torch.int32) * n, torch.arange(B * n, dtype=torch.int32, device="cuda")
    wrapper.plan(ends, indices, torch.full((B,), PAGE, dtype=torch.int32), G * H, H, D, PAGE, q_data_type=q.dtype,
                 kv_data_type=dtype, o_data_type=q.dtype)  # fmt: skip
    return lambda i: wrapper.run(q, pages[i % copies], out=out), read


def bandwidth():
    """(call, bytes): the maximum of a tensor's 32-bit words, which reads it once."""
    x = torch.zeros(4 << 30 >> 2, dtype=torch.int32, device="cuda").view(4, -1)
    return lambda i: x[i % 4].max(), x.nbytes // 4


def cell(S: int, B: int, D: int, T: int, rounds: int) -> list[dict]:
    torch._dynamo.reset()  # otherwise FlexAttention is compiled for the first eight shapes only
    makers = {k if k == v else f"{k}/{v}": functools.partial(paged, k, v, B, S, D, T) for k, v in NAMES}
    makers["read"] = bandwidth
    if T == 1:
        makers["int8 with accumulated attention"] = functools.partial(paged, "int8", "int8", B, S, D, accumulated=True)
        makers["append"] = functools.partial(append, "int8", B, D)
        makers |= {f"{k} step": functools.partial(paged, k, v, B, S, D, new=True) for k, v in NAMES if k == v}
        makers["flashinfer"] = functools.partial(flashinfer, B, S, D, torch.bfloat16)
        makers["flashinfer fp8"] = functools.partial(flashinfer, B, S, D, torch.float8_e4m3fn)
    shape = (copies_of(4 * B * H * S * D), B, H, S, D)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for name, backend in PEERS.items():
        makers[name] = functools.partial(dense, k, v, backend, T)
    made, graphs, failed, at = {}, {}, [], {"S": S, "B": B, "D": D, "T": T}
    for name, make in makers.items():
        try:
            made[name] = make()
            graphs[name] = Captured(made[name][0])
        except RuntimeError as error:  # out of memory, or an unsupported shape: recorded
            failed.append({**at, "name": name, "error": str(error).splitlines()[0]})
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.seconds())
    limit = made["read"][1] / statistics.median(times["read"])
    peers = [statistics.median(times[name]) for name in (*PEERS, "flashinfer") if name in times]
    rows = []
    for name, seconds in times.items():
        t, tenths = statistics.median(seconds), statistics.quantiles(seconds, n=10, method="inclusive")
        rows.append({**at, "name": name, "us": 1e6 * t, "p10_us": 1e6 * tenths[0], "p90_us": 1e6 * tenths[-1],
                     "GB/s": made[name][1] / t / 1e9, "of read": made[name][1] / t / limit,
                     "TFLOP/s": 4 * B * G * H * T * S * D / t / 1e12, "vs best peer": t / min(peers)})  # fmt: skip
    rows += layers(S, D, T, rounds) if T > 1 else steps_of_layers(S, B, D)
    ops.check("cuda")
    return rows + failed


def layers(S: int, D: int, T: int, rounds: int) -> list[dict]:
    """T tokens appended to a layer of S stored ones, another layer each time: by torch's kernels as the layer chooses,
    by each of them alone, and by kvcompress. `first us` is the host time of the first call, in which cuDNN creates its
    plans; the rest is timed with events, in eager mode."""
    ways = {"torch": (True, True, sdpa.CUDNN_LEAST), "cudnn": (True, False, 0), "flash": (False, True, 0),
            "ours": (False, False, 0)}  # fmt: skip
    q, k, v = (torch.randn(1, h, T, D, dtype=torch.bfloat16, device="cuda") for h in (G * H, H, H))
    x = torch.randn(1, H, S, D, dtype=torch.bfloat16, device="cuda")
    at, rows = {"S": S, "B": 1, "D": D, "T": T}, []
    try:
        for key, by in [(key, by) for key in ("raw", "int8", "int4") for by in ways]:
            switch(*ways[by])
            if by != "ours" and sdpa.attend(q, k, v, True, 1 / math.sqrt(D)) is None:
                rows.append({**at, "name": f"layer {key} {by}", "error": "no such kernel here"})
                continue
            times = []
            for _ in range(min(rounds, 10) + 1):
                kv = PagedKV(H, D, key=key, dtype=torch.bfloat16, device="cuda")
                kv.append(x, x.flip(2))
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                clock = time.perf_counter()
                start.record()
                kv.attend(q, k, v)
                end.record()
                end.synchronize()
                times.append((start.elapsed_time(end) / 1e3, time.perf_counter() - clock))
            t = statistics.median(t for t, _ in times[1:])
            rows.append({**at, "name": f"layer {key} {by}", "us": 1e6 * t, "first us": 1e6 * times[0][1],
                         "TFLOP/s": 4 * G * H * T * (S + T / 2) * D / t / 1e12})  # fmt: skip
    finally:
        switch(*ways["torch"])
    return rows


def step_us(name: str, S: int, B: int, D: int, weights: list[torch.Tensor], stream: torch.cuda.Stream) -> list[float]:
    """Of the attention kernel of a captured decode step of some layers with S - 40 tokens, a matrix product before
    each."""
    x = torch.randn(1, 4096, dtype=torch.bfloat16, device="cuda")
    one = [torch.randn(B, h, 1, D, dtype=torch.bfloat16, device="cuda") for h in (G * H, H, H)]
    captured = []
    for _ in weights:
        kv = PagedKV(H, D, key=name, batch=B, dtype=torch.bfloat16, device="cuda")
        kv.append(*(torch.randn(B, H, S - 40, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
        captured.append(CUDAGraphLayer(kv, S + 64))

    def run() -> None:
        for weight, layer in zip(weights, captured, strict=True):
            x @ weight
            layer.attend(*one)

    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with steps(captured):
            run()
        with steps(captured):
            with torch.cuda.graph(graph, stream=stream):
                run()
            graph.replay()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                with steps(captured):
                    graph.replay()
            torch.cuda.synchronize()
    return [event.device_time for event in found.events() if "kvc_attend" in event.name]


def steps_of_layers(S: int, B: int, D: int) -> list[dict]:
    """The attention kernel of a decode step as in a model: with sinks, an open page and the new token, behind other
    work, which leaves neither pages nor the kernel's code in caches."""
    weights = [torch.randn(4096, 28672, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    stream, rows = torch.cuda.Stream(), []
    for name in [k for k, v in NAMES if k == v]:
        row = {"S": S, "B": B, "D": D, "T": 1, "name": f"{name} layer"}
        try:
            us = step_us(name, S, B, D, weights, stream)
        except RuntimeError as error:  # out of memory: recorded
            rows.append({**row, "error": str(error).splitlines()[0]})
            continue
        tenths = statistics.quantiles(us, n=10, method="inclusive")
        rows.append({**row, "us": statistics.median(us), "p10_us": tenths[0], "p90_us": tenths[-1]})
        torch.cuda.empty_cache()
    return rows


def switch(cudnn: bool, flash: bool, least: int) -> None:
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(flash)
    sdpa.CUDNN_LEAST = least


def life(D: int, T: int = 4096):
    """The layer's other kernels: appends that seal, read-back, an eviction and its choice."""
    ops.pack(*[torch.zeros(1, 1, PAGE, D, dtype=torch.bfloat16, device="cuda")] * 2, 3, 3, PAGE)
    kv = PagedKV(H, D, key="int8", value="int4", sinks=0, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, H, T, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def call(i: int):
        kv.append(k, v)
        keys = kv.dense()[0]
        slots = torch.arange(T, dtype=torch.int32, device="cuda").expand(1, H, T).contiguous()
        keep = ops.select(keys.float().norm(dim=-1), slots, None, torch.full((1, H), T // 2, device="cuda"))
        kv.evict(keep[:, 0].cpu())

    return call, 0


def once(S: int = 32768, B: int = 8, D: int = 128) -> None:
    """Each call once, after printing its name; each starts with the launch that packs its pages (`ncu_rows` in
    gpu.py)."""
    made = {f"{k}/{v} B={b}": functools.partial(paged, k, v, b, S, D) for b in (B, 1) for k, v in NAMES}
    made["int8 with accumulated attention"] = functools.partial(paged, "int8", "int8", B, S, D, accumulated=True)
    made["int8, 32 tokens"] = functools.partial(paged, "int8", "int8", B, S, D, T=32)
    made |= {f"{k}/{v}, 2048 tokens": functools.partial(paged, k, v, 1, S, D, T=2048) for k, v in NAMES}
    made["append"] = functools.partial(append, "int8", B, D)
    made["append, read, choose, evict"] = functools.partial(life, D)
    for name, make in made.items():
        print("call", name, flush=True)
        make()[0](0)
    ops.check("cuda")


def main(rounds: int = 30, quick: bool = False, resume: bool = False) -> None:
    card, path = torch.cuda.get_device_properties(0), results() / "attention-cuda.json"
    about = {"device": card.name, "processors": card.multi_processor_count, "MiB": card.total_memory >> 20,
             "torch": torch.__version__, "cuda": torch.version.cuda}  # fmt: skip
    found = json.loads(path.read_text()) if resume and path.exists() else {}
    other = {key: found[key] for key, value in about.items() if found.get(key, value) != value}
    if other:
        raise SystemExit(f"--resume: expected {path} of {about}, got one of {other}")
    result: dict = {**about, "rows": found.get("rows", []), "state": found.get("state", [])}
    done = {(row["S"], row["B"], row["D"], row["T"]) for row in result["rows"]}
    shapes = [(S, B, D, 1) for D in (128, 64) for B in (1, 8, 32) for S in (32768, 4096, 131072)]
    shapes[2:2] = [(32768, 8, 128, 1), (32768, 1, 128, 2048)]  # most important first
    for shape in shapes[:4] if quick else shapes:
        if shape in done:
            continue
        before, rows = device.state(), cell(*shape, rounds)
        done.add(shape)
        result["rows"] += rows
        result["state"].append({**dict(zip("SBDT", shape, strict=True)), "before": before, "after": device.state()})
        torch.cuda.empty_cache()
        for row in rows:
            print(row, flush=True)
        print("wrote", save("attention-cuda", result), flush=True)
