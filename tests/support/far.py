"""An emulated device. Inside `Far()`, tensors on `FAR` are stored in host memory but report another device. Operations
that mix them with host tensors are refused, and reads by the host are explicit copies, which are counted: errors
that a GPU would raise are raised here without one. With KVCOMPRESS_TEST_DEVICE=cuda, FAR is a GPU."""

import torch
from cuda_twin import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FAR = torch.device("meta" if DEVICE == "cpu" else "cuda:0")
_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)  # indices may be on the host
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_WAITS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


class FarTensor(torch.Tensor):
    """`near` is the host tensor with the data."""

    near: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near):
        size = near.shape, near.stride(), near.storage_offset()
        x = torch.Tensor._make_wrapper_subclass(cls, *size, dtype=near.dtype, device=FAR)
        x.near = near
        return x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor on {FAR} outside of Far()")

    def __repr__(self):
        return f"FarTensor({list(self.shape)}, {self.dtype})"


def near(x):
    """The host tensor of a FarTensor; other values unchanged."""
    return x.near if isinstance(x, FarTensor) else x


class Far(TorchDispatchMode):
    """Emulates the device while active. waits: number of host synchronizations: reads, and writes except non_blocking.
    copies: host addresses of data copied to the device."""

    def __init__(self):
        super().__init__()
        self.waits, self.copies = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # not decomposed in inference mode
                return func.decompose(*args, **kwargs)
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        other = next((type(x) for x in leaves if type(x) not in (torch.Tensor, torch.nn.Parameter, FarTensor)), None)
        if other:  # functions of the package may use device tensors internally
            with self:
                return other.__torch_dispatch__(func, types, args, kwargs)
        far = {id(x.near): x for x in leaves if isinstance(x, FarTensor)}
        to = kwargs.get("device")
        moves = func in (_aten._to_copy.default, _aten.copy_.default)
        if not far and to != FAR:
            return func(*args, **kwargs)
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        source = args[0] if args else None
        there = bool(far) if to is None else to == FAR
        if func is _aten.copy_.default:
            there, source = isinstance(args[0], FarTensor), args[1]
        freely = isinstance(source, FarTensor) or kwargs.get("non_blocking") or (len(args) == 3 and args[2] is True)
        self.waits += func in _WAITS or (moves and not (there and freely))
        if moves and there and not isinstance(source, FarTensor):
            self.copies.append(source.data_ptr())
        if not moves:
            host = [leaves[0], *leaves[-1:]][: 1 + (func in _INDEXED[1:])] if func in _INDEXED else leaves
            mixed = [x for x in host if not isinstance(x, FarTensor) and x.dim()]
            if mixed and (far or to == FAR):
                raise RuntimeError(f"{func}: expected all tensors on one device, got {FAR} and {mixed[0].device}")
        args, kwargs = tree_map(near, (args, kwargs))
        if func is _aten.histc.default:  # for integers: supported by CUDA, but not by the host
            args = (args[0].float(), *args[1:])
        result = func(*args, **kwargs)
        if func in _EMPTY:  # as conftest.py initializes pools
            result.fill_(torch.nan if result.dtype.is_floating_point else 255 if result.dtype == torch.uint8 else -1)

        def wrap(x):
            if not isinstance(x, torch.Tensor) or not there:
                return x
            return far.get(id(x)) if id(x) in far else FarTensor(x)

        return tree_map(wrap, result)
