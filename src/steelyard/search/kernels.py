"""The inner loops of the search, compiled by numba: everything that runs once per state, per layer or per cut.

They are loops over plain arrays, with shape and meaning as in the modules that call them: `run_bounds` for `bounds`,
the others for `layers`. In numpy the same loops spend most of their time on calls, with arrays of a few dozen numbers.
Sorting is left to numpy, and arrays to fill in are passed, since both would take longer to compile than to run.

Compiled on first use (about three seconds) and cached on disk beside this file or, where that is read-only, in the
user's cache directory.

Shapes: K layer kinds, O options of a kind (padded), S strategies, C switch classes and one more row for "no layer
before", T different switch tables, J levels of transient peak, Q prices, L layers of the model, n layers of a run.
"""

# mypy: disable-error-code="untyped-decorator"

import numpy as np
from numba import njit
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@njit(cache=True, error_model="numpy")
def unbeaten(
    legal: BoolArray,
    seconds: FloatArray,
    num_bytes: IntArray,
    transient: IntArray,
    group: IntArray,
    table: IntArray,
    receives_less: BoolArray,
) -> BoolArray:
    """[K, S] legal strategies that no other of their switch class beats; of equal ones the first is kept.

    ``receives_less`` [T, S, S]: whether every sender pays no more into the first strategy than into the second.
    """
    kept = legal.copy()
    size = legal.shape[1]
    for kind in range(legal.shape[0]):
        for own in range(size):
            for other in range(size):
                if other == own or not legal[kind, other] or not kept[kind, own] or group[other] != group[own]:
                    continue
                better = (
                    seconds[kind, other] <= seconds[kind, own]
                    and num_bytes[kind, other] <= num_bytes[kind, own]
                    and transient[kind, other] <= transient[kind, own]
                    and receives_less[table[kind], other, own]
                )
                if better:
                    equal = (
                        seconds[kind, other] == seconds[kind, own]
                        and num_bytes[kind, other] == num_bytes[kind, own]
                        and transient[kind, other] == transient[kind, own]
                        and receives_less[table[kind], own, other]
                    )
                    if other < own or not equal:
                        kept[kind, own] = False
    return kept


@njit(cache=True, error_model="numpy")
def completions(
    rest: FloatArray,
    least: IntArray,
    kinds: IntArray,
    count: IntArray,
    strategy: IntArray,
    group: IntArray,
    num_bytes: IntArray,
    transient: IntArray,
    seconds: FloatArray,
    table: IntArray,
    switch: FloatArray,
    prices: FloatArray,
    upper: IntArray,
    priced: FloatArray,
) -> None:
    """Fills in the least priced cost, and the least bytes, of the layers from each position of a run to its end.

    ``rest`` [n + 1, J, Q, C + 1] is in seconds, by the class before; ``least`` [n + 1, J] in bytes; both come with
    zeros in the last position. Level j allows options with a transient of at most ``upper[j]``; infinite (2^60 bytes)
    where some layer has none. ``priced`` [O] is room to work in.
    """
    for position in range(len(kinds) - 1, -1, -1):
        kind = kinds[position]
        for level in range(len(upper)):
            smallest = 2**60
            for option in range(count[kind]):
                if transient[kind, option] <= upper[level] and num_bytes[kind, option] < smallest:
                    smallest = num_bytes[kind, option]
            smallest += least[position + 1, level]
            least[position, level] = smallest if smallest < 2**60 else 2**60
            for which in range(len(prices)):
                for option in range(count[kind]):
                    priced[option] = np.inf
                    if transient[kind, option] <= upper[level]:
                        paid = seconds[kind, option] + prices[which] * num_bytes[kind, option]
                        priced[option] = paid + rest[position + 1, level, which, group[kind, option]]
                for before in range(switch.shape[1]):
                    best = np.inf
                    for option in range(count[kind]):
                        paid = switch[table[kind], before, strategy[kind, option]] + priced[option]
                        best = min(best, paid)
                    rest[position, level, which, before] = best


