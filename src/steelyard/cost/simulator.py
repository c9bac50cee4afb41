r"""Plays a pipeline schedule event by event and yields the step time and the timeline.

Each stage does its forward and backward passes in the schedule's order, one at a time; a pass starts when the stage is
free and its input has arrived. After its last backward a stage does its once-a-step work (gradient reduction,
optimizer).

Without transfers and with backward passes that take the same multiple of the forward pass on every stage, GPipe takes
exactly $\sum_i t_i + (m-1)\max_i t_i$. 1F1B takes that on equal stages and up to a fifth less on unequal ones, since
the last passes of a fast stage hide behind those of a slow one before it. Never is a step shorter than the first pass
of every stage before one, all passes of that stage, and the last pass of every stage before it.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, arXiv 2104.04473, section 2.2).
Not modelled: a send that slows the sender's computation down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard.plan.plan import Schedule

Pass = Literal["forward", "backward", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage: passes of a microbatch, once-a-step work, and one transfer from the stage before."""

    forward_s: float
    backward_s: float
    once_s: float = 0.0
    transfer_s: float = 0.0
    """One way; the gradient takes as long back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One pass of a stage in the timeline."""

    stage: int
    kind: Pass
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All passes of one step, per stage in order of time."""

    step_time_s: float
    stages: tuple[tuple[Event, ...], ...]


def closed_form_s(stage_times_s: Sequence[float], num_microbatches: int) -> float:
    """Σ tᵢ + (m − 1) max tᵢ: the step time of a synchronous pipeline whose stages take tᵢ per microbatch."""
    return sum(stage_times_s) + (num_microbatches - 1) * max(stage_times_s)


def simulate(stages: Sequence[StageTimes], num_microbatches: int, schedule: Schedule) -> Timeline:
    """The timeline of one step."""
    orders = [_order(index, len(stages), num_microbatches, schedule) for index in range(len(stages))]
    ends: dict[tuple[int, Pass, int], float] = {}
    timeline: list[list[Event]] = [[] for _ in stages]
    free = [0.0] * len(stages)
    position = [0] * len(stages)
    remaining = sum(map(len, orders))
    while remaining:
        for index, stage in enumerate(stages):
            while position[index] < len(orders[index]):
                kind, microbatch = orders[index][position[index]]
                ready = _ready_s(stages, ends, index, kind, microbatch)
                if ready is None:
                    break
                start = max(free[index], ready)
                end = start + (stage.forward_s if kind == "forward" else stage.backward_s)
                ends[index, kind, microbatch] = free[index] = end
                timeline[index].append(Event(stage=index, kind=kind, microbatch=microbatch, start_s=start, end_s=end))
                position[index] += 1
                remaining -= 1
    for index, stage in enumerate(stages):
        end = free[index] + stage.once_s
        timeline[index].append(Event(stage=index, kind="once", microbatch=-1, start_s=free[index], end_s=end))
        free[index] = end
    return Timeline(step_time_s=max(free), stages=tuple(tuple(events) for events in timeline))


def _order(stage: int, num_stages: int, num_microbatches: int, schedule: Schedule) -> list[tuple[Pass, int]]:
    """Passes of one stage in the order in which it does them."""
    forwards: list[tuple[Pass, int]] = [("forward", m) for m in range(num_microbatches)]
    backwards: list[tuple[Pass, int]] = [("backward", m) for m in range(num_microbatches)]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = min(num_microbatches, num_stages - stage)
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [backward, forward]
    return order + backwards[num_microbatches - warm_up :]


def _ready_s(
    stages: Sequence[StageTimes], ends: dict[tuple[int, Pass, int], float], stage: int, kind: Pass, microbatch: int
) -> float | None:
    """When the input of a pass has arrived, or None if the pass that makes it has not been played yet."""
    if kind == "forward":
        if stage == 0:
            return 0.0
        made, transfer = ends.get((stage - 1, "forward", microbatch)), stages[stage].transfer_s
    elif stage == len(stages) - 1:
        made, transfer = ends.get((stage, "forward", microbatch)), 0.0
    else:
        made, transfer = ends.get((stage + 1, "backward", microbatch)), stages[stage + 1].transfer_s
    return None if made is None else made + transfer
