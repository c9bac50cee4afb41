r"""The largest of a size that still fits: tokens of a sample, samples computed at once, or a size of a lever.

Of each size that is tried the fewest bytes of a device in which there is a plan. They grow nearly as a line,

$$m(n) \approx m_0 + m_1 n,$$

since activations grow with tokens and samples, and states with the rank of adapters. So the next size to try is where
the line through the last two meets the budget, kept between the largest that fits and the smallest that does not:
false position, which takes a few sizes where halving would take ten. Each is a trace or a table of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from steelyard.errors import UserError
from steelyard.levers import LEVERS
from steelyard.plan.decisions import Decisions
from steelyard.planning.advise import LIMIT_S, least_bytes
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import FREE_CHOICE, Progress, Study
from steelyard.units import format_bytes

MOST_TRIED = 6
"""Sizes that are tried at most."""
_MOST = 2**24
SEQ_LEN, BATCH = "seq-len", "batch"
Ask = Callable[[Mapping[str, str]], PlanRequest]
"""Makes the request with these levers in the place of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that was found to fit."""

    what: str
    size: int
    too_large: int | None
    """The smallest that was found not to fit; None where the largest that was tried fits."""
    least_bytes: int
    """Fewest of a device in which there is a plan of this size."""
    budget_bytes: int
    step_s: float
    """Of its fastest plan that fits."""
    options: str
    """As `steelyard plan` takes it."""


def kinds() -> tuple[str, ...]:
    """Return what may be as large as fits."""
    return SEQ_LEN, BATCH, *(lever.size for lever in LEVERS.values() if lever.size)


def largest(what: str, request: PlanRequest, ask: Ask, *, progress: Progress = lambda _: None) -> Largest:
    """Return the largest size of a kind that fits; raises `UserError` where none does, or nothing has it."""
    given, first, step = _sizes(what, replace(request, time_limit_s=LIMIT_S), ask)
    known: dict[int, Study] = {}

    def needed(size: int) -> int:
        progress(f"{size}")
        known[size] = Study(given(size))
        return least_bytes(known[size]) or 2**50

    size, low, high = first, dict[int, int](), dict[int, int]()
    while len(known) < MOST_TRIED and size not in known:
        found, budget = needed(size), known[size].job.budget_bytes
        (low if found <= budget else high)[size] = found
        size = _next(low, high, budget, step)
    if not low:
        raise UserError(
            field="--max",
            found=f"{what} {min(high)}, which takes {format_bytes(min(high.values()))} of {format_bytes(budget)}",
            expected="a size that fits",
            hint="see `steelyard advise` without --max for what to change",
        )
    best = max(low)
    return Largest(
        what=what,
        size=best,
        too_large=min(high, default=None),
        least_bytes=low[best],
        budget_bytes=budget,
        step_s=known[best].answer(FREE_CHOICE).step_s,
        options=_options(what, known[best].request, best),
    )


def _next(low: Mapping[int, int], high: Mapping[int, int], budget: int, step: int) -> int:
    """The size to try next; one that is known where there is none between."""
    below, above = max(low, default=0), min(high, default=_MOST)
    if not high and len(low) == 1:
        return 2 * below
    if not low:
        return max(step, above // 2 // step * step)
    ends = sorted([*low.items(), *high.items()])
    (short, least), (long, most) = ends[-2:] if not high else ((below, low[below]), (above, high[above]))
    size = int(short + (budget - least) * (long - short) / max(1, most - least)) // step * step
    return max(min(size, above - step, 16 * below), below + step if above - below > step else below)


def _sizes(what: str, request: PlanRequest, ask: Ask) -> tuple[Callable[[int], PlanRequest], int, int]:
    """The request of a size, the first size to try, and the step between sizes."""
    if what == SEQ_LEN:
        return lambda size: replace(request, seq_len=size), 2048, 128
    if what == BATCH:
        at_once = replace(request, decisions=Decisions(num_microbatches=1))
        return lambda size: replace(at_once, global_batch=size), 1, 1
    lever = next((each for each in request.levers if each.size == what), None)
    if lever is None:
        names = ", ".join(f"--{each.name}" for each in LEVERS.values() if each.size == what)
        raise UserError(
            field="--max",
            found=f"{what} without {names}" if names else what,
            expected=f"one of {', '.join(kinds())}",
            hint=f"add {names}" if names else "choose one of them",
        )

    def sized(size: int) -> PlanRequest:
        found = ask(request.levers.texts | {lever.name: str(lever.sized(size))})
        return replace(found, time_limit_s=LIMIT_S)

    return sized, 16, 8


def _options(what: str, request: PlanRequest, size: int) -> str:
    if what == SEQ_LEN:
        return f"--seq-len {size}"
    if what == BATCH:
        return f"--global-batch {size} --microbatches 1"
    return " ".join(f"--{name} {text}" for name, text in request.levers.texts.items())
