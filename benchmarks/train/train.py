"""Trains a shipped toy model: books, and tasks whose answers are far back. Resumable: run the same command again.

    python benchmarks/train/train.py --text books.txt.xz wiki.txt --share 0.85 0.15 --out build/train/plain
        --tokens 24e6 [--init FOLDER] [--bias | --latent | --sinks] [--heads N --kv-heads N --head-dim N]

Checkpoints, the learning curve (curve.csv) and the finished model (model/) are written to --out. The data of a step
depend only on the seed and the step, so an interrupted run continues exactly."""

from __future__ import annotations

import argparse
import csv
import lzma
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from variants import give_bias, give_sinks, to_heads, to_latents

from kvcompress.tools.evaluation import tasks

TOKENS_A_STEP = 8192
LENGTHS = (512, 1024, 2048, 4096)
SIZE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "first_k_dense_replace": SIZE["num_hidden_layers"], "rope_interleave": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},  # 16 pairs: the faster half of 32 with 10,000
}  # fmt: skip
ANSWER_WEIGHT = 4.0  # weight of a token that can be looked up, relative to one of the text


def corpus(text: Path, tokenizer: object, cache: Path) -> np.ndarray:
    """All documents of a text as token ids, uint16; cached in a file."""
    if not cache.exists():
        opened = lzma.open if text.suffix == ".xz" else open
        with opened(text, "rt", encoding="utf-8") as f:
            documents = f.read().split("\0")
        parts = []
        for document in tqdm(documents, desc="tokenize"):
            parts.append(np.asarray(tokenizer(document, add_special_tokens=False)["input_ids"], dtype=np.uint16))
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.save(cache.with_suffix(".part.npy"), np.concatenate(parts))
        cache.with_suffix(".part.npy").rename(cache)
    return np.load(cache, mmap_mode="r")


class Data:
    """Sequences of step `n`, as a function of the seed and n."""

    def __init__(
        self,
        texts: list[np.ndarray],
        shares: list[float],
        tokenizer: object,
        task_share: float,
        seed: int,
        longest: int,
    ) -> None:
        self.texts, self.shares, self.task_share, self.seed = texts, shares, task_share, seed
        self.lengths = [n for n in LENGTHS if n <= longest]
        self.encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]

    def sequence(self, r: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Token ids [length + 1] and the weight of each as a target."""
        source = r.choices(self.texts, self.shares)[0]
        at = r.randrange(len(source) - length - 1)
        text = source[at : at + length].tolist()
        if r.random() >= self.task_share:
            return [0, *text], [1.0] * (length + 1)
        ids, asked = text[: int(length * r.uniform(0.3, 0.85))], []
        for task in r.sample(tasks.TASKS[:-1], r.randint(1, 3)) + r.choice(([], ["instructions"])):
            most = {"recall": 64, "induction": 24, "passkey": 1, "needles": 24, "tracking": 12, "instructions": 2}[task]
            count = r.randint(max(1, most // 6), max(2, most * length // 2048) if length < 2048 else max(2, most))
            sample = tasks.make(task, self.encode, ids, None, r.getrandbits(32), count=min(count, most))
            ids, asked = sample.context, asked + sample.questions
        ids, weights = [0, *ids], [1.0] * (len(ids) + 1)
        r.shuffle(asked)
        for question, answer in asked:
            ids += question + answer
            weights += [0.2] * len(question) + [ANSWER_WEIGHT] * len(answer)
        rest = max(0, length + 1 - len(ids))
        return (ids + text[len(text) - rest :])[: length + 1], (weights + [1.0] * rest)[: length + 1]

    def step(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, T + 1] and weights of step n."""
        r = random.Random(f"{self.seed} {n}")
        length = r.choices(self.lengths)[0]
        rows = [self.sequence(r, length) for _ in range(TOKENS_A_STEP // length)]
        return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def new_model(args: argparse.Namespace) -> torch.nn.Module:
    if args.latent:
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZE, **LATENT}))
    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads}
    if args.bias:
        return Qwen2ForCausalLM(Qwen2Config(**{**SIZE, **heads}))
    return LlamaForCausalLM(LlamaConfig(**{**SIZE, **heads}, head_dim=args.head_dim))


