r"""1F1B: warm-up forward passes, then alternating backward and forward passes.

Stage $i$ of $P$ first runs $\min(m, P - i)$ forward passes of $m$ microbatches and never holds more than these at once.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; the order of `torch.distributed.pipelining` 2.13.
"""

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule, all_of, in_turn


class OneFOneB(Schedule):
    """The default schedule."""

    name = "1f1b"
    title = "1F1B"
    torch_name = "Schedule1F1B"
    torchtitan_name = "1F1B"
    megatron_name = "forward_backward_pipelining_without_interleaving"
    words = ""

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return the warm-up forward passes, then alternating backward and forward passes, then the remaining ones."""
        count = pipeline.num_microbatches
        forwards, backwards = (all_of(count, each) for each in (Phase.FORWARD, Phase.BACKWARD))
        return in_turn(forwards, backwards, warm_up=self.in_flight(pipeline, stage), backward_first=True)

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Return an error if there are fewer microbatches than stages, which torch does not accept."""
        if pipeline.num_microbatches >= pipeline.num_stages:
            return None
        return InvalidPlanError(
            field="num_microbatches",
            found=f"{pipeline.num_microbatches} for {pipeline.num_stages} stages",
            expected=f"at least as many microbatches as stages under {self.name}",
            hint="raise num_microbatches or use the gpipe schedule",
        )

    def in_flight(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the number of warm-up forward passes."""
        return min(pipeline.num_microbatches, pipeline.num_stages - stage)

    def steady_from(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the number of warm-up microbatches plus two, which ensures the steady state.

        At least the number of stages, which torch requires.
        """
        return max(pipeline.num_stages, pipeline.num_stages - stage + 2)


ONE_F_ONE_B = OneFOneB()
