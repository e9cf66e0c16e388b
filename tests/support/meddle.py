"""Another process changes files between any two of our system calls (meddle.c). Whatever it changes, and before
whichever call: the operation succeeds or raises OSError or ValueError, the cache remains usable, and the target of
a link is not written.

    python tests/support/meddle.py [STEP]    every STEP-th system call"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from kvcompress import KVCache, QuantizedTensor, Tiers, quantize

HERE = Path(__file__).resolve().parent
CONFIG = LlamaConfig(
    hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_hidden_layers=2, vocab_size=50
)
UNLINK, EMPTY, SPOIL, LINK = range(4)
NAMES = ("unlinked", "emptied", "overwritten", "linked elsewhere")
PRECIOUS = b"precious" * 4096
X = torch.randn(1, 2, 300, 32)


def filled() -> KVCache:
    torch.manual_seed(1)
    cache = KVCache(CONFIG, page_size=16)
    for i in range(2):
        cache.update(*torch.randn(2, 1, 2, 300, 32), i)
    return cache


def values(cache: KVCache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in layer.store.dense()]


WANT = values(filled())


def same(cache: KVCache) -> None:
    assert all(torch.equal(a, b) for a, b in zip(values(cache), WANT, strict=True)), "other tokens"
    cache.pool.check()


def saves(cache: KVCache, path: Path) -> None:
    cache.save(path)


def loads(cache: KVCache, path: Path) -> None:
    same(KVCache.load(path, CONFIG))


def waits(cache: KVCache, path: Path) -> None:
    cache.suspend(path)
    try:
        cache.resume()
    except (OSError, ValueError):  # it is still suspended, and reports it
        assert cache.forward_pass.suspended is not None
        cache.reset()
        raise


def goes_out(cache: KVCache, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.use_tiers(Tiers(host_bytes=0, file_bytes=None, folder=path.parent), resident=16, unit=1)
    for layer in cache.layers:
        layer.store.attend(torch.randn(1, 2, 1, 32), *torch.randn(2, 1, 2, 1, 32))
        layer.store.crop(300)


def tensors(cache: KVCache, path: Path) -> None:
    quantize(X, "int8").save(path)
    back = QuantizedTensor.load(path).dequantize()
    assert torch.equal(back, quantize(X, "int8").dequantize())


# The operations. (A mapped file that is truncated ends the process with SIGBUS: see SECURITY.md.)
ACTS = {
    "save": (saves, (UNLINK, EMPTY, SPOIL, LINK)), "load": (loads, (UNLINK, SPOIL, LINK)),
    "suspend, resume": (waits, (UNLINK, SPOIL, LINK)), "tiers": (goes_out, (UNLINK, EMPTY, SPOIL, LINK)),
    "a tensor": (tensors, (UNLINK, SPOIL, LINK)),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    library: Any = ctypes.CDLL(None)
    root = Path(tempfile.mkdtemp(prefix="kvcompress-meddle-"))
    folder, victim = root / "folder", root / "victim"
    folder.mkdir()
    done = failed = 0
    for what, (act, actions) in ACTS.items():
        for action in actions:
            n, calls = 1, 1
            while n <= calls:
                for path in folder.iterdir():
                    path.unlink()
                victim.write_bytes(PRECIOUS)
                path, cache = folder / "a.kvc", filled()
                cache.save(path)
                library.meddle_start(os.fsencode(folder), os.fsencode(victim), action, n)
                error = None
                try:
                    act(cache, path)
                except (OSError, ValueError) as raised:
                    error, failed = raised, failed + 1
                finally:
                    calls = library.meddle_stop()
                where = f"{what}, {NAMES[action]} before call {n} of {calls} ({error!r})"
                assert victim.read_bytes() == PRECIOUS, f"{where}: another's file was written"
                if cache.get_seq_length() and cache.forward_pass.prefetcher is None:
                    same(cache)
                done, n = done + 1, n + int(sys.argv[1] if len(sys.argv) > 1 else 1)
    print(f"{done} meddled with, {failed} refused")


if __name__ == "__main__":
    if not hasattr(ctypes.CDLL(None), "meddle_start"):
        built = Path(tempfile.mkdtemp(prefix="kvcompress-meddle-")) / "meddle.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", HERE / "meddle.c", "-o", built, "-ldl"], check=True)
        paths = os.pathsep.join(x for x in sys.path if x)
        env = {**os.environ, "LD_PRELOAD": str(built), "PYTHONPATH": paths}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    main()
