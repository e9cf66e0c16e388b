"""Eviction in one layer: applying a policy (`eviction`, `accumulated_attention`), smaller formats for low scores
(`demotion`), positions in the cache (`positions`), estimated attention to evicted tokens (`evicted_attention`). The
policies are in `policies/`."""
