"""What each layer of a model caches, from a transformers config. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import parameters

_SLIDING = ("sliding_attention", "chunked_attention")
OURS = ("full_attention", *_SLIDING)  # layer types that a KVCache compresses
_NAMED = {"attention": "full_attention", "mamba": "linear_attention", "moe": "dummy", "mlp": "dummy"}
_PATTERN = {"*": "full_attention", "M": "linear_attention"}  # of Nemotron-H; other layers cache nothing


@dataclass(frozen=True)
class Layer:
    """What one layer caches. kind: transformers' layer type; heads: H (0: nothing that grows with the context);
    key_dim, value_dim: Dk and Dv (MLA: the latent and the rotary part); window: in tokens (0: full attention); indexer:
    dims of an indexer's key; topk: number of tokens that the indexer selects. Up to topk slots, a KVCache compresses
    the layer and stores no indexer keys."""

    kind: str
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    indexer: int = 0
    topk: int = 0

    @property
    def elements(self) -> int:
        """Number of elements of K, V and an indexer's key per token."""
        return self.heads * (self.key_dim + self.value_dim) + self.indexer

    def paged(self, tokens: int) -> bool:
        """True if a KVCache compresses the layer as full attention, at this number of tokens."""
        return self.kind == "full_attention" or 0 < tokens <= self.topk


@dataclass(frozen=True)
class Model:
    """Properties of a model that determine the size of its cache.

    query_heads: Hq; dims: (Dk, Dv) of a head (MLA: after expansion); trained: maximum number of positions, or None;
    parameters: number of parameters, or None if unknown; element: bytes per uncompressed element; biased: whether K has
    a bias, which needs formats that subtract the mean; source: origin of the config.
    """

    name: str
    layers: tuple[Layer, ...]
    query_heads: int
    dims: tuple[int, int] = (0, 0)
    trained: int | None = None
    parameters: int | None = None
    element: int = 2
    biased: bool = False
    latent: bool = False
    source: str = ""

    @property
    def attention(self) -> str:
        """ "MHA", "GQA 8:1", "MQA" or "MLA"."""
        if self.latent:
            return "MLA"
        heads = max((layer.heads for layer in self.layers), default=1)
        if heads == self.query_heads:
            return "MHA"
        return "MQA" if heads == 1 else f"GQA {self.query_heads // heads}:1"

    def with_attention(self, kind: str) -> Model:
        """The same model with other attention: "MHA", "MQA", or "MLA" (DeepSeek-V3's latents: 512 and 64). To compare
        sizes. Raises ValueError."""
        if kind not in ("MHA", "MQA", "MLA"):
            raise ValueError(f"attention: expected MHA, MQA or MLA, got {kind!r}")
        if kind == "MLA":
            heads, key, value = 1, 512, 64
        else:
            heads, (key, value) = self.query_heads if kind == "MHA" else 1, self.dims
        layers = tuple(replace(x, heads=heads, key_dim=key, value_dim=value) if x.heads else x for x in self.layers)
        return replace(self, layers=layers, latent=kind == "MLA")


@cache
def table() -> dict[str, dict[str, Any]]:
    """Well-known models: {name: {"source": URL, "config": relevant part of config.json, "parameters": if
    `parameters.count` does not support the model}}."""
    return json.loads(Path(__file__).with_name("models.json").read_text())


