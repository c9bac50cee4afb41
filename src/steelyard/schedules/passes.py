"""The passes that a rank of a pipeline does, one after another, and what they keep alive on the way.

A pass takes one microbatch forward or backward through one chunk of the model. A backward pass may be split: its input
part makes the gradient that the stage before waits for, its weight part, which can come later, those of the parameters;
what the forward pass saved is freed when both are done.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


class Phase(IntEnum):
    """What is done of a microbatch's work on a chunk; the number is the phase's code in a `PassOrder`."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    def __str__(self) -> str:
        return self.name.lower()


_CHANGES = {Phase.FORWARD: 1, Phase.BACKWARD: -1, Phase.BACKWARD_INPUT: 0, Phase.BACKWARD_WEIGHT: -1}
_PHASES = tuple(Phase)
_CHANGE = np.array([_CHANGES[phase] for phase in Phase], dtype=np.int64)


class Pass(NamedTuple):
    """One microbatch through one chunk of a stage, both counted from 0."""

    phase: Phase
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """The passes of one stage in order; three arrays of the same length, one entry for each pass."""

    phase: Column
    chunk: Column
    microbatch: Column

    @classmethod
    def of(cls, passes: Iterable[Pass]) -> Self:
        """These passes in their order."""
        table = np.array(list(passes), dtype=np.int64).reshape(-1, 3)
        return cls(phase=table[:, 0], chunk=table[:, 1], microbatch=table[:, 2])

    def __len__(self) -> int:
        return len(self.phase)

    def __iter__(self) -> Iterator[Pass]:
        phases = map(_PHASES.__getitem__, self.phase.tolist())
        return map(Pass._make, zip(phases, self.chunk.tolist(), self.microbatch.tolist(), strict=True))

    def in_flight(self, chunk: int) -> int:
        """Most microbatches of a chunk that are alive at once: forward begun, backward not ended."""
        return int((_CHANGE[self.phase] * (self.chunk == chunk)).cumsum().max())

    def peak_bytes(self, activation_bytes: Sequence[int]) -> int:
        """Most bytes of activations alive at once, given those of one microbatch for each chunk."""
        return int(self._held(activation_bytes).max())

    def _held(self, activation_bytes: Sequence[int]) -> Column:
        """Bytes of activations alive after each pass has begun, if it is a forward one, or ended."""
        per_pass = np.asarray(activation_bytes, dtype=np.int64)[self.chunk]
        return (_CHANGE[self.phase] * per_pass).cumsum()


def all_of(phase: Phase, num_microbatches: int) -> PassOrder:
    """All microbatches in order through the one chunk of a stage, in one phase."""
    microbatch = np.arange(num_microbatches)
    return PassOrder(phase=np.full_like(microbatch, phase), chunk=np.zeros_like(microbatch), microbatch=microbatch)


def in_turn(forwards: PassOrder, backwards: PassOrder, warm_up: int, *, backward_first: bool) -> PassOrder:
    """``warm_up`` forwards, then the other forwards and the backwards one by one, then the other backwards."""
    ahead, behind = (np.stack([each.phase, each.chunk, each.microbatch]) for each in (forwards, backwards))
    later = ahead[:, warm_up:]
    paired = behind[:, : later.shape[1]]
    pair = (paired, later) if backward_first else (later, paired)
    alternating = np.stack(pair, axis=2).reshape(3, -1)
    phase, chunk, microbatch = np.concatenate([ahead[:, :warm_up], alternating, behind[:, later.shape[1] :]], axis=1)
    return PassOrder(phase=phase, chunk=chunk, microbatch=microbatch)
