"""Runs engines one after another in this process: `engine.py JSON`, a list of settings; prints JSON for each."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.insert(0, str(Path(__file__).parent))
import vllm_models

ROOT = Path(__file__).resolve().parents[2]
BOOKS = str(ROOT / "assets" / "books-tiny")
MADE = tempfile.TemporaryDirectory()  # until the process ends
LENGTHS = (566, 865, 1500, 31, 64, 127)


def prompts_of(llm, model):
    if model is None:
        text, tokenizer = (ROOT / "assets" / "text" / "book.txt").read_text(), llm.get_tokenizer()
        ids = tokenizer.encode("<s>" + text[20000:60000], add_special_tokens=False)
        return [{"prompt_token_ids": ids[500 * i :][:n]} for i, n in enumerate(LENGTHS)]
    import random

    random.seed(0)
    return [{"prompt_token_ids": random.choices(range(3, 512), k=n)} for n in LENGTHS]


def run(tokens=60, format=None, mib=128, model=None, **options):
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_batched_tokens": 2048,
        "max_num_seqs": 16, "block_size": 128, "disable_log_stats": False, **options,
    }  # fmt: skip
    if model:
        settings["skip_tokenizer_init"] = True
    try:
        llm = LLM(
            vllm_models.make(model, Path(MADE.name)) if model else BOOKS,
            kv_cache_memory_bytes=mib << 20,
            additional_config={} if format is None else {"kvcompress": format},
            **settings,
        )
    except Exception as error:
        return {"error": str(error)}
    prompts = prompts_of(llm, model)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, detokenize=model is None)
    runs = [llm.generate(prompts, greedy, use_tqdm=False) for _ in range(2)]
    found = {
        "tokens": [[list(x.outputs[0].token_ids) for x in each] for each in runs],
        "logprobs": [[x.outputs[0].cumulative_logprob for x in each] for each in runs],
        "hits": sum(x.num_cached_tokens for x in runs[1]),
        "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
    }
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run(**each)), flush=True)
