"""Modules and operations with numbers that alone make one tensor of another, each of what the one before returned.

An operation is written behind a colon as its name and its numbers, as ``:mul:0.5``; logits are scaled and capped so.
``:select:1:0`` is what lies at place 0 of dim 1: a classifier reads the one token for the whole image.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{"mul": torch.mul, "div": torch.div, "tanh": torch.tanh},
        "select": lambda tensor, dim, place: tensor.select(int(dim), int(place)),
    }
)
_SPELLED = {"mul": "mul", "__mul__": "mul", "__rmul__": "mul", "div": "div", "__truediv__": "div", "tanh": "tanh"}


def called_at(model: nn.Module, step: str) -> Callable[[Tensor], Tensor]:
    """The module at a path of a model, or an operation with its number."""
    path, *operation = step.split(":")
    if not operation:
        return model.get_submodule(path)
    name, *numbers = operation
    return lambda tensor: _OPERATIONS[name](tensor, *map(float, numbers))


class _Call(NamedTuple):
    step: str
    given: Tensor
    returned: Tensor
    version: int
    """How often what it returned had been written to."""


class CalledModules:
    """Within it, it remembers the calls of a model's modules, and of operations, that make one tensor of one alone."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._calls: list[_Call] = []

    def __enter__(self) -> Self:
        self._operations = _Watched(self._calls)
        self._operations.__enter__()
        self._handles = [each.register_forward_hook(self._remember, with_kwargs=True) for each in self._paths]
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self._operations.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()

    def _remember(self, module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any], returned: Any) -> None:
        if len(places) == 1 and not names and isinstance(places[0], Tensor) and isinstance(returned, Tensor):
            self._calls.append(_Call(self._paths[module], places[0], returned, returned._version))

    def between(self, first: Tensor, last: Tensor) -> tuple[str, ...]:
        """The steps (see `called_at`) that make ``last`` of ``first``; none where more is done than that."""
        found: list[_Call] = []
        now, version = first, first._version
        while not (_is(now, last) and last._version == version):
            readers = [call for call in self._calls if _is(call.given, now) and call not in found]
            if not readers:
                return ()
            outermost = min(readers, key=lambda call: call.step.count("."))
            found.append(outermost)
            now, version = outermost.returned, outermost.version
        return tuple(call.step for call in found)


class _Watched(TorchFunctionMode):
    """Adds the operations that make a tensor of one and a number to the calls."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = function(*args, **(kwargs or {}))
        spelled = getattr(function, "__name__", "")
        if not kwargs and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            name, numbers = _selected(args[1]) if spelled == "__getitem__" else (_SPELLED.get(spelled, ""), args[1:])
            if name and all(isinstance(each, int | float) for each in numbers):
                step = ":".join(("", name, *(repr(float(each)) for each in numbers)))
                self._calls.append(_Call(step, args[0], returned, returned._version))
        return returned


def _selected(index: Any) -> tuple[str, tuple[Any, ...]]:
    """The operation with its numbers that an index is which takes one place of one dim; no operation for another."""
    entries = index if isinstance(index, tuple) else (index,)
    dims = [dim for dim, each in enumerate(entries) if type(each) is int]
    is_one = len(dims) == 1 and all(type(each) is int or _is_all(each) for each in entries)
    return ("select", (dims[0], entries[dims[0]])) if is_one else ("", ())


def _is_all(entry: object) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or views of all of it."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    )
