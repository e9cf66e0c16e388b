"""Small models derived from the shipped Llama that differ in properties relevant to formats (`train.py --init`): K
biases, latents, other heads, attention sinks. These are initial weights; all of them are then trained."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from kvcompress.hf.calibrate import measured


def give_bias(model: torch.nn.Module, size: float, seed: int) -> None:
    """K biases as large as in Qwen2 (|bias| many times the rest of K), in pairs of dims that RoPE rotates slowly.
    Unlike outliers of weights, this changes the function of the model, so training continues from there."""
    r = random.Random(seed)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        torch.nn.init.zeros_(bias)
        for head in bias.data.view(model.config.num_key_value_heads, 2, -1):
            for pair in r.sample(range(22, 32), 4):
                angle = r.uniform(0, 2 * math.pi)
                head[:, pair] = size * r.uniform(0.5, 1.0) * torch.tensor([math.cos(angle), math.sin(angle)])


@torch.no_grad()
def to_latents(model: torch.nn.Module, source: torch.nn.Module, ids: torch.Tensor) -> None:
    """Initial weights of a latent model from a Llama of the same size (as in TransMLA, arXiv 2502.07864). The slower
    half of each head's 32 pairs of dims loses its rotation. Together with V of both KV heads, 192 dims in total, it
    is projected to 128 principal components (the latents), computed on the text `ids` [1, T]. Each KV head
    contributes every other faster pair to the rotary part that all heads share."""
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
        size = (x @ both.T).std(0, keepdim=True).T  # weight K and V equally
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


@torch.no_grad()
def to_heads(model: torch.nn.Module, source: torch.nn.Module) -> None:
    """Initial weights of a Llama with other heads from one of the same size. A head with twice the dims consists of
    two KV heads, one on even and one on odd pairs (whose RoPE is slightly slower than before); each query head uses
    its own half at first. Fewer KV heads of the same dims are means of the old ones (arXiv 2305.13245). Additional
    query heads are copies with small differences, and share a part of the output."""
    new, old = model.config, source.config
    state = {name: w for name, w in source.state_dict().items() if "self_attn" not in name}
    model.load_state_dict(state, strict=False)
    d, D, times = old.head_dim, new.head_dim, new.num_attention_heads // old.num_attention_heads
    join = old.num_key_value_heads // new.num_key_value_heads
    if D not in (d, join * d) or times * old.num_attention_heads != new.num_attention_heads:
        raise ValueError(f"--init: expected multiples of {old.num_attention_heads} query heads, of {d} or {join * d} "
                         f"dims, got {new.num_attention_heads} of {D}")  # fmt: skip
    group = old.num_attention_heads // old.num_key_value_heads
    owner = torch.arange(old.num_attention_heads) // group % join  # the half that a query head uses
    for a, b in zip(model.model.layers, source.model.layers, strict=True):
        a, b = a.self_attn, b.self_attn
        q, k, v = (w.weight.unflatten(0, (-1, d)) for w in (b.q_proj, b.k_proj, b.v_proj))
        o = b.o_proj.weight.unflatten(1, (-1, d)).transpose(0, 1)  # [heads, hidden, d]
        k, v = (x.unflatten(0, (-1, join)) for x in (k, v))
        if d == D:
            k, v = k.mean(1), v.mean(1)
        else:
            k = k.unflatten(2, (2, d // 2)).permute(0, 2, 3, 1, 4).flatten(1, 3)  # pair i of half h: i * join + h
            v = v.flatten(1, 2)
            wide_q, wide_o = q.new_zeros(len(q), 2, d // 2, join, q.shape[2]), o.new_zeros(len(o), o.shape[1], join, d)
            for head, half in enumerate(owner.tolist()):
                wide_q[head, :, :, half] = q[head].unflatten(0, (2, d // 2)) * (D / d) ** 0.5
                wide_o[head, :, half] = o[head]
            q, o = wide_q.flatten(1, 3), wide_o.flatten(2)
        q, o = q.repeat_interleave(times, 0), o.repeat_interleave(times, 0) / times
        if times > 1:
            q, o = (x + 0.1 * x.std() * torch.randn_like(x) for x in (q, o))
        a.q_proj.weight.copy_(q.flatten(0, 1))
        a.k_proj.weight.copy_(k.flatten(0, 1))
        a.v_proj.weight.copy_(v.flatten(0, 1))
        a.o_proj.weight.copy_(o.transpose(0, 1).flatten(1))


@torch.no_grad()
def give_sinks(model: torch.nn.Module, ids: torch.Tensor, size: float) -> None:
    """Attention sinks as in large models (arXiv 2309.17453, 2402.17762). The first token has `size` times the values
    of others in one channel of the residual stream, so that its normalized row is just that channel: K maps it to a
    key with four times the norm of others, in pairs of dims that RoPE rotates slowly, V to zero. Another channel,
    equal in all other tokens, makes queries attend to it with half of their attention, and doubles the output. This
    changes the model, so training continues from there. ids [1, T]: a text to measure scores on."""
    config, weights = model.config, model.model.embed_tokens.weight
    first, rest = weights.std(0).argsort()[:2].tolist()
    usual, D = float(weights.std()), config.head_dim
    weights[:, [first, rest]] = 0.0
    weights[:, rest] = 5 * usual  # the first token's row does not grow through the layers, others grow a hundredfold
    weights[config.bos_token_id] *= 0.1
    weights[config.bos_token_id, first], weights[config.bos_token_id, rest] = size * usual, 0.0
    model.model.norm.weight[[first, rest]] = 0.0  # nothing is predicted from them
    for layer in model.model.layers:
        own = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj,
               layer.mlp.up_proj)  # fmt: skip
        for linear in own:
            linear.weight[:, [first, rest]] = 0.0
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[[first, rest]] = 0.0
        layer.input_layernorm.weight[[first, rest]] = 1.0
    slow = torch.cat([torch.arange(7 * D // 16, D // 2), torch.arange(15 * D // 16, D)])
    for i, layer in enumerate(model.model.layers):  # each layer on the result of those before it
        inputs: list[torch.Tensor] = []
        hook = layer.input_layernorm.register_forward_hook(lambda _, __, out, inputs=inputs: inputs.append(out[0]))
        found = measured(model, ids, _sums, context=ids.shape[1], tokens=ids.shape[1])[i]
        hook.remove()
        attention, length = layer.self_attn, 4 * found["length"]
        along = torch.zeros(config.num_key_value_heads, D)
        along[:, slow] = torch.linalg.eigh(found["queries"][:, slow][:, :, slow])[1][:, :, 0]  # where they are least
        attention.k_proj.weight[:, first] = (along * length[:, None] / config.hidden_size**0.5).flatten()
        group = len(found["sum"]) // len(length)
        looks = found["sum"] * D**0.5 / length.repeat_interleave(group) / inputs[0][1:, rest].mean()
        attention.q_proj.weight[:, rest] = (along.repeat_interleave(group, 0) * looks[:, None]).flatten()
        attention.o_proj.weight *= 2.0


def _sums(found: dict[str, Any], module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """For a call: log-sum-exp of a head's scores, norms of its keys, moments of its queries."""
    rows = q[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2)
    found["queries"] = rows.mT @ rows
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    later = torch.ones(scores.shape[2:]).triu(1).bool()
    found["sum"] = scores.masked_fill(later, float("-inf"))[0, :, q.shape[2] // 2 :].logsumexp(-1).mean(-1)
    found["length"] = k[0, :, 1:].norm(dim=-1).mean(-1)
