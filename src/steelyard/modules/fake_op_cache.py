"""Cache of the results of operations on fake tensors, so that PyTorch need not derive their shapes again.

The result of an operation on fake tensors depends on the operation, on the metadata of its tensors (shape, strides,
offset, type, size of the storage) and on its other arguments. Layers, remat choices and directions repeat the same few
hundred operations, and PyTorch's shape rules take most of the time of a trace.

A result is a new tensor, an argument itself, or a view of an argument. Results are rebuilt like those of
`FakeTensorMode`'s own cache, but with a cheaper key and together with the caller's count.

Not cached: operations without a fake tensor among their arguments, those whose result depends on values, those that
change the metadata of an argument, and results whose storage is neither new nor that of exactly one argument.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Self, TypeVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

Note = TypeVar("Note")
"""Caller's record of an operation, kept with its result."""

Look = tuple[Hashable, list[FakeTensor]]
"""Key of a call, equal for calls with equal results, and the tensors among its arguments."""

_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
_UNTOLD = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
"""Tags of operations whose result does not follow from the metadata of their arguments."""
_CPU = torch.device("cpu")
_VALUE = torch.ops.aten._local_scalar_dense.default
_DEVICE_QUERY = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class _Same:
    """Result that is the argument itself."""

    argument: int


@dataclass(frozen=True, slots=True)
class _Made:
    """Result that is a tensor on a new storage, or on the storage of an argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    view_of: int | None


_Result = _Same | _Made | None


@dataclass(frozen=True, slots=True)
class CachedOp(Generic[Note]):
    """Result of an operation, in a form that can be rebuilt, and the caller's note of it."""

    results: tuple[_Result, ...]
    container: type[list[Any]] | type[tuple[Any, ...]] | None
    note: Note

    def again(self, tensors: list[FakeTensor]) -> Any:
        """Rebuild the results for these tensors, which have the look of those of the first call."""
        made = [_make(result, tensors) for result in self.results]
        return made[0] if self.container is None else self.container(made)


@dataclass(slots=True)
class FakeOpCache(Generic[Note]):
    """Cached operations, under any number of fake modes."""

    _found: dict[Hashable, CachedOp[Note]] = field(default_factory=dict)

    def find(self, key: Hashable) -> CachedOp[Note] | None:
        """Return the cached result of a call by key; None if there was no such call."""
        return self._found.get(key)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], note: Callable[[Any], Note]
    ) -> tuple[Any, Note]:
        """Return the result of a call, run only if it is not cached, and the note of the result.

        Conditions on random draws (whether adapters of some kinds compute at all) are true.
        """
        if func is _VALUE and type(args[0]) is FakeTensor and args[0].dtype is torch.bool:
            return True, note(True)
        looks = look(func, args, kwargs)
        if looks is None:
            out = func(*args, **kwargs)
            return out, note(out)
        seen = self.find(looks[0])
        if seen is not None:
            return seen.again(looks[1]), seen.note
        with disable_fake_tensor_cache(looks[1][0].fake_mode):  # once remembered is enough
            out = func(*args, **kwargs)
        found = note(out)
        self.remember(looks, (func, args, kwargs), out, found)
        return out, found

    def remember(self, looks: Look, call: tuple[Any, ...], out: Any, note: Note) -> None:
        """Cache the result of a call (operation, arguments, named arguments) if it follows from the call's `look`."""
        key, tensors = looks
        after = look(*call)
        if after is None or after[0] != key:
            return
        container = type(out) if type(out) in (list, tuple) else None
        outs = (out,) if container is None else tuple(out)
        try:
            results = tuple(_describe(each, tensors) for each in outs)
        except _NotPlainError:
            return
        is_new = [isinstance(result, _Made) and result.view_of is None for result in results]
        storages = {each.untyped_storage()._cdata for each, new in zip(outs, is_new, strict=True) if new}
        if len(storages) == sum(is_new):
            self._found[key] = CachedOp(results=results, container=container, note=note)


