"""The part of docs/formats.md on latents (MLA), from the results of benchmarks/formats_latent.py."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    about, rows = found["about"], {row["strategy"]: row for row in found["rows"]}

    def kl(strategy: str) -> str:
        row = rows[strategy]
        return f"{row['wikitext2']['kl']:.1e} / {row['book']['kl']:.1e}"

    names, parts = (list(dict.fromkeys(name.split("/")[i] for name in rows if "/" in name)) for i in (0, 1))
    lines = ["| latent | " + " | ".join(f"rotary part `{x}`" for x in parts) + " |", "| --- " * (len(parts) + 1) + "|"]
    for x in names:
        cells = [kl("raw" if x == part == "raw" else f"{x}/{part}") for part in parts]
        lines.append(f"| `{x}` | " + " | ".join(cells) + " |")
    raw = rows["raw"]
    ppl = f"PPL {raw['wikitext2']['ppl']:.1f} on WikiText-2, {raw['book']['ppl']:.1f} on the book"
    return (
        "## Latents (MLA)\n"
        f"`benchmarks/formats_latent.py` on `books-tiny-latent`, a small DeepSeek-V3 with latents of {about['latent']} "
        f"+ {about['rotary']} dims ({ppl}): {about['windows']} windows of {about['context']:,} tokens, "
        f"{about['scored']} scored after them. KL in nats per token, WikiText-2 / book. K's format applies to the "
        "latent, V's to the rotary part, which has at least 8 bits (`int4` is `int4/int8`).\n\n"
        + "\n".join(lines)
        + "\n"
    )
