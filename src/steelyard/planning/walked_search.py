"""Searches for plans that the walk accepts, of settings whose floors admit faster ones than are accepted yet."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from steelyard.cost.pools import PooledJob, usable_of
from steelyard.cost.tables import CostTables
from steelyard.planning.refine import refined
from steelyard.planning.uniform import uniform_choices
from steelyard.planning.walked_settings import SAME, WalkedSettings, outcome_of, walked_bytes
from steelyard.search import SearchResult, SettingOutcome, SettingResult, partition_exact, search
from steelyard.search.evaluate import evaluate
from steelyard.search.layers import NO_LIMIT_BYTES
from steelyard.search.runs import AnyBudget

MAX_TRIES = 8
"""Budgets within which a floor is searched until the walk accepts a plan; then that of its own tables is left."""


HALVINGS = 4
"""How often the room between the least budget that was too much and the largest accepted is halved."""


WIDTH = 100
"""States of a layer that are kept where plans are sought by what a stage holds as each layer works."""


MOST_STATES = 2500
"""States of a layer that are told apart where the fastest plan of one stage is sought among all."""


NUM_REFINED = 3
"""Settings whose best plans are refined."""


REFINED_GAP = 0.001
"""Plans are not refined that may gain less than this fraction of a step."""


BEYOND_GAP = 0.002
"""Tables within more than there is are not searched for less than this fraction of a step: each takes long."""


def refine_best(settings: WalkedSettings) -> None:
    """Refines the best plans of the settings of which a faster one may be accepted."""
    goal_s = settings.cutoff_s * (1 - REFINED_GAP)
    known = [index for index in settings.open() if index in settings.accepted and settings.bounds_s[index] < goal_s]
    for index in sorted(known, key=lambda index: settings.accepted[index].outcome.score_s)[:NUM_REFINED]:
        outcome = settings.accepted[index].outcome
        if settings.refined_s.get(index) == outcome.score_s:
            continue
        solution = refined(
            outcome.tables,
            outcome.solution,
            is_refused=partial(settings.holds_too_much, index, outcome.tables, outcome.solution.boundaries),
            fits=partial(settings.fits, outcome.tables),
            is_over=lambda: settings.left_s == 0,
        )
        result = SettingResult(status="feasible", solution=solution, lower_bound_s=settings.bounds_s[index])
        settings.excess_bytes(outcome_of(index, outcome.tables, result))
        settings.refined_s[index] = settings.accepted[index].outcome.score_s


def search_all_states(settings: WalkedSettings) -> None:
    """Finds the fastest plans of settings of one stage by what it holds as each layer works, or bounds them better."""
    for index in settings.open():
        walks = settings.stage_walks(index) if settings.given[index].pipeline.num_stages == 1 else None
        if walks is None or settings.left_s == 0 or not settings.bounds_s[index] < settings.enough_s < np.inf:
            continue
        solution, bound_s = walks.fastest(settings.room_bytes, settings.cutoff_s, MOST_STATES)
        settings.bounds_s[index] = max(settings.bounds_s[index], bound_s)
        if solution is not None:
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=settings.bounds_s[index])
            settings.excess_bytes(outcome_of(index, walks.tables, result))


def compete(settings: WalkedSettings, contested: Sequence[int], found: SearchResult, num_alternatives: int) -> None:
    """Finds accepted plans of these settings: what their own tables allow, then what lies between."""
    above = search(
        [settings.given[index].bounded(settings.bounds_s[index]) for index in contested],
        usable_of(settings.job),
        num_exact=settings.num_exact,
        num_alternatives=num_alternatives,
        time_limit_s=settings.left_s,
        cutoff_s=settings.cutoff_s,
    )
    best = above.ranked[: settings.num_exact + num_alternatives]
    settings.admit([replace(each, index=contested[each.index]) for each in best])
    _plain(settings, settings.open())
    if settings.refines:
        refine_best(settings)
    if settings.refines and sum(settings.given[index].pipeline.num_stages == 1 for index in settings.open()) == 1:
        search_all_states(settings)
    for index in settings.open():
        if settings.left_s == 0 and not settings.given[index].is_made:
            continue
        if settings.bounds_s[index] < settings.enough_s:
            _between(settings, index, found.settings[index])
        if settings.to_the_end and settings.bounds_s[index] < settings.cutoff_s * (1 - BEYOND_GAP):
            _beyond(settings, index)


def search_as_layers_work(settings: WalkedSettings, found: SearchResult) -> None:
    """Finds plans by what a stage holds as each layer works, with the cuts of those within floors."""
    for index in settings.open():
        like = found.settings[index].result.solution
        if like is None or settings.left_s == 0 or settings.bounds_s[index] >= settings.enough_s:
            continue
        walks = settings.stage_walks(index)
        if walks is None:
            return
        if settings.given[index].pipeline.num_stages == 1:
            bound_s = walks.bound_s(settings.room_bytes, min(settings.cutoff_s, 1.1 * like.step_s))
            settings.bounds_s[index] = max(settings.bounds_s[index], bound_s)
        spared = 0
        for _ in range(MAX_TRIES):
            solution = walks.solution(like, settings.room_bytes - spared, WIDTH)
            if solution is None:
                break
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=settings.bounds_s[index])
            excess = settings.excess_bytes(outcome_of(index, walks.tables, result))
            if excess == 0:
                break
            spared += excess


def _plain(settings: WalkedSettings, indices: Sequence[int]) -> None:
    """Tries the plain plans of these settings that promise to be of use; over unlike pools none is plain."""
    if isinstance(settings.job, PooledJob):
        return
    given = [settings.given[index] for index in indices]
    for choice in uniform_choices(settings.job, given, settings.made.of):
        if choice.least_s >= settings.cutoff_s * (1 - SAME) or settings.left_s == 0:
            return
        if choice.least_bytes > settings.room_bytes:
            continue
        index = indices[choice.index]
        for whole, narrow, room_bytes in (
            (choice.floor, choice.floor_tables(), settings.room_bytes),
            (choice.setting, choice.tables(), usable_of(settings.job)),
        ):
            result = partition_exact(narrow, room_bytes, cutoff_s=settings.cutoff_s, deadline=settings.deadline)
            if result.solution is None:
                break
            places = [whole.strategies.index(strategy) for strategy in narrow.strategies]
            chosen = tuple(places[strategy] for strategy in result.solution.strategies)
            solution = replace(result.solution, strategies=chosen)
            if settings.excess_bytes(outcome_of(index, whole, replace(result, solution=solution))) == 0:
                break


def _between(settings: WalkedSettings, index: int, known: SettingOutcome) -> None:
    """Searches the floors of a setting within less and less until the walk accepts a plan, then within a little more.

    Begins with the floor that bounds the setting best.
    """
    outcome = known if known.result.status == "optimal" else None
    floors = [AnyBudget(each) for each in settings.floors(index)]
    for floor in floors[outcome is not None :]:
        outcome = _within(settings, index, floor, 0) or outcome
        if settings.bounds_s[index] >= settings.enough_s:
            return
    refused, spared = 0, 0
    for _ in range(MAX_TRIES):
        excess = 0 if outcome is None else settings.excess_bytes(outcome)
        if outcome is None or excess == 0:
            break
        walked = settings.room_bytes + excess
        least = {walked - _peak_bytes(each.tables, outcome): each for each in floors}
        floor = least[min(least)]
        refused, spared = spared, max(spared + 1, min(least))
        outcome = _within(settings, index, floor, spared)
    for _ in range(HALVINGS):
        middle = (refused + spared) // 2
        if not refused < middle < spared or settings.left_s == 0 or settings.bounds_s[index] >= settings.enough_s:
            return
        outcome = _within(settings, index, floor, middle)
        if outcome is None or settings.excess_bytes(outcome) == 0:
            spared = middle
        else:
            refused = middle


def _beyond(settings: WalkedSettings, index: int) -> None:
    """Searches the tables of a setting within more than there is, by as much as they are above the walk of its plan."""
    known, tables = settings.accepted.get(index), settings.given[index].tables
    if known is None:
        return
    accepted, refused, whole = 0, NO_LIMIT_BYTES, AnyBudget(tables)
    granted = _peak_bytes(tables, known.outcome) - walked_bytes(known.plan, settings.job)
    for _ in range(HALVINGS):
        if not accepted < granted < refused or settings.left_s == 0 or settings.bounds_s[index] >= settings.enough_s:
            return
        outcome = _within(settings, index, whole, -granted)
        if outcome is None or settings.excess_bytes(outcome) == 0:
            accepted = granted
        else:
            refused = granted
        granted = (accepted + refused) // 2 if refused < NO_LIMIT_BYTES else 2 * accepted


def _peak_bytes(tables: CostTables, outcome: SettingOutcome) -> int:
    solution = outcome.solution
    return evaluate(tables, solution.boundaries, solution.strategies).peak_bytes


def _within(settings: WalkedSettings, index: int, floor: AnyBudget, spared_bytes: int) -> SettingOutcome | None:
    """The fastest plan of a floor within so much less than there is; None where it is of no use."""
    cutoff_s = settings.cutoff_s * (1 - SAME)
    result = partition_exact(floor, settings.room_bytes - spared_bytes, cutoff_s=cutoff_s, deadline=settings.deadline)
    if spared_bytes == 0:
        settings.bounds_s[index] = max(settings.bounds_s[index], result.lower_bound_s)
    if result.solution is None or result.solution.step_s >= cutoff_s:
        return None
    return outcome_of(index, floor.tables, result)
