"""ONNX Runtime's GroupQueryAttention on CPU, as a model with one node: a cache that grows in place (past and present
share a buffer), float32, and INT8 and INT4 per channel if this release has them. Usage: onnx_gqa.py SHAPE THREADS"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from timing import arguments, report

KINDS = {"f32": (TensorProto.FLOAT, np.float32, 0), "int8": (TensorProto.INT8, np.int8, 8),
         "int4": (TensorProto.UINT8, np.uint8, 4)}  # fmt: skip


def session(Hq: int, H: int, D: int, kind: str, threads: int) -> ort.InferenceSession:
    stored, _, bits = KINDS[kind]
    quantized = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": bits}
    names = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
    scales = ["k_scale", "v_scale"] if bits else []
    node = helper.make_node(
        "GroupQueryAttention", names + ([""] * 5 + scales if bits else []), ["out", "present_k", "present_v"],
        domain="com.microsoft", num_heads=Hq, kv_num_heads=H, **(quantized if bits else {}),
    )  # fmt: skip

    def value(name: str, dtype: int, rank: int):
        return helper.make_tensor_value_info(name, dtype, [f"{name}_{i}" for i in range(rank)])

    floats, caches = [value(n, TensorProto.FLOAT, 3) for n in ("q", "k", "v")], ("past_k", "past_v")
    inputs = [*floats, *(value(n, stored, 4) for n in caches), value("seqlens_k", TensorProto.INT32, 1),
              helper.make_tensor_value_info("total", TensorProto.INT32, []),
              *(helper.make_tensor_value_info(n, TensorProto.FLOAT, [H * D]) for n in scales)]  # fmt: skip
    outputs = [value("out", TensorProto.FLOAT, 3), value("present_k", stored, 4), value("present_v", stored, 4)]
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10,
    )  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(B: int, Hq: int, H: int, D: int, S: int, T: int, kind: str, threads: int) -> None:
    _, dtype, bits = KINDS[kind]
    binding = (model := session(Hq, H, D, kind, threads)).io_binding()
    rng, total = np.random.default_rng(0), 0
    kept = []  # arrays bound by address must stay alive
    for side in "kv":
        x = rng.standard_normal((B, H, S, D), dtype=np.float32)
        if bits:
            x = np.clip(np.rint(x * (2 ** (bits - 1) - 1) / 4), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int8)
        if bits == 4:
            x = ((x[..., ::2] + 8) | (x[..., 1::2] + 8) << 4).astype(np.uint8)
        cache = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x, dtype))
        binding.bind_ortvalue_input(f"past_{side}", cache)
        binding.bind_ortvalue_output(f"present_{side}", cache)
        kept.append(cache)
        total += x.nbytes
        if bits:
            binding.bind_cpu_input(f"{side}_scale", np.full(H * D, 4 / (2 ** (bits - 1) - 1), np.float32))
    for name, heads in (("q", Hq), ("k", H), ("v", H)):
        binding.bind_cpu_input(name, rng.standard_normal((B, T, heads * D), dtype=np.float32))
    binding.bind_cpu_input("seqlens_k", np.full(B, S - 1, np.int32))
    binding.bind_cpu_input("total", np.array(S, np.int32))
    binding.bind_output("out")
    report("ONNX Runtime", kind, total / 1e6, lambda: model.run_with_iobinding(binding))


if __name__ == "__main__":
    shape, threads = arguments()
    for kind in KINDS:
        try:
            run(*shape, kind, threads)
        except Exception as error:  # not in this release, or not for this shape
            print(f"ONNX Runtime {kind}: {str(error).splitlines()[0][:300]}", flush=True)
