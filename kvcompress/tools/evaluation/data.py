"""Texts of an evaluation: token ids and windows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...hf.hub import from_hub

Text = str | Path | torch.Tensor | np.ndarray | list[int]


def load_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, or that of a folder or a name on the hub."""
    return from_hub(AutoTokenizer, tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """A function from text to token ids, without special tokens, and without warnings about long texts."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected a file in UTF-8, got {str(path)!r}: {error}; convert it (iconv)") from None


def load_ids(text: Text, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> list[int]:
    """Token ids of `text`: a path to a text file or to ids in .npy, a text, or ids.

    Raises ValueError for an empty text, ids outside of the vocabulary, or a text without a tokenizer.
    """
    if isinstance(text, str) and len(text) < 1000 and "\n" not in text:
        named = Path(text)
        if named.exists() or not any(map(str.isspace, text)):  # a single word is taken for a path
            text = named
    if isinstance(text, Path):
        if not text.is_file():
            raise ValueError(f"text: expected a file, got {str(text)!r}")
        text = np.load(text, allow_pickle=False) if text.suffix == ".npy" else read_text(text)
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("text: expected a tokenizer (tokenizer=...) with a text, got None")
        return encoder(tokenizer)(text)
    array = np.asarray(text)
    if array.dtype.kind not in "iu":
        raise ValueError(f"text: expected a text, a file or integer ids, got {type(text).__name__} of {array.dtype}")
    ids = [int(i) for i in array.reshape(-1)]
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        got = f"{min(ids)} to {max(ids)}" if ids else "none"
        raise ValueError(f"text: expected ids from 0 to {vocab - 1}, got {got}")
    return ids


def vocabulary(model: PreTrainedModel) -> int:
    """Vocabulary size of the model."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.num_embeddings


def window_starts(length: int, size: int, count: int, seed: int) -> list[int]:
    """Start positions of `count` windows of `size` tokens in a text of `length`: evenly spaced, shifted by the seed.

    Raises ValueError if the text is shorter than one window.
    """
    if length < size:
        raise ValueError(f"text: expected at least {size} tokens (context + scored), got {length}")
    room = length - size
    slot = room / count
    r = random.Random(seed)
    return [min(room, int(i * slot + r.random() * min(slot, size))) for i in range(count)]


def bos_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """[BOS token], or [] if the model has none."""
    for source in (tokenizer, model.config.get_text_config(decoder=True)):
        token = getattr(source, "bos_token_id", None)
        if isinstance(token, int):
            return [token]
    return []


def fingerprint(model: PreTrainedModel) -> str:
    """Hash of a model's config and a part of each weight, to identify the model."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith(("_", "transformers_version"))}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, p in model.named_parameters():
        head = p.detach().reshape(-1)[:1024].float().cpu().numpy()
        digest.update(f"{name} {list(p.shape)} {p.dtype}".encode() + head.tobytes())
    return digest.hexdigest()[:16]


def ids_hash(ids: list[int]) -> str:
    """Hash of token ids."""
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()[:16]


def as_batch(ids: list[int], device: Any) -> torch.Tensor:
    """[1, T] on the model's device."""
    return torch.tensor([ids], device=device)
