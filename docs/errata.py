"""Wrong figures from tutorials on KV caches, with the correct values computed here."""

from __future__ import annotations

from typing import NamedTuple

from kvcompress.tools.plan import size
from kvcompress.tools.plan.models import read
from kvcompress.tools.plan.units import show_bytes


class Erratum(NamedTuple):
    """claim: what a tutorial prints; truth: the correct value, computed by `size`; why: the cause of the error."""

    claim: str
    truth: str
    why: str


def _seventy(tokens: int, batch: int = 1, element: float = 2) -> float:
    return size.formula(read("llama-3-70b"), tokens, batch, element)


def entries() -> list[Erratum]:
    """All errata; the correct values are computed when called, as text with units (GB and GiB)."""
    mha = size.formula(read("llama-3-70b").with_attention("MHA"), 32_768, 200)
    one, row = _seventy(4096), 8 * 128 * 2 * 80
    return [
        Erratum(
            "A 70B Llama's cache at 128K tokens takes 160 GB",
            show_bytes(_seventy(131_072)),
            "2 x 80 layers x 8 KV heads x 128 dims x 131,072 tokens x 2 bytes. Without GQA (64 heads) it would be "
            f"{show_bytes(_seventy(131_072) * 8)}; 160 GB is neither.",
        ),
        Erratum(
            "0.33 GB per request (70B, 4,096 tokens)",
            show_bytes(one),
            f"{row:,} bytes for K and the same for V are 320 KiB per token; 0.33 GB would be 80 KiB, a quarter.",
        ),
        Erratum(
            "200 requests of 32K tokens take 1,720 GB, divided by 8 with GQA",
            show_bytes(_seventy(32_768, 200)),
            f"That figure already includes GQA; without GQA it is {show_bytes(mha)}. Dividing by 8 counts GQA twice.",
        ),
        Erratum(
            "1.07, 4.29 and 17.18 GB, printed by a function that divides by 1024 three times",
            "1.00, 4.00 and 16.00 GiB, which are 1.07, 4.29 and 17.18 GB",
            "GB is 10^9 bytes, GiB 2^30. The two differ by 7.4%: one request in fourteen.",
        ),
        Erratum(
            "INT8 halves the cache: 135.3 MB, 1.98x",
            "136.3 MB, 1.97x (a 2-byte scale per token and head of 128 dims: 8.125 bits)",
            "Scales take memory too. With block tables, open pages and sinks the ratio here is "
            f"{size.formula(read('llama-3-70b'), 4096) / size.exact(read('llama-3-70b'), 'int8', 4096).bytes:.2f}x "
            "for 4,096 tokens of the 70B model.",
        ),
        Erratum(
            "INT4 per token is 4.0x smaller",
            f"{row / (row / 4 + 80 * 8 * 2):.2f}x with a 2-byte scale per token and head of 128 dims",
            "4.125 bits, not 4; with groups of 32 and zero points 5.0 bits, 3.2x.",
        ),
        Erratum(
            "31.2x compression (sinks, recent and heavy tokens in INT8)",
            "2x from INT8; the other 15.6x come from evicting 936 of 1,000 tokens",
            "1000 / 64 x 2, for a random sequence. With scales, and sinks and recent tokens in 16 bits, it is 19.8x.",
        ),
        Erratum(
            "FP8 has 3.5 digits and is more accurate than INT8",
            "e4m3 has 3 mantissa bits, 1.2 digits",
            "With a scale per token and head, INT8 has 12 dB more SNR on Gaussian rows; see docs/formats.md.",
        ),
    ]


def table() -> str:
    """The errata as a Markdown table."""
    lines = ["| claim | correct value | cause |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {e.claim} | {e.truth} | {e.why} |" for e in entries())])
