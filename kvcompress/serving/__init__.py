"""Several sequences and prompts: continuous batching (`batch`), prefix caching (`prefix`, `prefix_offload`), prefixes
compressed for reuse (`kvzip`)."""
