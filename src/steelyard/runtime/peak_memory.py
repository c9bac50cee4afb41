"""Measurement of the peak memory of a process's tensors during a piece of work, in bytes by term.

On a GPU the allocator counts. On other devices a dispatch mode sees every tensor that an operation returns and tracks
its storage until the storage is freed or resized (FSDP frees gathered parameters by resizing them to zero). Parameters,
gradients, optimizer states, activations and gathered parameters are all counted, each storage once. A storage belongs
to the term that it was assigned to last, or to the working set. Terms are assigned afterwards (a gradient is only known
as such when the optimizer is about to read it), so the peak is assembled after the step.

Not counted on the CPU: scratch memory inside an operation, the process itself (code, libraries), and the tensors
without memory from which DTensor learns the shape of a result.

With ``--enforce-memory`` a rank is limited to the plan's budget, so that a plan can be tried on devices with more
memory: the CUDA allocator refuses to exceed it; on the CPU the peak of the first full step is compared with it.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from steelyard.errors import InvalidPlanError
from steelyard.modules.fake_op_cache import FakeOpCache, FakeOpMode, has_parts
from steelyard.modules.host_memory import is_on_host
from steelyard.plan.plan import Plan
from steelyard.units import format_bytes

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
CUDA_METHOD = "torch.cuda.max_memory_allocated"
STORAGE_METHOD = "live tensor storages"
_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def measure_peak(tensors: Iterable[Tensor], device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that measures the peak of the existing ``tensors`` and the allocations of its body.

    It yields an object whose ``peak_bytes`` is final when the context ends.
    """
    return _cuda_peak(device) if device.type == "cuda" else LiveStorages(tensors)


def memory_method(device: torch.device) -> str:
    """Name of the method that `measure_peak` uses on a device."""
    return CUDA_METHOD if device.type == "cuda" else STORAGE_METHOD


