r"""Cost of resharding activations between a layer in one layout and the next layer in another.

The stage mesh has small axes. On each axis the activation is divided by samples (B) or by sequence (S), or replicated
(R). The steps are those of DTensor's redistribution. First, from the innermost axis outwards, each axis changes to the
target, or to R if the outer axes that divide the same dim differ from the target. Then, from the outermost axis
inwards, remaining differences change. A step from a divided axis to R is an all-gather over that axis, a step between B
and S an all-to-all (gloo has none: an all-gather and a slice), a step from R a slice, which is free. If the token order
changes (C, head and tail), every axis that divides the sequence before or after goes through R. The gradient takes the
reverse direction.

Source: ``DTensorRedistributePlanner.generate_greedy_transform_infos`` of torch 2.13. Not modelled: overlap with
compute; neighbouring all-gathers that DTensor merges into one where another layer's group spans just these axes.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import Group
from steelyard.cost.job import Job, JobConfig
from steelyard.model.chain import ModelChain
from steelyard.plan.dimensions.dimension import Placed
from steelyard.plan.strategy import HiddenPlacement, Strategy, mesh_axes
from steelyard.profiles.profile import Collective
from steelyard.units import Amount

Placement = str
"""One letter of `steelyard.plan.dimensions.dimension.Placed` per axis of the stage mesh."""
Step = tuple[Collective, int, float]
"""Collective, axis of the stage mesh, and bytes as a fraction of the whole tensor."""
_Flow = tuple[tuple[int, bool], ...]
"""Entries per sample of each tensor, and whether its gradient is needed."""
_HEAD_TAIL = Placed.HEAD_TAIL.value
_OF_SEQUENCE = {Placed.HEAD_TAIL.value, Placed.SEQUENCE.value}


def switch_table(strategies: tuple[Strategy, ...], config: JobConfig) -> NDArray[np.float64]:
    """Seconds [K, S, S] per microbatch of resharding between two strategies' layouts, by type of the receiving layer.

    Includes the gradient back if needed. Every tensor that flows into the layer is redistributed once and separately:
    those that it reads and those that it passes on to later layers.
    """
    found = Switches(strategies, config)
    table: NDArray[np.float64] = found.table()[:, found.layouts[:, None], found.layouts]
    return table


class Switches:
    """Seconds of resharding between D layouts, in one configuration or M that differ in the number of microbatches."""

    def __init__(self, strategies: tuple[Strategy, ...], config: JobConfig) -> None:
        numbers: dict[HiddenPlacement, int] = {}
        self.layouts = np.array([numbers.setdefault(each.hidden, len(numbers)) for each in strategies], dtype=np.int64)
        """[S] index of each strategy's layout"""
        sizes = mesh_axes(config.devices_per_stage)
        placements = [layout.placements(sizes) for layout in numbers]
        self._flows = _entering(config.job)
        self._costs = [_between(placements, sizes, each, config) for each in dict.fromkeys(self._flows)]
        """Seconds [D, D, M] of each distinct flow."""

    def table(self, place: int = 0) -> NDArray[np.float64]:
        """Return seconds [K, D, D] in the configuration of this index, by type of the receiving layer."""
        tables = np.stack([costs[:, :, place] for costs in self._costs])
        if len(tables) == 1:
            return np.broadcast_to(tables[0], (len(self._flows), *tables[0].shape))
        distinct = list(dict.fromkeys(self._flows))
        found: NDArray[np.float64] = tables[[distinct.index(each) for each in self._flows]]
        return found


def border_table(
    before: tuple[Strategy, ...], after: tuple[Strategy, ...], sending: JobConfig, receiving: JobConfig
) -> NDArray[np.float64]:
    """Seconds [K, S, S'] as in `switch_table`, but between two stages. Between stages of equal size, the seconds are
    those within the receiving stage.

    Between stages of different sizes the activation arrives in even parts of the target layout, and the gradient, if
    needed, in even parts of the layout that the activation had: each side gathers the copies that its ranks hold.
    """
    if sending.devices_per_stage == receiving.devices_per_stage:
        return switch_table((*before, *after), receiving)[:, : len(before), len(before) :]
    back = _gather_seconds(before, sending, gradients=True)
    return back[:, :, None] + _gather_seconds(after, receiving)[:, None, :]


