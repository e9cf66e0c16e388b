"""Peak memory. benchmarks/results/peak.json.

    python benchmarks/peak.py [--tokens N]

A prompt of N tokens in chunks of 512, then 64 tokens, on the shipped model; each cache in a separate process. Peak: the
maximum resident size minus that before the prompt."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CACHES = ("dynamic", "raw", "int8", "int4")
CHILD = """
import re, sys, torch, transformers as hf
from kvcompress import KVCache, enable
name, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
hf.logging.set_verbosity_error()
model = hf.AutoModelForCausalLM.from_pretrained("assets/books-tiny").eval()
if name != "dynamic":
    enable(model, verbose=False)
def now(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
def go(tokens, new):
    cache = hf.DynamicCache(config=model.config) if name == "dynamic" else KVCache(model.config, name)
    ids = torch.randint(1, 200, (1, tokens), generator=torch.Generator().manual_seed(0))
    model.generate(ids, past_key_values=cache, max_new_tokens=new, prefill_chunk_size=512, do_sample=False,
                   eos_token_id=None, attention_mask=torch.ones_like(ids))
    if name != "dynamic":
        return cache.stats()["bytes"]
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
go(600, 2)  # what is loaded and allocated once
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
before = now("VmRSS")
held = go(tokens, 64)
print(held, now("VmHWM") - before)
"""


def measure(name: str, tokens: int) -> dict[str, int]:
    """Bytes of the cache `name` at the end, and the peak minus the start."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", CHILD, name, str(tokens)]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    held, peak = map(int, done.stdout.split())
    return {"held": held, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    found = {name: measure(name, tokens) for name in CACHES}
    path = Path(__file__).parent / "results" / "peak.json"
    path.write_text(json.dumps({"tokens": tokens, "chunk": 512, "new": 64, "caches": found}, indent=1) + "\n")
    for name, row in found.items():
        print(f"{name:8} held {row['held'] / 1e6:6.1f} MB, peak {row['peak'] / 1e6:6.1f} MB")


if __name__ == "__main__":
    main()
