"""How much of each sequence lies in sealed pages, for formats with residual pages where drafts may be rejected: a page
is sealed when all of its tokens are sure to stay, which lengths alone do not say afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .settings import PAGE


@dataclass
class _Last:
    """Of a sequence's last step: tokens without and with drafts, of the sealed pages, and the page of the last sure
    token."""

    sure: int
    end: int
    sealed: int
    page: int


class Sealed:
    """Of an engine's sequences, by their residual blocks. Blocks change hands without a word, so a step goes on from
    the last one of its block only where it begins between that one's ends and the last sure token lies in the page that
    it lay in. Any other step is the first of a request, or of one that was preempted: it has no drafts, and what it
    begins with was sealed by whoever computed it.

    drafts: tokens of a step that may be rejected, at most."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts
        self.last: dict[int, _Last] = {}

    def step(
        self, blocks: list[int], pages: torch.Tensor, ends: list[int], lengths: list[int], prefilling: list[bool] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens in sealed pages before the step, drafts in it), int32 [B], for `ops.attend_varlen`.

        blocks: residual block of each sequence; pages: block table in pages [B, ..]; ends: tokens after the step;
        lengths: of them new; prefilling: whether the prompt is not yet computed, so that none of them is a draft. A
        short piece of a preempted answer that is computed again looks like drafts: its page is sealed a step later.
        """
        sealed, drafts = [], []
        for b, (block, end, new) in enumerate(zip(blocks, ends, lengths, strict=True)):
            last, before = self.last.get(block), end - new
            if last and not (last.sure <= before <= last.end and pages[b, (last.sure - 1) // PAGE] == last.page):
                last = None
            sealed.append(last.sealed if last else before // PAGE * PAGE)
            known = last is None or new > 1 + self.drafts or (prefilling is not None and prefilling[b])
            drafts.append(0 if known else max(new - 1, 0))
            sure = end - drafts[b]
            now = max(sealed[b], sure // PAGE * PAGE)
            self.last[block] = _Last(sure, end, now, int(pages[b, max(sure - 1, 0) // PAGE]))
        return torch.tensor(sealed, dtype=torch.int32), torch.tensor(drafts, dtype=torch.int32)