def names() -> list[str]:
    """Sorted names (texts) that `read` knows."""
    return sorted(table())


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config."""
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), Mapping):
            return {"model_type": config.get("model_type", ""), **config[part]}
    return dict(config)


def _kinds(c: Mapping[str, Any], layers: int) -> list[str]:
    """Type of each layer, derived as in transformers if the config does not list them."""
    window, family = c.get("sliding_window"), str(c.get("model_type", ""))
    full, slide = "full_attention", "sliding_attention"
    shared = c.get("num_kv_shared_layers") or 0
    if shared:  # the last layers attend to K and V of earlier ones
        return [*_kinds({**c, "num_kv_shared_layers": 0}, layers)[: layers - shared], *["dummy"] * shared]
    if c.get("layer_types"):
        return [_NAMED.get(kind, kind) for kind in c["layer_types"]]
    if c.get("hybrid_override_pattern"):
        return [_PATTERN.get(letter, "dummy") for letter in c["hybrid_override_pattern"]]
    if every := c.get("full_attention_interval"):
        return [full if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if c.get("index_topk"):
        return ["indexed_attention"] * layers
    if not window or (family.startswith(("qwen2", "qwen3")) and not c.get("use_sliding_window")):
        return [full] * layers
    if family.startswith("qwen2"):
        return [slide if i >= c.get("max_window_layers", layers) else full for i in range(layers)]
    if family in ("gemma2", "gpt_oss"):
        return [full if (i + 1) % 2 == 0 else slide for i in range(layers)]
    pattern = c.get("sliding_window_pattern") or (6 if family.startswith(("gemma3", "gemma4")) else 0)
    if pattern:
        return [full if (i + 1) % pattern == 0 else slide for i in range(layers)]
    return [slide] * layers


def _dim(c: Mapping[str, Any], query_heads: int) -> int:
    return c.get("head_dim") or c.get("hidden_size", c.get("n_embd", 0)) // query_heads


def _layer(c: Mapping[str, Any], kind: str, query_heads: int) -> Layer:
    if kind not in (*OURS, "indexed_attention"):
        return Layer(kind, 0, 0, 0)
    if c.get("kv_lora_rank"):
        chooses = kind == "indexed_attention"
        indexer, single = c.get("index_head_dim", 0), chooses and (c.get("index_kpool") or 1) == 1
        return Layer(kind, 1, c["kv_lora_rank"], c.get("qk_rope_head_dim", 64), indexer=indexer if chooses else 0,
                     topk=c.get("index_topk", 0) if single else 0)  # fmt: skip
    if kind == "full_attention" and c.get("global_head_dim"):  # Gemma 4; K as V is stored twice, after RoPE and before
        heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
        return Layer(kind, heads or c["num_key_value_heads"], *(c["global_head_dim"],) * 2)
    dim = _dim(c, query_heads)
    heads = 1 if c.get("multi_query") else c.get("num_key_value_heads") or c.get("num_kv_heads") or query_heads
    return Layer(kind, heads, dim, dim, int(c.get("sliding_window") or 0) if kind in _SLIDING else 0)


def from_config(config: Mapping[str, Any], name: str = "", source: str = "") -> Model:
    """The Model for a config.json as a dict. Raises ValueError if it does not describe attention."""
    c = _text(config)
    count = c.get("num_hidden_layers") or c.get("n_layer") or c.get("num_layers")
    count = count or len(c.get("hybrid_override_pattern") or "")
    query_heads = c.get("num_attention_heads") or c.get("n_head")
    if not count or not query_heads or not (c.get("head_dim") or c.get("hidden_size") or c.get("n_embd")):
        raise ValueError(
            f"config: expected num_hidden_layers, num_attention_heads and head_dim or hidden_size, got {sorted(c)[:12]}"
        )
    kinds = _kinds(c, count)
    dims = (_dim(c, query_heads),) * 2
    if c.get("kv_lora_rank"):
        dims = c.get("qk_nope_head_dim", 128) + c.get("qk_rope_head_dim", 64), c.get("v_head_dim", 128)
    family = str(c.get("model_type", ""))
    dtype = str(c.get("dtype") or c.get("torch_dtype")).removeprefix("torch.")
    return Model(
        name or str(config.get("_name_or_path") or family or "model"),
        tuple(_layer(c, kind, query_heads) for kind in kinds),
        query_heads,
        dims,
        c.get("max_position_embeddings") or c.get("n_positions"),
        parameters.count({**c, "tie_word_embeddings": config.get("tie_word_embeddings", c.get("tie_word_embeddings"))}),
        4 if dtype == "float32" else 2,
        family.startswith("qwen2") or bool(c.get("attention_bias") or c.get("qkv_bias")),
        bool(c.get("kv_lora_rank")),
        source,
    )


def read(config: Any) -> Model:
    """A `Model` (layers, heads, dims in elements) from a name in the table ("llama-3-70b"), a config.json or its
    folder, a dict, a transformers config or model, or a Model.

    Raises ValueError for an unknown name (with similar names) or an invalid file.
    """
    if isinstance(config, Model):
        return config
    if isinstance(config, Mapping):
        return from_config(config)
    if hasattr(config, "config") and hasattr(config.config, "to_dict"):
        config = config.config
    if hasattr(config, "to_dict"):
        return from_config(config.to_dict())
    text = str(config)
    known = table().get(text.lower().rsplit("/", 1)[-1])
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"config: expected JSON in {str(path)!r}: {error}") from None
        return from_config(
            found if isinstance(found, dict) else {},
            path.parent.name if path.name == "config.json" else path.stem,
            str(path),
        )
    if known:
        model = from_config(known["config"], text.lower().rsplit("/", 1)[-1], known["source"])
        return replace(model, parameters=known.get("parameters", model.parameters))
    raise ValueError(
        f"config: expected a config.json, its folder, or one of {', '.join(names())}, got {text!r}; "
        "for another model, download its config.json and pass its path"
    )
