"""Bytes of a layer type under several strategies of a pipeline configuration, by `steelyard.cost.layer_memory`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.inputs import sample_bytes
from steelyard.cost.job import JobConfig, Strategies
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
from steelyard.model.chain import LayerType
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
    """A layer type under S strategies, one or more, which are legal for it; arrays are [S]."""

    layer_type: LayerType
    chosen: Sequence[Strategy]
    numbers: Strategies
    states: list[LayerStates]
    lines: NDArray[np.float64]
    """[2, 4, S] as in `work_bytes`."""
    inputs: IntTable
    """As in `recomputed_inputs`."""
    needy: list[int]
    """Places of those whose dimensions need more than was traced (`needs_more`)."""

    @classmethod
    def of(cls, layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> Self:
        """The same for all configurations of a job that have one microbatch, or all that have several."""
        once, has_several = config.job.once, config.has_several
        cells = [once(layer_type, (each, has_several), partial(_cell, layer_type, each, config)) for each in chosen]
        numbers = np.array([each.numbers for each in cells]).T
        inputs, needs, *degrees = numbers
        return cls(
            layer_type=layer_type,
            chosen=chosen,
            numbers=Strategies(*degrees),
            states=[each.states for each in cells],
            lines=np.array([each.lines for each in cells]).T.reshape(2, 4, -1),
            inputs=inputs,
            needy=np.flatnonzero(needs).tolist(),
        )

    def work(self, config: JobConfig) -> RowWork:
        """In a configuration with as many microbatches, one or several."""
        samples = rank_samples(self.numbers, config)
        needed = np.zeros((4, len(self.chosen)))
        for place in self.needy:
            strategy = self.chosen[place]
            more = work_needed(layer_profile(self.layer_type, strategy, config), strategy, config)
            needed[:, place] = more
        saved, entered, forward, backward = work_bytes(self.lines, samples, needed)
        read = np.broadcast_to(sample_bytes(self.layer_type, self.numbers, config), saved.shape).astype(np.int64)
        return RowWork(saved, entered, self.inputs * entered, forward, backward, read)


class _Cell(NamedTuple):
    """What no number of samples changes of a layer type under a strategy."""

    states: LayerStates
    lines: tuple[float, ...]
    numbers: tuple[int, ...]
    """`recomputed_inputs`, `needs_more`, and what `Strategies` has."""


def _cell(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> _Cell:
    once, states = config.job.once, layer_states(layer_type, strategy, config)
    layer = layer_profile(layer_type, strategy, config)
    degrees = strategy.sample_degree, strategy.token_degree, strategy.sequence_degree
    lines = once(layer, strategy.remat, partial(work_lines, layer, strategy.remat))
    return _Cell(states, lines, (recomputed_inputs(strategy), needs_more(strategy), *degrees))
