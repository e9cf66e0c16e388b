"""Two steps of GRPO with TRL; its trainer samples completions with a KVCache.

pip install trl && python examples/trl/run.py
"""

import tempfile
from pathlib import Path

import transformers as hf
from datasets import Dataset
from datasets.table import InMemoryTable
from trl import GRPOConfig, GRPOTrainer

import kvcompress

MODEL = Path(__file__).parents[2] / "assets" / "books-tiny"
PROMPTS = ["It was a dark night", "The old house by the river", "She said", "Once upon a time"]


def length(completions: list[str], **_: object) -> list[float]:
    """A reward without a model: longer is better."""
    return [float(len(text)) for text in completions]


def main() -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = hf.AutoTokenizer.from_pretrained(MODEL)
    rows = Dataset(InMemoryTable.from_pydict({"prompt": PROMPTS}), fingerprint="prompts")
    with tempfile.TemporaryDirectory() as folder, kvcompress.patch_generate(model, "int4") as patch:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=4, num_generations=2, max_completion_length=16, max_steps=2,
            use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=length, args=settings, train_dataset=rows, processing_class=tokenizer
        )
        trainer.train()
        print(f"{patch.calls} calls of generate, the last held {patch.last['bytes']:,} bytes")


if __name__ == "__main__":
    main()
