"""Where pages lie, and how they move: on a device (`remote`, by `lanes`), parked in one piece (`parking`), in host
memory and files (`tiers`), brought back ahead of a layer's attention (`away`) or attended where they are (`beside`,
`joining`). What moves them refers to its layer weakly (`following`). No policy, no transformers; `.kvc` files are in
`caches/`."""
