"""FAR (far.py) with our kernels: the CUDA sources compiled for the host, or those of a GPU."""

import contextlib
import copy
import functools
from unittest import mock

import torch
from cuda_twin import Twin
from far import FAR, Far, FarTensor, near
from torch.utils._pytree import tree_map

from kvcompress import PagedKV, checks, ops
from kvcompress.hf import backend, latent
from kvcompress.offload.tiers import CopyThread
from kvcompress.store import pools

TENSOR = torch.tensor  # saved: it ignores the mode


def far_op(op):
    """A launcher of the twin as an op of FAR; all tensors are there."""

    def call(*args):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        assert all(isinstance(x, FarTensor) for x in tensors), [x.device for x in tensors]
        result = op(*map(near, args))
        return tree_map(lambda x: x if x is None else FarTensor(x), result)

    return call


@contextlib.contextmanager
def a_device():
    """FAR with our kernels."""
    if FAR.type == "cuda":
        yield Far()  # without counting
        return
    twin, found = Twin(), {"flags": 0}
    with contextlib.ExitStack() as patches:

        def patch(where, name, new):
            patches.enter_context(mock.patch.object(where, name, new))

        for module in (pools, backend, latent):
            patch(module, "usable", lambda device: None)
        for name in ("attend", "attend_step", "attend_varlen", "read", "compact", "pack"):
            host, there = getattr(ops, name), far_op(getattr(twin, name))

            def op(*args, host=host, there=there):
                if not any(isinstance(x, FarTensor) for x in args):
                    return host(*args)
                result = there(*args)
                found["flags"] |= twin.flags
                return result

            patch(ops, name, op)

        def check(device):
            if torch.device(device).type == FAR.type:
                flags, found["flags"] = found["flags"], 0
                ops.raise_found(device, flags)

        patch(ops, "check", check)
        patch(checks, "_DEVICES", (*checks._DEVICES, FAR.type))
        patch(PagedKV, "op", staticmethod(ops.attend))
        patch(torch, "tensor", lambda *data, device=None, **like: TENSOR(*data, **like).to(device or "cpu"))
        with Far() as device:
            yield device


def cross(module, *calls):
    """Moves the module to FAR. The methods `calls` take host tensors, move them there, and return host tensors."""
    for part in module.modules():
        for kind in (part._parameters, part._buffers):
            kind.update({name: x.detach().to(FAR) for name, x in kind.items() if x is not None})

    def at(device, x):
        return tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x)

    def crossing(call):
        @functools.wraps(call)
        def crossed(*args, **options):
            args, options = at(FAR, (args, options))
            return at("cpu", call(*args, **options))

        return crossed

    for name in calls:
        setattr(module, name, crossing(getattr(module, name)))
    return module


def there(m):
    """A copy of the model on FAR, for callers on the host."""
    return cross(copy.deepcopy(m), "generate", "forward")


def spread(m):
    """A copy of the model with odd layers on FAR and the others on the host."""
    made = copy.deepcopy(m)
    for layer in made.get_decoder().layers[1::2]:
        cross(layer, "forward")
    return made


class FarCopyThread(CopyThread):
    """Copies to and from FAR in a thread, in which the device must be registered again."""

    def start(self, job):
        def there():
            with Far():
                return job()

        return super().start(there if FAR.type != "cuda" else job)


@contextlib.contextmanager
def arena_of(store):
    """The bytes of a layer's pages, uint8 [n], readable and writable, on any device."""
    if not store.page_store.mirror:
        yield store.page_store.pool.arena
        return
    there = store.page_store.mirror.arena.reach()
    host = near(there) if FAR.type != "cuda" else there.cpu()
    yield host.numpy()
    if FAR.type == "cuda":
        there.copy_(host)