@njit(cache=True, error_model="numpy")
def candidates(
    group: IntArray,
    num_bytes: IntArray,
    transient: IntArray,
    seconds: FloatArray,
    own_strategy: IntArray,
    own_group: IntArray,
    own_bytes: IntArray,
    own_transient: IntArray,
    own_seconds: FloatArray,
    switch: FloatArray,
    lower: IntArray,
    upper: IntArray,
    budget: int,
    limit_s: float,
    prices: FloatArray,
    completion: FloatArray,
    rest_bytes: IntArray,
    places: IntArray,
    values: FloatArray,
) -> int:
    """Extends states by the options of one more layer; returns how many may still fit and be in time.

    The first four arrays are states, those that begin with ``own`` options. ``switch`` [C + 1, S]; ``prices`` [J, Q],
    ``completion`` [J, Q, C + 1] and ``rest_bytes`` [J] are for the layers still to come. Fills ``places`` [5, room]
    with state, option, bytes, transient and its level, and ``values`` [2, room] with seconds and the lower bound of
    the whole run.
    """
    found = 0
    for state in range(len(group)):
        for option in range(len(own_group)):
            taken = num_bytes[state] + own_bytes[option]
            peak = transient[state] if transient[state] > own_transient[option] else own_transient[option]
            level = 0
            while upper[level] < peak:
                level += 1
            spent = seconds[state] + (switch[group[state], own_strategy[option]] + own_seconds[option])
            bound = np.inf
            for higher in range(level, len(upper)):
                reached = lower[higher] if higher > level else peak
                if taken + rest_bytes[higher] + reached > budget:
                    continue
                excess = float(taken + reached - budget)
                least = 0.0
                for which in range(prices.shape[1]):
                    paid = completion[higher, which, own_group[option]] + prices[higher, which] * excess
                    least = max(least, paid)
                bound = min(bound, least)
            if spent + bound <= limit_s and bound < np.inf:
                places[0, found] = state
                places[1, found] = option
                places[2, found] = taken
                places[3, found] = peak
                places[4, found] = level
                values[0, found] = spent
                values[1, found] = spent + bound
                found += 1
    return found


@njit(cache=True, error_model="numpy")
def sweep(
    order: IntArray,
    entry: IntArray,
    group: IntArray,
    transient: IntArray,
    level: IntArray,
    seconds: FloatArray,
    detour: FloatArray,
    fastest: FloatArray,
    same: FloatArray,
    same_peak: IntArray,
    kept: IntArray,
) -> int:
    """Visits candidates in order of bytes, then seconds, and fills ``kept`` with the unbeaten ones; returns how many.

    ``detour`` [C + 1, C + 1] is at most so much longer takes whatever follows from the first class than from the
    second. Room to work in, [entries, C + 1, J], infinite at first: ``fastest`` so far at a level or below, ``same``
    the fastest at the very level and ``same_peak`` its transient.
    """
    num_kept = 0
    for index in order:
        came, left, peak, own = entry[index], group[index], transient[index], level[index]
        beaten = False
        for other in range(detour.shape[0]):
            longest = seconds[index] - detour[other, left]
            if own > 0 and fastest[came, other, own - 1] <= longest:
                beaten = True
            if same[came, other, own] <= longest and same_peak[came, other, own] <= peak:
                beaten = True
        if beaten:
            continue
        kept[num_kept] = index
        num_kept += 1
        if seconds[index] < same[came, left, own]:
            same[came, left, own] = seconds[index]
            same_peak[came, left, own] = peak
        for higher in range(own, fastest.shape[2]):
            fastest[came, left, higher] = min(fastest[came, left, higher], seconds[index])
    return num_kept


@njit(cache=True, error_model="numpy")
def run_bounds(
    prefix: FloatArray,
    missing: IntArray,
    prices: FloatArray,
    lower: IntArray,
    room: int,
    starts: IntArray,
    ends: IntArray,
    found: FloatArray,
) -> None:
    """Fills [starts, ends] with lower bounds in seconds of the layers start..end-1 on a stage; see `bounds`.

    Infinite for runs without layers.
    """
    for row in range(len(starts)):
        for column in range(len(ends)):
            start, end = starts[row], ends[column]
            bound = np.inf
            for level in range(len(lower)):
                if start >= end or missing[level, end] > missing[level, start]:
                    continue
                least = 0.0
                for which in range(len(prices)):
                    paid = prefix[level, which, end] - prefix[level, which, start]
                    paid -= prices[which] * (room - lower[level])
                    least = max(least, paid)
                bound = min(bound, least)
            found[row, column] = bound
