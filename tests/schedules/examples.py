"""Pipeline configurations by the names of their schedules, and plans in an order of passes of their own."""

from steelyard.cost.pass_order import StageLimit, best_order
from steelyard.cost.simulator import StageTimes
from steelyard.plan.plan import Plan
from steelyard.schedules import PipelineConfig, find_schedule


def pipeline(
    num_stages: int = 1, num_microbatches: int = 1, schedule: str = "1f1b", num_chunks: int = 1
) -> PipelineConfig:
    return PipelineConfig(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        schedule=find_schedule(schedule),
    )


def in_own_order(plan: Plan) -> Plan:
    """The plan in an order that suits some times and up to twice as many passes in flight as usual."""
    shape = plan.pipeline
    parts = [
        StageTimes(forward_s=1 + number % 3, backward_s=4, weight_s=1 + number % 2, transfer_s=1)
        for number in range(shape.num_parts)
    ]
    limits = [StageLimit(in_flight=2 * shape.in_flight(stage), waiting=3) for stage in range(shape.num_stages)]
    return Plan.model_validate(plan.model_dump(mode="json") | {"pass_order": best_order(parts, shape, limits)})
