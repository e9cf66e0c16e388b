"""OpenVINO's PagedAttention on CPU, as a model with one op; blocks of 32 tokens in random order. Usage: openvino_pa.py
SHAPE THREADS"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import Model, PartialShape, Type
from openvino import opset13 as op
from openvino.op import _PagedAttentionExtension as PagedAttention
from timing import arguments, report

BLOCK, FILL = 32, 256  # tokens per block; per chunk while filling
f, i = np.float32, np.int32


def constant(dtype, shape, values=()):
    return op.constant(np.array(values, dtype=dtype).reshape(shape))


def parameter(shape, dtype, name):
    p = op.parameter(PartialShape(shape), dtype, name)
    p.output(0).get_tensor().set_names({name})
    return p


def build(Hq: int, H: int, D: int) -> Model:
    q, k, v = (parameter([-1, n * D], Type.f32, name) for n, name in ((Hq, "q"), (H, "k"), (H, "v")))
    caches = [parameter([-1] * 4, Type.dynamic, name) for name in ("key_cache.0", "value_cache.0")]
    index = [parameter([-1], Type.i32, name)
             for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")]  # fmt: skip
    longest = parameter([], Type.i32, "max_context_len")

    def none(dtype):
        return constant(dtype, (0,))

    inputs = [q, k, v, *caches, *index, constant(f, (), [D**-0.5]), constant(i, (), [0]), none(f), longest, none(i),
              none(i), none(i), none(f), none(f), constant(i, (), [64]), constant(i, (), [8]), none(f),
              constant(i, (), [0]), none(i), none(i), none(i), none(i), none(np.uint8), none(i)]  # fmt: skip
    for n in (len(inputs), 27, 26, 25, 21):  # the op has gained inputs in later releases
        try:
            node = PagedAttention([x.output(0) for x in inputs[:n]])
            break
        except Exception as error:
            failed = error
    else:
        raise failed
    info = node.get_rt_info()
    for name, value in (("num_k_heads", H), ("k_head_size", D), ("num_v_heads", H), ("v_head_size", D)):
        info[name] = value
    return Model([node.output(0)], [q, k, v, *caches, *index, longest], "attention")


def run(B: int, Hq: int, H: int, D: int, S: int, T: int, kind: str, threads: int) -> None:
    compute = "bf16" if kind in ("u8", "u4", "bf16") else "f32"
    compiled = ov.Core().compile_model(
        build(Hq, H, D), "CPU",
        {"KV_CACHE_PRECISION": kind, "INFERENCE_PRECISION_HINT": compute, "INFERENCE_NUM_THREADS": threads},
    )  # fmt: skip
    request, blocks, total = compiled.create_infer_request(), S // BLOCK, 0
    for x in compiled.inputs:
        if "cache" in x.get_any_name():
            shape = x.get_partial_shape()
            room = ov.Tensor(x.get_element_type(), ov.Shape([B * blocks] + [shape[j].get_length() for j in (1, 2, 3)]))
            total += room.byte_size
            request.set_tensor(x.get_any_name(), room)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((B, S, H * D), dtype=f) for _ in "kv")
    order = rng.permutation(B * blocks).astype(i).reshape(B, blocks)

    def feed(q, k, v, past, begins, indices, index_begins, longest):
        arrays = {"q": q, "k": k, "v": v, "past_lens": past, "subsequence_begins": begins, "block_indices": indices,
                  "block_indices_begins": index_begins}  # fmt: skip
        for name, x in arrays.items():
            request.set_tensor(name, ov.Tensor(np.ascontiguousarray(x)))
        request.set_tensor("max_context_len", ov.Tensor(np.array(longest, i)))
        request.infer()

    for b in range(B):  # filled in chunks, each as a separate sequence
        for at in range(0, S, FILL * 8):
            n = min(8, (S - at) // FILL)
            end = at + n * FILL
            feed(np.zeros((n * FILL, Hq * D), f), k[b, at:end], v[b, at:end], np.zeros(n, i),
                 np.arange(n + 1, dtype=i) * FILL, order[b, at // BLOCK : end // BLOCK],
                 np.arange(n + 1, dtype=i) * (FILL // BLOCK), FILL)  # fmt: skip
    q = rng.standard_normal((B * T, Hq * D), dtype=f)
    feed(q, k[:, -T:].reshape(B * T, -1), v[:, -T:].reshape(B * T, -1), np.full(B, S - T, i),
         np.arange(B + 1, dtype=i) * T, order.reshape(-1), np.arange(B + 1, dtype=i) * blocks, S)  # fmt: skip
    report("OpenVINO", kind, total / 1e6, request.infer)


if __name__ == "__main__":
    shape, threads = arguments()
    for kind in ("bf16", "u8", "u4"):
        run(*shape, kind, threads)
