"""Runs engines one after another in this process: `engine.py JSON`, a list of settings; prints JSON for each."""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ((20000, 566), (50000, 865), (90000, 1500), (150000, 31), (180000, 64), (200000, 127))


def run(tokens=60, format=None, mib=128, **options):
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_batched_tokens": 2048,
        "max_num_seqs": 16, "block_size": 128, "disable_log_stats": False, **options,
    }  # fmt: skip
    extra = {} if format is None else {"kvcompress": format}
    try:
        llm = LLM(
            str(ROOT / "assets" / "books-tiny"), kv_cache_memory_bytes=mib << 20, additional_config=extra, **settings
        )
    except Exception as error:
        return {"error": str(error)}
    text, tokenizer = (ROOT / "assets" / "text" / "book.txt").read_text(), llm.get_tokenizer()
    prompts = [
        {"prompt_token_ids": tokenizer.encode("<s>" + text[at : at + 8 * n], add_special_tokens=False)[:n]}
        for at, n in PROMPTS
    ]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    runs = [llm.generate(prompts, greedy, use_tqdm=False) for _ in range(2)]
    return {
        "tokens": [[list(x.outputs[0].token_ids) for x in each] for each in runs],
        "hits": sum(x.num_cached_tokens for x in runs[1]),
        "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
    }


if __name__ == "__main__":
    from kvcompress.vllm import register

    register()
    for each in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run(**each)), flush=True)
