r"""Simulation of a pipeline whose stages share processor cores and are slower if more of them compute.

Durations $d$ of passes are those while all stages compute. While $k$ of them compute, each completes $s_k\,\Delta t$ of
its pass in $\Delta t$ seconds, and

$$\sum_\text{passes} d = \sum_{k} k\,s_k\,T_k$$

where $T_k$ are the seconds in which $k$ stages compute and $s_k$ (``speeds``, measured) is the speed of a stage while k
stages of its device group (pool) compute, relative to its speed while all compute. Stages of different groups do not
share cores. With more processes than cores a pipeline pays for its work but hardly for its bubbles, because the cores
work for other stages meanwhile. A transfer between two stages counts as work of both, because it copies through the
host's network stack: after the sender's pass and before the receiver's. Once-per-step work follows the passes of a
stage and is treated like them.

`PassTable` and `StageRun` describe a pipeline for both simulators: durations of passes, consumers of their results, and
their times.

Source: processor sharing as in Kleinrock 1976 (Queueing Systems II, section 4.4), with measured speeds in place of
$P/k$. Not modelled: unequal slowdown of passes that share a cache.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Simulated passes of one stage in order: code, start, end, and end of the transfer of the result."""

    codes: list[int]
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """Ends of transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """Duration and consumer of passes by pass group, which is work · number of parts + part.

    The code of a pass is group · m + microbatch. The works are forward, backward, weight and once-per-step work.
    """

    num_parts: int
    duration_s: list[float]
    consumer: list[int]
    """Group of the pass that consumes the result, or −1."""
    receiver: list[int]
    """Stage of that pass."""
    transfer_s: list[float]
    link: list[int]
    """Index of the link that carries the result."""


def arrivals(table: PassTable, num_microbatches: int, unknown_s: float) -> list[float]:
    """Return the arrival time of each pass's input: 0 for forward passes of the first part, weight passes and
    once-per-step work, which depend on no other stage; else ``unknown_s``."""
    num_passes = 2 * table.num_parts * num_microbatches
    found = [0.0] * (len(table.duration_s) * num_microbatches)
    found[num_microbatches:num_passes] = [unknown_s] * (num_passes - num_microbatches)
    return found


_NEVER = float("inf")
_LEAST_SHARE = 1e-12
"""Remaining fraction of a pass below which it counts as finished, because of rounding."""


def play_on_shared_cores(
    runs: Sequence[StageRun],
    table: PassTable,
    num_microbatches: int,
    speeds: Sequence[tuple[int, Sequence[float]]],
) -> None:
    """Fill in the times of every run; ``speeds`` has for each stage its device group and the speeds of a stage in it.

    The speeds have one entry per number of stages of the group that compute at once, or none if no cores are shared.
    """
    play = _Play(runs, table, num_microbatches)
    while any(play.is_unfinished(stage) for stage in range(len(runs))):
        for stage in play.waiting():
            play.begin_if_ready(stage)
        play.advance(speeds)


class _Play:
    """State of all stages at time ``now_s``."""

    def __init__(self, runs: Sequence[StageRun], table: PassTable, num_microbatches: int) -> None:
        self.now_s = 0.0
        self._runs = runs
        self._table = table
        self._count = num_microbatches
        work_s = list(table.duration_s)
        for group, target in enumerate(table.consumer):
            if target >= 0:
                work_s[group] += table.transfer_s[group]
                work_s[target] += table.transfer_s[group]
        self._work_s = work_s
        self._arrival_s = arrivals(table, num_microbatches, _NEVER)
        self._free_s = [0.0] * len(runs)
        self._left_s: dict[int, float] = {}

    def is_unfinished(self, stage: int) -> bool:
        """Return whether the stage has passes to begin or to end."""
        return len(self._runs[stage].ends_s) < len(self._runs[stage].codes)

    def waiting(self) -> Iterator[int]:
        """Yield the idle stages that have passes to begin."""
        yield from (
            stage for stage in range(len(self._runs)) if stage not in self._left_s and self.is_unfinished(stage)
        )

    def begin_if_ready(self, stage: int) -> None:
        """Begin the stage's next pass if its input has arrived."""
        if self._ready_s(stage) <= self.now_s:
            run = self._runs[stage]
            run.starts_s.append(self.now_s)
            self._left_s[stage] = self._work_s[run.codes[len(run.ends_s)] // self._count]

    def advance(self, speeds: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Advance to the next time at which a pass ends or an input arrives."""
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
        """End the current pass of a stage and deliver its result."""
        run, table = self._runs[stage], self._table
        group, microbatch = divmod(run.codes[len(run.ends_s)], self._count)
        run.ends_s.append(self.now_s)
        run.sent_s.append(self.now_s)
        if table.consumer[group] >= 0:
            self._arrival_s[table.consumer[group] * self._count + microbatch] = self.now_s
        self._free_s[stage] = self.now_s
