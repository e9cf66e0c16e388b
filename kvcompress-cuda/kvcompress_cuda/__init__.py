"""The CUDA library of kvcompress, which looks for it here. Nothing to call."""
