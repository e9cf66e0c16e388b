"""Runs engines one after another in this process: reads settings as JSON, one line each, and prints their results as
JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parent))
import sealed_pages
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


def margin(logprobs):
    """The margin in log-probability of a token over the next best one."""
    first, second = sorted((x.logprob for x in logprobs.values()), reverse=True)[:2]
    return first - second


def choices(llm, prompts):
    """For each token of the prompts, the model's most likely token at that place."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    answers = llm.generate(prompts, asked, use_tqdm=False)
    return [[max(y.items(), key=lambda z: z[1].logprob)[0] for y in x.prompt_logprobs[1:]] for x in answers]


def adapter():
    """A folder with a random LoRA adapter of the shipped model."""
    import torch
    from safetensors.torch import save_file

    config, at = json.loads(Path(BOOKS, "config.json").read_text()), Path(MADE.name, "adapter")
    at.mkdir(exist_ok=True)
    weights, hidden = {}, config["hidden_size"]
    torch.manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            to = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora"
            weights[f"{to}_A.weight"] = torch.randn(8, hidden) * hidden**-0.5
            weights[f"{to}_B.weight"] = torch.randn(config[heads] * config["head_dim"], 8) * 0.3
    save_file(weights, at / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (at / "adapter_config.json").write_text(json.dumps(said))
    return str(at)


def transfer(shared):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": shared},
    )  # fmt: skip


def layers_of(llm):
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.compilation_config.static_forward_context.items()


def formats_of(llm):
    """Format, and bytes per page, of each layer."""
    layers = [layer for _, layer in layers_of(llm) if hasattr(layer, "impl")]
    return [[x.impl.settings.format, x.kv_cache[0].nbytes // (x.kv_cache.shape[2] // 64)] for x in layers]


def found_in_cache(llm, shared):
    """The number of blocks in the folder, and how many of them are in the cache of the same layer, byte-identical."""
    from safetensors.torch import load_file

    count = there = 0
    for name, layer in layers_of(llm):
        cache = layer.kv_cache  # [blocks, heads, tokens of a block, bytes]
        blocks = {x.numpy().tobytes() for x in cache.transpose(1, 2).contiguous()}
        for file in Path(shared).glob(f"*/{name}.safetensors"):
            saved = [
                x.contiguous().numpy().tobytes() for x in load_file(file)["kv_cache"].split(cache.shape[2]) if len(x)
            ]
            count, there = count + len(saved), there + len(blocks & set(saved))
    return [count, there]


def run(tokens=60, format=None, mib=128, model=None, forced=False, lora=False, pattern=None, key="kvcompress",
        shared=None, watched=False, **options):  # fmt: skip
    """tokens: number to generate, twice; mib: size of the cache; forced: also `choices`; lora: with an adapter;
    pattern: of a structured output; key: of additional_config; shared: a folder for transferring prompts' pages
    between engines; watched: check the contents of full pages after each step."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    settings = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_batched_tokens": 2048,
        "max_num_seqs": 16, "block_size": 128, "disable_log_stats": False, **options,
    }  # fmt: skip
    if (settings.get("speculative_config") or {}).get("model") == "books-tiny":
        settings["speculative_config"] = {**settings["speculative_config"], "model": BOOKS}
    if lora:
        settings |= {"enable_lora": True, "max_lora_rank": 8}
    if model:
        settings["skip_tokenizer_init"] = True
    if shared:
        settings["kv_transfer_config"] = transfer(shared)
    try:
        llm = LLM(
            vllm_models.make(model, Path(MADE.name)) if model else BOOKS,
            kv_cache_memory_bytes=mib << 20,
            additional_config={} if format is None else {key: format},
            **settings,
        )
    except Exception as error:
        return {"error": str(error)}
    prompts = prompts_of(llm, model)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2, detokenize=model is None)
    if pattern:
        greedy.structured_outputs = StructuredOutputsParams(regex=pattern)
    watch = sealed_pages.Watch(llm) if watched else None
    request = LoRARequest("one", 1, adapter()) if lora else None
    runs = [llm.generate(prompts, greedy, use_tqdm=False, lora_request=request) for _ in range(2)]
    found = {
        "tokens": [[list(x.outputs[0].token_ids) for x in each] for each in runs],
        "logprobs": [[x.outputs[0].cumulative_logprob for x in each] for each in runs],
        "margins": [[margin(y) for y in x.outputs[0].logprobs] for x in runs[0]],
        "loaded": sum(x.num_cached_tokens for x in runs[0]),
        "hits": sum(x.num_cached_tokens for x in runs[1]),
        "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
    }
    if forced:
        found["choices"] = choices(llm, prompts)
    found["formats"] = formats_of(llm) if isinstance(format, dict) else None
    if watch:
        found["looked at"], found["not sealed"] = watch.checked, watch.bad
    if shared:
        found["pages"] = found_in_cache(llm, shared)
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print("RESULT " + json.dumps(run(**json.loads(line))), flush=True)
