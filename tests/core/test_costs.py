"""Costs that must be linear in the size of a table: 64 times the pages take 60 to 150 times the CPU time (caches, page
faults), and would take 4,096 times if they were quadratic."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from kvcompress import PagedKV

SIZES, MOST = (2048, 131072), 768  # pages; a fifth of 4,096, five times what was measured


def filled(pages: int, **options) -> PagedKV:
    layer = PagedKV(1, 16, page_size=16, sinks=0, **options)
    k = torch.randn(1, 1, 16 * pages, 16)
    layer.append(k, k)
    return layer


def shared(pages):
    layer = filled(pages)
    twin = layer.clone()
    return lambda: (twin, layer.page_store.table.stats())


def evicted(key):
    def make(pages):
        table = filled(pages, key=key).page_store.table
        keep = np.random.default_rng(1).random((1, 1, 16 * pages)) < np.repeat(np.linspace(1, 0.2, pages), 16)
        return lambda: (table.plan_evict(keep), table.rollback())

    return make


MAKE = {"stats of shared pages": shared, "pages that stay": evicted("int8"), "pages merged": evicted("kivi4")}


@pytest.mark.parametrize("name", MAKE)
def test_linear(name):
    took = []
    for pages in SIZES:
        act, each = MAKE[name](pages), []
        for _ in range(3):
            begin = time.thread_time()
            act()
            each.append(time.thread_time() - begin)
        took.append(min(each))
    assert took[1] < MOST * took[0], took
