"""Layers distributed over processes (gloo on this machine), compared with one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcompress import KVCache
from kvcompress.parallel import ShardedKV, join_heads, split_heads

RANKS = Path(__file__).parents[1] / "support" / "parallel_ranks.py"


def run(case: str, ranks: int, folder: Path) -> None:
    env = {**os.environ, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    (folder / "out").mkdir()
    ids = [{"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    started = [subprocess.Popen([sys.executable, RANKS, case, folder / "out"], env={**env, **own}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for own in ids]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(outputs)


CASES = [
    ("cache", 2),
    ("dead", 3),
    *(
        pytest.param(case, ranks, marks=pytest.mark.full)
        for case, ranks in (
            ("evict", 2),
            ("layer", 4),
            ("accumulated", 3),
            ("evict", 4),
            ("heads", 2),
            ("plan", 2),
            ("full", 3),
        )
    ),
]


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_over_ranks(case, ranks, tmp_path):
    run(case, ranks, tmp_path)
    if case == "dead":
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["error0", "error1"]


def test_bad_inputs():
    for call in (lambda: ShardedKV(2, 32), lambda: split_heads(torch.ones(1, 2)), lambda: join_heads(torch.ones(1, 2))):
        with pytest.raises(ValueError, match="torch.distributed to be initialized"):
            call()
    with pytest.raises(ValueError, match="group or max_length"):
        from models import model

        KVCache(model("llama").config, group=object(), max_length=10)
    assert not torch.distributed.is_initialized()
