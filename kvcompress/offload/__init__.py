"""Pages in host memory and files (`tiers`): fetched ahead of a layer's attention (`prefetch`), or attended where they
are (`in_place`)."""
