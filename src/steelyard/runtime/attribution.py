"""Which term each byte of a peak belongs to: live storages with a history, and what lived when they were most.

A storage belongs to the term that it was assigned to last, or to the working set. Terms are assigned after the fact (a
gradient is known as one when the optimizer is about to read it), so the peak is put together when the step has ended.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import disable_fake_tensor_cache

from steelyard.modules.fake_op_cache import FakeOpCache, look
from steelyard.runtime.peak_memory import LiveStorages, held_tensor

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
    """The most bytes that lived at once during a step, by term, and what ran then."""

    terms: dict[str, int]
    where: str

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())


class AttributedStorages(LiveStorages):
    """Live storages with a history, so that those that lived at the peak can be told apart afterwards.

    Operations on fake tensors in ``seen`` are not run again: layers, microbatches and ranks repeat each other.
    """

    def __init__(self, seen: FakeOpCache[None]) -> None:
        self.place = "building the model"
        self._peak_place = self.place
        self._ids: dict[int, int] = {}
        self._num_born = 0
        self._terms: dict[int, str] = {}
        self._before: Counter[int] = Counter()
        self._events: list[tuple[int, int]] = []
        self._num_events_at_peak = 0
        self._seen = seen
        super().__init__([])

    def begin(self) -> None:
        """Starts a new measurement: what lives now is the first candidate for the peak."""
        for identity, num_bytes in self._events:
            self._before[identity] += num_bytes
        self._before = +self._before
        self._events, self._num_events_at_peak = [], 0
        self.peak_bytes = self.live_bytes
        self._peak_place = self.place

    def peak(self) -> Peak:
        """The peak since `begin`."""
        sizes = self._before.copy()
        for identity, num_bytes in self._events[: self._num_events_at_peak]:
            sizes[identity] += num_bytes
        terms: Counter[str] = Counter()
        for identity, num_bytes in sizes.items():
            terms[self._terms.get(identity, "working set")] += num_bytes
        assert terms.total() == self.peak_bytes
        return Peak(terms={name: terms[name] for name in TERMS if terms[name]}, where=self._peak_place)

    def assign(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of these tensors under ``term``, whatever they counted under before."""
        for tensor in tensors:
            key = held_tensor(tensor).untyped_storage()._cdata
            if key in self._ids:
                self._terms[self._ids[key]] = term

    def assign_born_since(self, first: int, term: str) -> None:
        """Counts what was born since `num_born` was ``first``, and lives and has no term yet, under ``term``."""
        for identity in self._ids.values():
            if identity >= first:
                self._terms.setdefault(identity, term)

    @property
    def num_born(self) -> int:
        """Storages that were seen so far."""
        return self._num_born

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looks = look(func, args, kwargs)
        if looks is None:
            return func(*args, **kwargs)
        seen = self._seen.find(looks[0])
        if seen is not None:
            return seen.again(looks[1])
        with disable_fake_tensor_cache(looks[1][0].fake_mode):  # once remembered is enough
            out = func(*args, **kwargs)
        self._seen.remember(looks, (func, args, kwargs), out, None)
        return out

    def _set_size(self, key: int, num_bytes: int) -> None:
        if key not in self._ids:
            self._ids[key] = self._num_born
            self._num_born += 1
        change = num_bytes - self._sizes[key]
        if change:
            self._events.append((self._ids[key], change))
        peak_before = self.peak_bytes
        super()._set_size(key, num_bytes)
        if self.peak_bytes > peak_before:
            self._num_events_at_peak, self._peak_place = len(self._events), self.place

    def _forget(self, key: int) -> None:
        self._events.append((self._ids.pop(key), -self._sizes[key]))
        super()._forget(key)