def starting_model(args: argparse.Namespace, ids: torch.Tensor) -> torch.nn.Module:
    """The model before its first step; ids [1, T]: a text, for initializations that measure on one."""
    model, missing = new_model(args), []
    if args.init:
        source = AutoModelForCausalLM.from_pretrained(args.init).float()
        shapes = {name: w.shape for name, w in model.state_dict().items()}
        if args.latent and source.config.model_type == "llama":
            to_latents(model, source, ids)
        elif any(shapes.get(name, w.shape) != w.shape for name, w in source.state_dict().items()):
            to_heads(model, source)
        else:
            missing, _ = model.load_state_dict(source.state_dict(), strict=False)
    if args.bias and (not args.init or missing):
        give_bias(model, args.bias_size, args.seed)
    if args.sinks:
        give_sinks(model, ids, args.sinks)
    return model


def optimizers(model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_of(model: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu" if ids.is_cpu else "cuda", torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    target, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    each = F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="none")
    text, answers = each[weight == 1], each[weight == ANSWER_WEIGHT]
    return (each * weight).sum() / len(each), text.detach().mean(), answers.detach().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="documents, NUL between (.txt or .txt.xz)")
    parser.add_argument("--share", type=float, nargs="+", default=[1.0], help="of the sequences, of each text")
    parser.add_argument("--tokenizer", type=Path, default=Path("assets/books-tiny"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="model folder to go on from")
    parser.add_argument("--bias", action="store_true", help="Qwen2 type, with large K biases")
    parser.add_argument("--latent", action="store_true", help="DeepSeek-V3 type (MLA), without experts")
    parser.add_argument("--bias-size", type=float, default=24.0)
    parser.add_argument("--sinks", type=float, nargs="?", const=3000.0, default=0.0, metavar="SIZE",
                        help="the first token as a sink: one channel of SIZE times the others' numbers")  # fmt: skip
    parser.add_argument("--heads", type=int, default=SIZE["num_attention_heads"], help="of queries")
    parser.add_argument("--kv-heads", type=int, default=SIZE["num_key_value_heads"])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", type=float, default=24e6)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warm", type=int, default=60, help="steps in which the rate rises")
    parser.add_argument("--task-share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="stop and save after so many: the same command goes on")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if len(args.share) != len(args.text):
        parser.error(f"--share: expected {len(args.text)} numbers, one a text, got {len(args.share)}")
    texts = [corpus(text, tokenizer, args.out.parent / f"{text.name.split('.')[0]}.npy") for text in args.text]
    data = Data(texts, args.share, tokenizer, args.task_share, args.seed, args.longest)

    torch.manual_seed(args.seed)
    model = starting_model(args, torch.from_numpy(texts[0][:4096].astype(np.int64))[None])
    model = model.float().to(device).train()
    both, steps, done = optimizers(model, args.rate), int(args.tokens // TOKENS_A_STEP), 0
    saved = args.out / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        for o, s in zip(both, state["optimizers"], strict=True):
            o.load_state_dict(s)
        done = state["step"]
    warm, cool = args.warm, int(steps * 0.6)
    wrote, sums = time.monotonic(), []
    until = wrote + 60 * args.minutes if args.minutes else float("inf")
    with (args.out / "curve.csv").open("a", newline="") as f, tqdm(total=steps, initial=done, unit="step") as bar:
        curve = csv.writer(f)
        for n in range(done, steps):
            rate = args.rate * min(1.0, (n + 1) / warm, max(0.02, (steps - n) / (steps - cool)))
            for o in both:
                o.param_groups[0]["lr"] = rate
            ids, weights = data.step(n)
            loss, text, answers = loss_of(model, ids.to(device), weights.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for o in both:
                o.step()
                o.zero_grad(set_to_none=True)
            sums.append((text.item(), answers.item()))
            bar.update(1)
            if len(sums) == 20:
                means = np.nanmean(np.asarray(sums), axis=0)
                curve.writerow([(n + 1) * TOKENS_A_STEP, *means.round(4), round(rate, 6)])
                f.flush()
                bar.set_postfix(text=f"{means[0]:.3f}", answers=f"{means[1]:.3f}")
                sums.clear()
            stop = time.monotonic() > until
            if time.monotonic() - wrote > 120 or n + 1 == steps or stop:
                state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in both], "step": n + 1}
                torch.save(state, saved.with_suffix(".part"))
                saved.with_suffix(".part").rename(saved)
                wrote = time.monotonic()
            if stop and n + 1 < steps:
                return
    model.to("cpu", torch.bfloat16).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
