"""kvcompress._C by itself: loads without torch, arrays without copies, clear errors."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcompress import _C, formats

LEVELS = ("scalar", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "dotprod", "i8mm")  # worst first


def run(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


def test_loads_and_works_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from kvcompress import _C, formats
codes, scales = _C.quantize(np.ones((2, 32), np.float32), formats.CODES["int8"])
assert (codes == 255).all() and _C.dequantize(codes, scales, formats.CODES["int8"]).shape == (2, 32)
print(_C.isa())
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in _C.isa_available()


def test_import_is_lazy():
    code = """
import sys, kvcompress
kvcompress.__version__, kvcompress.formats.NAMES
assert not {"torch", "transformers"} & set(sys.modules)
"""
    assert run(code).returncode == 0


def test_levels_follow_the_cpu():
    levels, features = _C.isa_available(), _C.cpu_features()
    assert levels == tuple(x for x in LEVELS if x in levels)
    assert levels[0] == "scalar"
    assert ("avx2" in levels) == all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    if platform.machine() == "x86_64":
        known = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].replace("_", "").split())
        assert features == {name: name in known for name in features} and len(features) == 13
    assert run("from kvcompress import _C; print(_C.isa())", KVCOMPRESS_ISA="").stdout.strip() == levels[-1]


def test_isa_is_chosen_by_name():
    for level in _C.isa_available():
        assert run("from kvcompress import _C; print(_C.isa())", KVCOMPRESS_ISA=level).stdout.strip() == level
    done = run("from kvcompress import _C; _C.isa()", KVCOMPRESS_ISA="mmx")
    assert "ValueError" in done.stderr and "mmx" in done.stderr and "unset" in done.stderr


def table(pool=None, **options):
    spec = dict(heads=2, key_dim=32, value_dim=32, batch=2, raw=0, key=3, value=3) | options
    return _C.Table(pool or _C.Pool(), **spec)


def test_entries_in_python():
    pool = _C.Pool()
    t = table(pool)
    t.plan(200)  # the first pages of 64 tokens are sealed, the last one stays raw
    t.commit()
    entries = t.entries[:, 0, :]
    entries = entries[entries >= 0]
    assert set(formats.pair_of(entries).tolist()) == {3 << 8 | 3, 0}
    assert all(pool.refs(offset) == 1 for offset in formats.offset_of(entries).tolist())
    assert len(set(formats.offset_of(entries).tolist())) == len(entries)
    assert (formats.entry_of(formats.offset_of(entries), formats.pair_of(entries)) == entries).all()


def test_arrays_are_views():
    pool = _C.Pool()
    t = table(pool)
    entries, rows = t.entries, t.rows
    t.plan(100)
    t.commit()
    assert (rows[:, 0, 0] == 100).all() and (entries[:, 0, :3] >= 0).all()
    assert np.shares_memory(pool.arena, pool.arena) and pool.arena.nbytes == pool.extent
    address = entries.__array_interface__["data"][0]
    assert t.entries.__array_interface__["data"][0] == address


def test_views_outlive_what_they_show():
    t = table()
    entries, version = t.entries, t.version
    old = entries.copy()
    t.plan(5000)  # more columns: the array is reallocated
    t.commit()
    assert t.version > version and t.entries.shape[2] > entries.shape[2]
    assert np.array_equal(entries, old)
    arena = t.pool.arena
    del t
    arena[:10] = 7
    assert (arena[:10] == 7).all()


@pytest.mark.parametrize("call,error,text", [
    (lambda: table(page_size=40), ValueError, "page_size"),
    (lambda: table(sinks=-1), ValueError, "sinks"),
    (lambda: table(heads=0), ValueError, "KV head"),
    (lambda: table(key_dim=24), ValueError, "head dim"),
    (lambda: table(key=77), ValueError, "code 77"),
    (lambda: table(raw=3), ValueError, "raw format"),
    (lambda: table(key=1), ValueError, "raw format of the open page"),
    (lambda: table(key=5, direct=True), ValueError, "8-bit"),
    (lambda: table().plan(-1), ValueError, "tokens"),
    (lambda: table().plan(3, np.ones((2, 4), bool)), ValueError, "real"),
    (lambda: table().plan(3, np.ones((2, 3))), TypeError, "bool"),
    (lambda: table().plan(3, [1]), TypeError, "NumPy array"),
    (lambda: table().crop(1), ValueError, "keep"),
    (lambda: table().select(np.array([2])), ValueError, "rows"),
    (lambda: table().select(np.array([], np.int64)), ValueError, "at least one"),
    (lambda: table().reset(batch=-1), ValueError, "batch"),
    (lambda: _C.Pool(-1), ValueError, "max_bytes"),
    (lambda: _C.Pool(1 << 20).unref(64), ValueError, "slot in use"),
    (lambda: _C.Pool(1 << 20).alloc(0), ValueError, "1 byte"),
    (lambda: _C.Pool(1 << 20).alloc(2 << 20), MemoryError, "full"),
    (lambda: _C.page_bytes(3, 3, 32, 32, 40), ValueError, "page_size"),
    (lambda: _C.quantize([1.0], 3), TypeError, "ndarray"),
])  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_binding_without_torch_says_what_to_do():
    done = run("from kvcompress import _C; _C.bind_torch('/nonexistent/libtorch_cpu.so')")
    assert "ImportError" in done.stderr and "import torch first" in done.stderr


def test_two_plans_are_refused():
    t = table()
    t.plan(1)
    for call in (lambda: t.plan(1), lambda: t.crop(0), lambda: t.select(np.array([0, 1])), t.reset, t.clone):
        with pytest.raises(ValueError, match="commit or roll"):
            call()
    t.rollback()
    t.plan(1)


def test_format_table():
    assert [row["code"] for row in formats.TABLE] == list(range(len(formats.TABLE)))
    assert formats.NAMES[:4] == ("raw", "int8", "fp8_e4m3", "int4")
    assert len(formats.NAMES) + len(formats.CALIBRATED) == len(formats.TABLE) - 2
    assert {formats.effective_bits(formats.CODES[n], 128) for n in ("int8", "fp8_e4m3")} == {8.125}
    assert formats.effective_bits(formats.CODES["int4"], 128) == 4.125 + 0.25
    for row in formats.TABLE:
        assert f"`{row['name']}`" in formats.support_matrix()
    assert _C.page_bytes(3, 3, 128, 128) == 64 * 2 * (128 + 2)


def test_find():
    """Finds the first array with equal shape and bytes."""
    rows = np.arange(24).reshape(3, 2, 4)
    ones = (rows[1], rows[1] + 1, rows[1, :, :3].copy(), rows[1, 0], rows[1].reshape(4, 2), rows[0] * 0)
    assert [_C.find(rows, x) for x in ones] == [1, -1, -1, -1, -1, -1]
    assert _C.find(rows[:0], rows[1]) == -1 and _C.find(np.zeros((2, 0), int), rows[0, 0, :0]) == 0
    for wrong in ((rows.astype(np.int32), rows[0]), (rows, rows[0].T), (rows.tolist(), rows[0]), (rows, None),
                  (rows, rows[0].byteswap().view(">i8"))):  # fmt: skip
        with pytest.raises(ValueError, match="find: expected"):
            _C.find(*wrong)
    with pytest.raises(TypeError, match="got 1"):
        _C.find(rows)
