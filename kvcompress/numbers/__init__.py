"""Numbers by themselves, without a cache: tensors quantized for analysis or for other engines and their blocks
(`quantized`, `blocks`), how far they are from the true ones (`metrics`), which format where (`precision`), lines
through measured times (`lines`)."""
