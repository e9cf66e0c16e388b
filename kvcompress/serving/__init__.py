"""Many sequences and many prompts: caches side by side in one forward pass (`batch`), prompts that begin alike
(`prefix`, `prefix_offload`), a prefix compressed once for all questions (`kvzip`)."""
