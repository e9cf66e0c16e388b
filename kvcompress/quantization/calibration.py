"""Calibration: linear maps of K and V for each layer and KV head, measured on a text and stored in a file.

`kvcompress.hf.calibrate` measures them. K and V are mapped before they are stored; q and the output are mapped such
that attention does not change. See docs/formats.md for the effect on formats.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks, files, formats, ops

KIND, VERSION = "kvcompress calibration", "1"
_SHARE, _DAMPING = 0.625, 0.02  # see `Calibration.basis`, `feedback`
_SIDES = ("key", "value")


class Basis(NamedTuple):
    """The maps of one layer, fp32 [H, D, D]: K @ key is stored, and K = stored @ key_back; likewise for V. costs: fp32
    [H, D], the cost of noise in each stored dim, if codes are chosen by it (`feedback`)."""

    key: Tensor
    key_back: Tensor
    value: Tensor
    value_back: Tensor
    key_costs: Tensor = None  # type: ignore[assignment]
    value_costs: Tensor = None  # type: ignore[assignment]

    def to(self, device: torch.device) -> Basis:
        """A copy on `device`."""
        return Basis(*(x if x is None else x.to(device).contiguous() for x in self))


def mapped(x: Tensor, by: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [B, Hq, N, D] with the rows of each group of Hq / H heads multiplied by the matrix of their head in by [H, D,
    D], in float32 even under autocast. Bitwise reproducible on every CPU."""
    if x.device.type == "cpu":
        return ops.map_heads(x if x.stride(3) == 1 else x.contiguous(), by.contiguous(), by.new_empty(0, dtype=dtype))
    with torch.autocast(x.device.type, enabled=False):
        rows = x.float().unflatten(1, (by.shape[0], -1)).transpose(0, 1).flatten(1, 3)
        out = torch.bmm(rows, by).unflatten(1, (x.shape[0], -1, x.shape[2])).transpose(0, 1)
        return out.flatten(1, 2).to(dtype)


