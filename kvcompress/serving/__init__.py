"""Many sequences and many prompts: caches side by side in one forward pass (`batch`), prompts that begin alike
(`prefix`), a prefix compressed once for all questions (`kvzip`)."""
