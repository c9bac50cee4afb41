r"""Plays a pipeline whose stages compute on the same processor cores, so that they are slower when more of them work.

Durations $d$ of passes are those while all stages compute. While $k$ of them do, each has done $s_k\,\Delta t$ of its
pass after $\Delta t$ seconds, and

$$\sum_\text{passes} d = \sum_{k} k\,s_k\,T_k$$

where $T_k$ are the seconds in which $k$ stages compute and $s_k$ (``speeds``, measured) is the speed of a stage while k
of its pool compute, over that while all do. Stages of different pools of devices have cores of their own. So a pipeline
of more processes than cores pays for its work and hardly for its bubbles: the cores have other stages to work for.
A transfer between two stages is work of both, for as long as it takes: copies through the host's network stack, after
the sender's pass and before the receiver's. What a stage does once a step, after its passes, is work like them.

`PassTable` and `StageRun` are a pipeline as both simulators see it: how long each pass takes, who waits for its result,
and when it was done.

Source: processor sharing as in Kleinrock 1976 (Queueing Systems II, section 4.4), with measured speeds in place of
$P/k$. Not modelled: that passes which share a cache slow each other down unequally.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What the play of one stage left: pass after pass its code, start and end, and when its result was on the link."""

    codes: list[int]
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """End of the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """What follows from a pass and how long it takes, by pass group: its work times the number of parts, and its part.

    A pass has the code group · m + microbatch. The works are forward, backward, weight, and what is done once a step.
    """

    num_parts: int
    duration_s: list[float]
    consumer: list[int]
    """Group of the pass that takes the result, or −1."""
    receiver: list[int]
    """Stage of that pass."""
    transfer_s: list[float]
    link: list[int]
    """Of the stage's links, that which the result takes."""


def arrivals(table: PassTable, num_microbatches: int, unknown_s: float) -> list[float]:
    """When the input of each pass is there: at once for forward passes of the first part and for what follows passes of
    its own stage, weight passes and what is done once a step."""
    num_passes = 2 * table.num_parts * num_microbatches
    found = [0.0] * (len(table.duration_s) * num_microbatches)
    found[num_microbatches:num_passes] = [unknown_s] * (num_passes - num_microbatches)
    return found


_NEVER = float("inf")
_LEAST_SHARE = 1e-12
"""What is left of a pass, as a share of it, is rounding where it is less."""


def play_on_shared_cores(
    runs: Sequence[StageRun],
    table: PassTable,
    num_microbatches: int,
    speeds: Sequence[tuple[int, Sequence[float]]],
) -> None:
    """Fills in the times of every run; ``speeds`` has of each stage its pool and the speeds of one in it.

    Those have one entry for each number of stages of the pool that compute at once, none where no cores are shared.
    """
    play = _Play(runs, table, num_microbatches)
    while any(play.is_unfinished(stage) for stage in range(len(runs))):
        for stage in play.waiting():
            play.begin_if_ready(stage)
        play.advance(speeds)


class _Play:
    """The state of all stages at one moment, ``now_s``."""

    def __init__(self, runs: Sequence[StageRun], table: PassTable, num_microbatches: int) -> None:
        self.now_s = 0.0
        self._runs = runs
        self._table = table
        self._count = num_microbatches
        self._work_s = _with_transfers(table)
        self._arrival_s = arrivals(table, num_microbatches, _NEVER)
        self._free_s = [0.0] * len(runs)
        self._left_s: dict[int, float] = {}

    def is_unfinished(self, stage: int) -> bool:
        """Whether the stage has passes to begin or to end."""
        return len(self._runs[stage].ends_s) < len(self._runs[stage].codes)

    def waiting(self) -> Iterator[int]:
        """Stages that compute nothing and have passes to begin."""
        yield from (
            stage for stage in range(len(self._runs)) if stage not in self._left_s and self.is_unfinished(stage)
        )

    def begin_if_ready(self, stage: int) -> None:
        """Begins the stage's next pass if its input is there."""
        if self._ready_s(stage) <= self.now_s:
            run = self._runs[stage]
            run.starts_s.append(self.now_s)
            self._left_s[stage] = self._work_s[run.codes[len(run.ends_s)] // self._count]

    def advance(self, speeds: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Goes on to the next moment at which a pass ends or an input arrives."""
        arrives_s = min((self._ready_s(stage) for stage in self.waiting()), default=_NEVER)
        if not self._left_s:
            assert arrives_s < _NEVER, "the orders of the stages wait for each other"
            self.now_s = arrives_s
            return
        busy = Counter(speeds[stage][0] for stage in self._left_s)
        speed = {stage: of[busy[pool] - 1] if of else 1.0 for stage, (pool, of) in enumerate(speeds) if busy[pool]}
        ends_s = {stage: self.now_s + left_s / speed[stage] for stage, left_s in self._left_s.items()}
        next_s = min(arrives_s, *ends_s.values())
        elapsed_s, self.now_s = next_s - self.now_s, next_s
        for stage, left_s in list(self._left_s.items()):
            run = self._runs[stage]
            whole_s = self._work_s[run.codes[len(run.ends_s)] // self._count]
            self._left_s[stage] = left_s - elapsed_s * speed[stage]
            if ends_s[stage] <= next_s or self._left_s[stage] <= _LEAST_SHARE * whole_s:
                del self._left_s[stage]
                self._end(stage)

    def _ready_s(self, stage: int) -> float:
        run = self._runs[stage]
        return max(self._free_s[stage], self._arrival_s[run.codes[len(run.ends_s)]])

    def _end(self, stage: int) -> None:
        """Ends the pass of a stage and sends its result on its way."""
        run, table = self._runs[stage], self._table
        group, microbatch = divmod(run.codes[len(run.ends_s)], self._count)
        run.ends_s.append(self.now_s)
        run.sent_s.append(self.now_s)
        if table.consumer[group] >= 0:
            self._arrival_s[table.consumer[group] * self._count + microbatch] = self.now_s
        self._free_s[stage] = self.now_s


def _with_transfers(table: PassTable) -> list[float]:
    """The seconds of each group of passes with those of handing over what it takes and what it makes."""
    work_s = list(table.duration_s)
    for group, target in enumerate(table.consumer):
        if target >= 0:
            work_s[group] += table.transfer_s[group]
            work_s[target] += table.transfer_s[group]
    return work_s
