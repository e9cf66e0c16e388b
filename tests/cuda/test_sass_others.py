"""Kernels beside attention and codecs as nvcc makes them, run by the emulator (sass/): what the twin's tests want of
them, with fewer tokens."""

import pytest
import runner
import test_cuda_faults
import test_cuda_latent
import test_cuda_layer
import test_cuda_varlen
import torch
from test_attend import BOUND, data
from test_latent_heads import check, drive

from kvcompress import PagedKV, ops


@pytest.fixture
def machines(monkeypatch):
    """(architecture) -> machines that take the place of the twins of those tests, and what they ran."""
    made = []

    def put(arch, kernels):
        def machine(**options):
            made.append(runner.Machine(f"kvc_({kernels})", arch, **options))
            return made[-1]

        for module in (test_cuda_faults, test_cuda_latent, test_cuda_layer):
            monkeypatch.setattr(module, "Twin", machine)
        return machine

    put.ran = lambda: {block.kernel.name for machine in made for block in machine.blocks}
    return put


@pytest.mark.parametrize("arch", ["80", "90"])
def test_choices_and_flags(machines, arch):
    """Ties, zeros of both signs, what is protected; scores that are none."""
    machines(arch, "choose_kernel")
    test_cuda_layer.test_the_same_tokens_are_chosen(7)
    test_cuda_layer.test_nan_scores_are_flagged()
    assert machines.ran() == {"kvc_choose_kernel"}


def test_invalid_moves(machines):
    machines("90", "(anew|move)_kernel")
    test_cuda_layer.test_invalid_moves_are_flagged_and_ignored()
    assert machines.ran() == {"kvc_anew_kernel", "kvc_move_kernel"}


def test_score_tokens(machines):
    machines("90", "score_kernel")
    test_cuda_faults.test_score_tokens_equals_float64("raw", "int8")
    assert machines.ran() == {"kvc_score_kernel"}


def test_accumulated_attention(machines):
    """Accumulated attention of a decode step, of weights that attention left, and of more rows by its own kernel."""
    H, G, D, tokens = 1, 4, 64, 70
    machine = machines("90", "(attend_int8_64|kept_kernel|accumulate_any_64)")(formats=1 << 3)
    kv = PagedKV(H, D, key="int8", page_size=64, dtype=torch.float16)
    kv.append(*(x.half() for x in (data(1, H, tokens, D, 1), data(1, H, tokens, D, 2))))
    q, none = data(1, H * G, 9, D, 3).half(), torch.empty(1, H, 0, D, dtype=torch.float16)
    store = kv.page_store
    for T in (1, 9):
        args = (q[:, :, :T], none, none, *store.views(), store.no_mask, torch.empty(0), store.no_seals, kv.seen, 64,
                kv.sinks, 0, D**-0.5, 0.0, tokens + 3)  # fmt: skip
        for a, b in zip(machine.attend(*args), ops.attend(*args), strict=True):
            torch.testing.assert_close(a.float(), b.float().view(a.shape), rtol=2e-2, atol=2e-3)
    assert machines.ran() == {"kvc_attend_int8_64", "kvc_kept_kernel", "kvc_accumulate_any_64"}


@pytest.mark.parametrize("kernel,D,arch", [("store_kernel", 64, "90"), ("store_wide", 288, "90")])
def test_single_tokens_to_slots(machines, kernel, D, arch):
    """Nowhere too, and behind the last block."""
    machine = machines(arch, kernel)()
    for name, dtype in (("raw", torch.bfloat16), ("int8", torch.float32)):
        far, near = test_cuda_varlen.pair_of(name, 1, dtype=dtype, D=D, Dv=32)
        k, v = data(1, 2, 5, D, 1)[0].to(dtype).transpose(0, 1), data(1, 2, 5, 32, 2)[0].to(dtype).transpose(0, 1)
        slots, flag = torch.tensor([70, 3, -1, 128, 5000]), torch.zeros(1, dtype=torch.int32)
        code = far.key << 8 | far.value
        machine.store_tokens(k, v, far.cache, slots, flag, code, 128, 64)
        ops.store_tokens(k, v, near.cache, slots, flag.clone(), code, 128, 64)
        assert machine.flags == 0 and torch.equal(far.cache, near.cache) and not flag
    assert machines.ran() == {f"kvc_{kernel}"}


def test_an_engines_batch(machines, monkeypatch):
    """Lengths and blocks become rows and lists of work; pages are sealed, attention reads them."""
    machine = machines("90", "(varlen|write)_kernel|attend_int8_64")()
    pair = test_cuda_varlen.pair_of("int8", 2, dtype=torch.float16, D=64, G=4)
    for lengths in ([70, 5], [1, 1]):
        test_cuda_varlen.same(pair, *test_cuda_varlen.step(pair, monkeypatch, lengths, twin=machine), 5e-3)
    assert machines.ran() == {"kvc_varlen_kernel", "kvc_write_kernel", "kvc_attend_int8_64"}


@pytest.mark.parametrize("arch", ["90", "120"])
def test_flags_are_taken(machines, arch):
    machines(arch, "take_kernel")
    test_cuda_faults.test_flags_are_taken_in_one_step()
    assert machines.ran() == {"kvc_take_kernel"}


def test_wide_rows(machines):
    """Heads of more than 256 dims, which have kernels of their own."""
    machines("90", "(de)?quantize_rows_wide")
    for name in ("int4", "nvfp4"):
        test_cuda_latent.test_wide_rows_are_quantized_as_on_the_cpu(name)
    assert machines.ran() == {"kvc_quantize_rows_wide", "kvc_dequantize_rows_wide"}


def test_wide_pages(machines):
    names = "read_rows_wide", "clear_wide", "score_wide", "pack_rows_wide"
    machines("90", "|".join(names))
    test_cuda_latent.test_wide_pages_are_read_packed_and_scored_as_on_the_cpu(16, 4, 37)
    assert machines.ran() == {f"kvc_{name}" for name in names}


@pytest.mark.parametrize("key,value,D,Dv,heads,dtype,arch", [
    ("int8", "int8", 512, 64, 9, torch.bfloat16, "90"), ("int4", "raw", 288, 32, 5, torch.float16, "90"),
    ("raw", "raw", 64, 16, 9, torch.float32, "90"), ("int8", "fp8_e4m3", 64, 16, 9, torch.float32, "120"),
])  # fmt: skip
def test_latents(machines, key, value, D, Dv, heads, dtype, arch):
    """Against float64 on what is stored; bytes and accumulated attention are the CPU's. Also a page that fills."""
    write = "write_wide" if D > 256 else "write_kernel"
    machine = machines(arch, f"attend_wide|accumulate_wide|{write}")(processors=6)

    def attend(q, k, v, arena, *rest):
        ours = arena.clone()
        want = ops.attend(q, k, v, arena, *rest)
        if q.shape[2] > 4:  # the prompt
            return want
        got = machine.attend(q, k, v, ours, *rest)
        assert machine.flags == 0 and torch.equal(ours, arena)
        torch.testing.assert_close(got[2], want[2], rtol=2e-2, atol=2e-3)
        return got

    store = test_cuda_latent.latents(key, value, D=D, Dv=Dv, dtype=dtype, page_size=16)
    results = drive(store, [29, 1, 4], heads, dtype, loud=dtype == torch.float32, attend=attend)
    check(results, 1e-2 if dtype != torch.float32 else BOUND["raw_f32" if key == "raw" else key])
    assert machines.ran() == {"kvc_attend_wide", "kvc_accumulate_wide", f"kvc_{write}"}