@functools.cache
def hadamard(dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal block-diagonal Hadamard matrix, with blocks of the largest power of two that divides `dim`, in the
    order of the core's rotation."""
    block = torch.ones(1, 1, dtype=dtype, device="cpu")
    while len(block) < dim & -dim:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / len(block) ** 0.5] * (dim // len(block)))


def feedback(costs: Tensor, dim: int) -> Tensor:
    """The error feedback by which rotated formats choose codes (`kvc_attend_feedback` in csrc/core/kvc.h), fp32 [H, dim
    + 1, dim]: the factorization L D L^T of the metric diag(costs), costs [H, D], rotated like rows of `dim` dims.
    Damped, since dims of almost no cost would otherwise receive errors beyond the range of codes."""
    rotation = hadamard(dim, torch.float64)
    metric = pad(costs.double().cpu(), (0, dim - costs.shape[1]))
    metric = metric / metric.mean(1, keepdim=True) + _DAMPING
    lower = torch.linalg.cholesky(rotation.mT * metric[:, None] @ rotation)
    diagonal = lower.diagonal(dim1=1, dim2=2)
    weights = (lower / diagonal[:, None]).mT.triu(1)
    return torch.cat([weights, diagonal.square()[:, None]], 1).float().contiguous()


class Calibration:
    """The maps of a model.

    layers: {layer: (key [H, Dk, Dk], value [H, Dv, Dv])}. model: hash of the config. weights: {layer: hash of the
    weights of its attention}. path: its file, or None. deviations: {layer: (key [H, Dk], value [H, Dv])}, standard
    deviations of the mapped dims; without them all formats use the maps unchanged.
    """

    def __init__(
        self, layers: Mapping[int, tuple[Tensor, Tensor]], model: str, weights: Mapping[int, str],
        path: str | os.PathLike[str] | None = None, deviations: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.layers, self.model, self.weights = dict(layers), model, dict(weights)
        self.path, self.deviations = None if path is None else os.fspath(path), dict(deviations or {})
        if not layers:
            raise ValueError(
                f"calibration: {self.path or 'layers'}: expected maps of at least one layer, got none; run "
                "`kvcompress calibrate` again"
            )
        if set(self.layers) != set(self.weights):
            raise ValueError(f"calibration: expected weights of layers {sorted(layers)}, got of {sorted(weights)}")
        for index in self.deviations.keys() & self.layers.keys():
            for side, x, by in zip(_SIDES, self.layers[index], self.deviations[index], strict=True):
                _check_deviations(index, side, x, by)
        self._bases = {
            index: Basis(*(x for side in zip(_SIDES, pair, strict=True) for x in _pair(index, *side)))
            for index, pair in self.layers.items()
        }

    @classmethod
    def of(cls, given: Any) -> Calibration:
        """`given`, a Calibration, or the one loaded from the path `given`."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise TypeError(f"calibration: expected a path or a Calibration, got {type(given).__name__}")
        return cls.load(given)

    def basis(self, layer: int, even: tuple[bool, bool] = (False, False)) -> Basis | None:
        """The basis of a layer, or None if it was not measured. even: whether the formats of K, of V use the same bits
        for every dim. For those, dims are scaled by deviation^-_SHARE, and the format rotates them (1 would be best for
        `feedback`, 1/2 without). For others, dims of equal width are mixed, so that no code sees an unusual
        distribution alone, and scaled to variance one."""
        found = self._bases.get(layer)
        if found is None or layer not in self.deviations:
            return found
        parts = list(found)
        for side, deviation in enumerate(self.deviations[layer]):
            if even[side]:
                more = deviation ** (_SHARE - 0.5)
                parts[2 * side] = found[2 * side] / more[:, None]
                parts[2 * side + 1] = found[2 * side + 1] * more[:, :, None]
                parts[4 + side] = deviation ** (2 * _SHARE)
            else:
                mixing, blocks = _mixing_matrix(deviation.shape[1])
                root = (deviation @ (blocks / blocks.sum(0)) @ blocks.T).sqrt()
                parts[2 * side] = found[2 * side] @ mixing / root[:, None]
                parts[2 * side + 1] = mixing.T @ found[2 * side + 1] * root[:, :, None]
        return Basis(*parts)

    def __deepcopy__(self, memo: Any) -> Calibration:
        return self  # immutable

    def digest(self) -> str:
        """SHA-256 of its contents."""
        digest = hashlib.sha256(self._about()["layers"].encode() + self.model.encode())
        if self.deviations:
            digest.update(str(_SHARE).encode())  # the basis of pages in saved caches depends on it
        for index in sorted(self.layers):
            for x in (*self.layers[index], *self.deviations.get(index, ())):
                digest.update(str(list(x.shape)).encode() + x.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _about(self) -> dict[str, str]:
        return {
            "kind": KIND,
            "version": VERSION,
            "model": self.model,
            "layers": json.dumps(self.weights, sort_keys=True),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        from safetensors.torch import save

        both = {"": self.layers, ".deviation": self.deviations}
        parts = {
            f"{i}.{side}{name}": x.contiguous() for name, of in both.items() for i in of
            for side, x in zip(_SIDES, of[i], strict=True)
        }  # fmt: skip
        with files.replacing(checks.path("Calibration: save", path)) as file:
            file.write(save(parts, self._about()))
        self.path = os.fspath(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Loads a file that `save` wrote. Raises OSError if it cannot be read, ValueError if it is invalid."""

        def refuse(got: str) -> ValueError:
            return ValueError(
                f"calibration: {os.fspath(path)}: expected a file that `kvcompress calibrate` wrote, got {got}"
            )

        with files.safetensors(checks.path("Calibration: load", path), refuse) as file:
            about = file.metadata() or {}
            if about.get("kind") != KIND or about.get("version") != VERSION:
                raise refuse(f"a {about.get('kind') or 'file of another kind'}, version {about.get('version')}")
            try:
                weights = {int(i): str(x) for i, x in json.loads(about["layers"]).items()}
                layers = {i: tuple(file.get_tensor(f"{i}.{side}").clone() for side in _SIDES) for i in weights}
                there = set(file.keys())
                by = {i: tuple(file.get_tensor(f"{i}.{side}.deviation").clone() for side in _SIDES) for i in weights
                      if f"{i}.key.deviation" in there}  # fmt: skip
                model = about["model"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise refuse(f"a damaged file ({error})") from None
        return cls(layers, model, weights, path, by)  # type: ignore[arg-type]


def _mixing_matrix(D: int) -> tuple[Tensor, Tensor]:
    """An orthonormal [D, D] that mixes dims of equal width: Hadamard transforms of the largest power of two in the
    first quarter of D, the next half, and the last quarter; and the block of each dim, [D, blocks]."""
    parts = [n for n in (D // 4, D // 2, D - D // 4 - D // 2) if n]
    sizes = [n & -n for n in parts for _ in range(n // (n & -n))]
    return torch.block_diag(*map(hadamard, parts)), torch.block_diag(*[torch.ones(n, 1) for n in sizes])


def _check_deviations(index: int, side: str, x: Tensor, by: Tensor) -> None:
    if by.dtype != torch.float32 or by.shape != x.shape[:2] or not bool((by > 0).all() and by.isfinite().all()):
        raise ValueError(f"calibration: layer {index}: {side}: expected deviations above 0, float32 "
                         f"{list(x.shape[:2])}, got others, {by.dtype} {list(by.shape)}; calibrate again")  # fmt: skip


def _pair(index: int, side: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """A map and its inverse."""
    what = f"calibration: layer {index}: {side}"
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[1] != x.shape[2] or not x.numel():
        raise ValueError(f"{what}: expected float32 [H, D, D], got {x.dtype} {list(x.shape)}")
    if x.shape[1] > formats.MAX_DIM:
        raise ValueError(f"{what}: expected heads of at most {formats.MAX_DIM} dims, got {x.shape[1]}")
    back, info = torch.linalg.inv_ex(x.double())
    off = (x @ back.float() - torch.eye(x.shape[1], device=x.device)).abs().amax()  # in the dtype of their use
    if bool(info.any()) or not float(off) < 1e-3:
        raise ValueError(f"{what}: expected maps that are invertible in float32, got others; calibrate again")
    return x, back.float()
