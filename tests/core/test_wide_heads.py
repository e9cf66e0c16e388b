"""Attention for heads of up to 576 dims, in every format, compared with float64 over the stored values."""

import pytest
from test_attend import BOUND, Store, check, run


@pytest.mark.parametrize("D, Dv, group", [(512, 512, 2), (576, 512, 5)])
@pytest.mark.parametrize("key", ["raw", *list(BOUND)[3:]])
def test_wide_heads(key, D, Dv, group):
    bound = BOUND["raw_f32" if key == "raw" else key]
    check(run(Store(key, key, D=D, Dv=Dv), [150, 1, 6, 1], group, outliers=True), bound)
