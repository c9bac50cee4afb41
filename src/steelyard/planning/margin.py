"""How much of a device's memory a plan leaves free, so that the allocator does not come under pressure.

PyTorch's allocator keeps what was freed for the next tensor of that size. Where the device is nearly full it gives all
of that back and asks for it again, in every step. In published runs (`benchmarks/README.md`) those that were measured
above 90 % of their device took 3 to 8 times as long as predicted. Of those of that source whose predicted memory, an
upper bound, is above 95 % six of 33 took 3 times as long, below it one in forty; others show nothing of it. So plans
are searched within `MARGIN` less than a GPU has, and within all of it where none fits so.
"""

from collections.abc import Sequence

from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import StagePrediction
from steelyard.units import format_bytes

MARGIN = 0.05
"""Part of a GPU's memory that is left free unless something else is asked for."""
MOST_MARGIN = 0.9


def check_margin(share: float) -> None:
    """Raise `UserError` unless ``share`` is a fraction of the memory that can be left free."""
    if not 0 <= share <= MOST_MARGIN:
        raise UserError(
            field="memory_margin",
            found=f"{share:g}",
            expected=f"a share of the memory from 0 to {MOST_MARGIN:g}",
            hint=f"give for example --memory-margin {MARGIN:g}, or leave it out",
        )


def with_margin(job: Job, share: float | None, *, is_asked: bool) -> Job:
    """The job within so much less memory, by default `MARGIN` of a GPU's own and nothing of a budget ``is_asked`` for.

    The CPU's allocator keeps nothing.
    """
    if share is None:
        share = MARGIN if job.cluster.device.is_gpu and not is_asked else 0.0
    margin = int(job.budget_bytes * share)
    return job.within(job.budget_bytes - margin, margin_bytes=margin)


def without_margin(job: Job) -> Job:
    """The job within all the memory that there is."""
    return Job.over([each.within(each.budget_bytes + each.margin_bytes) for each in job.by_group])


def warnings_of(
    job: Job, plan: Plan, stages: Sequence[StagePrediction], *, missed: Job | None = None
) -> tuple[str, ...]:
    """What should be known of a plan: of its model, and `_pressure` in each pool that it uses.

    ``missed`` is the job with the margins that no plan was found to leave free.
    """
    found, own = list(job.chain.warnings(job.seq_len)), job.jobs(plan)
    for place, pool in enumerate(job.by_group):
        used = [stage for stage, each in zip(stages, own, strict=True) if each is pool]
        told = _pressure(pool, used, missed.groups[place].margin_bytes if missed else 0) if used else ()
        found += [f"{pool.cluster.name}: {each}" if job.is_mixed else each for each in told]
    return tuple(found)


def _pressure(job: Job, stages: Sequence[StagePrediction], missed_bytes: int) -> tuple[str, ...]:
    """The warning that a device is so full that its allocator may slow the steps; nothing where none is.

    ``missed_bytes`` is the margin that no plan was found to leave free, which is said too.
    """
    device = job.cluster.device
    fullest = max(stage.total_bytes for stage in stages)
    has = device.memory_bytes
    told = [f"no plan was found that leaves {format_bytes(missed_bytes)} per device free"] if missed_bytes else []
    if device.is_gpu and has is not None and fullest > has * (1 - MARGIN):
        told.append(
            f"the fullest device holds {format_bytes(fullest)}, {fullest / has:.1%} of what it has; an allocator so "
            "full may free and allocate again in every step, which has slowed published runs"
        )
        if not missed_bytes:
            told.append(f"a plan with --memory-margin {MARGIN:g} leaves more free, where one fits")
    return ("; ".join(told),) if told else ()
