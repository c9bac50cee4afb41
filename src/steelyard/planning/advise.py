"""Advice for when nothing fits, or more should: each lever and each option of the engine alone, and the best in pairs.

Each change comes with the fewest bytes per device in which there is a plan, and with the fastest plan that fits. Its
time is compared with that of the request itself, without a memory limit if necessary. Changes with which something fits
come first, single ones before pairs: the fastest of those that save time, then the others by the step time that each
GiB saved costs. Changes with which nothing fits follow, ordered by the bytes that are still missing.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from steelyard.arguments import checked
from steelyard.engines import check_levers
from steelyard.engines.engine import Engine, options_in
from steelyard.errors import UserError
from steelyard.levers import LEVERS, Levers
from steelyard.levers.lever import Result
from steelyard.plan.choices import RESULTS, Advice, Found
from steelyard.plan.plan import Plan
from steelyard.planning.choose import device_bytes
from steelyard.planning.price import peak_bytes, refuse_host, with_price
from steelyard.planning.problem import is_uniform
from steelyard.planning.request import PlanRequest, with_levers
from steelyard.planning.variants import FREE_CHOICE, Progress, Study, run_by, within
from steelyard.search.runs import smallest_peak_bytes
from steelyard.units import format_seconds

LIMIT_S = 2.0
"""Time limit in seconds of the search for the fastest plan under one change."""
TOTAL_S = 10.0
"""Process time in seconds after which no further change is tried, if it needs another trace."""
MOST_HINTED = 64
"""Largest number of devices for which changes are tried unasked."""
MOST_PAIRS = 3
"""Number of pairs that are tried, the best changes first."""
NUM_HINTS = 3
"""Number of changes that are named if nothing fits."""
_NO_LIMIT = 2**50


class Change(NamedTuple):
    """Levers and options of the engine in addition to those of a request."""

    levers: Mapping[str, str] = {}
    options: tuple[str, ...] = ()

    def __or__(self, other: "Change") -> "Change":
        return Change({**self.levers, **other.levers}, (*self.options, *other.options))

    @property
    def name(self) -> str:
        """Name of the first lever, or of the first option."""
        return next(iter((*self.levers, *self.options)))

    @property
    def takes_long(self) -> bool:
        """Whether its first lever takes long to try."""
        return bool(self.levers) and LEVERS[self.name].takes_long

    def of(self, request: PlanRequest) -> PlanRequest:
        """Return the request with this change. Raises `UserError` if it is impossible."""
        changed = with_levers(request, self.levers) if self.levers else request
        return replace(changed, engine=request.engine.with_options(self.options)) if self.options else changed

    def text(self, engine: Engine) -> str:
        """Return the change of a request with this engine as command-line options."""
        options = f"--engine {engine.with_options(self.options).name}" if self.options else ""
        return " ".join(filter(None, (options, as_options(self.levers))))

    def result(self, engine: Engine) -> Result:
        """Return the greatest effect on the training result. A host rounds updates differently."""
        levers, own = Levers.of(self.levers), (engine.options[name].result or "exact" for name in self.options)
        stepped: Result = "rounding" if engine.effects(levers).steps_on_host else "exact"
        return max((*(lever.result for lever in levers), *own, stepped), key=RESULTS.index)


@checked
def advise(request: PlanRequest, *, asked: bool = True, progress: Progress = lambda _: None) -> Found:
    """Return the needs of the request itself, and the effect of each change of levers or options of its engine.

    Levers that take long to try come last, none of them after half of the time, and are left out if advice was not
    ``asked`` for. Changes that need no new trace are tried for half as long again, after tracing others took the time.
    Pairs combine the best change of each lever, and each option, that saves memory or time.
    """
    limited, deadline = replace(request, time_limit_s=LIMIT_S), time.process_time() + TOTAL_S
    progress("the job as asked")
    study = Study(limited)
    base = study.answer(FREE_CHOICE)
    base = base if base.plan is not None else study.answer(within("", _NO_LIMIT))
    own = _advice(study, Change(), request.engine, math.nan, base.step_s)
    before, base_s = own.least_bytes or math.nan, base.step_s
    found: dict[str, Advice] = {}
    refused: dict[str, list[str]] = {}
    untried: list[str] = []
    best: dict[str, tuple[Advice, Change]] = {}
    singles = [*_of_engine(study, base.plan), *(Change(levers=texts) for texts in single_changes(request, asked=asked))]
    for number, change in enumerate(singles, start=1):
        text = change.text(request.engine)
        progress(f"{number} of {len(singles)} changes, {text}")
        reason = _refusal(request, change)
        more = (Levers.of(change.levers).change(request.chain) is request.chain) - change.takes_long
        if not reason and time.process_time() > deadline + more * TOTAL_S / 2:
            untried.append(text)
            continue
        each = reason or _try(limited, change, before, base_s)
        if isinstance(each, Advice) and not each.gains_on(own):
            each = "no gain"
        if isinstance(each, str):
            refused.setdefault(each, []).append(text)
            continue
        found[text] = each
        if change.name not in best or each.order < best[change.name][0].order:
            best[change.name] = each, change
    ordered = [change for _, change in sorted(best.values(), key=lambda each: each[0].order)]
    pairs = sorted(combinations(range(len(ordered)), 2), key=sum)[:MOST_PAIRS]
    of_two: dict[str, Advice] = {}
    for number, change in enumerate((ordered[one] | ordered[other] for one, other in pairs), start=1):
        if time.process_time() > deadline:
            break
        text = change.text(request.engine)
        progress(f"{number} of {len(pairs)} pairs, {text}")
        each = _try(limited, change, before, base_s)
        if isinstance(each, Advice):
            of_two[text] = each

    def rank(each: Advice) -> tuple[object, ...]:
        return not each.fits, each.fits and each.options in of_two, each.order

    changes = sorted((found | of_two).values(), key=rank)
    left_out = [f"{reason}: {', '.join(texts)}" for reason, texts in refused.items()]
    return Found(own, tuple(changes), tuple(left_out), tuple(untried))


def hints(request: PlanRequest, *, progress: Progress = lambda _: None) -> Iterator[str]:
    """Yield the best changes, one per line, for when nothing fits.

    They include a value that a search may choose, if one fits.
    """
    is_large = request.cluster.num_devices > MOST_HINTED
    if is_large or request.is_mixed or request.seq_len is None or request.global_batch is None:
        return
    found = advise(replace(request, searched=()), asked=False, progress=progress).changes
    fits = [each for each in found if each.fits]
    searched = tuple(f"--{name} " for name, lever in LEVERS.items() if lever.searched)
    exact = [each for each in fits if each.options.startswith(searched)][:1]
    for each in [*dict.fromkeys((*fits[: NUM_HINTS - 1], *exact, *fits))][:NUM_HINTS]:
        yield f"{each.options} ({each.result}, {format_seconds(each.step_s)} a step)"


def single_changes(request: PlanRequest, *, asked: bool) -> Iterable[dict[str, str]]:
    """Yield the values to try of each lever that the request does not set.

    Those that take long come last, and of these the ones that need another lever at the very end.
    """
    order = sorted(
        LEVERS.items(), key=lambda each: (each[1].takes_long, each[1].takes_long and len(each[1].offered_with))
    )
    for name, lever in order:
        if name not in request.levers.texts and (asked or not lever.takes_long):
            beside = {
                other: text
                for other, text in lever.offered_with.items()
                if other not in request.levers.texts and request.engine.lever_refusal(LEVERS[other].parse(text)) is None
            }
            yield from ({name: text, **beside} for text in lever.offered_for(request.chain))


def _of_engine(study: Study, plan: Plan | None) -> list[Change]:
    """Return the options of the engine that a request does not have yet.

    The first ones reduce the product of time and memory of its own plan most, if there is a plan.
    """
    request, engine = study.request, study.request.engine
    taken = options_in(engine.name)
    found = [Change(options=(name,)) for name, each in engine.options.items() if each.result and name not in taken]

    def product(change: Change) -> float:
        assert plan is not None, "sorted if there is a plan"
        priced = with_price(plan, study.at(run_by(change.of(request).engine)).job)
        return priced.step_s * peak_bytes(priced)

    return sorted(found, key=product) if plan is not None else found


def _refusal(request: PlanRequest, change: Change) -> str:
    """Return why the engine, the model or the devices do not allow a change; empty if they do."""
    levers = Levers.of({**request.levers.texts, **change.levers})
    devices = tuple(pool.device for pool in request.cluster.pools)
    try:
        check_levers(levers, request.chain, request.engine, devices, request.precision)
    except UserError as error:
        lever = next((each for each in levers if error.field == f"--{each.name}"), None)
        return f"not possible {error.found.removeprefix(f'{error.field} {lever} ')}"
    return ""


def _try(request: PlanRequest, change: Change, before: float, base_s: float) -> Advice | str:
    """Return the effect of a change, or the reason why it is impossible."""
    try:
        return _advice(Study(change.of(request)), change, request.engine, before, base_s)
    except UserError as error:
        return f"not possible ({error.field}: {error.found})"


def _advice(study: Study, change: Change, engine: Engine, before: float, base_s: float) -> Advice:
    """Return the effect of a change, which a study has, on the minimum bytes ``before`` and the step time ``base_s``.

    ``engine`` is that of the request without the change.
    """
    answer, least = study.answer(FREE_CHOICE), least_bytes(study)
    if answer.plan is not None and study.job.effects.uses_host:
        refuse_host(with_price(answer.plan, study.job))
    missing = 0
    if answer.plan is None:
        short = (least or _NO_LIMIT) - study.job.budget_bytes if answer.missing_bytes is None else answer.missing_bytes
        missing = max(1, short)
    return Advice(
        options=change.text(engine),
        result=change.result(engine),
        least_bytes=least,
        saved_bytes=0 if least is None or math.isnan(before) else int(before) - least,
        step_s=answer.step_s,
        slowdown=answer.step_s / base_s - 1,
        missing_bytes=missing,
    )


def as_options(texts: Mapping[str, str]) -> str:
    """Return texts of levers as command-line options."""
    return " ".join(f"--{name} {text}" for name, text in texts.items())


def is_beyond_host(study: Study) -> bool:
    """Return whether the fastest plan that fits needs more host memory than there is."""
    if not study.job.effects.uses_host or (plan := study.answer(FREE_CHOICE).plan) is None:
        return False
    priced = with_price(plan, study.job).prediction
    return bool(priced and priced.host and not priced.host.fits)


def least_bytes(study: Study) -> int | None:
    """Return the fewest bytes per device in which a searched configuration has a plan; None if none is legal.

    Configurations in chunks never need less, because more passes are in flight, so they only count if all have chunks.
    """
    whole = [each for each in study.tables if each.pipeline.num_chunks == 1]
    found, job = smallest_peak_bytes(each.any_budget for each in whole or study.tables), study.job
    least = None if found is None else device_bytes(job, found)
    if least is None or not is_uniform(job, study.request.decisions):
        return least
    of_one = study.answer(within("", least))  # a plan of one strategy may need more
    if of_one.plan is not None:
        return least
    return None if of_one.missing_bytes is None else least + of_one.missing_bytes
