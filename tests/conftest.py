"""Shared by all tests: fixed seeds, threads, no network."""

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Per tree: what is compiled for one tree contains the argument names of its ops.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "build" / "inductor"))

# With more threads than cores, parallel workers spin waiting for each other, and a suite of minutes takes many times as
# long.
# programs that they start.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
if THREADS == 1:
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
import soaked
import torch
from record import record


@pytest.fixture(autouse=True)
def _fixed():
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    # NaN in all unwritten memory: unused slots of pages, workspace, scales.
    from kvcompress import _C

    _C.alloc_poison(True)


@pytest.fixture(scope="module")
def llama():
    """A tiny Llama with our attention."""
    from generation import select
    from models import model

    return select(model("llama"), "kvcompress")


@pytest.fixture
def fail_at():
    """Makes the n-th allocation from now fail; disabled afterwards."""
    from kvcompress import _C

    yield _C.alloc_fail_at
    _C.alloc_fail_at(0)


def pytest_collection_finish(session):
    """Garbage collection traverses all of torch and transformers: half a second each, and some tests need dozens."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of several workers: the first process does the counting
        session.config.workeroutput["soaked"] = dict(soaked.steps)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    soaked.steps.update(getattr(node, "workeroutput", {}).get("soaked", {}))


def pytest_terminal_summary(terminalreporter):
    if "KVCOMPRESS_SOAK" not in os.environ:
        return
    for name, n in soaked.steps.items():
        terminalreporter.write_line(f"{name}: {n:,} steps")
    if len(soaked.steps) == soaked.KINDS:  # all of them: `make soak`
        figures = {name.replace(",", "").replace(" ", "_"): n for name, n in soaked.steps.items()}
        record("soak", f"make soak SOAK={os.environ['KVCOMPRESS_SOAK']}", **figures)
