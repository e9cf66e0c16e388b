"""Trains a shipped toy model: books, and tasks whose answers lie far back. Resumable: run the same command again.

    python benchmarks/train/train.py --text books.txt.xz wiki.txt --share 0.85 0.15 --out build/train/plain \\
        --tokens 24e6 [--init FOLDER] [--bias | --latent]

Checkpoints, the learning curve (curve.csv) and the finished model (model/) go to --out. Every step's data follow from
the seed and the step alone, so an interrupted run goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import math
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
ANSWER_WEIGHT = 4.0  # of a token that can be looked up, against one of the text


def corpus(text: Path, tokenizer: object, cache: Path) -> np.ndarray:
    """All documents of a text as token ids, uint16; kept in a file."""
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
    """Sequences of step `n`, from the seed and n alone."""

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


def new_model(bias: bool, latent: bool) -> torch.nn.Module:
    if latent:
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZE, **LATENT}))
    return Qwen2ForCausalLM(Qwen2Config(**SIZE)) if bias else LlamaForCausalLM(LlamaConfig(**SIZE, head_dim=64))


def give_bias(model: torch.nn.Module, size: float, seed: int) -> None:
    """K biases as large as in Qwen2 (|bias| many times the rest of K), in pairs of dims that RoPE turns slowly.

    Training goes on from there; it cannot be done so that nothing changes, unlike outliers of the weights.
    """
    r = random.Random(seed)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        torch.nn.init.zeros_(bias)
        for head in bias.data.view(SIZE["num_key_value_heads"], 2, -1):
            for pair in r.sample(range(22, 32), 4):
                angle = r.uniform(0, 2 * math.pi)
                head[:, pair] = size * r.uniform(0.5, 1.0) * torch.tensor([math.cos(angle), math.sin(angle)])


@torch.no_grad()
def to_latents(model: torch.nn.Module, source: torch.nn.Module, ids: torch.Tensor) -> None:
    """Weights of a latent model from a Llama of the same size, to be trained on (as TransMLA, arXiv 2502.07864).

    Of each head's 32 pairs of dims the slower half loses its rotation. They and V of both KV heads, 192 dims, go
    through the latents' 128 principal components on the text `ids` [1, T]. Each KV head gives every other of the
    faster pairs to the rotary part that all heads share.
    """
    state = {name: w for name, w in source.state_dict().items() if "_proj" not in name or "mlp" in name}
    model.load_state_dict(state, strict=False)
    seen: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(source.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: seen.update({i: (args[0] if args else kwargs["hidden_states"])[0]}),
            with_kwargs=True,
        )
    source(ids, use_cache=False)
    slow, fast = torch.cat([torch.arange(16, 32), torch.arange(48, 64)]), torch.arange(16)
    for i, (new, old) in enumerate(zip(model.model.layers, source.model.layers, strict=True)):
        a, b, x = new.self_attn, old.self_attn, seen[i].double()
        q, k, v = (w.weight.double().unflatten(0, (-1, 64)) for w in (b.q_proj, b.k_proj, b.v_proj))
        both = torch.cat([k[:, slow].flatten(0, 1), v.flatten(0, 1)])  # [192, 256]
        size = (x @ both.T).std(0, keepdim=True).T  # K and V count alike
        basis = torch.linalg.svd(both / size @ x.T, full_matrices=False)[0][:, :128]
        down = basis.T @ (both / size)
        scale = (x @ down.T).square().mean().sqrt()
        up_k, up_v = (size * basis * scale).split([64, 128])
        owner = fast % 2  # KV head of each shared pair
        rotary = torch.cat([k[owner, fast], k[owner, fast + 32]])
        a.kv_a_proj_with_mqa.weight.copy_(torch.cat([down / scale, rotary]))
        a.kv_a_layernorm.weight.fill_(1.0)
        per_head = torch.cat([up_k.unflatten(0, (2, 32)), up_v.unflatten(0, (2, 64))], 1)  # [2, 96, 128]
        a.kv_b_proj.weight.copy_(per_head.repeat_interleave(2, 0).flatten(0, 1))
        mine = (owner == torch.arange(2)[:, None]).repeat_interleave(2, 0)[..., None]  # [4, 16, 1]
        shared = [torch.where(mine, q[:, half], 0.0) for half in (fast, fast + 32)]
        a.q_proj.weight.copy_(torch.cat([q[:, slow], *shared], 1).flatten(0, 1))
        a.o_proj.weight.copy_(b.o_proj.weight)


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
    parser.add_argument("--tokens", type=float, default=24e6)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--task-share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
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
    model = new_model(args.bias, args.latent)
    if args.init:
        source = AutoModelForCausalLM.from_pretrained(args.init)
        if args.latent and source.config.model_type == "llama":
            missing = to_latents(model, source.float(), torch.from_numpy(texts[0][:4096].astype(np.int64))[None])
        else:
            missing, _ = model.load_state_dict(source.state_dict(), strict=False)
    if args.bias and (not args.init or missing):
        give_bias(model, args.bias_size, args.seed)
    model = model.float().to(device).train()
    both, steps, done = optimizers(model, args.rate), int(args.tokens // TOKENS_A_STEP), 0
    saved = args.out / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        for o, s in zip(both, state["optimizers"], strict=True):
            o.load_state_dict(s)
        done = state["step"]
    warm, cool = 60, int(steps * 0.6)
    wrote, sums = time.monotonic(), []
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
            if time.monotonic() - wrote > 120 or n + 1 == steps:
                state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in both], "step": n + 1}
                torch.save(state, saved.with_suffix(".part"))
                saved.with_suffix(".part").rename(saved)
                wrote = time.monotonic()
    model.to("cpu", torch.bfloat16).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
