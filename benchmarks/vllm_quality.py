"""Quality in vLLM compared with `kvcompress.evaluate`: benchmarks/vllm_quality.py

The same windows of WikiText-2 through both, in chunks of equal size: KL in nats from the uncompressed model (one
forward pass in transformers, float32), over the full vocabulary. vLLM's values are its prompt_logprobs. A KVCache keeps
its first 4 tokens raw, for which vLLM's blocks have no space: the difference is to a KVCache without sinks (`sinks=0`),
with the same blocks of 16 tokens, with twice its standard error. Then greedy answers of ANSWER tokens in float32
compared with those of `raw`, for prompts of 31 to 1,500 tokens of the book."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from vllm_common import ROOT, apart, arguments, prompts, start

CONTEXT, SCORED, CHUNK = 2048, 256, 64
ANSWER, LENGTHS = 200, (566, 865, 1500, 31, 64, 127)
FORMATS = ("raw", "int8", "fp8_e4m3", "int8/int4", "int4")


def through_vllm(name: str, folder: str) -> int:
    """Writes log-probabilities [windows, SCORED, V], float32, of the tokens in windows.npy; returns the number of
    windows."""
    import numpy as np
    from vllm import SamplingParams

    options = {"additional_config": {"kvcompress": name}, "block_size": 512, "dtype": "float32", "max_logprobs": -1}
    llm = start("vLLM bf16", 64, **options, max_num_seqs=1, max_num_batched_tokens=CHUNK, enable_chunked_prefill=True)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    found = []
    for ids in np.load(Path(folder) / "windows.npy"):
        (answer,) = llm.generate([{"prompt_token_ids": ids.tolist()}], asked, use_tqdm=False)
        flat = answer.prompt_logprobs
        rows = []
        for at in range(len(ids) - SCORED, len(ids)):
            part = slice(flat.start_indices[at], flat.end_indices[at])
            tokens, values = np.array(flat.token_ids[part]), np.array(flat.logprobs[part], np.float32)
            row = np.full(tokens.max() + 1, np.nan, np.float32)
            row[tokens] = values  # the token of the text comes twice, with one value
            rows.append(row)
        found.append(np.stack(rows))
    np.save(Path(folder) / "logprobs.npy", np.stack(found))
    return len(found)


def answers(name: str, requests: int) -> list[list[int]]:
    from vllm import SamplingParams

    options = {"additional_config": {"kvcompress": name}, "block_size": 512, "dtype": "float32"}
    llm = start("vLLM bf16", 256, **options)
    asked = prompts(llm, requests, max(LENGTHS))
    for i, prompt in enumerate(asked):
        prompt["prompt_token_ids"] = prompt["prompt_token_ids"][: LENGTHS[i % len(LENGTHS)]]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    return [list(x.outputs[0].token_ids) for x in llm.generate(asked, greedy, use_tqdm=False)]


def compare(formats: list[str], requests: int) -> None:
    print(f"\n| greedy answers of {ANSWER} tokens | the same text | tokens equal | tokens until texts part |")
    print("|---|---|---|---|")
    wanted = apart(answers, "raw", requests)
    for name in formats:
        pairs = list(zip(wanted, apart(answers, name, requests), strict=True))
        same = sum(a == b for a, b in pairs)
        equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
        before = sum(next((i for i in range(ANSWER) if a[i] != b[i]), ANSWER) for a, b in pairs)
        apart_after = f"{before // (requests - same):,}" if same < requests else "-"
        print(f"| `{name}` | {same} of {requests} | {equal / requests / ANSWER:.1%} | {apart_after} |", flush=True)


def divergence(formats: list[str], count: int, text_file: str) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvcompress.tools.evaluation import data, measure
    from kvcompress.tools.strategy import Strategy

    books = ROOT / "assets" / "books-tiny"
    model = AutoModelForCausalLM.from_pretrained(books).float().eval()
    text = data.load_ids(text_file, AutoTokenizer.from_pretrained(books), data.vocabulary(model))
    size = CONTEXT + SCORED + 1
    starts = data.window_starts(len(text), size, count, 0)
    windows = torch.tensor([text[at : at + size] for at in starts])
    references = [measure.reference_logits(model, ids[None, :-1], SCORED) for ids in windows]
    print("| | evaluate | the same, `sinks=0` | vLLM | vLLM - `sinks=0` |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "windows.npy", windows.numpy())
        for name in formats:
            apart(through_vllm, name, folder)
            logprobs = torch.from_numpy(np.load(Path(folder) / "logprobs.npy"))
            kl: dict[str, list[float]] = {"evaluate": [], "no sinks": [], "vLLM": []}
            for ids, reference, got in zip(windows, references, logprobs, strict=True):
                for column, strategy in (("evaluate", name), ("no sinks", f"{name}+sinks:0")):
                    found = measure.quality(
                        model, Strategy(strategy), ids[None], SCORED, reference, chunk=CHUNK, prefill=CHUNK
                    )
                    kl[column] += found["kl"]
                kl["vLLM"] += measure.by_block(measure.figures(reference, got, ids[-SCORED:]))["kl"]
            means = [f"{statistics.fmean(x):.2e}" for x in kl.values()]
            apart_by = [b - a for a, b in zip(kl["no sinks"], kl["vLLM"], strict=True)]
            error = 2 * statistics.stdev(apart_by) / len(apart_by) ** 0.5
            print(f"| `{name}` | {' | '.join(means)} | {statistics.fmean(apart_by):+.1e} +- {error:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4, help="0: none, answers only")
    parser.add_argument("--text", default=str(ROOT / "assets" / "text" / "wikitext2-test.txt"))
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--answers", type=int, default=60)
    options = arguments(parser, through_vllm, answers)
    if options.windows:
        divergence(options.formats, options.windows, options.text)
    compare([x for x in options.formats if x != "raw"], options.answers)


if __name__ == "__main__":
    main()
