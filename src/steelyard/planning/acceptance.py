"""The fastest plan that the walk through its passes accepts, and what no such plan is faster than.

The walk (`steelyard.cost.stage_memory`) takes a whole plan; the search takes tables that add up. So a *floor* that no
walk is below (`steelyard.cost.memory_floor`) stands for each pipeline setting beside its own tables, which are about as
much above the walk. The fastest plan within a floor is a bound of all plans that the walk accepts, and where the walk
accepts that very plan it is the answer: so it is wherever memory does not bind. Else its cuts get the strategies that
are best by what a stage holds as each layer works (`steelyard.search.stage_walk`), which also bounds plans of one stage
better. Then the floor is searched within less and less, by as much as the walk of the plan found last exceeds its
floor, until a plan is accepted, and the room between the last two is halved; what the setting's own tables allow and
its plain plans compete with it, as far as the walk accepts them. Where the gap of a setting of one stage is open at the
end, or before where it is the only one of these, the fastest of all its plans is sought by what it holds as each layer
works.
Only settings whose bound is below the best accepted plan take part.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from steelyard.cost.memory_floor import Floors
from steelyard.cost.pools import AnyJob, PooledFloors, PooledJob, usable_of
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Partition
from steelyard.planning.least_walked import Least, least_plan, misses
from steelyard.planning.restrictions import means_of, restricted
from steelyard.planning.walked_search import compete, refine_best, search_all_states, search_as_layers_work
from steelyard.planning.walked_settings import SAME, Accepted, WalkedSettings
from steelyard.search import OnDemand, SearchResult, SettingOutcome, search
from steelyard.search.partition import quick_bound_s
from steelyard.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The accepted plans of the settings, fastest first, and what the search says of all settings.

    ``search`` has the bound of all accepted plans and ranks those found. Where there is none its nearest miss is what
    the walk of the plan of least memory found takes, and no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    search: SearchResult
    bounds_s: tuple[float, ...]
    """What no accepted plan of each setting is faster than, in the order given."""
    floor_bytes: int = 0

    def bounded(self, tables: Sequence[OnDemand]) -> tuple[OnDemand, ...]:
        """The tables that were searched with their bounds, for further searches within no more memory."""
        return tuple(each.bounded(bound_s) for each, bound_s in zip(tables, self.bounds_s, strict=True))


def accept(
    job: AnyJob,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
    floors: Floors | PooledFloors | None = None,
    cutoff_s: float = np.inf,
    to_the_end: bool = True,
) -> Acceptance:
    """The fastest accepted plans of a job, of all settings whose cost tables are given.

    ``num_exact`` and ``num_alternatives`` as in `search`. With another ``partition`` than exact nothing is proven.
    ``floors`` saves making those of the tables again for another budget. Plans that are no faster than ``cutoff_s`` are
    of no use. Not ``to_the_end`` leaves out what takes most of the time and finds some percent at most: the tables
    within more than there is, refinement, the search without each means, and once there is a plan those that gain less
    than `LEAST_GAIN` of a step; what is proven holds all the same. Plans over unlike pools, which are searched several
    times, are not refined.
    """
    made = floors or (PooledFloors(job) if isinstance(job, PooledJob) else Floors(job))
    given = [OnDemand.of(each) for each in tables]
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    settings = WalkedSettings(
        job=job,
        given=given,
        num_exact=num_exact,
        made=made,
        known_s=cutoff_s,
        deadline=deadline,
        to_the_end=to_the_end,
        refines=to_the_end and not isinstance(job, PooledJob),
    )
    if partition != "exact":
        found = search(given, usable_of(job), partition=partition)
        settings.bounds_s = [quick_bound_s(each.tables) for each in given]
        settings.admit(found.ranked)
        return _summary(settings, found)
    found = _settle(settings, num_alternatives)
    if settings.refines:
        refine_best(settings)
        _without_means(settings)
        search_all_states(settings)
    return _summary(settings, found)


def _settle(settings: WalkedSettings, num_alternatives: int) -> SearchResult:
    """Searches all settings, lets the best of them compete, and says what the search says of all."""
    found = search(
        settings.given,
        settings.room_bytes,
        num_exact=settings.num_exact,
        num_alternatives=num_alternatives,
        time_limit_s=settings.left_s,
        stand_in=lambda index: settings.floors(index)[0],
        cutoff_s=settings.known_s,
    )
    known_s = [each.least_s for each in settings.given]
    settings.bounds_s = [max(each.result.lower_bound_s, known_s[each.index]) for each in found.settings]
    refused = settings.admit(found.ranked[: settings.num_exact + num_alternatives])
    search_as_layers_work(settings, found)
    contested = sorted({*settings.open(), *(each.index for each in refused)})
    if contested:
        compete(settings, contested, found, num_alternatives)
    return found


def _without_means(settings: WalkedSettings) -> None:
    """Tries the settings of which a faster plan may be accepted without each means of the best plan, over and over.

    A smaller space has floors closer to its walks, and plans in it that the whole one hides behind others that the walk
    refuses. Not over unlike pools, of which each search takes seconds.
    """
    assert isinstance(settings.made, Floors), "over pools there is no such search"
    tried = set[str]()
    while settings.accepted:
        best = min(settings.accepted.values(), key=lambda each: each.outcome.score_s)
        means = {name: keeps for name, keeps in means_of(best.plan).items() if name not in tried}
        indices = settings.open()
        if not means or not indices or settings.left_s == 0:
            return
        name, keeps = next(iter(means.items()))
        tried.add(name)
        given = [settings.given[index].narrowed(partial(restricted, keeps=keeps)) for index in indices]
        smaller = replace(
            settings,
            given=given,
            made=settings.made.of_others(),
            num_exact=1,
            known_s=settings.cutoff_s,
            accepted={},
            refines=False,
            walked_stages={},
        )
        _settle(smaller, 0)
        for index, each in smaller.accepted.items():
            outcome = replace(each.outcome, index=indices[index])
            known = settings.accepted.get(indices[index])
            if known is None or outcome.score_s < known.outcome.score_s:
                settings.accepted[indices[index]] = replace(each, outcome=outcome)


def _summary(settings: WalkedSettings, found: SearchResult) -> Acceptance:
    """What was accepted, best first, with the bound that holds for all accepted plans."""
    least = None if settings.accepted or settings.known_s < np.inf else least_plan(settings)
    if least is not None:
        settings.admit([least.outcome])
    accepted = (replace(each, is_settled=settings.is_settled(index)) for index, each in settings.accepted.items())
    ranked = tuple(sorted(accepted, key=lambda each: (each.outcome.score_s, each.outcome.index)))
    if not ranked:
        return _nothing_accepted(settings, found, least)
    fastest_s = ranked[0].outcome.score_s
    bound_s = min(*settings.bounds_s, fastest_s)
    proven = bound_s >= fastest_s * (1 - SAME)
    return Acceptance(
        ranked=ranked,
        search=replace(
            found,
            status="optimal" if proven else "feasible",
            ranked=tuple(each.outcome for each in ranked),
            settings=tuple(_reported(settings, each) for each in found.settings),
            lower_bound_s=fastest_s if proven else bound_s,
        ),
        bounds_s=tuple(settings.bounds_s),
    )


def _reported(settings: WalkedSettings, outcome: SettingOutcome) -> SettingOutcome:
    """The outcome of a setting with the plan that was accepted, or with none."""
    accepted = settings.accepted.get(outcome.index)
    if accepted is not None:
        return replace(outcome, given=accepted.outcome.given, result=accepted.outcome.result)
    if outcome.result.solution is None:
        return outcome
    bound_s = settings.bounds_s[outcome.index]
    reason = f"no plan of it that fits was found; none takes less than {format_seconds(bound_s)} a step"
    return replace(outcome, result=replace(outcome.result, solution=None), reason=reason)


def _nothing_accepted(settings: WalkedSettings, found: SearchResult, least: Least | None) -> Acceptance:
    nothing = tuple(_reported(settings, each) for each in found.settings)
    return Acceptance(
        ranked=(),
        bounds_s=tuple(settings.bounds_s),
        floor_bytes=min((miss.needed_bytes for _, miss in misses(settings)), default=0) if least else 0,
        search=replace(
            found,
            status="infeasible",
            ranked=(),
            settings=nothing,
            lower_bound_s=min(settings.bounds_s),
            nearest_miss=least.miss if least else None,
            nearest_index=least.outcome.index if least else None,
        ),
    )
