"""Of tests of machine code (test_sass_*.py): full tier, on the host, where nvcc and nvdisasm are."""

import sys
from pathlib import Path

import cuda_twin
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sass"))


def pytest_collection_modifyitems(items):
    emulated = [item for item in items if item.path.name.startswith("test_sass_")]
    if not emulated:
        return
    import runner

    why = runner.missing()
    for item in emulated:
        item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.skipif(cuda_twin.DEVICE != "cpu", reason="the twin's"))
        item.add_marker(pytest.mark.skipif(why is not None, reason=str(why)))
