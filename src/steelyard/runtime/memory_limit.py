"""What happens when memory runs out: an error that names the predicted and the measured bytes.

With ``--enforce-memory`` a rank may take no more than the plan's budget, so that a plan can be tried on devices that
have more: the CUDA allocator refuses what is above it; on the CPU the peak of the first full step is compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from steelyard.errors import InvalidPlanError
from steelyard.plan.plan import Plan
from steelyard.units import format_bytes

_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


class MemoryExceededError(RuntimeError):
    """A rank ran out of memory, or took more than the budget that is enforced."""

    is_final = True


class MemoryLimit:
    """The memory that this rank may take, and how it ends when that is not enough.

    Raises `InvalidPlanError` where a budget is to be enforced and the plan has none.
    """

    def __init__(self, plan: Plan, *, enforce: bool) -> None:
        self._plan = plan
        self._stage = plan.stage_of(dist.get_rank())
        self._budget_bytes = _budget_bytes(plan) if enforce else None
        if self._budget_bytes is not None and torch.cuda.is_available():
            total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget_bytes / total_bytes))

    def check(self, peak_bytes: int) -> None:
        """Raises `MemoryExceededError` if the peak of a step is above the budget that is enforced."""
        if self._budget_bytes is not None and peak_bytes > self._budget_bytes:
            raise MemoryExceededError(f"its tensors took {format_bytes(peak_bytes)} in a step; {self._predicted()}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what PyTorch raises in the context when memory runs out into a `MemoryExceededError`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryExceededError(self._message(str(error))) from error
        except RuntimeError as error:
            if _CPU_MESSAGE not in str(error):
                raise
            raise MemoryExceededError(self._message(str(error))) from error

    def _message(self, cause: str) -> str:
        held = ""
        if torch.cuda.is_available():
            held = f"its tensors took {format_bytes(torch.cuda.max_memory_allocated())} by then; "
        return f"memory ran out; {held}{self._predicted()}\n{cause.splitlines()[0]}"

    def _predicted(self) -> str:
        prediction = self._plan.prediction
        if prediction is None:
            return "the plan has no prediction"
        predicted = format_bytes(prediction.stages[self._stage].total_bytes)
        return f"predicted for stage {self._stage}: {predicted}, of a budget of {format_bytes(prediction.device_bytes)}"


def _budget_bytes(plan: Plan) -> int:
    if plan.prediction is None:
        raise InvalidPlanError(
            field="prediction",
            found="nothing",
            expected="a plan with a budget, for --enforce-memory",
            hint="write the plan with `steelyard plan`, or leave the option out",
        )
    return plan.prediction.device_bytes
