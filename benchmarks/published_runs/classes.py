"""Classes of published runs that predictions are judged by, and the device generations asked for apart.

| class        | runs                                                                     |
|--------------|--------------------------------------------------------------------------|
| adapters     | low-rank adapters are trained, the base is frozen                        |
| experts      | models with experts, in any precision                                    |
| long context | context parallelism, without experts, in any precision                   |
| 8-bit        | linear layers multiply in 8 bits or fewer: fp8, MXFP8, NVFP4             |
| dense 16-bit | all others: bf16, fp16, and rows that do not state a precision           |

A run is of the first class that it belongs to.
"""

from published_runs.rows import PublishedRun
from published_runs.targets import is_recommended_dense

DENSE, EXPERTS, CONTEXT, EIGHT_BIT, ADAPTERS = "dense 16-bit", "experts", "long context", "8-bit", "adapters"
CLASSES = (DENSE, EXPERTS, CONTEXT, EIGHT_BIT, ADAPTERS)
"""In the order of tables."""
_LOW_PRECISIONS = ("fp8", "fp4", "float8")

BLACKWELL, CDNA3_ON = "Blackwell (B200 to GB300)", "MI300X to MI355X"
DEVICE_GROUPS = {
    BLACKWELL: frozenset({"B200", "GB200", "B300", "GB300"}),
    CDNA3_ON: frozenset({"MI300X", "MI325X", "MI350X", "MI355X"}),
}
"""Devices that have targets of their own, by the name in column gpu."""


def class_of(run: PublishedRun) -> str:
    """The class of a run, one of `CLASSES`."""
    if run.text("lora"):
        return ADAPTERS
    if run.text("moe_experts"):
        return EXPERTS
    if (run.count("cp") or 1) > 1:
        return CONTEXT
    return EIGHT_BIT if is_low_precision(run) else DENSE


def is_low_precision(run: PublishedRun) -> bool:
    """Whether linear layers multiply in 8 bits or fewer."""
    return any(name in run.text("precision").lower() for name in _LOW_PRECISIONS)


def counts_for_time(run: PublishedRun) -> bool:
    """Whether a run's time is judged: recommended rows of dense models, and every row of the classes that have few."""
    return run.is_open and bool(run.step_time_s) and (class_of(run) != DENSE or is_recommended_dense(run))
