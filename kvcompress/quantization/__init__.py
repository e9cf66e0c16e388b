"""Tensors quantized by themselves (`tensor`), errors (`metrics`), formats by layer and position (`mixed_precision`),
blocks of other engines put into pages (`pack`)."""
