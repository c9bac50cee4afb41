"""Modules and operations with a number that alone make one tensor of another, each of what the one before returned.

An operation is written behind a colon as its name and its number, as ``:mul:0.5``; logits are scaled and capped so.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"mul": torch.mul, "div": torch.div, "tanh": torch.tanh}
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
        name = _SPELLED.get(getattr(function, "__name__", ""))
        if name and not kwargs and isinstance(args[0], Tensor) and args[0].is_floating_point():
            tensor, *numbers = args
            if all(isinstance(each, int | float) for each in numbers):
                step = ":".join(("", name, *(repr(float(each)) for each in numbers)))
                self._calls.append(_Call(step, tensor, returned, returned._version))
        return returned


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or views of all of it."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    )