TERMS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "activations",
    "pipeline buffers",
    "working set",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak bytes of live tensors during a step by term, and the place in the step where the peak was reached."""

    terms: dict[str, int]
    where: str

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())


class LiveStorages(FakeOpMode):
    """Dispatch mode that counts the bytes of all storages of ``tensors`` and of the results of operations.

    Its history tells which storages were alive at the peak. Operations on fake tensors in ``seen`` are not run again,
    because layers, microbatches and ranks repeat each other.
    """

    def __init__(self, tensors: Iterable[Tensor], seen: FakeOpCache[None] | None = None) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.host_bytes = 0
        """Peak bytes in host memory, which the other counters leave out."""
        self.num_born = 0
        """Number of storages seen so far."""
        self.place = "building the model"
        self._on_host: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._sizes: dict[int, int] = {}
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """Serial number of each live storage, used in the history, and a weak reference to it."""
        self._terms: dict[int, str] = {}
        self._before: Counter[int] = Counter()
        self._events: list[tuple[int, int]] = []
        self._at_peak = 0, self.place
        self._seen = seen
        for tensor in tensors:
            self._follow(tensor)

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            result = resize(storage, num_bytes)
            if storage._cdata in self._live:
                self._set_size(storage._cdata, num_bytes)
            return result

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        return super().__enter__()

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation and track its results."""
        if self._seen is None:
            result = func(*args, **kwargs)
        else:
            result, _ = self._seen.run(func, args, kwargs, lambda _out: None)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return result

    def begin(self) -> None:
        """Start a new measurement; the current live bytes are the first candidate for the peak."""
        for identity, num_bytes in self._events:
            self._before[identity] += num_bytes
        self._before, self._events = +self._before, []
        self.peak_bytes, self._at_peak = self.live_bytes, (0, self.place)

    def peak(self) -> Peak:
        """Return the peak since `begin`."""
        sizes, (num_events, place) = self._before.copy(), self._at_peak
        for identity, num_bytes in self._events[:num_events]:
            sizes[identity] += num_bytes
        terms: Counter[str] = Counter()
        for identity, num_bytes in sizes.items():
            terms[self._terms.get(identity, "working set")] += num_bytes
        assert terms.total() == self.peak_bytes
        return Peak(terms={name: terms[name] for name in TERMS if terms[name]}, where=place)

    def assign(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Assign the storages of these tensors to ``term``, replacing an earlier term."""
        for tensor in chain.from_iterable(map(held_tensors, tensors)):
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                self._terms[self._live[key][0]] = term

    def assign_born_since(self, first: int) -> None:
        """Assign to the activations the live storages without a term created since `num_born` was ``first``."""
        for identity, _ in self._live.values():
            if identity >= first:
                self._terms.setdefault(identity, "activations")

    def _follow(self, tensor: Tensor) -> None:
        for each in held_tensors(tensor) if not self.is_learning else ():
            # skip meta tensors; for a fake tensor ``is_meta`` would be an operation, so read its attribute
            if (each.fake_device.type != "meta") if type(each) is FakeTensor else not each.is_meta:
                self._follow_storage(each.untyped_storage())

    def _follow_storage(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if is_on_host(storage):
            if key not in self._on_host:
                self._on_host[key] = num_bytes, weakref.ref(storage, lambda _: self._on_host.pop(key))
                self.host_bytes = max(self.host_bytes, sum(size for size, _ in self._on_host.values()))
            return
        if key not in self._live:
            self._live[key] = self.num_born, weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = 0
            self.num_born += 1
        elif num_bytes == self._sizes[key]:
            return
        self._set_size(key, num_bytes)

    def _set_size(self, key: int, num_bytes: int) -> None:
        change, self._sizes[key] = num_bytes - self._sizes[key], num_bytes
        self._events.append((self._live[key][0], change))
        self.live_bytes += change
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._at_peak = self.live_bytes, (len(self._events), self.place)

    def _forget(self, key: int) -> None:
        self._set_size(key, 0)
        del self._live[key], self._sizes[key]


def held_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of ``tensor``.

    A DTensor and the result of a collective only wrap another tensor; a quantized state is made of several.
    """
    while isinstance(tensor, _WRAPPERS):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    if has_parts(type(tensor)):
        names, _ = tensor.__tensor_flatten__()
        return tuple(getattr(tensor, name) for name in names)
    return (tensor,)


@contextmanager
def _cuda_peak(device: torch.device) -> Iterator[SimpleNamespace]:
    meter = SimpleNamespace(peak_bytes=0)
    torch.cuda.reset_peak_memory_stats(device)
    yield meter
    meter.peak_bytes = torch.cuda.max_memory_allocated(device)


class MemoryExceededError(RuntimeError):
    """Raised when a rank runs out of memory, or takes more than the enforced budget."""

    is_final = True


class MemoryLimit:
    """Memory limit of this rank, with the errors that report that it was exceeded.

    Raises `InvalidPlanError` if a budget is to be enforced and the plan has none.
    """

    def __init__(self, plan: Plan, *, enforce: bool) -> None:
        self._plan = plan
        self._stage = plan.stage_of(dist.get_rank())
        self._budget_bytes = _budget_bytes(plan) if enforce else None
        if self._budget_bytes is not None and torch.cuda.is_available():
            total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget_bytes / total_bytes))

    def check(self, peak_bytes: int) -> None:
        """Raise `MemoryExceededError` if the peak of a step is above the enforced budget."""
        if self._budget_bytes is not None and peak_bytes > self._budget_bytes:
            raise MemoryExceededError(f"its tensors reached {format_bytes(peak_bytes)} in a step; {self._predicted()}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn PyTorch's out-of-memory errors in the context into a `MemoryExceededError`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryExceededError(self._message(str(error))) from error
        except RuntimeError as error:
            if _CPU_MESSAGE not in str(error):
                raise
            raise MemoryExceededError(self._message(str(error))) from error

    def _message(self, cause: str) -> str:
        held = ""
        if torch.cuda.is_available():
            held = f"its tensors reached {format_bytes(torch.cuda.max_memory_allocated())}; "
        return f"memory ran out; {held}{self._predicted()}\n{cause.splitlines()[0]}"

    def _predicted(self) -> str:
        prediction = self._plan.prediction
        if prediction is None:
            return "the plan has no prediction"
        predicted = format_bytes(prediction.stages[self._stage].total_bytes)
        return f"predicted for stage {self._stage}: {predicted}, of a budget of {format_bytes(prediction.device_bytes)}"


def _budget_bytes(plan: Plan) -> int:
    if plan.prediction is None:
        raise InvalidPlanError(
            field="prediction",
            found="nothing",
            expected="a plan with a budget, for --enforce-memory",
            hint="make the plan with `steelyard plan`, or leave the option out",
        )
    return plan.prediction.device_bytes
