"""Modules that alone make one tensor of another: each is called with nothing but what the one before returned."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import Tensor, nn


class _Call(NamedTuple):
    path: str
    given: Tensor
    returned: Tensor
    version: int
    """How often what it returned had been written to."""


class CalledModules:
    """Within it, it remembers the calls of a model's modules with one tensor alone, which return one."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._calls: list[_Call] = []

    def __enter__(self) -> Self:
        self._handles = [each.register_forward_hook(self._remember, with_kwargs=True) for each in self._paths]
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _remember(self, module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any], returned: Any) -> None:
        if len(places) == 1 and not names and isinstance(places[0], Tensor) and isinstance(returned, Tensor):
            self._calls.append(_Call(self._paths[module], places[0], returned, returned._version))

    def between(self, first: Tensor, last: Tensor) -> tuple[str, ...]:
        """The paths of the modules that make ``last`` of ``first``; none where more is done than that."""
        found: list[_Call] = []
        now, version = first, first._version
        while not (_is(now, last) and last._version == version):
            readers = [call for call in self._calls if _is(call.given, now) and call not in found]
            if not readers:
                return ()
            outermost = min(readers, key=lambda call: call.path.count("."))
            found.append(outermost)
            now, version = outermost.returned, outermost.version
        return tuple(call.path for call in found)


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or views of all of it."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    )
