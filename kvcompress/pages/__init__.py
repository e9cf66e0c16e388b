"""One attention layer in pages, without a model and without transformers: PagedKV (`layer`), the part of it that evicts
(`keeping`), ShardedKV (`parallel`), does a model's K suit its format (`guard`), the way back from a pass that failed
(`undo`), what it looks like (`show`)."""
