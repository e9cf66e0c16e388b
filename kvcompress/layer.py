"""PagedKV: paged and compressed keys and values of one attention layer. Independent of transformers."""

from __future__ import annotations

from typing import Any

import torch

from . import checks, formats, ops, sdpa
from .eviction import tokens
from .eviction.eviction import Eviction
from .layer_store import LayerStore
from .offload import in_place
from .policies import Policy
from .quantization.calibration import Basis
from .quantization.mixed_precision import Spans
from .store import pools
from .store.device_memory import sent
from .store.display_mixin import DisplayMixin, Stats
from .store.page_store import PageStore
from .store.pools import device_of
from .store.sequence import Kept
from .store.window import AttentionWindow

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PagedKV(LayerStore, DisplayMixin):
    """Keys and values of one attention layer in pages. Full pages are sealed, that is compressed to the `key`/`value`
    format; the newest tokens stay raw.

    Shapes: B batch, H KV heads, Hq query heads (a multiple of H), T new tokens, D head dim (Dk, Dv). A *slot*
    is an index in the padded sequence; `seen` counts slots, padding included; padding is never stored.

    Args:
        num_kv_heads: H.
        head_dim: Dk, up to 576; stored zero-padded to a multiple of 16 (of 32 in some formats).
        key: format of sealed K pages, one of `kvcompress.formats.NAMES`.
        value: format of sealed V pages. Default: `key`.
        value_dim: Dv. Default: `head_dim`.
        batch: B.
        dtype: of k, v and raw pages: float32, float16 or bfloat16.
        device: "cpu", or a GPU if the build has CUDA kernels (docs/cuda.md).
        page_size: tokens per page, a multiple of 16.
        sinks: number of first tokens of each row that are never quantized. Default: the policy's; 4 without a policy.
        residual_length: minimum number of newest tokens that stay raw. None: those of the newest page. 0: none; tokens
            are written to sealed pages directly (8-bit formats only).
        spans, span_tokens: formats by position, instead of key and value; see `quantization.mixed_precision.Spans`.
        policy: eviction policy (`kvcompress.policies`), applied after each call. None keeps all tokens.
        layer: (index of this layer, number of layers), for policies that treat layers differently.
        window: size of the sliding window in slots, the query included; 0: full attention. Pages outside of the window
            are freed. `crop` can go back to the start of the last call if that had at most page_size tokens. Excludes
            sinks, spans and policy.
        chunked: chunked attention (Llama 4): queries see their own chunk of `window` tokens (a multiple of page_size)
            instead of a sliding window.
        rope: float64 [Dk / 2], frequencies of the model's RoPE, for policies with positions="cache".
        pool: the `_C.Pool` to allocate pages from, shared between layers. Default: a new one.
        basis: basis to store K and V in (`kvcompress.quantization.calibration`). Attention is unchanged;
            quantization errors become smaller where attention is sensitive to them. `cal2` is designed for it.
        latent: multi-head latent attention (MLA): k is the latent of a token, v the rotary part of its key. `attend`
            takes q with Dk + Dv dims and returns weighted sums of latents (Dk dims). One KV head; CPU only.

    A method that raises (ValueError, TypeError, MemoryError) leaves the layer unchanged.
    """

    op = staticmethod(ops.attend)
    dense_op = staticmethod(sdpa.attend)
    """Attention for long calls on a GPU; `op` then only appends. See `kvcompress.sdpa`."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        key: str = "int8",
        value: str | None = None,
        value_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        page_size: int = 64,
        sinks: int | None = None,
        residual_length: int | None = None,
        spans: Any = None,
        span_tokens: int | None = None,
        policy: Policy | None = None,
        layer: tuple[int, int] = (0, 1),
        window: int = 0,
        chunked: bool = False,
        rope: torch.Tensor | None = None,
        pool: Any = None,
        latent: bool = False,
        basis: Basis | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"PagedKV: dtype: expected torch.float32, float16 or bfloat16, got {dtype}")
        checks.policy(policy)
        device = device_of(device)
        if residual_length is not None:
            residual_length = checks.integer("residual_length", residual_length, 0)
        sinks = (policy.sinks if policy else 0 if window else 4) if sinks is None else sinks
        head_dim = checks.integer("head_dim", head_dim, 1, formats.MAX_DIM)
        store = PageStore(
            checks.integer("num_kv_heads", num_kv_heads, 1), head_dim,
            head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1, formats.MAX_DIM), key=key,
            value=key if value is None else value, batch=checks.integer("batch", batch, 1), dtype=dtype, device=device,
            page_size=checks.integer("page_size", page_size, 1), sinks=checks.integer("sinks", sinks, 0),
            residual_length=residual_length, spans=None if spans is None else Spans(spans, span_tokens),
            ladder=policy.ladder if policy else (), pool=pools.for_pages(device) if pool is None else pool,
            latent=checks.flag("latent", latent), basis=basis,
        )  # fmt: skip
        if policy is not None and (window or chunked):
            raise ValueError(f"PagedKV: expected no policy with a window, got {policy!r}")
        super().__init__(
            store,
            None if policy is None else Eviction(store, policy, *layer, rope),
            AttentionWindow(store, window, chunked) if window or chunked else None,
        )
        self.num_kv_heads, self.head_dim, self.value_dim = store.num_kv_heads, store.head_dim, store.value_dim
        self.key, self.value, self.dtype, self.spans = store.key, store.value, store.dtype, store.spans
        self.page_size, self.sinks = store.page_size, store.sinks

    # ------------------------------------------------------------------ work

    def check_pair(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises unless k [B, H, T, Dk] and v [B, H, T, Dv] can be appended. Does not check for NaN."""
        store = self.page_store
        if store.takes(k, v):
            return
        T = k.shape[2] if isinstance(k, torch.Tensor) and k.dim() == 4 else 0
        rows = (store.table.batch, store.num_kv_heads, T)
        checks.side("k", k, "[B, H, T, Dk]", (*rows, store.head_dim), store.dtype, store.device)
        checks.side("v", v, "[B, H, T, Dv]", (*rows, store.value_dim), store.dtype, store.device)

    def _step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        s_aux: torch.Tensor, window: int, scale: float, softcap: float, return_attention: bool = False,
        quick: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """plan -> op -> commit, then eviction. quick: `table.step` may handle the call; q, scale and softcap are not
        checked yet, since it checks them itself."""
        if self.eviction:
            self.eviction.evict_deferred()
        store = self.page_store
        return_attention |= bool(self.eviction and self.eviction.wants_attention(k.shape[2]))
        other = return_attention or self.offload or (store.spans and not store.seen)  # spans are placed first
        found = store.table.step(q, k, v, scale, window, softcap, store.maps) if quick and not other else None
        result = found and (*found, store.no_attention)
        if result is None:
            if quick:
                scale, _, softcap = self._checked(q, k, scale, 0, softcap)
            width = store.table.longest + k.shape[2] if return_attention else 0
            result = self._step_by_op(q, k, v, mask, s_aux, window, scale, softcap, width)
        if self.eviction:
            self.after_append(q, k.shape[2], mask, result[1], result[2], scale=scale, window=window, softcap=softcap)
        if self.sliding:
            self.sliding.on_appended(k.shape[2], mask)
        return result

    def _step_by_op(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        s_aux: torch.Tensor, window: int, scale: float, softcap: float, width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """plan -> op -> commit through torch's dispatcher; rolls the table back on any error."""
        store = self.page_store
        table, given = store.table, store.as_given
        seen, seals = table.seen, None
        if seen == 0:
            store.place_spans(k.shape[2])
        if not given:
            k, v = store.filled(k, 0), store.filled(v, 1)
        plain = q.shape[2] >= sdpa.LEAST and mask is None and not (s_aux.numel() or softcap or width)
        found = self._attend_dense(q, k, v, window, scale) if plain else None
        try:
            seals, held = store.plan(k.shape[2], mask)
            result = self._attend(
                q[:, :, :0] if found else q if given else store.query(q), k, v,
                store.no_mask if mask is None else sent(mask, store.device), s_aux,
                sent(seals, store.device) if len(seals) else store.no_seals, seen, window, scale, softcap, width,
            )  # fmt: skip
            self.commit(held)
        except BaseException as error:
            # A plan that failed has rolled itself back, and a plan that is open now is another thread's; but Ctrl-C
            # may come right after this thread's plan.
            if seals is not None or not isinstance(error, Exception):
                table.rollback()
            raise
        out = found[0] if found else result[0] if given else store.result(result[0], q.dtype)
        return out, found[1] if found else result[1], result[2]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, s_aux: torch.Tensor,
        seals: torch.Tensor, seen: int, window: int, scale: float, softcap: float, width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The op. Offloaded pages are fetched first, or attended in place."""
        call = (self.op, q, k, v, mask, s_aux, seals, seen, window, scale, softcap, width)
        if not self.offload:
            return self.page_store.attend(*call)
        if self.offload.can_attend_in_place(q.shape[2], k.shape[2], window, width):
            return in_place.attend(self.offload, self.op, q, k, v, mask, s_aux, seals, seen, scale, softcap)
        with self.offload.present():
            return self.page_store.attend(*call)

    def _attend_dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """out and lse of a long call on a GPU, computed by torch's kernels before anything is stored. None if they do
        not support it (queries that do not see all of the past, among others): the op then attends."""
        store = self.page_store
        if (
            store.device.type == "cpu" or self.offload or not store.as_given or store.latent
            or 0 < abs(window) < store.seen + k.shape[2] or not sdpa.suits(q, k, v, scale) or not store.whole()
        ):  # fmt: skip
            return None
        return sdpa.attend_parts(self.dense_op, store.pieces(sdpa.PIECE) if store.seen else (), q, k, v, scale)

    def append(self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Stores k [B, H, T, Dk] and v [B, H, T, Dv] at slots seen .. seen + T - 1.

        mask: bool [B, T], True for tokens, False for padding, which takes a slot but is not stored. None: no padding.
        """
        self.check_pair(k, v)
        mask = checks.own_mask(mask, self.batch, k.shape[2])
        self._step(k[:, :, :0], k, v, mask, self.page_store.no_aux, 0, self.page_store.scale, 0.0)
        self.end_call()

    def append_dense(
        self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`append`, then returns dense K and V of the slots from `start` on, as `attend` would see them in this call:
        the new tokens are exact, the page that the call fills is still raw, padding is zero. With a policy, stored
        tokens are read before the append, while `attend` may seal pages first."""
        self.check_pair(k, v)
        mask = checks.own_mask(mask, self.batch, k.shape[2])
        if mask is not None:
            pads = ~mask[:, None, :, None].to(self.device)
            k, v = k.masked_fill(pads, 0), v.masked_fill(pads, 0)
        base = self.seen
        if base == 0 or self.eviction:
            stored = self.dense() if base else None
            self.append(k, v, mask)
            return (torch.cat([stored[0], k], 2), torch.cat([stored[1], v], 2)) if stored else (k, v)
        # A shorter call cannot both fill a page and push it out of the newest page_size tokens.
        starts = self.page_store.page_starts() if k.shape[2] > self.page_size else []
        before = self.dense(start) if starts else ()
        self._step(k[:, :, :0], k, v, mask, self.page_store.no_aux, 0, self.page_store.scale, 0.0)
        after = self.dense(start)
        for now, old in zip(after, before, strict=False):
            for b, slot in enumerate(starts):
                now[b, :, max(0, slot - start) : base - start] = old[b, :, max(0, slot - start) :]
        after[0][:, :, base - start :], after[1][:, :, base - start :] = k, v
        self.end_call()
        return after

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
        return_attention: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Causal attention over all stored tokens. With k and v, also appends them, in the same call.

        Args:
            q: [B, Hq, T, Dk], queries of the last T slots (those of k and v if given): float32, float16 or bfloat16.
                With `latent`: [B, Hq, T, Dk + Dv].
            k, v: [B, H, T, Dk] and [B, H, T, Dv] to append; q attends to their exact values, before quantization.
            mask: bool [B, T], True for tokens, False for padding (see `append`); only with k and v.
            scale: softmax scale. Default: 1 / sqrt(last dim of q), which is not that of a model with MLA.
            window: sliding window in slots, the query included; 0: the layer's own window, or all.
            softcap: scores become softcap * tanh(score / softcap); 0: off.
            s_aux: float32 [Hq], attention-sink logit of each query head: enters the softmax, adds no value.
            return_attention: also return the attention that each stored token received.

        Returns:
            out [B, Hq, T, Dv] in q's dtype (Dk dims with `latent`), zero for queries that see no token; lse float32
            [B, Hq, T], the natural log of the sum of exp(score), without s_aux, -inf for queries that see no token.
            Both are NaN where q has NaN or Inf, or scores overflow. With `return_attention` also float32 [B, H, N]: for
            each of the N tokens of the longest row, in stored order and the new tokens last, the sum of exp(score -
            lse) over T and the query heads of a group, as H2O accumulates it (Zhang et al. 2023, section 4); 0 after
            the last token of a shorter row, and for tokens cropped from a sealed page or evicted in page-bound formats.
        """
        if k is not None and v is not None:
            self.check_pair(k, v)
        out, *rest = self.attend_checked(q, k, v, mask, scale, window, softcap, s_aux, return_attention)
        return out.transpose(1, 2), *rest

    def attend_checked(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, mask: torch.Tensor | None,
        scale: float | None, window: int = 0, softcap: float = 0.0, s_aux: torch.Tensor | None = None,
        return_attention: bool = False,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """`attend` with k and v that have passed `check_pair`; returns out as [B, T, Hq, Dv]."""
        store, scale = self.page_store, self.page_store.scale if scale is None else scale
        quick = (
            k is not None and v is not None and mask is None and s_aux is None and self.op is ops.attend
            and type(window) is int and 0 <= window < 1 << 31 and store.can_step()
            and not (self.eviction and self.eviction.overdue)  # a wrong call does not even evict
        )  # fmt: skip
        if not quick:
            scale, window, softcap = self._checked(q, k, scale, window, softcap)
        aux = store.no_aux if s_aux is None else checks.aux(s_aux, q.shape[1]).to(store.device)
        if self.sliding:
            window = self.sliding.of_call(window, (q if k is None else k).shape[2], k is not None)
        if k is not None and v is not None:
            own = None if mask is None else checks.own_mask(mask, self.batch, k.shape[2])
            out, *rest = self._step(q, k, v, own, aux, window, scale, softcap, return_attention, quick)
            if self.sliding:
                self.end_call()
            return out, *rest[: 1 + return_attention]
        if k is not None or v is not None or mask is not None:
            raise ValueError("PagedKV: expected k and v together, and mask only with both; got one without the others")
        if q.shape[2] > self.seen:
            raise ValueError(f"PagedKV: q: expected at most {self.seen} queries, one per slot seen, got {q.shape[2]}")
        no_k, no_v = store.empties()
        out, *rest = self._attend(
            store.query(q), no_k, no_v, store.no_mask, aux, store.no_seals, self.seen,
            window, scale, softcap, store.table.longest if return_attention else 0,
        )  # fmt: skip
        return store.result(out, q.dtype), *rest[: 1 + return_attention]

    def _checked(
        self, q: torch.Tensor, k: torch.Tensor | None, scale: Any, window: Any, softcap: Any
    ) -> tuple[float, int, float]:
        """Checks q against the layer and against k, if given; returns (scale, window, softcap)."""
        store = self.page_store
        numbers = checks.attention(q, store.query_dim, store.device, scale, window, softcap)
        if k is not None and q.shape[2] != k.shape[2]:
            raise ValueError(f"PagedKV: q: expected {k.shape[2]} tokens, as in k, got {q.shape[2]}")
        return numbers

    def dense(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded K [B, H, seen - start, Dk] and V [B, H, seen - start, Dv] of the slots from `start` on, in the
        layer's dtype; zero at slots that are not stored (padding, evicted tokens). Always new tensors."""
        start = checks.integer("start", start, 0, self.seen)
        with self.present():
            return self.page_store.dense(start)

    # ------------------------------------------------------------------ what stays

    def observe(self, weights: torch.Tensor) -> None:
        """Adds attention weights [B, Hq, T, seen] (by slot, as eager attention returns them) to the scores of a policy
        that accumulates attention (H2O), for models that compute attention themselves."""
        checks.tensor("weights", weights, "[B, Hq, T, seen]", self.device)
        if self.eviction is None or not self.eviction.policy.needs_attention:
            raise ValueError("observe: expected a layer with a policy that accumulates attention (H2O), got another")
        self.eviction.observe(weights)

    def evict(self, keep: torch.Tensor | None = None) -> None:
        """Evicts now. keep: bool [B, seen], or [B, H, seen] for each head, False at slots to drop; None: as the policy
        decides, for rows over their budget. The first `sinks` tokens of a row must be kept. Empty pages are freed."""
        if keep is None:
            if self.eviction is None:
                raise ValueError("evict: expected `keep`, or a layer with a policy, got neither")
            self.eviction.evict_over_budget()
            return
        evict = self.eviction or self._bare()
        evict.drop(tokens.by_index(self.page_store, keep))
        self.eviction = evict  # from now on it tracks which slots are padding

    def evicted_attention(self) -> torch.Tensor:
        """Experimental: the estimated share of the newest query's attention that evicted tokens would have received,
        float32 [B], mean over heads. Needs `policies.Watch`."""
        if self.eviction is None or self.eviction.evicted is None:
            raise ValueError("evicted_attention: expected a policy in policies.Watch, got none")
        return self.eviction.evicted.evicted_attention()

    def kept_heads(self) -> Kept:
        """Slots, positions and scores of the stored tokens, by row and head, in sequence order."""
        return (self.eviction or self._bare()).kept()

    def _bare(self) -> Eviction:
        """An `Eviction` for `evict(keep)` in a layer without a policy."""
        evict = Eviction.bare(self.page_store, self.sliding.pads if self.sliding else None, self.op)
        evict.offload = self.offload
        return evict

    # ------------------------------------------------------------------ figures

    def stats(self) -> dict[str, Any]:
        """Size and contents of the layer, as a dict.

        seen: slots; kept: stored tokens, summed over rows; bytes: total, with all of the pool's slack, even if the pool
        is shared; bytes_per_token: bytes / kept; ratio: size of all tokens seen, evicted ones included, in the
        layer's dtype / bytes; ratio_kept: the same for stored tokens; rewritten: tokens that evictions rewrote (see
        docs/eviction.md); parts: bytes of sealed, open and sink pages, tables, and slack.
        """
        pool, kept = self.page_store.pool.stats(), self.page_store.kept_tokens
        parts = {**self.page_store.parts(), "slack": pool["resident"] - pool["used"]}
        total, one = sum(parts.values()), self.page_store.token_bytes()
        return Stats(
            seen=self.seen, kept=kept, bytes=total, bytes_per_token=total / kept if kept else 0.0,
            ratio=self.real_tokens() * one / total, ratio_kept=kept * one / total,
            rewritten=self.page_store.table.stats()["rewritten"], parts=parts,
        )  # fmt: skip

    def __repr__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        s = self.stats()
        return (
            f"PagedKV({self.num_kv_heads} heads x {dims}, key={self.key!r}, value={self.value!r}, "
            f"{str(self.dtype).removeprefix('torch.')}, batch {self.batch}, seen {s['seen']}, "
            f"kept {s['kept']}, {s['bytes']:,} bytes)"
        )
