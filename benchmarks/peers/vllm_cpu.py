"""vLLM's attention kernel for CPUs over its paged cache, bfloat16 and fp8 (one scale per tensor): the newest tokens
are stored, then attended to. Run by the Python of `make vllm`. Usage: vllm_cpu.py SHAPE THREADS"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from timing import arguments, report


def main() -> None:
    (B, Hq, H, D, S, T), threads = arguments()
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch
    from vllm.platforms import current_platform
    from vllm_attention import BLOCK, vllm_calls

    torch.set_num_threads(threads)
    current_platform.import_kernels()
    torch.cpu._init_amx()  # asks Linux for AMX; without it, vLLM's kernels are killed (SIGILL)
    torch.manual_seed(0)
    k, v = torch.randn(2, B, S, H, D).bfloat16()
    q = torch.randn(B, T, Hq, D).bfloat16()
    table = torch.randperm(B * S // BLOCK).int().view(B, -1)
    for config, dtype in (("bf16", "auto"), ("fp8", "fp8_e4m3")):
        call = vllm_calls(k, v, q, table, 1, dtype)
        report("vLLM", config, (k.nbytes + v.nbytes) / (1e6 if config == "bf16" else 2e6), lambda call=call: call(0))


if __name__ == "__main__":
    main()
