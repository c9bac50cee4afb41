"""Tensors without values that stand for what depends on parameters which are not there.

A blank says that it is on a device and has nothing in memory; an operation that is given one computes nothing and
returns one. So what does not depend on parameters is computed as ever, and what does can never pass for a value: where
it would be needed, there is an error and no wrong result.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from steelyard.errors import InvalidModelError

HINT = "docs/your-own-model.md says what a module must be like"
META = torch.device("meta")
FILLED = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
"""Operations that read of a tensor its shape and type alone."""


class Blank(Tensor):
    """A tensor without values; ``meta`` has its shape and type."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "Blank":
        """Makes one like a tensor on the meta device."""
        options = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        found = Tensor._make_wrapper_subclass(cls, meta.shape, **options, device=device, requires_grad=False)
        found.meta = meta
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes nothing."""
        return _of_blanks(func, args, kwargs or {})


class Blanks(TorchDispatchMode):
    """Within it operations on blanks are seen by no mode that counts or keeps what is computed."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Blank) for each in pytree.tree_leaves((args, kwargs))):
            return _of_blanks(func, args, kwargs)
        return func(*args, **kwargs)


def blank_of(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Blank:
    """A blank of a shape and a type."""
    with _disable_current_modes():
        return Blank(torch.empty(tuple(shape), dtype=dtype, device=META), device)


def _of_blanks(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    (first, *_) = (each for each in given if isinstance(each, Blank))
    name = func._schema.name.partition("::")[2]
    if name in FILLED and isinstance(args[0], Blank):
        like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
        return func(like, *args[1:], **kwargs)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor) and not isinstance(value, Blank):
            raise InvalidModelError(
                field="forward",
                found=f"{func}, which writes what depends on parameters into a tensor of shape {list(value.shape)}",
                expected="new tensors, outside the blocks",
                hint=HINT,
            )
    device = kwargs.get("device") or first.device
    with _disable_current_modes():
        places, names = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        found = func(*places, **(names | ({"device": META} if "device" in kwargs else {})))
        known = {id(each.meta): each for each in given if isinstance(each, Blank)}
        return pytree.tree_map_only(
            Tensor, lambda each: known[id(each)] if id(each) in known else Blank(each, device), found
        )


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Blank):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
