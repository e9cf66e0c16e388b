"""SlidingPagedLayer: a layer of a KVCache with a sliding window, or with chunks, whose old pages are freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..store.padding import Pads
from . import masks
from .layer import Block, PagedLayer
from .lazy import dense


class SlidingPagedLayer(PagedLayer):
    """Stores the tokens of its window, in whole pages. Decodes `window - 1` slots and those of the call, as
    transformers' own sliding-window layers, so that transformers' masks apply."""

    is_sliding = True

    # ------------------------------------------------------------------ the window

    @property
    def sliding(self) -> Any:
        """The `AttentionWindow` of its pages; None before `lazy_initialization`."""
        return self.store and self.store.sliding

    def start_of(self, seen: int) -> int:
        return max(0, seen - self.window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        start = self.start_of(seen)
        return seen - start + int(query_length), start

    def flat_mask(self, mask: torch.Tensor, base: int) -> torch.Tensor | None:
        if isinstance(mask, masks.WindowMask) and (mask.window, mask.chunked) == (self.window, self.chunked):
            return mask.padding
        return dense(mask)

    def window_mask(self, mask: torch.Tensor | None, window: int) -> tuple[torch.Tensor | None, int]:
        """(mask, window) for attention over the dense K and V."""
        if mask is not None and mask.dim() == 4:
            return dense(mask), window
        if self.chunked:
            raise ValueError("kvcompress: expected transformers' mask of a chunked-attention layer, got none")
        return mask, self.window

    def attend(
        self, block: Block, query: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor | None:
        return super().attend(block, query, mask, **{**options, "window": 0})

    def commit(self, own: torch.Tensor | None = None, append: Callable[..., Any] | None = None) -> Any:
        if self.staged is not None and own is None:  # the call may have had padding
            self.sliding.sure = False
        return super().commit(own, append)

    # ------------------------------------------------------------------ what goes

    def evict(self) -> None:
        if sliding := self.sliding:
            sliding.end_call()

    def activate_past_recording(self) -> None:
        """Frees nothing until the next `crop`."""
        self.recording = True
        if self.sliding:
            self.sliding.recording = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError where `crop` would."""
        if self.sliding and tokens_to_remove < 0:
            self.sliding.check_crop(max(0, self.get_seq_length() + tokens_to_remove))

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.recording and self.sliding:
            self.sliding.release(self.store.seen)

    def fill(self, keys: torch.Tensor, values: torch.Tensor, own: torch.Tensor | None, seen: int) -> None:
        """See PagedLayer.fill."""
        last = keys.shape[2] - min(seen, self.window - 1)  # the source may hold more, for `crop`
        keys, values = (x[:, :, last:].detach().contiguous() for x in (keys, values))
        self.lazy_initialization(keys, values)
        sliding = self.sliding
        B, H, T, _ = keys.shape
        pads, lead = Pads(B), seen - T
        if own is not None:
            pads.append(0, own)
        if lead:  # freed slots, so that chunks start at the same slots
            stand_in = torch.zeros(B, lead, dtype=torch.bool, device="cpu")
            for b in range(B if self.chunked else 0):
                first = pads.first(b)
                stand_in[b, first + max(0, lead - first) // self.window * self.window :] = True
            k, v = (x.new_zeros(1, 1, 1, x.shape[3]).expand(B, H, lead, -1) for x in (keys, values))
            self.store.append(k, v, stand_in)
        self.store.append(keys, values, None if own is None else own[:, lead:])
        sliding.pads, sliding.sure = pads, own is not None
        sliding.release(seen)
        sliding.back = seen
