r"""Discrete-event simulation of a pipeline schedule, for the step time and the timeline.

Each stage runs its forward, backward and weight passes in the schedule's order (`steelyard.schedules`), one at a time.
A pass starts when the stage is free and its input has arrived. A transfer occupies its link, one direction between two
stages, for ``transfer_s`` and then arrives. The sender continues meanwhile, or waits for the link if sends do not
overlap. After its passes a stage runs its once-per-step work (optimizer).

Without transfers, and if backward passes take the same multiple of the forward pass on every stage, GPipe takes exactly
$\sum_i t_i + (m-1)\max_i t_i$. 1F1B takes the same on equal stages and up to a fifth less on unequal ones, because the
last passes of a fast stage overlap those of a slow stage before it. In interleaved schedules with equal parts and P a
divisor of m, the bubble is the fraction $(P-1)/(vm)$ of the work. Weight passes move part of a backward pass into
bubbles. For any stage, the step takes at least the first pass of every stage before it, all its own passes, and the
last pass of every stage before it.

| symbol        | argument   | meaning                                                                             |
|---------------|------------|-------------------------------------------------------------------------------------|
| $P$, $v$, $m$ | `pipeline` | stages: groups of ranks; parts of the model on every stage; microbatches of a step  |
| $t_i$         | `parts`    | forward and backward of a microbatch                                                |

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved; arXiv 2104.04473, sections 2.2 and 2.3).
Not modelled: slowdown of the sender's computation by a send; gradient reductions that delay the gradient sent to the
previous stage, as FSDP's do in the last backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from steelyard.cost.shared_cores import PassTable, StageRun, arrivals, play_on_shared_cores
from steelyard.schedules import Phase, PipelineConfig

Work = Literal["forward", "backward", "weight", "once"]
Wait = Literal["pipeline fills", "waits for activation", "waits for gradient", "step ends"]

_WORKS: tuple[Work, ...] = ("forward", "backward", "weight", "once")
"""Names of the phases of `Phase`, by value, and of once-per-step work."""
_ONCE = len(Phase)
_WAITS: dict[Work, Wait] = {
    "forward": "waits for activation",
    "backward": "waits for gradient",
    "weight": "waits for gradient",
    "once": "step ends",
}
_NOT_YET = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage or a chunk: passes of a microbatch, once-per-step work, and one transfer."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """Part of the backward pass that moves to a weight pass, if the schedule has these."""
    once_s: float = 0.0
    transfer_s: float = 0.0
    """Seconds that the link from the previous part is occupied; the gradient takes the same time back."""
    gives_back: bool = True
    """Whether the gradient is sent back, which is not needed if no part before is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One pass of a stage in the timeline; ``microbatch`` is −1 for once-per-step work."""

    stage: int
    work: Work
    microbatch: int
    start_s: float
    end_s: float
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """An activation or a gradient that occupies the link between two stages; ``chunk`` is the sender's."""

    stage: int
    chunk: int
    payload: Literal["activation", "gradient"]
    microbatch: int
    receiver: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Idle time of a stage, and the reason."""

    stage: int
    reason: Wait
    microbatch: int
    """Microbatch whose pass ends the bubble; −1 if there is none."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """All passes of one step. Events are built on first use, because most callers need only the step time."""

    step_time_s: float
    pipeline: PipelineConfig
    _table: PassTable
    _runs: tuple[StageRun, ...]

    @cached_property
    def stages(self) -> tuple[tuple[Event, ...], ...]:
        """Passes of each stage, over all its chunks, and its once-per-step work, in order of time."""
        return tuple(tuple(self._events(stage)) for stage in range(self.pipeline.num_stages))

    @cached_property
    def sends(self) -> tuple[tuple[Send, ...], ...]:
        """Transfers of nonzero duration that each stage sends, in order."""
        return tuple(tuple(self._sends(stage)) for stage in range(self.pipeline.num_stages))

    def worked_s(self, stage: int) -> float:
        """Seconds in which a stage works on its passes and its once-per-step work."""
        starts_s, ends_s = self._runs[stage].starts_s, self._runs[stage].ends_s
        passes = slice(-self.pipeline.num_chunks)
        return (
            sum(ends_s[passes])
            - sum(starts_s[passes])
            + sum(ends_s[place] - starts_s[place] for place in range(-self.pipeline.num_chunks, 0))
        )

    def bubbles(self, stage: int) -> tuple[Bubble, ...]:
        """Return the idle times of a stage, with their reasons."""
        events = self.stages[stage]
        gaps: list[tuple[Wait, int, float, float]] = [("pipeline fills", events[0].microbatch, 0.0, events[0].start_s)]
        for before, after in pairwise(events):
            gaps.append((_WAITS[after.work], after.microbatch, before.end_s, after.start_s))
        gaps.append(("step ends", -1, events[-1].end_s, self.step_time_s))
        return tuple(
            Bubble(stage=stage, reason=reason, microbatch=microbatch, start_s=start, end_s=end)
            for reason, microbatch, start, end in gaps
            if end > start
        )

    def bubble_share(self) -> float:
        """Idle fraction of the step, averaged over the stages."""
        idle_s = sum(
            each.end_s - each.start_s for stage in range(self.pipeline.num_stages) for each in self.bubbles(stage)
        )
        return idle_s / (self.step_time_s * self.pipeline.num_stages) if self.step_time_s else 0.0

    def _events(self, stage: int) -> list[Event]:
        run = self._runs[stage]
        events = []
        for code, start, end in zip(run.codes, run.starts_s, run.ends_s, strict=True):
            work, chunk, microbatch = self._place(code)
            events.append(
                Event(stage=stage, work=_WORKS[work], microbatch=microbatch, start_s=start, end_s=end, chunk=chunk)
            )
        return events

    def _sends(self, stage: int) -> list[Send]:
        run, table, sends = self._runs[stage], self._table, []
        for code, end in zip(run.codes, run.sent_s, strict=True):
            group = code // self.pipeline.num_microbatches
            if table.transfer_s[group] > 0:
                work, chunk, microbatch = self._place(code)
                sends.append(
                    Send(
                        stage=stage,
                        chunk=chunk,
                        payload="activation" if work == Phase.FORWARD else "gradient",
                        microbatch=microbatch,
                        receiver=table.receiver[group],
                        start_s=end - table.transfer_s[group],
                        end_s=end,
                    )
                )
        return sends

    def _place(self, code: int) -> tuple[int, int, int]:
        """Return work, chunk and microbatch of a pass; the microbatch is −1 for once-per-step work."""
        group, microbatch = divmod(code, self.pipeline.num_microbatches)
        work, part = divmod(group, self._table.num_parts)
        return work, part // self.pipeline.num_stages, -1 if work == _ONCE else microbatch


def simulate(
    parts: Sequence[StageTimes],
    pipeline: PipelineConfig,
    *,
    overlap_sends: bool = True,
    speeds: Sequence[tuple[int, Sequence[float]]] = (),
) -> Timeline:
    """Simulate one step.

    ``parts``: times of the parts of the model in the order of the layers. Without ``overlap_sends`` a stage waits until
    its result is sent. ``speeds``: speeds of stages that share processor cores, see `steelyard.cost.shared_cores`;
    empty if they do not. Raises `InvalidPlanError` if the schedule cannot run the number of microbatches.
    """
    num_stages, num_microbatches = pipeline.num_stages, pipeline.num_microbatches
    assert len(parts) == pipeline.num_parts, "one entry for each part of the model"
    table = pass_table(parts, pipeline)
    runs = []
    for stage in range(num_stages):
        order, own = pipeline.passes(stage), np.array(pipeline.parts_of(stage))
        group = order.phase * pipeline.num_parts + own[order.chunk]
        once = (_ONCE * pipeline.num_parts + own) * num_microbatches
        runs.append(StageRun(codes=[*(group * num_microbatches + order.microbatch).tolist(), *once.tolist()]))
    if speeds:
        play_on_shared_cores(runs, table, num_microbatches, speeds)
    else:
        _play(runs, table, num_microbatches, overlap_sends=overlap_sends)
    return Timeline(step_time_s=max(run.ends_s[-1] for run in runs), pipeline=pipeline, _table=table, _runs=tuple(runs))


def pass_table(parts: Sequence[StageTimes], pipeline: PipelineConfig) -> PassTable:
    """Return durations and transfers of all passes of a pipeline whose parts have these times."""
    count, num_stages = len(parts), pipeline.num_stages
    stage_of = [pipeline.stage_of(part) for part in range(count)]
    consumer = [*range(1, count), 2 * count - 1, -1, *range(count, 2 * count - 1), *[-1] * (2 * count)]
    if pipeline.schedule.splits_backward:
        parts = [replace(part, backward_s=part.backward_s - part.weight_s) for part in parts]
    receiver, transfer_s = [], []
    for group, target in enumerate(consumer):
        sender, receiving = stage_of[group % count], stage_of[target % count]
        is_sent = target >= 0 and sender != receiving
        receiver.append(receiving)
        later = parts[max(group % count, target % count)]
        is_sent &= group < count or later.gives_back
        transfer_s.append(later.transfer_s if is_sent else 0.0)
    return PassTable(
        num_parts=count,
        duration_s=[getattr(part, f"{work}_s") for work in _WORKS for part in parts],
        consumer=consumer,
        receiver=receiver,
        transfer_s=transfer_s,
        link=[stage_of[group % count] * num_stages + stage for group, stage in enumerate(receiver)],
    )


def _play(runs: Sequence[StageRun], table: PassTable, num_microbatches: int, *, overlap_sends: bool) -> None:
    """Fill in the times of every run: each stage runs until an input is missing, and resumes when it has arrived."""
    num_stages = len(runs)
    arrival_s = arrivals(table, num_microbatches, _NOT_YET)
    free_s, link_free_s = [0.0] * num_stages, [0.0] * num_stages**2
    duration_s, transfer_s = table.duration_s, table.transfer_s
    consumer, receiver, link = table.consumer, table.receiver, table.link
    awaited, ready = [-1] * num_stages, list(range(num_stages))
    while ready:
        stage = ready.pop()
        run, now = runs[stage], free_s[stage]
        for index in range(len(run.ends_s), len(run.codes)):
            code = run.codes[index]
            arrived = arrival_s[code]
            if arrived < 0.0:
                awaited[stage] = code
                break
            group, microbatch = divmod(code, num_microbatches)
            start = arrived if arrived > now else now
            now = sent = start + duration_s[group]
            run.starts_s.append(start)
            run.ends_s.append(now)
            target = consumer[group]
            if target >= 0:
                if transfer_s[group]:
                    free = link_free_s[link[group]]
                    sent = (free if free > now else now) + transfer_s[group]
                    link_free_s[link[group]] = sent
                    now = now if overlap_sends else sent
                target = target * num_microbatches + microbatch
                arrival_s[target] = sent
                if awaited[receiver[group]] == target:
                    awaited[receiver[group]] = -1
                    ready.append(receiver[group])
            run.sent_s.append(sent)
        free_s[stage] = now
    assert all(len(run.ends_s) == len(run.codes) for run in runs), "the orders of the stages wait for each other"
