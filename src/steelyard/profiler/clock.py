"""Seconds on a device, agreed on by all processes: time marks, number of repetitions, and their summary."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist


class Stopwatch:
    """Marks between pieces of work. On a GPU a mark is an event in the stream, so launches may run ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times_s: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """End the current lap and begin the next."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times_s.append(time.perf_counter())

    def laps_s(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the device, then forgets the marks."""
        synchronize(self._device)
        laps = [after - before for before, after in pairwise(self._times_s)]
        laps += [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        self._times_s, self._events = [], []
        return laps


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; a CPU needs no waiting."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device: torch.device) -> None:
    """Wait until every process has arrived here with its device idle."""
    synchronize(device)
    dist.barrier()


def over_ranks(values: Sequence[float], device: torch.device, op: dist.ReduceOp.RedOpType) -> list[float]:
    """Return ``values`` reduced elementwise over all processes, the same on each."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, begun together on all processes, until the slowest has finished; the same on each."""
    watch = Stopwatch(device)
    barrier(device)
    watch.mark()
    work()
    watch.mark()
    return over_ranks(watch.laps_s(), device, dist.ReduceOp.MAX)[0]


def typical_seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    most: int = 20,
    prepare: Callable[[], object] = lambda: None,
) -> float:
    """Typical seconds of one call on the slowest process, from as many calls as ``budget_s`` allows (at least 3).

    ``prepare`` runs before each call and is not timed.
    """

    def once_s() -> float:
        prepare()
        return seconds_of(work, device)

    first_s = once_s()
    return fast_half_mean([once_s() for _ in range(num_repetitions(first_s, budget_s, most=most))])


def num_repetitions(once_s: float, budget_s: float, *, least: int = 3, most: int = 20) -> int:
    """Number of repetitions of ``once_s`` seconds that fit into ``budget_s``; ``once_s`` must be equal on all ranks."""
    return int(min(max(budget_s / max(once_s, 1e-9), least), most))


def fast_half_mean(values: Sequence[float]) -> float:
    """Return the mean of the smaller half of the values (the middle one included).

    Disturbances only make a measurement longer, so the longer half is left out. Within the kept half it is the mean,
    not the minimum, because a step adds up good and bad moments.
    """
    kept = sorted(values)[: (len(values) + 1) // 2]
    return sum(kept) / len(kept)


def fast_half_columns(rows: Sequence[Sequence[float]], totals: Sequence[float]) -> list[float]:
    """Return the mean of each column over the half of the rows whose ``totals`` are smaller."""
    order = sorted(range(len(rows)), key=lambda row: totals[row])[: (len(rows) + 1) // 2]
    return [sum(rows[row][column] for row in order) / len(order) for column in range(len(rows[0]))]
