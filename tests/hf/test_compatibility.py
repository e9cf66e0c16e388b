"""Files that earlier versions wrote are read by this one, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from golden.cache import NAMES, config, dense, filled

import kvcompress
from kvcompress import formats

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if (path / "cache.kvc").exists())


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_all_versions_are_read(version):
    cache = kvcompress.KVCache.load(GOLDEN / version / "cache.kvc", config())
    wanted = np.load(GOLDEN / version / "dense.npz")
    got = dense(cache)
    assert got.keys() == set(wanted.files)
    for name, x in got.items():
        assert np.array_equal(x, wanted[name]), name
    cache.update(torch.ones(1, 1, 1, 32), torch.ones(1, 1, 1, 32), 0)  # and they go on
    assert cache.get_seq_length() == 41


def test_this_version_has_a_file_that_it_would_write_again():
    assert kvcompress.__version__ in VERSIONS, "python tests/golden/cache.py writes it"
    wanted = np.load(GOLDEN / kvcompress.__version__ / "dense.npz")
    assert all(np.array_equal(x, wanted[name]) for name, x in dense(filled()).items())
    assert set(formats.NAMES) == set(NAMES)
