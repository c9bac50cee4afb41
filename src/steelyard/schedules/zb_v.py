r"""ZB-V: two chunks per stage in a V, and weight passes that fill the bubbles.

Stage $i$ of $P$ has parts $i$ and $2P - 1 - i$ of the model: the first chunk runs from the first stage to the last, the
second chunk back. The embedding and the head therefore lie on the first stage, and the last stage hands activations and
gradients to itself. At most $2P$ passes, of half a stage each, are in flight on every stage: as much memory as 1F1B
needs on its first stage. With equal times of forward, backward and weight passes and no transfers, the only idle time
is that of filling the first chunk.

Stage $i$ runs $2(P - i) - 1$ forward passes of its first chunk, then forward passes of both chunks in turn until the
head's stage may begin its backward passes, then all three passes of both chunks in turn. A weight pass follows its
backward pass at once until the forward passes are used up. Then weight passes fill the time in which gradients return.

torchtitan runs it with torch's split backward passes, as interleaved zero-bubble. Megatron-Core has no schedule with
chunks in a V.

Source: Qi et al. 2024 (arXiv 2401.10241), section 6; the order of `ScheduleZBVZeroBubble` of
`torch.distributed.pipelining` 2.13.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule

Pass = tuple[Phase, int, int]
"""Phase, chunk and microbatch."""

F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT
MOST_TRIED = 512
"""Maximum number of microbatches for which the search tries a V: with more, the bubble is negligible anyway."""


class ZeroBubbleV(Schedule):
    """Two chunks per stage in a V, with weight passes in the bubbles."""

    name = "zb-v"
    title = "ZB-V"
    torch_name = "ScheduleZBVZeroBubble"
    torchtitan_name: str | None = "ZBVZeroBubble"
    chunk_counts = (2,)
    keeps_sends = True
    splits_backward = True
    only_alone = True
    why_not_everywhere = "searched only if --schedule names no other schedule"
    why_nowhere = (
        f"no configuration has two or more stages, enough microbatches (at most {MOST_TRIED}), and blocks that divide "
        "into two chunks"
    )

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return warm-up, steady and cool-down passes, without those of microbatches that the step does not have."""
        pipeline.check()
        return _order(type(self), pipeline.num_stages, pipeline.num_microbatches, stage)

    def sequence(self, num_stages: int, num_microbatches: int, stage: int) -> Iterator[Pass]:
        """Yield the passes of a stage; torch plans at least as many microbatches as the pipeline has room for."""
        count, next_of = max(2 * num_stages - 1, num_microbatches), Counters()
        yield from (next_of(F, 0) for _ in range(2 * (num_stages - stage) - 1))
        for _ in range(stage):
            yield from (next_of(F, 1), next_of(F, 0))
        for _ in range(num_stages - stage):
            yield from (next_of(F, 1), next_of(B, 1), next_of(W, 1))
        while next_of.count(F, 1) < count:
            if next_of.count(F, 0) < count:
                yield next_of(F, 0)
            yield from (next_of(B, 0), next_of(W, 0), next_of(F, 1), next_of(B, 1), next_of(W, 1))
        for _ in range(stage):
            yield from (next_of(B, 0), next_of(B, 1))
        for _ in range(num_stages - stage):
            yield from (next_of(B, 0), next_of(W, 0))
        for chunk in (1, 0):
            yield from (next_of(W, chunk) for _ in range(count - next_of.count(W, chunk)))

    def stage_of(self, pipeline: PipelineConfig, part: int) -> int:
        """Return the stage of a part: the first chunk runs from the first stage to the last, the second one back."""
        return min(part, pipeline.num_parts - 1 - part)

    def parts_of(self, pipeline: PipelineConfig, stage: int) -> tuple[int, ...]:
        """Return the two parts on a stage."""
        return stage, pipeline.num_parts - 1 - stage

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Return an error if a stage does not have two chunks."""
        if pipeline.num_chunks == 2:
            return None
        return InvalidPlanError(
            field="num_chunks",
            found=f"{pipeline.num_chunks} under {self.name}",
            expected="2 chunks on every stage, which make a V",
            hint="divide each stage into two chunks, or use another schedule",
        )

    def is_tried(self, pipeline: PipelineConfig) -> bool:
        """Return whether there are several stages and microbatches that fill them, and the bubble is not negligible."""
        filled = 2 <= pipeline.num_stages <= pipeline.num_microbatches <= MOST_TRIED
        return filled and super().is_tried(pipeline)

    def waiting(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the most pending weight passes when another pass begins."""
        return pipeline.passes(stage).waiting()

    def unfinished(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the most passes whose weight pass has not ended: weight passes wait only as others end."""
        return pipeline.passes(stage).unfinished()

    def received_ahead(self, _pipeline: PipelineConfig, _stage: int) -> tuple[int, int]:
        """Return 2 and 2, taken from torch's pass orders of up to 8 stages and 31 microbatches."""
        return 2, 2


class Counters:
    """Passes of a stage so far by phase and chunk."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Phase, int], int] = {}

    def __call__(self, phase: Phase, chunk: int) -> Pass:
        """Return the next pass of this phase and chunk and count it."""
        microbatch = self.count(phase, chunk)
        self._counts[phase, chunk] = microbatch + 1
        return phase, chunk, microbatch

    def count(self, phase: Phase, chunk: int) -> int:
        """Number of passes of this phase and chunk."""
        return self._counts.get((phase, chunk), 0)


ZB_V = ZeroBubbleV()


@lru_cache(maxsize=256)
def _order(schedule: type[ZeroBubbleV], num_stages: int, num_microbatches: int, stage: int) -> PassOrder:
    passes = schedule().sequence(num_stages, num_microbatches, stage)
    phase, chunk, microbatch = np.array([each for each in passes if each[2] < num_microbatches], dtype=np.int64).T
    return PassOrder(phase=phase, chunk=chunk, microbatch=microbatch)
