r"""1F1B: after as many forwards as there are stages from here on, a backward and a forward in turn.

Stage $i$ of $P$ does $\min(m, P - i)$ forwards of $m$ microbatches first, so that it holds no more than these at once.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; the order of `torch.distributed.pipelining` 2.13.
"""

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule, all_of, in_turn


class OneFOneB(Schedule):
    """The usual schedule: that of a configuration of which nothing else is said."""

    name = "1f1b"
    title = "1F1B"
    torch_name = "Schedule1F1B"
    torchtitan_name = "1F1B"
    megatron_name = "forward_backward_pipelining_without_interleaving"
    words = ""

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """The first forwards, then a backward and a forward in turn, then the other backwards."""
        count = pipeline.num_microbatches
        forwards, backwards = (all_of(count, each) for each in (Phase.FORWARD, Phase.BACKWARD))
        return in_turn(forwards, backwards, warm_up=self.in_flight(pipeline, stage), backward_first=True)

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Torch wants as many microbatches as there are stages, or more."""
        if pipeline.num_microbatches >= pipeline.num_stages:
            return None
        return InvalidPlanError(
            field="num_microbatches",
            found=f"{pipeline.num_microbatches} for {pipeline.num_stages} stages",
            expected=f"at least as many microbatches as stages under {self.name}",
            hint="raise num_microbatches or use the gpipe schedule",
        )

    def in_flight(self, pipeline: PipelineConfig, stage: int) -> int:
        """Those of the first forwards."""
        return min(pipeline.num_microbatches, pipeline.num_stages - stage)

    def steady_from(self, pipeline: PipelineConfig, stage: int) -> int:
        """A stage with n behind it begins with n + 1 microbatches; two more make sure that it is in its steady state.

        Torch wants at least as many as there are stages.
        """
        return max(pipeline.num_stages, pipeline.num_stages - stage + 2)


ONE_F_ONE_B = OneFOneB()
