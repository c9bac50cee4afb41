"""GPipe: each stage runs all its forward passes, then all its backward passes.

Source: Huang et al. 2019; the order of `torch.distributed.pipelining` 2.13.
"""

from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule, all_of, in_turn


class GPipe(Schedule):
    """All forward passes, then all backward passes: every microbatch is alive at once."""

    name = "gpipe"
    title = "GPipe"
    torch_name = "ScheduleGPipe"
    torchtitan_name = "GPipe"
    keeps_sends = True
    why_not_everywhere = (
        "searched only with fewer microbatches than stages: otherwise 1f1b is as fast and holds fewer activations"
    )

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return all forward passes, then all backward passes."""
        count = pipeline.num_microbatches
        forwards, backwards = (all_of(count, each) for each in (Phase.FORWARD, Phase.BACKWARD))
        return in_turn(forwards, backwards, warm_up=count, backward_first=False)

    def is_tried(self, pipeline: PipelineConfig) -> bool:
        """Return whether there are too few microbatches for 1F1B."""
        return pipeline.num_microbatches < pipeline.num_stages

    def in_flight(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the number of microbatches, which are all in flight at once."""
        return pipeline.num_microbatches


GPIPE = GPipe()
