"""Check of plans whose samples hold several sequences, or padding."""

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.modules.sample_proof import wrong_per_sample
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import shrunk_plan


def check_per_sample(plan: Plan) -> None:
    """Raise `UserError` unless samples under the plan may hold several sequences, or padding that is not seen.

    A small model of the same structure is tried on the CPU, which takes about a second.
    """
    if any(each.token_degree > 1 for each in plan.strategies):
        raise InvalidPlanError(
            field="strategies",
            found="cp, and samples with several sequences or masked padding",
            expected="whole samples on each rank, because cp divides one causal sequence",
            hint="plan without cp, or pack rows into one sequence (--packing wrapped)",
        )
    small = shrunk_plan(plan)
    if reason := wrong_per_sample(small.chain(), small.seq_len):
        raise InvalidModelError(
            field="model_type",
            found=f"{plan.chain().family.model_type}: {reason}",
            expected="a model that masks attention between packed sequences, and to padding",
            hint="use one sequence per sample, or pack rows into one sequence (--packing wrapped)",
        )
