"""What a calibration measures: rows are weighted by the cost of noise in them, and the axes follow from that."""

import copy

import models
import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcompress.hf.backend import observing
from kvcompress.hf.calibrate import _costs, calibrate, second_moments

H, D = 2, 64


def reads(q, k, v, metric):
    """Squared gain from noise in K and in V of token j to output i, float64 [G, i, j]; q [G, T, D]."""
    T = len(k)
    scores = np.where(np.tri(T, dtype=bool), q @ k.T / q.shape[2] ** 0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    off = v[None, None] - (p @ v)[:, :, None]
    page = (np.arange(T) - 4) // 64
    p = p**2 * ((page >= 0) & (page < page[:, None]))
    return p * (off @ metric[:, None] * off).sum(-1), p


def counted(x, cost):
    return (x * (cost + 0.1 * cost.mean())[:, None]).T @ x


def test_what_is_measured():
    """With rows weighted by the cost of noise, the axes are the sorted, grouped generalized eigenvectors: by cost; for
    formats of one width, 5/8 by cost and the rest by variance."""
    model = copy.deepcopy(models.model("llama", head_dim=D))
    found = calibrate(model, models.ids(1, 600), context=300, tokens=600)
    seen = {}

    def note(module, args, kwargs, out):
        x = kwargs["hidden_states"]
        q, k, v = (p(x).unflatten(2, (-1, D)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        for name, y in (("q", q), ("k", k), ("v", v)):
            seen.setdefault((module.layer_idx, name), []).append(y[0].double().detach().numpy())

    hooks = [x.self_attn.register_forward_hook(note, with_kwargs=True) for x in model.model.layers]
    with torch.no_grad():
        for part in models.ids(1, 600).view(2, 1, 300):
            model(part)
    for hook in hooks:
        hook.remove()
    for layer in range(2):
        wo = model.model.layers[layer].self_attn.o_proj.weight.double().detach().numpy()
        for h in range(H):
            o = np.stack([wo[:, (2 * h + g) * D : (2 * h + g + 1) * D] for g in range(2)])
            metric, asked, keys, values_of, of_output = o.transpose(0, 2, 1) @ o, 0, 0, 0, 0
            for q, k, v in zip(*(seen[layer, name] for name in "qkv"), strict=True):
                lost, shares = reads(q[2 * h : 2 * h + 2], k[h], v[h], metric)
                pages = k[h, 4:260].reshape(4, D, D)
                centred = (pages - pages.mean(1, keepdims=True)).reshape(256, D)
                asked += counted(q[2 * h : 2 * h + 2].reshape(-1, D), lost.sum(2).reshape(-1))
                keys += counted(centred, lost.sum((0, 1))[4:260])
                values_of += counted(v[h, 4:260], shares.sum((0, 1))[4:260])
                of_output += (metric * shares.sum((1, 2))[:, None, None]).sum(0)
            bases = found.basis(layer), found.basis(layer, (True, True))
            for name, metric, rows in (("key", asked, keys), ("value", of_output, values_of)):
                n = np.repeat((0, 1, 2), (16, 32, 16))  # three widths
                values = np.sort(np.sqrt(np.linalg.eigvals(rows @ metric).real))[::-1]
                found_of = []
                for b in bases:
                    m, back = (getattr(b, name + x)[h].double().numpy() for x in ("", "_back"))
                    assert np.allclose(m @ back, np.eye(D), atol=1e-3)
                    cost = np.einsum("ij,jk,ik->i", back, metric, back)
                    found_of += [cost, np.einsum("ji,jk,ki->i", m, rows, m)]
                cost, there, even_cost, even = found_of
                # for each width, the variance of the rows is one, and noise in all of them has the same cost
                for i in range(2):
                    assert np.isclose(there[n == i].mean() / there[n == 0].mean(), 1, rtol=1e-2)
                    assert np.allclose(
                        cost[n == i] / cost[0], (values[n == i].mean() / values[:16].mean()) ** 2, rtol=2e-2
                    )
                # codes of one width, which feedback chooses by what noise in each axis costs
                assert np.allclose(even[:48] / even[0], (values[:48] / values[0]) ** 0.75, rtol=2e-2)
                assert np.allclose(even_cost[:48] / even_cost[0], (values[:48] / values[0]) ** 1.25, rtol=2e-2)
                known = getattr(bases[1], f"{name}_costs")[h].double().numpy()
                assert np.allclose(known[:48] / known[0], even_cost[:48] / even_cost[0], rtol=2e-2)
                assert even.mean() * even_cost.mean() < np.trace(rows) * np.trace(metric) / D**2


@pytest.mark.parametrize("given", [{}, {"scaling": 0.3, "softcap": 3.0}, {"s_aux": torch.tensor([1.0, -2.0])}])
def test_costs_are_those_of_the_derivative(given):
    """By autograd: the derivative of each output by each row of K and V, in the metric of the output projection."""
    G, T, dim = 2, 140, 8
    draw = torch.Generator().manual_seed(1)
    q, k, v, w = (torch.randn(*s, generator=draw).double() for s in ((G, T, dim), (T, dim), (T, 6), (G, 5, 6)))
    scale, cap, aux = given.get("scaling", dim**-0.5), given.get("softcap"), given.get("s_aux")

    def attention(keys, values):
        scores = q @ keys.T * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
        more = scores if aux is None else torch.cat([scores, aux.double()[:, None, None].expand(G, T, 1)], 2)
        return torch.einsum("gij,jd,ged->gie", more.softmax(-1)[..., :T], values, w)

    page = (torch.arange(T) - 4).div(64, rounding_mode="floor")
    sealed = (page >= 0) & (page < page[:, None])
    by_k, by_v = (x.square().sum((2, 4)) * sealed for x in torch.func.jacrev(attention, (0, 1))(k, v))  # [G, i, j]
    by_k = by_k / (scale**2 * q.square().sum(2)[..., None])
    own = (w.mT @ w).diagonal(dim1=1, dim2=2).sum(1)
    asked, keys, values = _costs(q[None], k[None, None], v[None, None], w.mT @ w, given)
    assert torch.allclose(values, (by_v / own[:, None, None]).sum(1), rtol=1e-4)
    for got, want in ((asked, by_k.sum(2)), (keys, by_k.sum(1))):
        if cap:  # scores near the softcap hardly change, which is ignored
            assert bool((got >= want * (1 - 1e-4)).all()) and float(got.sum()) < 2 * float(want.sum())
        else:
            assert torch.allclose(got, want, rtol=1e-4)


def test_queries_that_attend_to_sinks_get_small_weights():
    """Sinks are raw, so noise does not affect queries that attend to them; they have a small weight, since later
    queries may differ."""
    dim, T = 16, 4 + 64 * 4
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, T, dim, generator=draw) for heads in (2, 1, 1))
    q[..., 0] = k[..., 0] = 0.0
    k[:, :, 0, 0], q[:, 1] = 300.0, 0.0
    q[:, 1, :, 0] = 3.0
    module = torch.nn.Module()
    module.o_proj = torch.nn.Linear(2 * dim, 8, bias=False)
    found = {"given": {}}
    second_moments(found, module, q, k, v)
    share = found["q"][0, 0, 0] / found["q"][0].trace()
    assert q[0, 1].square().sum() / q.square().sum() > 0.3 and 0 < share < 0.05


def test_models_that_are_measured_at_once_are_told_apart():
    seen, first, second = [], copy.deepcopy(models.model("llama")), models.model("llama")
    with observing(first, lambda *_: seen.append("first")):
        with observing(second, lambda *_: seen.append("second")):
            first(models.ids(1, 3))
        first(models.ids(1, 3))
    assert set(seen) == {"first"}
