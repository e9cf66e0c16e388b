"""Offloading of pages to host memory and files (`tiers`), prefetch ahead of a layer's attention (`prefetch`), and
attention on offloaded pages in place (`in_place`)."""
