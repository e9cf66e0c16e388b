"""Quantized tensors (`tensor`), error metrics (`metrics`), formats by layer and position (`mixed_precision`), pages
from blocks of other engines (`pack`)."""
