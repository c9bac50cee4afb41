r"""Interleaved 1F1B: every stage holds $v$ chunks of the model and alternates between them, for a smaller bubble.

Stage $i$ of $P$ first runs $\min(mv, (v - 1)g + 2(P - 1 - i))$ forward passes of $m$ microbatches, then alternates
forward and backward passes, then runs the remaining backward passes. It visits its chunks in rounds of $g$
microbatches: forward passes from the first chunk to the last, backward passes from the last to the first.
$g = m / \max(1, \lfloor m / P \rfloor)$, which is $P$ if $P$ divides $m$.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; the order of `torch.distributed.pipelining` 2.13.
"""

import numpy as np

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule, in_turn

MOST_TRIED = 4096
"""Maximum number of microbatches for which the search tries it: with more, the bubble is negligible anyway."""


class Interleaved1F1B(Schedule):
    """1F1B over the chunks of every stage."""

    name = "interleaved-1f1b"
    title = "interleaved 1F1B"
    torch_name = "ScheduleInterleaved1F1B"
    torchtitan_name: str | None = "Interleaved1F1B"
    megatron_name: str | None = "forward_backward_pipelining_with_interleaving"
    chunk_counts = tuple(range(2, 21))
    """Counts that public recipes use (NeMo: up to 20)."""
    keeps_sends = True
    forwards_per_hop = 2
    """Forward passes that a stage runs ahead of the next stage."""
    why_nowhere = (
        f"no configuration has two or more stages, at least as many microbatches (at most {MOST_TRIED}), and "
        "blocks that divide into chunks"
    )

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return the warm-up forward passes, then alternating forward and backward passes, then the remaining ones."""
        size = microbatches_per_round(pipeline)
        steps = np.arange(pipeline.num_passes)
        turn, within = np.divmod(steps, size)
        whole_round, place = np.divmod(turn, pipeline.num_chunks)
        microbatch = whole_round * size + within
        forwards = PassOrder(phase=np.full(len(steps), Phase.FORWARD), chunk=place, microbatch=microbatch)
        backward, last = np.full(len(steps), Phase.BACKWARD), pipeline.num_chunks - 1
        backwards = PassOrder(phase=backward, chunk=last - place, microbatch=microbatch)
        return in_turn(forwards, backwards, self.warm_up(pipeline, stage), backward_first=False)

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Return an error if the microbatches do not divide into rounds of equal length."""
        count, num_stages, rounds = pipeline.num_microbatches, pipeline.num_stages, _num_rounds(pipeline)
        if count % rounds == 0:
            return None
        return InvalidPlanError(
            field="num_microbatches",
            found=f"{count} for {num_stages} stages under {self.name}",
            expected=f"a multiple of its {rounds} rounds ({count} // {num_stages})",
            hint=f"take a multiple of {num_stages} microbatches",
        )

    def is_tried(self, pipeline: PipelineConfig) -> bool:
        """Return whether every stage has a microbatch, the schedule can run, and the bubble is not negligible."""
        filled = 2 <= pipeline.num_stages <= pipeline.num_microbatches <= MOST_TRIED
        return filled and super().is_tried(pipeline)

    def in_flight(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the warm-up forward passes plus the one before the first backward pass, over all chunks."""
        return min(pipeline.num_passes, self.warm_up(pipeline, stage) + 1)

    def received_ahead(self, pipeline: PipelineConfig, stage: int) -> tuple[int, int]:
        """Return a round less one for activations of the first stage and gradients of the last; else 1 and 2.

        The first and the last stage receive these from each other. A stage is ready to receive as soon as the other
        sends. The bound is tight for torch's pass orders of up to 12 stages and 8 chunks, from which it was taken.
        """
        waiting = microbatches_per_round(pipeline) - 1
        return waiting if stage == 0 else 1, waiting if stage == pipeline.num_stages - 1 else 2

    def warm_up(self, pipeline: PipelineConfig, stage: int) -> int:
        """Number of forward passes of a stage before the first one that is paired with a backward pass."""
        first = (pipeline.num_chunks - 1) * microbatches_per_round(pipeline)
        return min(pipeline.num_passes, first + self.forwards_per_hop * (pipeline.num_stages - 1 - stage))


INTERLEAVED_1F1B = Interleaved1F1B()


def _num_rounds(pipeline: PipelineConfig) -> int:
    return max(1, pipeline.num_microbatches // pipeline.num_stages)


def microbatches_per_round(pipeline: PipelineConfig) -> int:
    """Number of microbatches that a stage runs through one chunk before it moves to the next.

    There are max(1, ⌊m / P⌋) rounds of equal length: P microbatches if P divides m. Raises `InvalidPlanError` if the
    rounds do not divide m, which is the rule of `torch.distributed.pipelining`.
    """
    pipeline.check()
    return pipeline.num_microbatches // _num_rounds(pipeline)
