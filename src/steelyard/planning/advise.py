"""What to change where nothing fits, or more should: each lever alone and two together, with what it saves and costs.

Of each change the fewest bytes of a device in which there is a plan, and the fastest plan that fits. Time is set beside
that of the request itself, if need be with no limit of memory. First come changes with which something fits, one before
two, by what a GiB that they save costs of a step; then the others, by what is still missing.
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
from steelyard.planning.request import PlanRequest, with_levers
from steelyard.planning.variants import FREE_CHOICE, Progress, Study, within
from steelyard.search.runs import smallest_peak_bytes
from steelyard.units import format_seconds

LIMIT_S = 1.0
"""Of the search for the fastest plan under one change."""
TOTAL_S = 10.0
"""After which no further change is tried."""
MOST_HINTED = 64
"""Devices of a cluster for which changes are tried unasked."""
NUM_HINTS = 3
"""Changes that are named where nothing fits."""
_NO_LIMIT = 2**50


def advise(request: PlanRequest, *, asked: bool = True, progress: Progress = lambda _: None) -> Found:
    """Return what the request itself needs, and what each change of levers does.

    Levers that take long to try come last, and where advice was not ``asked`` for they are left out. Two changes are
    tried together where both save memory: the best of each lever.
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
        progress(f"{number} of {len(singles)} changes, {_options(texts)}")
        if time.process_time() > deadline:
            untried.append(_options(texts))
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
        progress(f"{number} of {len(pairs)} pairs, {_options(one | other)}")
        each = _try(limited, one | other, own, free.step_s)
        if isinstance(each, Advice):
            found[each.options] = each
    return Found(own, tuple(sorted(found.values(), key=lambda each: each.order)), tuple(left_out), tuple(untried))


def hints(request: PlanRequest, *, progress: Progress = lambda _: None) -> Iterator[str]:
    """The best changes in a line each, for where nothing fits, one of them a value that a search may choose."""
    is_large = request.cluster.num_devices > MOST_HINTED
    if is_large or request.is_mixed or request.seq_len is None or request.global_batch is None:
        return
    found = advise(replace(request, searched=()), asked=False, progress=progress).changes
    fits = [each for each in found if each.fits]
    exact = [each for each in fits if LEVERS[each.options.split()[0].removeprefix("--")].searched][:1]
    for each in [*dict.fromkeys((*fits[: NUM_HINTS - 1], *exact, *fits))][:NUM_HINTS]:
        yield f"{each.options} ({each.result}, {format_seconds(each.step_s)} a step)"


def single_changes(request: PlanRequest, *, asked: bool) -> Iterable[dict[str, str]]:
    """The values of each lever that the request does not set."""
    for name, lever in sorted(LEVERS.items(), key=lambda each: (each[1].takes_long, bool(each[1].offered_with))):
        if name not in request.levers.texts and (asked or not lever.takes_long):
            beside = {
                other: text
                for other, text in lever.offered_with.items()
                if other not in request.levers.texts and request.engine.lever_refusal(LEVERS[other].parse(text)) is None
            }
            yield from ({name: text, **beside} for text in lever.offers)


def _try(request: PlanRequest, texts: Mapping[str, str], own: Advice, free_s: float) -> Advice | str:
    """What a change does, or why it cannot be had."""
    try:
        study = Study(with_levers(request, texts))
        return _advice(study, texts, own.least_bytes or math.nan, free_s, Levers.of(texts))
    except UserError as error:
        return f"{_options(texts)}: {error.field} {error.found}"


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
        options=_options(texts),
        result=max(results, key=RESULTS.index, default="exact"),
        least_bytes=least,
        saved_bytes=0 if least is None or math.isnan(before) else int(before) - least,
        step_s=answer.step_s,
        slowdown=answer.step_s / free_s - 1,
        missing_bytes=missing,
    )


def _options(texts: Mapping[str, str]) -> str:
    return " ".join(f"--{name} {text}" for name, text in texts.items())


def is_beyond_host(study: Study) -> bool:
    """Return whether the fastest plan that fits holds more in host memory than there is."""
    if not study.job.effects.uses_host or (plan := study.answer(FREE_CHOICE).plan) is None:
        return False
    priced = with_price(plan, study.job).prediction
    return bool(priced and priced.host and not priced.host.fits)


def least_bytes(study: Study) -> int | None:
    """Return the fewest bytes of a device in which there is a plan, of the configurations that are searched."""
    least = smallest_peak_bytes(each.any_budget for each in study.tables)
    return None if least is None else device_bytes(study.job, least)
