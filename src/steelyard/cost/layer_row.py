"""Bytes of a kind of layer under several strategies of a pipeline setting, by `steelyard.cost.layer_memory`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.inputs import sample_bytes
from steelyard.cost.layer_load import layer_profile, rank_samples
from steelyard.cost.layer_memory import (
    LayerStates,
    layer_states,
    needs_more,
    recomputed_inputs,
    work_bytes,
    work_lines,
    work_needed,
)
from steelyard.cost.setting import Setting, Strategies
from steelyard.model.chain import LayerKind
from steelyard.plan.strategy import Strategy

IntTable = NDArray[np.int64]


class RowWork(NamedTuple):
    """[S] what grows with the samples, of one microbatch."""

    saved: IntTable
    input: IntTable
    reducing: IntTable
    """What is left of the layer's work when the last of its gradients is made, beside the gradient of its input."""
    forward: IntTable
    backward: IntTable
    read: IntTable
    """As `sample_bytes` has it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRow:
    """A kind of layer under S strategies, one or more, which are legal for it; arrays are [S]."""

    kind: LayerKind
    chosen: Sequence[Strategy]
    numbers: Strategies
    states: list[LayerStates]
    lines: NDArray[np.float64]
    """[2, 4, S] as in `work_bytes`."""
    inputs: IntTable
    """As in `recomputed_inputs`."""
    needy: list[int]
    """Places of those whose kinds need more than was traced (`needs_more`)."""

    @classmethod
    def of(cls, kind: LayerKind, chosen: Sequence[Strategy], setting: Setting) -> Self:
        """The same for all settings of a job that have one microbatch, or all that have several."""
        once, has_several = setting.job.once, setting.has_several
        cells = [once(kind, (each, has_several), partial(_cell, kind, each, setting)) for each in chosen]
        numbers = np.array([each.numbers for each in cells]).T
        inputs, needs, *degrees = numbers
        return cls(
            kind=kind,
            chosen=chosen,
            numbers=Strategies(*degrees),
            states=[each.states for each in cells],
            lines=np.array([each.lines for each in cells]).T.reshape(2, 4, -1),
            inputs=inputs,
            needy=np.flatnonzero(needs).tolist(),
        )

    def work(self, setting: Setting) -> RowWork:
        """In a setting with as many microbatches, one or several."""
        samples = rank_samples(self.numbers, setting)
        needed = np.zeros((4, len(self.chosen)))
        for place in self.needy:
            strategy = self.chosen[place]
            more = work_needed(layer_profile(self.kind, strategy, setting), strategy, setting)
            needed[:, place] = more
        saved, entered, forward, backward = work_bytes(self.lines, samples, needed)
        read = np.broadcast_to(sample_bytes(self.kind, self.numbers, setting), saved.shape).astype(np.int64)
        return RowWork(saved, entered, self.inputs * entered, forward, backward, read)


class _Cell(NamedTuple):
    """What no number of samples changes of a kind under a strategy."""

    states: LayerStates
    lines: tuple[float, ...]
    numbers: tuple[int, ...]
    """`recomputed_inputs`, `needs_more`, and what `Strategies` has."""


def _cell(kind: LayerKind, strategy: Strategy, setting: Setting) -> _Cell:
    once, states = setting.job.once, layer_states(kind, strategy, setting)
    layer = layer_profile(kind, strategy, setting)
    degrees = strategy.sample_degree, strategy.token_degree, strategy.sequence_degree
    lines = once(layer, strategy.remat, partial(work_lines, layer, strategy.remat))
    return _Cell(states, lines, (recomputed_inputs(strategy), needs_more(strategy), *degrees))
