"""A policy at work in one layer: what it scores, keeps and frees (`eviction`, `accumulated_attention`), smaller formats
before eviction (`demotion`), positions of what stays (`positions`), attention that evicted tokens would have had
(`evicted_attention`). Which tokens stay is said in `policies/`."""
