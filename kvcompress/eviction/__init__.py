"""A policy at work in one layer: what it scores, keeps and frees (`eviction`), smaller formats before eviction
(`demotion`), positions of what stays (`positions`), what was lost (`regret`). Which tokens stay is said next door, in
`policies/`: one idea a file."""