def _gather_seconds(
    strategies: tuple[Strategy, ...], config: JobConfig, *, gradients: bool = False
) -> NDArray[np.float64]:
    """Seconds [K, S] to gather a layer's input that arrived in even parts and of which ranks hold copies.

    With ``gradients``, only the tensors whose gradients are needed.
    """
    sizes = mesh_axes(config.devices_per_stage)
    whole, even = Placed.WHOLE.value, Placed.BATCH.value

    @cache
    def seconds(placements: Placement, flow: _Flow) -> float:
        steps = moves(placements.replace(whole, even), placements, sizes)
        sent = [entries for entries, is_needed in flow if is_needed or not gradients]
        each = (_step_seconds(sizes, entries, config)(step) for entries in sent for step in steps)
        return float(np.ravel(config.job.time_factor * sum(each, start=0.0))[0])

    placed = [strategy.hidden.placements(sizes) for strategy in strategies]
    return np.array([[seconds(each, flow) for each in placed] for flow in _entering(config.job)])


def _entering(job: Job) -> tuple[_Flow, ...]:
    return job.once("entering", lambda: _entering_entries(job.chain, job.seq_len))


def _entering_entries(chain: ModelChain, seq_len: int) -> tuple[_Flow, ...]:
    """Return the entries per sample of every tensor that flows into layers of each type.

    If layers of a type differ, those of the largest flow. A type without input, which needs no resharding, has those of
    another type.
    """
    entering: dict[int, _Flow] = {}
    for layer in range(1, chain.num_layers):
        flow = tuple((prod(each.shape), each.needs_gradient) for each in chain.flow(layer - 1, seq_len))
        both = flow, entering.get(chain.layers[layer], ())
        entering[chain.layers[layer]] = max(both, key=lambda each: sum(size * (1 + back) for size, back in each))
    return tuple(entering.get(layer_type, entering[chain.layers[1]]) for layer_type in range(len(chain.layer_types)))


def _between(
    placements: list[Placement],
    sizes: tuple[int, ...],
    flow: _Flow,
    config: JobConfig,
) -> NDArray[np.float64]:
    """Seconds [D, D, M] from each placement to each other, forward and backward, for the tensors of a flow."""
    costs = np.zeros((len(placements), len(placements), len(config.samples)))
    for entries, is_needed in flow:
        step_s, there_s = _step_seconds(sizes, entries, config), np.zeros_like(costs)
        for row, before in enumerate(placements):
            for column, after in enumerate(placements):
                if steps := moves(before, after, sizes):
                    there_s[row, column] = sum(map(step_s, steps))
        costs += config.job.time_factor * (there_s + np.swapaxes(there_s, 0, 1) if is_needed else there_s)
    return costs


def _step_seconds(sizes: tuple[int, ...], entries: int, config: JobConfig) -> Callable[[Step], Amount]:
    """Return a function for the seconds of a redistribution step of a tensor with ``entries`` entries per sample."""
    whole_bytes = config.samples * config.job.compute_bytes * entries
    has_all_to_all = config.job.cluster.device.backend.has_all_to_all

    @cache
    def seconds(step: Step) -> Amount:
        collective, axis, fraction = step
        group = Group(size=sizes[axis], stride=prod(sizes[axis + 1 :]), span=config.devices_per_stage)
        if collective == "all_to_all" and not has_all_to_all:
            collective, fraction = "all_gather", fraction * sizes[axis]
        return config.job.collective_s(collective, fraction * whole_bytes, group)

    return seconds


@lru_cache(maxsize=65536)
def moves(before: Placement, after: Placement, sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps of a redistribution in order."""
    current = list(before)
    found: list[Step] = []
    reordered = [letter == _HEAD_TAIL for letter in before] != [letter == _HEAD_TAIL for letter in after]
    for axis in reversed(range(len(sizes))):
        whole = reordered and {current[axis], after[axis]} & _OF_SEQUENCE
        wanted = "R" if whole or _is_nested_otherwise(current, after, axis) else after[axis]
        if current[axis] != wanted:
            found += _change(current, axis, wanted, sizes)
    for axis in range(len(sizes)):
        if current[axis] != after[axis]:
            found += _change(current, axis, after[axis], sizes)
    return tuple(found)


def _change(current: list[str], axis: int, wanted: Placement, sizes: tuple[int, ...]) -> list[Step]:
    """Change one axis of ``current`` in place and return the collective that it needs, if any."""
    before, current[axis] = current[axis], wanted
    if before == "R":
        return []
    local = 1.0
    for place, letter in enumerate(current):
        local /= sizes[place] if letter != "R" and place != axis else 1
    if wanted == "R":
        return [("all_gather", axis, local)]
    return [("all_to_all", axis, local / sizes[axis])]


def _is_nested_otherwise(current: list[str], after: Placement, axis: int) -> bool:
    """Return whether the outer axes that divide the target dim of an axis differ from those of the target."""
    dim = after[axis]
    return dim != "R" and any((current[outer] == dim) != (after[outer] == dim) for outer in range(axis))
