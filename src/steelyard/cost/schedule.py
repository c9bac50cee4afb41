r"""The order in which each stage of a pipeline does its passes, and what it keeps alive on the way.

A stage is a group of ranks; under interleaved 1F1B its layers come in $v$ chunks, and chunk $c$ of stage $i$ is part
$cP + i$ of the model. With $m$ microbatches and $P$ stages:

| schedule         | order on stage i                                                                            |
|------------------|---------------------------------------------------------------------------------------------|
| gpipe            | all forwards, then all backwards                                                            |
| 1f1b             | min(m, P − i) forwards, then a backward and a forward in turn, then the rest                  |
| interleaved-1f1b | min(mv, (v − 1)g + 2(P − 1 − i)) forwards, then a forward and a backward in turn, then the rest |

Interleaved, a stage goes through its chunks in rounds of $g$ microbatches, forwards from the first chunk to the last
and backwards from the last to the first; $g = m / \max(1, \lfloor m / P \rfloor)$, which is $P$ where $P$ divides $m$.
These are the orders of `torch.distributed.pipelining` 2.13, so what is predicted is what runs.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.plan.plan import Schedule, microbatches_per_round

Passes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """The passes of one stage in order; three arrays of the same length, one entry for each pass."""

    chunk: Passes
    microbatch: Passes
    is_backward: NDArray[np.bool_]

    def in_flight(self, chunk: int) -> int:
        """Most microbatches of a chunk that are alive at once: forward begun, backward not ended."""
        changes = np.where(self.is_backward, -1, 1) * (self.chunk == chunk)
        return int(changes.cumsum().max())

    def peak_bytes(self, activation_bytes: Sequence[int]) -> int:
        """Most bytes of activations alive at once, given those of one microbatch for each chunk."""
        per_pass = np.asarray(activation_bytes, dtype=np.int64)[self.chunk]
        return int(np.where(self.is_backward, -per_pass, per_pass).cumsum().max())


def pass_order(
    stage: int, num_stages: int, num_microbatches: int, schedule: Schedule, num_chunks: int = 1
) -> PassOrder:
    """The passes of one stage in the order in which it does them."""
    steps = np.arange(num_microbatches * num_chunks)
    size = microbatches_per_round(num_microbatches, num_stages) if schedule == "interleaved-1f1b" else num_microbatches
    turn, within = np.divmod(steps, size)
    whole_round, place = np.divmod(turn, num_chunks)
    microbatch = whole_round * size + within
    forwards = np.stack([place, microbatch, np.zeros_like(steps)])
    backwards = np.stack([num_chunks - 1 - place, microbatch, np.ones_like(steps)])
    warm_up = min(len(steps), _warm_up(stage, num_stages, num_microbatches, schedule, (num_chunks - 1) * size))
    chunk, microbatch, is_backward = _in_turn(forwards, backwards, warm_up, backward_first=schedule == "1f1b")
    return PassOrder(chunk=chunk, microbatch=microbatch, is_backward=is_backward.astype(bool))


def _warm_up(stage: int, num_stages: int, num_microbatches: int, schedule: Schedule, earlier_chunks: int) -> int:
    """Forwards of a stage before its first backward or, interleaved, before the first forward paired with one."""
    match schedule:
        case "gpipe":
            return num_microbatches
        case "1f1b":
            return num_stages - stage
        case "interleaved-1f1b":
            return earlier_chunks + 2 * (num_stages - 1 - stage)


def _in_turn(forwards: Passes, backwards: Passes, warm_up: int, *, backward_first: bool) -> Passes:
    """``warm_up`` forwards, then the other forwards and the backwards one by one, then the other backwards."""
    later = forwards[:, warm_up:]
    paired = backwards[:, : later.shape[1]]
    pair = (paired, later) if backward_first else (later, paired)
    alternating = np.stack(pair, axis=2).reshape(3, -1)
    return np.concatenate([forwards[:, :warm_up], alternating, backwards[:, later.shape[1] :]], axis=1)
