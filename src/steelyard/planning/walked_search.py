"""Searches for plans that the walk accepts, of settings whose floors admit faster ones than are accepted yet."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from steelyard.cost.pools import PooledJob, usable_of
from steelyard.cost.tables import CostTables
from steelyard.planning.plain import PLAIN_N_D, plain_choices
from steelyard.planning.refine import refined
from steelyard.planning.walked_settings import SAME, WalkedSettings, outcome_of, walked_bytes
from steelyard.search import (
    SearchResult,
    SettingOutcome,
    SettingResult,
    partition_exact,
    search,
)
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


def refine_best(contest: "WalkedSettings") -> None:
    """Refines the best plans of the settings of which a faster one may be accepted."""
    goal_s = contest.cutoff_s * (1 - REFINED_GAP)
    known = [index for index in contest.open() if index in contest.accepted and contest.bounds_s[index] < goal_s]
    for index in sorted(known, key=lambda index: contest.accepted[index].outcome.score_s)[:NUM_REFINED]:
        outcome = contest.accepted[index].outcome
        if contest.refined_s.get(index) == outcome.score_s:
            continue
        solution = refined(
            outcome.tables,
            outcome.solution,
            is_refused=partial(contest.holds_too_much, index, outcome.tables, outcome.solution.boundaries),
            fits=partial(contest.fits, outcome.tables),
            is_over=lambda: contest.left_s == 0,
        )
        result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
        contest.excess_bytes(outcome_of(index, outcome.tables, result))
        contest.refined_s[index] = contest.accepted[index].outcome.score_s


def search_all_states(contest: "WalkedSettings") -> None:
    """Finds the fastest plans of settings of one stage by what it holds as each layer works, or bounds them better."""
    for index in contest.open():
        walks = contest.stage_walks(index) if contest.given[index].pipeline.num_stages == 1 else None
        if walks is None or contest.left_s == 0 or not contest.bounds_s[index] < contest.enough_s < np.inf:
            continue
        solution, bound_s = walks.fastest(contest.room_bytes, contest.cutoff_s, MOST_STATES)
        contest.bounds_s[index] = max(contest.bounds_s[index], bound_s)
        if solution is not None:
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
            contest.excess_bytes(outcome_of(index, walks.tables, result))


def compete(contest: WalkedSettings, contested: Sequence[int], found: SearchResult, num_alternatives: int) -> None:
    """Finds accepted plans of these settings: what their own tables allow, then what lies between."""
    above = search(
        [contest.given[index].bounded(contest.bounds_s[index]) for index in contested],
        usable_of(contest.job),
        num_exact=contest.num_exact,
        num_alternatives=num_alternatives,
        time_limit_s=contest.left_s,
        cutoff_s=contest.cutoff_s,
    )
    best = above.ranked[: contest.num_exact + num_alternatives]
    contest.admit([replace(each, index=contested[each.index]) for each in best])
    _plain(contest, contest.open())
    if contest.refines:
        refine_best(contest)
    if contest.refines and sum(contest.given[index].pipeline.num_stages == 1 for index in contest.open()) == 1:
        search_all_states(contest)
    for index in contest.open():
        if contest.left_s == 0 and not contest.given[index].is_made:
            continue
        if contest.bounds_s[index] < contest.enough_s:
            _between(contest, index, found.settings[index])
        if contest.to_the_end and contest.bounds_s[index] < contest.enough_s:
            _beyond(contest, index)


def search_as_layers_work(contest: WalkedSettings, found: SearchResult) -> None:
    """Finds plans by what a stage holds as each layer works, with the cuts of those within floors."""
    for index in contest.open():
        like = found.settings[index].result.solution
        if like is None or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            continue
        walks = contest.stage_walks(index)
        if walks is None:
            return
        if contest.given[index].pipeline.num_stages == 1:
            bound_s = walks.bound_s(contest.room_bytes, min(contest.cutoff_s, 1.1 * like.step_s))
            contest.bounds_s[index] = max(contest.bounds_s[index], bound_s)
        spared = 0
        for _ in range(MAX_TRIES):
            solution = walks.solution(like, contest.room_bytes - spared, WIDTH)
            if solution is None:
                break
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
            excess = contest.excess_bytes(outcome_of(index, walks.tables, result))
            if excess == 0:
                break
            spared += excess


def _plain(contest: WalkedSettings, indices: Sequence[int]) -> None:
    """Tries the plain plans of these settings that promise to be of use; over unlike pools none is plain."""
    if isinstance(contest.job, PooledJob):
        return
    given = [contest.given[index] for index in indices]
    for choice in plain_choices(PLAIN_N_D, contest.job, given, contest.made.of):
        if choice.least_s >= contest.cutoff_s * (1 - SAME) or contest.left_s == 0:
            return
        if choice.least_bytes > contest.room_bytes:
            continue
        index = indices[choice.index]
        for whole, narrow, room_bytes in (
            (choice.floor, choice.floor_tables(), contest.room_bytes),
            (choice.setting, choice.tables(), usable_of(contest.job)),
        ):
            result = partition_exact(narrow, room_bytes, cutoff_s=contest.cutoff_s, deadline=contest.deadline)
            if result.solution is None:
                break
            places = [whole.strategies.index(strategy) for strategy in narrow.strategies]
            chosen = tuple(places[strategy] for strategy in result.solution.strategies)
            solution = replace(result.solution, strategies=chosen)
            if contest.excess_bytes(outcome_of(index, whole, replace(result, solution=solution))) == 0:
                break


def _between(contest: WalkedSettings, index: int, known: SettingOutcome) -> None:
    """Searches the floors of a setting within less and less until the walk accepts a plan, then within a little more.

    Begins with the floor that bounds the setting best.
    """
    outcome = known if known.result.status == "optimal" else None
    floors = [AnyBudget(each) for each in contest.floors(index)]
    for floor in floors[outcome is not None :]:
        outcome = _within(contest, index, floor, 0) or outcome
        if contest.bounds_s[index] >= contest.enough_s:
            return
    refused, spared = 0, 0
    for _ in range(MAX_TRIES):
        excess = 0 if outcome is None else contest.excess_bytes(outcome)
        if outcome is None or excess == 0:
            break
        walked = contest.room_bytes + excess
        least = {walked - _peak_bytes(each.tables, outcome): each for each in floors}
        floor = least[min(least)]
        refused, spared = spared, max(spared + 1, min(least))
        outcome = _within(contest, index, floor, spared)
    for _ in range(HALVINGS):
        middle = (refused + spared) // 2
        if not refused < middle < spared or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            return
        outcome = _within(contest, index, floor, middle)
        if outcome is None or contest.excess_bytes(outcome) == 0:
            spared = middle
        else:
            refused = middle


def _beyond(contest: WalkedSettings, index: int) -> None:
    """Searches the tables of a setting within more than there is, by as much as they are above the walk of its plan."""
    known, tables = contest.accepted.get(index), contest.given[index].tables
    if known is None:
        return
    accepted, refused, whole = 0, NO_LIMIT_BYTES, AnyBudget(tables)
    granted = _peak_bytes(tables, known.outcome) - walked_bytes(known.plan, contest.job)
    for _ in range(HALVINGS):
        if not accepted < granted < refused or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            return
        outcome = _within(contest, index, whole, -granted)
        if outcome is None or contest.excess_bytes(outcome) == 0:
            accepted = granted
        else:
            refused = granted
        granted = (accepted + refused) // 2 if refused < NO_LIMIT_BYTES else 2 * accepted


def _peak_bytes(tables: CostTables, outcome: SettingOutcome) -> int:
    solution = outcome.solution
    return evaluate(tables, solution.boundaries, solution.strategies).peak_bytes


def _within(contest: WalkedSettings, index: int, floor: AnyBudget, spared_bytes: int) -> SettingOutcome | None:
    """The fastest plan of a floor within so much less than there is; None where it is of no use."""
    cutoff_s = contest.cutoff_s * (1 - SAME)
    result = partition_exact(floor, contest.room_bytes - spared_bytes, cutoff_s=cutoff_s, deadline=contest.deadline)
    if spared_bytes == 0:
        contest.bounds_s[index] = max(contest.bounds_s[index], result.lower_bound_s)
    if result.solution is None or result.solution.step_s >= cutoff_s:
        return None
    return outcome_of(index, floor.tables, result)
