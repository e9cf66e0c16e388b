"""Time to first token of a second request with a known prefix. benchmarks/results/prefix.json.

    python benchmarks/prefix.py [--shared N] [--own N] [--rounds N]

On the shipped model: a shared prefix of N tokens (a system prompt) and a question of --own tokens, a new one each
round. The time is from the token ids to the first new token. Cold: an empty cache of the same format. Warm: the result
of `PrefixCache.open`; from the host, from files: the same with an offloaded prefix. Interleaved, in one process.

    python benchmarks/prefix.py --index N

The index alone: the time to offload the pages of 64 tokens, by the number of those offloaded before, up to N."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from common import machine, save

from kvcompress import _C, PrefixCache, Tiers, enable, formats

ROOT = Path(__file__).parents[1]


def offload_in_index(most: int) -> None:
    """Prints us per link, chains of 5 links, medians of the calls of each tenth."""
    pool = _C.Pool()
    index, page, root = _C.Prefix(pool), formats.entry_of(pool.take(np.array([64])), np.array([0])), b"r" * 32
    for chain in range(most // 5):
        index.put(root, np.arange(5) + 5 * chain, 1, 1, 1, 1, np.repeat(page, 5))
    for tenth in range(10):
        times = []
        for _ in range(most // 10):
            begin = time.perf_counter()
            link, _, pages, _ = index.oldest(True)
            entries, _ = index.entries(link, pages)
            index.offload(link)
            times.append(1e6 * (time.perf_counter() - begin))
            pool.drop(np.ascontiguousarray(formats.offset_of(entries)))
        print(f"{tenth * most // 10:7,} links offloaded before: {statistics.median(times):.1f} us per link")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--index", type=int, default=0)
    options = parser.parse_args()
    if options.index:
        offload_in_index(options.index)
        return
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    torch.set_num_threads(2)
    model = hf.AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "books-tiny").eval()
    enable(model, verbose=False)
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "assets" / "books-tiny")
    text = tokenizer((ROOT / "assets" / "text" / "book.txt").read_text(), return_tensors="pt").input_ids
    shared = text[:, : options.shared]
    questions = text[:, options.shared :].unfold(1, options.own, options.own)[0]

    @torch.inference_mode()
    def first_token(cache, ids) -> float:
        begin = time.perf_counter()
        made = cache()
        out = model(ids[:, made.get_seq_length() :], past_key_values=made, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        return 1e3 * (time.perf_counter() - begin)

    found = {}
    for fmt in ("raw", "int8", "int4"):
        prefix = PrefixCache(model.config, fmt)
        waits = {"host": PrefixCache(model.config, fmt, tiers=Tiers()),
                 "file": PrefixCache(model.config, fmt, tiers=Tiers(host_bytes=0, file_bytes=None))}  # fmt: skip
        ids = torch.cat([shared, questions[:1]], 1)
        for one in (prefix, *waits.values()):
            cache = one.open(ids)
            out = model.generate(ids, past_key_values=cache, max_new_tokens=80, do_sample=False, eos_token_id=None)
            one.commit(cache, out)
        cold, warm, held = [], [], 0
        offloaded: dict[str, list[float]] = {name: [] for name in waits}
        for i in range(1, options.rounds + 2):
            ids = torch.cat([shared, questions[i : i + 1]], 1)
            held = prefix.open(ids).get_seq_length()
            cold.append(first_token(prefix.new, ids))
            warm.append(first_token(partial(prefix.open, ids), ids))
            for name, one in waits.items():
                one.trim()
                offloaded[name].append(first_token(partial(one.open, ids), ids))
        cold, warm = cold[1:], warm[1:]
        ratios = [a / b for a, b in zip(cold, warm, strict=True)]
        found[fmt] = {
            "held": held, "cold_ms": statistics.median(cold), "warm_ms": statistics.median(warm),
            "times": statistics.median(ratios), "times_least": min(ratios), "bytes": prefix.stats()["bytes"],
            **{f"{name}_ms": statistics.median(x[1:]) for name, x in offloaded.items()},
        }  # fmt: skip
        row = found[fmt]
        print(f"{fmt:5} {held} of {options.shared + options.own} tokens known: first token after "
              f"{row['cold_ms']:.1f} ms cold, {row['warm_ms']:.1f} ms warm: {row['times']:.1f} times "
              f"(least {min(ratios):.1f}), {row['host_ms']:.1f} from the host, {row['file_ms']:.1f} from files; "
              f"{row['bytes'] / 1e6:.1f} MB kept")  # fmt: skip
    save("prefix", {"machine": machine(), "shared": options.shared, "own": options.own, "formats": found})


if __name__ == "__main__":
    main()
