r"""Largest size that still fits: tokens per sample, samples computed at once, the size of a lever, or a model.

For each size, the fewest bytes per device in which there is a plan grow nearly linearly,

$$m(n) \approx m_0 + m_1 n,$$

because activations grow with tokens and samples, and states with the rank of adapters and with parameters. The sizes of
models are those of the packaged models of the same type. The next size to try is where the line through the last two
meets the budget, kept between the largest that fits and the smallest that does not. This false-position method needs a
few sizes where bisection would need ten, and each size needs its own trace or table.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from steelyard.errors import UserError
from steelyard.levers import LEVERS
from steelyard.model.read import load_model, model_names
from steelyard.plan.decisions import Decisions
from steelyard.planning.advise import LIMIT_S, as_options, is_beyond_host, least_bytes
from steelyard.planning.job import job_of
from steelyard.planning.request import PlanRequest
from steelyard.planning.simple import num_params
from steelyard.planning.variants import FREE_CHOICE, Progress, Study
from steelyard.units import format_bytes

MOST_TRIED = 6
"""Maximum number of sizes that are tried."""
_MOST, _MOST_SAMPLES = 2**24, 2**16
_BEYOND = 2**50
SEQ_LEN, BATCH, MODEL = "seq-len", "batch", "model"
Ask = Callable[..., PlanRequest]
"""Function that builds the request with these levers instead of its own, and with the packaged model of this name if
one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """Largest size that was found to fit."""

    what: str
    size: int | str
    """Number, or name of a model."""
    too_large: int | str | None
    """Smallest size that was found not to fit; None if every size that was tried fits."""
    least_bytes: int
    """Fewest bytes per device in which there is a plan of this size."""
    budget_bytes: int
    step_s: float
    """Step time in seconds of its fastest plan that fits."""
    options: str
    """Options of `steelyard plan` for this size; empty for a model."""


def kinds() -> tuple[str, ...]:
    """Return the kinds of sizes that can be maximised."""
    return SEQ_LEN, BATCH, MODEL, *(lever.size for lever in LEVERS.values() if lever.size)


def largest(what: str, request: PlanRequest, ask: Ask, *, progress: Progress = lambda _: None) -> Largest:
    """Return the largest size of a kind that fits.

    Raises `UserError` if no size fits, or if the request has no size of this kind.
    """
    given, first, sizes, names = _sizes(what, replace(request, time_limit_s=LIMIT_S), ask)
    known: dict[int, Study] = {}

    def needed(size: int) -> int:
        progress(f"trying {names.get(size, f'{what} {size}')}")
        known[size] = Study(given(size))
        return _BEYOND if is_beyond_host(known[size]) else least_bytes(known[size]) or _BEYOND

    size, low, high = first, dict[int, int](), dict[int, int]()
    while len(known) < MOST_TRIED and size not in known:
        found, budget = needed(size), known[size].job.budget_bytes
        (low if found <= budget else high)[size] = found
        size = _next(low, high, budget, sizes)
    if not low:
        least = min(high.values())
        needs = f"which takes {format_bytes(least)} of {format_bytes(budget)}" if least < _BEYOND else "without a plan"
        raise UserError(
            field="--max",
            found=f"{what} {names.get(min(high), min(high))}, {needs}",
            expected="a size that fits",
            hint="see `steelyard advise` without --max for what to change",
        )
    best, too_large = max(low), min(high, default=None)
    return Largest(
        what=what,
        size=names.get(best, best),
        too_large=None if too_large is None else names.get(too_large, too_large),
        least_bytes=low[best],
        budget_bytes=budget,
        step_s=known[best].answer(FREE_CHOICE).step_s,
        options=_options(what, known[best].request, best),
    )


def _next(low: Mapping[int, int], high: Mapping[int, int], budget: int, sizes: Sequence[int]) -> int:
    """Return the size to try next, or a known one if there is none between."""
    below, above = max(low, default=0), min(high, default=sizes[-1] + 1)

    def at_most(size: int) -> int:
        return sizes[max(0, bisect_right(sizes, size) - 1)]

    if not low:
        return at_most(above // 2)
    last = at_most(above - 1)
    least_next = min(last, sizes[min(bisect_left(sizes, below) + 1, len(sizes) - 1)])
    if not high and len(low) == 1:
        return max(at_most(2 * below), least_next)
    ends = sorted([*low.items(), *high.items()])
    (short, least), (long, most) = ends[-2:] if not high else ((below, low[below]), (above, high[above]))
    size = int(short + (budget - least) * (long - short) / max(1, most - least))
    return max(at_most(min(size, last, 16 * below)), least_next)


class _Sizes(NamedTuple):
    given: Callable[[int], PlanRequest]
    """Function that builds the request of a size."""
    first: int
    sizes: Sequence[int]
    names: Mapping[int, str] = {}


def _sizes(what: str, request: PlanRequest, ask: Ask) -> _Sizes:
    if what == SEQ_LEN:
        return _Sizes(lambda size: replace(request, seq_len=size), 2048, range(128, _MOST, 128))
    if what == BATCH:
        at_once = replace(request, decisions=Decisions(num_microbatches=1))
        ranks = request.cluster.num_devices  # above their number, those that they share evenly
        sizes = [*range(1, ranks), *range(ranks, ranks * _MOST_SAMPLES, ranks)]
        return _Sizes(lambda size: replace(at_once, global_batch=size), ranks, sizes)  # fewer need more than data ranks
    if what == MODEL:
        named = {num_params(job_of(each)): each.chain.name for each in _of_type(request, ask)}
        first = sorted(named)[len(named) // 2]
        given = partial(ask, request.levers.texts)
        return _Sizes(lambda size: replace(given(named[size]), time_limit_s=LIMIT_S), first, sorted(named), named)
    lever = next((each for each in request.levers if each.size == what), None)
    if lever is None:
        having = [each for each in LEVERS.values() if each.size == what]
        names = ", ".join(f"--{each.name}" for each in having)
        raise UserError(
            field="--max",
            found=f"{what} without {names}" if names else what,
            expected=f"one of {', '.join(kinds())}",
            hint=f"add --{having[0].name} {having[0].offers[0]}" if having else "choose one of them",
        )

    def sized(size: int) -> PlanRequest:
        found = ask(request.levers.texts | {lever.name: str(lever.sized(size))})
        return replace(found, time_limit_s=LIMIT_S)

    return _Sizes(sized, 16, range(8, _MOST, 8))


def _of_type(request: PlanRequest, ask: Ask) -> Iterator[PlanRequest]:
    """Yield the request without levers for each packaged model of the same type, if it is valid for it."""
    for name in reversed(model_names()):
        if load_model(name).family.model_type == request.chain.family.model_type:
            with suppress(UserError):
                yield ask({}, name)


def _options(what: str, request: PlanRequest, size: int) -> str:
    if what == MODEL:
        return ""
    if what == SEQ_LEN:
        return f"--seq-len {size}"
    if what == BATCH:
        return f"--global-batch {size} --microbatches 1"
    return as_options(request.levers.texts)
