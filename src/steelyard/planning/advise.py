"""Advice for when nothing fits, or more should: each lever alone and in pairs, with its saving and its cost.

Each change comes with the fewest bytes per device in which there is a plan, and with the fastest plan that fits. Its
time is compared with that of the request itself, without a memory limit if necessary. Changes with which something fits
come first, single ones before pairs, ordered by the step time that each GiB saved costs. The others follow, ordered by
the bytes that are still missing.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from steelyard.errors import UserError
from steelyard.levers import LEVERS, Levers
from steelyard.plan.choices import RESULTS, Advice, Found
from steelyard.planning.choose import device_bytes
from steelyard.planning.price import refuse_host, with_price
from steelyard.planning.problem import is_uniform
from steelyard.planning.request import PlanRequest, with_levers
from steelyard.planning.variants import FREE_CHOICE, Progress, Study, within
from steelyard.search.runs import smallest_peak_bytes
from steelyard.units import format_seconds

LIMIT_S = 1.0
"""Time limit in seconds of the search for the fastest plan under one change."""
TOTAL_S = 10.0
"""Process time in seconds after which no further change is tried."""
MOST_HINTED = 64
"""Largest number of devices for which changes are tried unasked."""
NUM_HINTS = 3
"""Number of changes that are named if nothing fits."""
_NO_LIMIT = 2**50


def advise(request: PlanRequest, *, asked: bool = True, progress: Progress = lambda _: None) -> Found:
    """Return the needs of the request itself, and the effect of each change of levers.

    Levers that take long to try come last, none of them after half of the time, and are left out if advice was not
    ``asked`` for. Pairs combine the best change of each lever that saves memory.
    """
    limited = replace(request, time_limit_s=LIMIT_S)
    progress("the job as asked")
    study = Study(limited)
    free = study.answer(within("", _NO_LIMIT))
    own = _advice(study, {}, math.nan, free.step_s, None)
    found: dict[str, Advice] = {}
    left_out: list[str] = []
    untried: list[str] = []
    best: dict[str, tuple[Advice, dict[str, str]]] = {}
    deadline = time.process_time() + TOTAL_S
    singles = list(single_changes(request, asked=asked))
    for number, texts in enumerate(singles, start=1):
        progress(f"{number} of {len(singles)} changes, {as_options(texts)}")
        takes_long = LEVERS[next(iter(texts))].takes_long
        if time.process_time() > deadline - takes_long * TOTAL_S / 2:
            untried.append(as_options(texts))
            continue
        each = _try(limited, texts, own, free.step_s)
        if isinstance(each, str):
            left_out.append(each)
            continue
        found[each.options] = each
        name = next(iter(texts))
        if each.saved_bytes > 0 and (name not in best or each.order < best[name][0].order):
            best[name] = each, texts
    pairs = list(combinations(best.values(), 2))
    for number, ((_, one), (_, other)) in enumerate(pairs, start=1):
        if time.process_time() > deadline:
            break
        progress(f"{number} of {len(pairs)} pairs, {as_options(one | other)}")
        each = _try(limited, one | other, own, free.step_s)
        if isinstance(each, Advice):
            found[each.options] = each
    return Found(own, tuple(sorted(found.values(), key=lambda each: each.order)), tuple(left_out), tuple(untried))


def hints(request: PlanRequest, *, progress: Progress = lambda _: None) -> Iterator[str]:
    """Yield the best changes, one per line, for when nothing fits.

    They include a value that a search may choose, if one fits.
    """
    is_large = request.cluster.num_devices > MOST_HINTED
    if is_large or request.is_mixed or request.seq_len is None or request.global_batch is None:
        return
    found = advise(replace(request, searched=()), asked=False, progress=progress).changes
    fits = [each for each in found if each.fits]
    exact = [each for each in fits if LEVERS[each.options.split()[0].removeprefix("--")].searched][:1]
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


def _try(request: PlanRequest, texts: Mapping[str, str], own: Advice, free_s: float) -> Advice | str:
    """Return the effect of a change, or the reason why it is impossible."""
    try:
        study = Study(with_levers(request, texts))
        return _advice(study, texts, own.least_bytes or math.nan, free_s, Levers.of(texts))
    except UserError as error:
        return f"{as_options(texts)}: {error.field} {error.found}"


def _advice(study: Study, texts: Mapping[str, str], before: float, free_s: float, levers: Levers | None) -> Advice:
    answer, least = study.answer(FREE_CHOICE), least_bytes(study)
    if answer.plan is not None and study.job.effects.uses_host:
        refuse_host(with_price(answer.plan, study.job))
    missing = 0
    if answer.plan is None:
        short = (least or _NO_LIMIT) - study.job.budget_bytes if answer.missing_bytes is None else answer.missing_bytes
        missing = max(1, short)
    results = [lever.result for lever in levers or ()]
    return Advice(
        options=as_options(texts),
        result=max(results, key=RESULTS.index, default="exact"),
        least_bytes=least,
        saved_bytes=0 if least is None or math.isnan(before) else int(before) - least,
        step_s=answer.step_s,
        slowdown=answer.step_s / free_s - 1,
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
    """Return the fewest bytes per device in which a searched configuration has a plan; None if none is legal."""
    found, job = smallest_peak_bytes(each.any_budget for each in study.tables), study.job
    least = None if found is None else device_bytes(job, found)
    if least is None or not is_uniform(job, study.request.decisions):
        return least
    of_one = study.answer(within("", least - 1))  # a plan of one strategy may need more
    return None if of_one.missing_bytes is None else least - 1 + of_one.missing_bytes
