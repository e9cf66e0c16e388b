"""The backend as on a GPU, without one: builder and forward on the tests' device (support/far.py), with the CUDA
sources compiled for the host, compared with the backend on the CPU."""

import importlib.util
from types import SimpleNamespace as Some

import pytest
import torch
from far import FAR, near
from far_kernels import a_device
from test_vllm_settings import config

if not importlib.util.find_spec("vllm.config"):
    pytest.skip("vLLM is not installed: make vllm, then make test-vllm", allow_module_level=True)
from kvcompress.vllm import backend, residual
from kvcompress.vllm.settings import PAGE, Settings

H, G, D, BLOCK, BLOCKS = 2, 2, 64, 8 * PAGE, 12


class Side:
    """The part of an engine on one device."""

    def __init__(self, format, device, monkeypatch, drafts=None):
        said = config(format, torch.bfloat16, block_size=BLOCK, drafts=drafts)
        said.compilation_config = Some(static_forward_context={})
        said.cache_config.num_gpu_blocks, said.cache_config.kv_cache_size_tokens = BLOCKS, None
        self.config, self.device, layers = said, torch.device(device), said.compilation_config.static_forward_context
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda: said)
        self.impl = backend.Impl(H * G, D, D**-0.5, num_kv_heads=H)
        spec = Some(num_kv_heads=H, head_size=D, head_size_v=D)
        self.builder = backend.Builder(spec, ["layer"], said, self.device)
        shape = Settings.of(said).geometry(H, D)
        size = BLOCKS, H, PAGE, shape.page_bytes // H // PAGE
        self.cache = torch.full(size, 255, dtype=torch.uint8, device=device)
        raw = Settings.of(said).residual_pages * shape.residual_bytes
        self.raw = torch.full((BLOCKS, raw or 1), 255, dtype=torch.uint8, device=device)
        for layer in layers.values():
            layer.kv_cache = self.raw
        self.context = Some(no_compile_layers=layers, attn_metadata={})

    def metadata(self, lengths, ends, tables):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        there = [x.to(self.device) for x in (starts, torch.tensor(ends).int(), tables[0], tables[1])]
        cam = Some(
            query_start_loc=there[0], query_start_loc_cpu=starts, seq_lens=there[1], num_reqs=len(lengths), causal=True,
            max_query_len=max(lengths), block_table_tensor=there[2], is_prefilling=None,
        )  # fmt: skip
        return cam, Some(block_table_tensor=there[3], num_reqs=len(lengths))

    def step(self, monkeypatch, cams, q, k, v):
        m = self.builder.build(0, cams[0])
        for name in self.context.no_compile_layers:
            self.context.attn_metadata[name] = residual.ResidualBuilder.build(None, 0, cams[1])
        monkeypatch.setattr(backend, "get_forward_context", lambda: self.context)
        out = torch.zeros_like(q)
        self.impl.forward(None, q, k, v, self.cache, m, out)
        return out, m


STEPS = {
    "no drafts": (None, [([100, 62, 130], [0, 0, 0]), ([1, 1, 1], [0, 0, 0]), ([1, 1, 70], [0, 0, 0]),
                         ([1, 1, 1], [0, 0, 0]), ([1, 1, 0], [0, 0, 0])]),
    "drafts": (3, [([100, 62, 127], [0, 0, 0]), ([4, 4, 2], [1, 3, 1]), ([2, 4, 4], [0, 2, 3]),
                   ([1, 4, 1], [0, 0, 0])]),
}  # fmt: skip
"""Drafts at most, and of each step the new tokens of three sequences and how many of them are then taken back."""


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_steps_as_on_the_cpu(format, mode, monkeypatch):
    """Prompts, decode steps, remaining chunks of a prompt, a padded row, drafts: the same bytes, results within the
    bounds. The host neither waits nor copies, and tensors read by a captured step are not reallocated."""
    torch.manual_seed(3)
    drafts, steps = STEPS[mode]
    near_side = Side(format, "cpu", monkeypatch, drafts)
    tables = [torch.randperm(BLOCKS).view(3, 4).int(), torch.randperm(BLOCKS)[:3].view(3, 1).int()]
    ends, places = [0, 0, 0], set()
    with a_device() as device:
        far_side = Side(format, FAR, monkeypatch, drafts)
        for lengths, taken in steps:
            ends = [end + n for end, n in zip(ends, lengths, strict=True)]
            data = [torch.randn(sum(lengths), h, D).bfloat16() for h in (H * G, H, H)]
            wanted, _ = near_side.step(monkeypatch, near_side.metadata(lengths, ends, tables), *data)
            cams, there = far_side.metadata(lengths, ends, tables), [x.to(FAR) for x in data]
            waits, copies = device.waits, len(device.copies)
            got, m = far_side.step(monkeypatch, cams, *there)
            assert (device.waits, len(device.copies)) == (waits, copies)
            assert m.seq_lens.shape == (3,) and len(m.calls) == 1 + (lengths[0] == 1 < max(lengths))
            places.add(near(m.flags).data_ptr())
            assert float((near(got).float() - wanted.float()).abs().max()) <= 2e-2
            assert torch.equal(near(far_side.cache), near_side.cache) and torch.equal(near(far_side.raw), near_side.raw)
            ends = [end - n for end, n in zip(ends, taken, strict=True)]
    assert len(places) == 1


def test_the_log_says_what_fits(monkeypatch):
    said, lines = config("int8", block_size=BLOCK), []
    monkeypatch.setattr(backend.logger, "info", lambda text, *values: lines.append(text % values))
    for tokens in (12_345, None):
        said.cache_config.num_gpu_blocks, said.cache_config.kv_cache_size_tokens = BLOCKS, tokens
        backend.Builder(Some(num_kv_heads=H, head_size=D, head_size_v=D), ["a", "b"], said, torch.device("cpu"))
    size = BLOCK // PAGE * Settings.of(said).geometry(H, D).page_bytes
    assert f"int8 for 2 layers (a, ..): {size} bytes a block of 512 tokens and layer, 12 blocks in all; " in lines[0]
    assert lines[0].endswith("; 12,345 tokens fit") and lines[1].endswith("; vLLM says how many tokens fit")


def test_cuda_finds_the_class_again_by_its_name(monkeypatch):
    """vLLM's platform turns the class into a path, which vLLM resolves again."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from kvcompress.vllm import selected

    said = config("int4")
    monkeypatch.setattr(selected, "get_current_vllm_config_or_none", lambda: said)
    made = selected.CUSTOM
    assert made.get_name() == "CUSTOM" and made is resolve_obj_by_qualname(".".join(made.full_cls_name()))
    assert selected.CPU_ATTN.get_name() == "CPU_ATTN" and selected.CPU_ATTN is not made
