"""A chain of modules and scalar operations, each of which maps the previous result to the next tensor.

An operation is written as its name and numbers after a colon: logits are scaled and capped by steps such as
``:mul:0.5``. ``:select:1:0`` selects index 0 of dim 1: a classifier reads one token for the whole image.
``:positions:PATH`` adds the output of the module at a path for the positions of the tokens.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from steelyard.model.family import Context
from steelyard.modules.known_values import values_of

_OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{"mul": torch.mul, "div": torch.div, "tanh": torch.tanh},
        "select": lambda tensor, dim, place: tensor.select(int(dim), int(place)),
    }
)
_SPELLED = {"mul": "mul", "__mul__": "mul", "__rmul__": "mul", "div": "div", "__truediv__": "div", "tanh": "tanh"}
_ATTENTION = functional.scaled_dot_product_attention.__name__
_ADDED = ("add", "__add__", "__radd__", "__iadd__")
POSITIONS = ":positions:"
"""Prefix of a step that adds the output of a module for positions."""


def called_at(model: nn.Module, step: str) -> Callable[[Tensor, Context], Tensor]:
    """Return a step as a function of a tensor and the context of a forward pass; a copy of it copies its module."""
    path, *operation = step.split(":")
    if not operation:
        return partial(_of_tensor, model.get_submodule(path))
    if step.startswith(POSITIONS):
        return partial(_with_positions, model.get_submodule(operation[1]))
    name, *numbers = operation
    return partial(_of_numbers, _OPERATIONS[name], [float(each) for each in numbers])


def _of_tensor(module: nn.Module, tensor: Tensor, _context: Context) -> Tensor:
    return module(tensor)


def _with_positions(table: nn.Module, tensor: Tensor, context: Context) -> Tensor:
    return tensor + table(context.side.position_ids)


def _of_numbers(operation: Callable[..., Tensor], numbers: list[float], tensor: Tensor, _context: Context) -> Tensor:
    return operation(tensor, *numbers)


class _Call(NamedTuple):
    step: str
    given: Tensor
    written: int
    """Number of earlier in-place writes to the input."""
    returned: Tensor
    version: int
    """Number of in-place writes to the output by then."""


class CalledModules:
    """Context manager that records calls of a model's modules, and of operations, that map one tensor to one."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._calls: list[_Call] = []
        self._positions: list[_Call] = []
        self._written: dict[nn.Module, int] = {}
        self._operations = _Watched(self._calls, self._positions)

    @property
    def attention_drops(self) -> bool:
        """Whether an attention kernel with dropout was called."""
        return self._operations.attention_drops

    def __enter__(self) -> Self:
        self._operations.__enter__()
        self._hooks = ExitStack()
        for each in self._paths:
            self._hooks.enter_context(each.register_forward_pre_hook(self._look))
            self._hooks.enter_context(each.register_forward_hook(self._remember, with_kwargs=True))
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self._operations.__exit__(None, None, None)
        self._hooks.close()

    def _look(self, module: nn.Module, places: tuple[Any, ...]) -> None:
        if places and isinstance(places[0], Tensor):
            self._written[module] = places[0]._version

    def _remember(self, module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any], returned: Any) -> None:
        if len(places) == 1 and not names and isinstance(places[0], Tensor) and isinstance(returned, Tensor):
            call = _Call(self._paths[module], places[0], self._written[module], returned, returned._version)
            tensor = places[0]
            are_positions = tensor.ndim == 2 and values_of(tensor) == (1, tensor.shape[1], *range(tensor.shape[1]))
            (self._positions if are_positions else self._calls).append(call)

    def between(self, first: Tensor, last: Tensor) -> tuple[str, ...] | None:
        """Return the steps (see `called_at`) that map ``first`` to ``last``; None if other operations are involved."""
        found: list[_Call] = []
        now, version = first, first._version
        while not (_is(now, last) and last._version == version):
            readers = [call for call in self._calls if _is(call.given, now) and call.written == version]
            readers = [call for call in readers if call not in found]
            if not readers:
                return None
            outermost = min(readers, key=lambda call: call.step.count("."))
            found.append(outermost)
            now, version = outermost.returned, outermost.version
        return tuple(call.step for call in found)


class _Watched(TorchFunctionMode):
    """Mode that records operations of a tensor with a number, and additions of a result for positions."""

    def __init__(self, calls: list[_Call], positions: list[_Call]) -> None:
        super().__init__()
        self._calls, self._positions = calls, positions
        self.attention_drops = False

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        written = [each._version if isinstance(each, Tensor) else 0 for each in args]
        returned = function(*args, **(kwargs or {}))
        spelled = getattr(function, "__name__", "")
        self.attention_drops |= spelled == _ATTENTION and bool((kwargs or {}).get("dropout_p"))
        if spelled in _ADDED and not kwargs and all(isinstance(each, Tensor) for each in args):
            for (tensor, other), before in zip((args, args[::-1]), written, strict=True):
                steps = [POSITIONS + each.step for each in self._positions if _is(each.returned, other)]
                self._calls += [_Call(step, tensor, before, returned, returned._version) for step in steps]
        if not kwargs and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            name, numbers = _selected(args[1]) if spelled == "__getitem__" else (_SPELLED.get(spelled, ""), args[1:])
            if name and all(isinstance(each, int | float) for each in numbers):
                step = ":".join(("", name, *(repr(float(each)) for each in numbers)))
                self._calls.append(_Call(step, args[0], written[0], returned, returned._version))
        return returned


def _selected(index: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the operation and its numbers for an index of one place of one dim; no operation for any other index."""
    entries = index if isinstance(index, tuple) else (index,)
    dims = [dim for dim, each in enumerate(entries) if type(each) is int]
    is_one = len(dims) == 1 and all(
        type(each) is int or (isinstance(each, slice) and each == slice(None)) for each in entries
    )
    return ("select", (dims[0], entries[dims[0]])) if is_one else ("", ())


def _is(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are identical, or views of all of the same storage part."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    )
