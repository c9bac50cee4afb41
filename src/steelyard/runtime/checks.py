"""What must hold before a plan is run; checked by every process before it takes memory."""

from steelyard.errors import InvalidPlanError
from steelyard.plan.plan import Plan


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raises `InvalidPlanError` unless there are as many processes as the plan has ranks."""
    if world_size != plan.num_devices:
        raise InvalidPlanError(
            field="stages.ranks",
            found=f"a plan for {plan.num_devices} processes",
            expected=f"a plan for the {world_size} processes that were started",
            hint=f"start {plan.num_devices} processes, or plan for {world_size} devices",
        )