class FakeOpMode(TorchDispatchMode):
    """Dispatch mode that counts operations on the local tensors of one rank, which DTensors and quantized states unfold
    into.

    Operations that DTensor runs on whole tensors without memory to derive the shape of a result are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_learning = False
        """Whether such an uncounted operation is running."""
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        learn = ShardingPropagator._propagate_tensor_meta_non_cached

        def uncounted(*arguments: Any) -> Any:
            self.is_learning = True
            try:
                return learn(*arguments)
            finally:
                self.is_learning = False

        self._patches.enter_context(mock.patch.object(ShardingPropagator, learn.__name__, uncounted))
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._patches.close()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operation unless it has parts; return the device of a fake tensor without counting."""
        if func is _DEVICE_QUERY and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # which half of all calls ask for
        if any(map(has_parts, types)):
            return NotImplemented
        return self.count(func, args, kwargs or {})

    @abstractmethod
    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and count it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and each call of a wrapped `__torch_dispatch__` takes longer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that a compiled block is seen as its kernels."""
        return True


def has_parts(tensor_type: type[torch.Tensor]) -> bool:
    """Return whether tensors of a type consist of others, on which their operations run."""
    return hasattr(tensor_type, "__tensor_flatten__") and not issubclass(tensor_type, AsyncCollectiveTensor)


def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Look | None:
    """Return the `Look` of a call; None if the result does not follow from it."""
    if not _UNTOLD.isdisjoint(func.tags):
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    tensors: list[FakeTensor] = []
    known = _look_at(args, key, tensors)
    if known and kwargs:
        key.append(tuple(kwargs))
        known = _look_at(kwargs.values(), key, tensors)
    return (tuple(key), tensors) if known and tensors else None


def _look_at(arguments: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add the metadata of the arguments to ``key``; return whether the result follows from it."""
    for argument in arguments:
        cls = type(argument)
        if cls is FakeTensor:
            if not _is_plain(argument):
                return False
            tensors.append(argument)
            key += (
                argument.shape,
                argument.stride(),
                argument.storage_offset(),
                argument.dtype,
                argument.untyped_storage().nbytes(),
            )
        elif cls in _PLAIN:
            key += (cls, argument)
        elif cls is list or cls is tuple:
            key += (cls, len(argument))
            if not _look_at(argument, key, tensors):
                return False
        else:
            return False
    return True


class _NotPlainError(Exception):
    """A result that cannot be rebuilt from a description."""


def _is_plain(tensor: FakeTensor) -> bool:
    return (
        tensor.constant is None
        and tensor.fake_device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _describe(out: Any, tensors: list[FakeTensor]) -> _Result:
    """Return a description from which a result can be rebuilt, given the tensors among the arguments."""
    if out is None:
        return None
    if type(out) is not FakeTensor or not _is_plain(out):
        raise _NotPlainError
    same = [place for place, tensor in enumerate(tensors) if tensor is out]
    if len(same) == 1:
        return _Same(same[0])
    storage = out.untyped_storage()
    sharing = [place for place, each in enumerate(tensors) if each.untyped_storage()._cdata == storage._cdata]
    made = _Made(
        shape=tuple(out.shape),
        strides=out.stride(),
        offset=out.storage_offset(),
        dtype=out.dtype,
        view_of=sharing[0] if sharing else None,
    )
    if len(same) > 1 or len(sharing) > 1 or out.requires_grad:
        raise _NotPlainError
    if not sharing and (out.storage_offset() or storage.nbytes() != _make(made, tensors).untyped_storage().nbytes()):
        raise _NotPlainError
    return made


def _make(result: _Result, tensors: list[FakeTensor]) -> Any:
    if result is None:
        return None
    if isinstance(result, _Same):
        return tensors[result.argument]
    mode = tensors[0].fake_mode
    with no_dispatch():
        made = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device="meta")
        if result.view_of is not None:
            storage = tensors[result.view_of].untyped_storage()
            made.set_(storage, result.offset, result.shape, result.strides)
        fields = _fields_of_any()
    fake = torch.Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=_CPU)
    fake.__dict__.update(fields, fake_mode=mode)  # as its constructor does, which takes five times as long
    return fake


@cache
def _fields_of_any() -> dict[str, Any]:
    """Return the attributes that the constructor sets in a CPU fake tensor, whatever its mode."""
    return vars(FakeTensor(FakeTensorMode(), torch.empty((), device="meta"), _CPU))
