"""Measures how fast a process computes while few of the processes of a host do: they share its cores.

Layers are measured while all processes compute. In a pipeline some wait for others, and those that do not are then
faster. On GPUs every process has a device of its own, and nothing is to be measured.
"""

from itertools import accumulate

import torch.distributed as dist

from steelyard.profiler.clock import barrier, fast_half_mean, num_repetitions, over_ranks
from steelyard.profiler.layers import ShortChain, repetition_laps


def measure_busy_speeds(short: ShortChain, *, samples: int, budget_s: float) -> tuple[float, ...]:
    """The speed of a process while 1, 2, … of them compute, over its speed while all do; a collective call.

    Never rising, the last one 1; empty on GPUs. ``short`` must have no tensor parallelism, so that its processes need
    not wait for each other.
    """
    world_size = dist.get_world_size()
    if short.device.type == "cuda" or world_size == 1:
        return ()
    counts = range(1, world_size + 1)
    rounds = [[_seconds(short, samples, count) for count in counts]]
    rounds += [
        [_seconds(short, samples, count) for count in counts]
        for _ in range(num_repetitions(sum(rounds[0]), budget_s - sum(rounds[0]), least=1))
    ]
    typical_s = [fast_half_mean(column) for column in zip(*rounds[1:], strict=True)]
    return non_rising([typical_s[-1] / seconds for seconds in typical_s])


def non_rising(speeds: list[float]) -> tuple[float, ...]:
    """``speeds`` raised, where noise makes it necessary, so that none is below a later one."""
    return tuple(accumulate(reversed(speeds), max))[::-1]


def _seconds(short: ShortChain, samples: int, num_busy: int) -> float:
    """Seconds of a microbatch on the first ``num_busy`` processes, the others idle: the mean over those that work."""
    is_busy = dist.get_rank() < num_busy
    if is_busy:
        seconds = sum(repetition_laps(short, samples))
    else:
        barrier(short.device)  # the one with which those that work begin
        seconds = 0.0
    barrier(short.device)
    return over_ranks([seconds], short.device, dist.ReduceOp.SUM)[0] / num_busy
