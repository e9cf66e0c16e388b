"""lm-evaluation-harness with a KVCache: its HuggingFace model and a local task, without changes to its calls.

    pip install lm-eval        # or install kvcompress with the extra `harness`
    python examples/harness/run.py [MODEL] [--formats int8 int4] [--limit N]

`patch_generate` makes every `generate` of the model use a KVCache. Only tasks that generate (`generate_until`) use a
cache; the harness computes log-likelihoods without one: use `python -m kvcompress eval` for these.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvcompress
from kvcompress.tools.evaluation import tasks

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def write_task(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, samples: int = 8) -> None:
    """Writes the task file, and secret_words.jsonl with 8 questions for each of `samples` texts of 900 tokens."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    book = encode((ROOT / "assets" / "text" / "book.txt").read_text())
    text = (HERE / "secret_words.yaml").read_text()
    (folder / "secret_words.yaml").write_text(text.replace("secret_words.jsonl", str(folder / "secret_words.jsonl")))
    with (folder / "secret_words.jsonl").open("w") as lines:
        for seed in range(samples):
            sample = tasks.make("needles", encode, book, 900, seed)
            for question, answer in sample.questions:
                row = {
                    "context": tokenizer.decode(sample.context + question),
                    "answer": tokenizer.decode(answer).strip(),
                }
                lines.write(json.dumps(row) + "\n")


def score(model: transformers.PreTrainedModel, tokenizer: object, folder: Path, limit: int | None) -> float:
    """Exact match score of the harness's HuggingFace model on the task."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, add_bos_token=True, max_length=2048)
    found = lm_eval.simple_evaluate(
        harness, tasks=["secret_words"], task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        limit=limit, bootstrap_iters=0,
    )  # fmt: skip
    return float(found["results"]["secret_words"]["exact_match,word"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "assets" / "books-tiny"))
    parser.add_argument("--formats", nargs="*", default=["int8", "int4"])
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    folder = Path(tempfile.mkdtemp())
    try:
        write_task(folder, tokenizer)
        rows = [("DynamicCache", score(model, tokenizer, folder, options.limit), "")]
        for key in options.formats:
            with kvcompress.patch_generate(model, key) as patch:
                matches = score(model, tokenizer, folder, options.limit)
            rows.append((key, matches, f"{patch.calls} calls, {patch.last['ratio']:.1f}x smaller"))
    finally:
        shutil.rmtree(folder)
    for name, matches, note in rows:
        print(f"{name:14} exact match {matches:.3f}  {note}")


if __name__ == "__main__":
    main()
