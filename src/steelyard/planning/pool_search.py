"""The search over pipelines on unlike pools: settings in the order of what each can be at best.

Each setting that waits has its bound made sharper step by step (`steelyard.planning.pool_space`), and only those that
promise enough after the last are searched, some at a time, until no other can be faster than the best plan that was
accepted. So what is optimal is so among all of them. A pool alone is searched as its own cluster would be.

Not searched: a part of a pool, stages of unlike sizes within one, and chunks over several.
"""

import heapq
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from steelyard.cost.pools import PooledJob
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.planning.acceptance import Acceptance, Accepted, accept
from steelyard.planning.pool_space import LEVELS, SAME, PooledSetting, PooledSpace
from steelyard.search.least_memory import IMPOSSIBLE

LEAST_GAIN = 0.01
"""Of a step what a plan must gain to be looked for, once there is one, where the search does not go to the end."""
RIVALS = 8
"""Settings that are searched at most though only the simulator may find them the faster."""
ROUNDS = (1, 7, 24)
"""Settings that are searched together at first, then, and from then on."""


def search_pools(
    job: PooledJob,
    space: PooledSpace,
    *,
    time_limit_s: float | None = None,
    to_the_end: bool = True,
) -> Acceptance:
    """The fastest plans of all settings of a space that fit.

    Not ``to_the_end`` leaves out, once there is a plan, those that gain less than `LEAST_GAIN` of a step.
    What the search and bounds say of settings is of those that were searched together last.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    least_gain = 0.0 if to_the_end else LEAST_GAIN
    settings = space.settings()
    waiting = [(setting.bound_s, index, 0) for index, setting in enumerate(settings)]
    heapq.heapify(waiting)
    best: dict[int, Accepted] = {}
    bounds: list[float] = []
    refused: list[int] = []
    found, nearest, num_rounds, num_rivals = None, None, 0, 0
    while num_rivals < RIVALS:
        if found is not None and time.monotonic() > deadline:
            break
        most, limit = ROUNDS[min(num_rounds, len(ROUNDS) - 1)], math.inf if found is None else deadline
        goal_s = min((each.outcome.score_s for each in best.values()), default=math.inf) * (1 - least_gain)
        taken = _most_promising(waiting, space, settings, refused, goal_s, most, limit)
        if not taken and best and to_the_end:
            goal_s = _simulated_s(job, best.values())
            taken = _most_promising(waiting, space, settings, refused, goal_s, RIVALS - num_rivals, limit)
            num_rivals += len(taken)
        if not taken:
            break  # none is left, or no time
        found = accept(
            job,
            [space.tables(settings[index]) for index in taken],
            num_alternatives=0,
            time_limit_s=None if time_limit_s is None else max(0.0, deadline - time.monotonic()),
            cutoff_s=goal_s,
        )
        num_rounds += 1
        bounds.append(found.search.lower_bound_s)
        nearest = found if nearest is None or _missing_bytes(found) < _missing_bytes(nearest) else nearest
        best.update({taken[each.outcome.index]: each for each in found.ranked})
    if not best:
        nearest = _nearest(job, space, [settings[index] for index in refused], nearest)
    if nearest is None:
        raise UserError(
            field="global_batch",
            found=f"{job.global_batch} samples over {job.cluster.name}",
            expected=f"a batch that some pipeline{space.asked_stages} over these pools can divide among its ranks",
            hint="a larger batch, fewer devices" + (", or no --stages" if space.asked_stages else ""),
        )
    ranked = tuple(sorted(best.values(), key=lambda each: each.outcome.score_s))
    if found is None or not ranked:
        return nearest
    fastest_s = ranked[0].outcome.score_s
    lower = min(*bounds, *(bound_s for bound_s, _, _ in waiting), fastest_s)
    proven = lower >= fastest_s * (1 - SAME)
    return Acceptance(
        ranked=ranked,
        search=replace(
            found.search,
            status="optimal" if proven else "feasible",
            ranked=tuple(each.outcome for each in ranked),
            lower_bound_s=fastest_s if proven else lower,
        ),
        bounds_s=found.bounds_s,
    )


def _simulated_s(job: PooledJob, best: Collection[Accepted]) -> float:
    """What a setting has to promise to be a rival: to be faster than the fastest of these as they are simulated."""
    return min(predict(each.plan, job).step_time_s for each in best)


def _nearest(
    job: PooledJob, space: PooledSpace, settings: Sequence[PooledSetting], known: Acceptance | None
) -> Acceptance | None:
    """What is ``known`` of the nearest miss, or that of one of these settings, whose layers memory does not hold."""
    nearest, least = known, IMPOSSIBLE if known is None else int(min(_missing_bytes(known), IMPOSSIBLE))
    promising = sorted(((space.missing_bytes(each, least), place) for place, each in enumerate(settings)))
    for bound, place in promising:
        if bound >= least:
            break
        found = accept(job, [space.tables(settings[place])])
        if _missing_bytes(found) < least:
            nearest, least = found, int(_missing_bytes(found))
    return nearest


def _missing_bytes(found: Acceptance) -> float:
    miss = found.search.nearest_miss
    return math.inf if miss is None else miss.miss_bytes


def _most_promising(
    waiting: list[tuple[float, int, int]],
    space: PooledSpace,
    settings: list[PooledSetting],
    refused: list[int],
    goal_s: float,
    most: int,
    deadline: float,
) -> list[int]:
    """Takes the settings of the least bounds from those that wait, each bound as sharp as it gets without a search.

    A setting whose times promise enough becomes one for every order of its pools, which are added to ``settings``;
    those whose layers memory does not hold, however cut, are ``refused``.
    """
    taken: list[int] = []
    while waiting and len(taken) < most and waiting[0][0] < goal_s * (1 - SAME) and time.monotonic() < deadline:
        bound_s, index, level = heapq.heappop(waiting)
        if level == LEVELS:
            taken.append(index)
            continue
        sharper_s = max(bound_s, space.next_bound_s(settings[index], level, goal_s))
        if not math.isfinite(sharper_s):
            refused += [index] if level == LEVELS - 1 else []
            continue
        indices = [index]
        if level == 0:
            _, *others = space.orders(settings[index])
            indices += range(len(settings), len(settings) + len(others))
            settings += others
        for each in indices:
            heapq.heappush(waiting, (sharper_s, each, level + 1))
    return taken
