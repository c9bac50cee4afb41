"""Zero-bubble in the best order found for the times of the passes, within the memory of interleaved zero-bubble.

The order is part of the plan (``pass_order``), because the runtime knows no times. `steelyard.cost.pass_order` chooses
it. Until it is known, as in the search, and in plans without one, the order is that of interleaved zero-bubble. The
plan runs as rows of torch's CSV files for pipeline schedules.

Source: the automatic schedules of Qi et al. 2024 (arXiv 2401.10241), section 3, over the chunks of every stage.
"""

from functools import lru_cache

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pass_rows import check_rows, read_row, received_ahead, with_transfers
from steelyard.schedules.pipeline import PassOrder, PipelineConfig
from steelyard.schedules.zero_bubble import InterleavedZeroBubble


class ZeroBubbleAuto(InterleavedZeroBubble):
    """Interleaved zero-bubble in an order of passes that suits their times."""

    name = "zero-bubble-auto"
    title = "zero-bubble in the best order found"
    torch_name = "_PipelineScheduleRuntime"
    torchtitan_name = None
    orders_by_time = runs_as_rows = True

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return the passes of the plan's order, or else of interleaved zero-bubble."""
        given = pipeline.pass_order
        return read_row(given[stage], pipeline.num_stages) if given else super().passes(pipeline, stage)

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Return an error if the microbatches do not suit, or the plan's order has other passes or cannot run."""
        return super().refusal(pipeline) or (_refusal_of(pipeline) if pipeline.pass_order else None)

    def in_flight(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the most passes that are alive at once in the plan's order, or else in interleaved zero-bubble."""
        return self.passes(pipeline, stage).in_flight() if pipeline.pass_order else super().in_flight(pipeline, stage)

    def waiting(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return the most pending weight passes when another pass begins, or else those of interleaved zero-bubble."""
        return self.passes(pipeline, stage).waiting() if pipeline.pass_order else super().waiting(pipeline, stage)

    def received_ahead(self, pipeline: PipelineConfig, stage: int) -> tuple[int, int]:
        """Return the counts of the rows that the runtime runs, or else those of interleaved zero-bubble."""
        return _received_ahead(pipeline)[stage] if pipeline.pass_order else super().received_ahead(pipeline, stage)


ZERO_BUBBLE_AUTO = ZeroBubbleAuto()


@lru_cache(maxsize=64)
def _refusal_of(pipeline: PipelineConfig) -> InvalidPlanError | None:
    try:
        check_rows(pipeline)
    except InvalidPlanError as error:
        return error
    return None


@lru_cache(maxsize=64)
def _received_ahead(pipeline: PipelineConfig) -> tuple[tuple[int, int], ...]:
    return tuple(map(received_ahead, with_transfers(pipeline)))
