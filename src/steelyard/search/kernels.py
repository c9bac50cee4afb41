"""The inner loops of the search, compiled by numba: everything that runs once per state, per layer or per cut.

They are loops over plain arrays, with shape and meaning as in the modules that call them. In numpy the same loops spend
most of their time on calls, with arrays of a few dozen numbers. Sorting is left to numpy, and arrays to fill in are
passed, since both would take longer to compile than to run.

A wheel brings them compiled, for any processor of its architecture (`hatch_build.py`). From sources numba compiles them
on first use (about three seconds) and caches them on disk beside this file or, where that is read-only, in the user's
cache directory. With neither they run as they stand, tens of times slower, which is said once.

Shapes: K layer kinds, O options of a kind (padded), S strategies, F numbers of microbatches in flight, C switch classes
and one more row for "no layer before", T different switch tables, J levels of transient peak, Q prices, L layers of the
model, n layers of a run.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

SIGNATURES: dict[str, str] = {}
"""Of the kernels, by name: what the wheel's are compiled for."""
_IN_WHEEL = f"{__package__}.compiled_kernels" if __package__ else ""
SWEPT = 64
"""States that are compared at once."""


def compiled(signature: str) -> Callable[[Kernel], Kernel]:
    """Compiles a kernel of this signature, in the words of numba; that of the wheel takes its place."""

    def decorate(kernel: Kernel) -> Kernel:
        SIGNATURES[kernel.__name__] = signature
        if _IN_WHEEL and find_spec(_IN_WHEEL):
            return cast("Kernel", getattr(import_module(_IN_WHEEL), kernel.__name__))
        if find_spec("numba"):
            from numba import njit

            return cast("Kernel", njit(cache=True, error_model="numpy")(kernel))
        if len(SIGNATURES) == 1:
            logging.getLogger(__name__).warning("the search is not compiled here, and slow: pip install numba")
        return kernel

    return decorate


@compiled(
    "void(f8[:,:,:,::1], i8[:,::1], i8[::1], i8[::1], i8[:,:,::1], "
    "f8[:,::1], i8[::1], i8[:,::1], f8[:,:,::1], f8[::1], i8[::1], f8[::1])"
)
def completions(
    rest: FloatArray,
    least: IntArray,
    kinds: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    table: IntArray,
    entry: IntArray,
    entry_s: FloatArray,
    prices: FloatArray,
    upper: IntArray,
    priced: FloatArray,
) -> None:
    """Fills in the least priced cost, and the least bytes, of the layers from each position of a run to its end.

    ``rest`` [n + 1, J, Q, C + 1] is in seconds, by the class before; ``least`` [n + 1, J] in bytes; both come with
    zeros in the last position. ``rows`` [K, 4, O] as in `StageCosts`, ``entry`` [T, S] and ``entry_s`` [T, C + 1, D] as
    in `Switches`. Level j allows options with a transient of at most ``upper[j]``; infinite (2^60 bytes) where some
    layer has none. ``priced`` [D] is room to work in: what is entered alike costs least whatever it is entered from.
    """
    for position in range(len(kinds) - 1, -1, -1):
        kind = kinds[position]
        for level in range(len(upper)):
            smallest = 2**60
            for option in range(count[kind]):
                if rows[kind, 3, option] <= upper[level] and rows[kind, 2, option] < smallest:
                    smallest = rows[kind, 2, option]
            smallest += least[position + 1, level]
            least[position, level] = smallest if smallest < 2**60 else 2**60
            for which in range(len(prices)):
                for own in range(len(priced)):
                    priced[own] = np.inf
                for option in range(count[kind]):
                    if rows[kind, 3, option] <= upper[level]:
                        own = entry[table[kind], rows[kind, 0, option]]
                        paid = seconds[kind, option] + prices[which] * rows[kind, 2, option]
                        paid += rest[position + 1, level, which, rows[kind, 1, option]]
                        priced[own] = min(priced[own], paid)
                for before in range(entry_s.shape[1]):
                    best = np.inf
                    for own in range(len(priced)):
                        paid = entry_s[table[kind], before, own] + priced[own]
                        best = min(best, paid)
                    rest[position, level, which, before] = best


@compiled("void(i8[:,::1], i8[::1], i8[:,:,::1], f8[:,::1], f8[::1], i8[::1], i8[::1], i8, f8, f8[:,::1])")
def drop_useless(  # noqa: C901, PLR0912 (as `sweep`)
    numbers: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    prices: FloatArray,
    lower: IntArray,
    upper: IntArray,
    budget: int,
    limit_s: float,
    least: FloatArray,
) -> None:
    """Moves the options that runs within the limit may hold to the front, and counts them; see `layers`.

    ``numbers`` [R, 2] are the kinds of a run and how many layers it has of each. ``least`` [R, Q] is room to work in.
    Options of use are marked by a negative strategy meanwhile.
    """
    for level in range(len(upper)):
        for part in range(len(numbers)):
            kind = numbers[part, 0]
            for which in range(len(prices)):
                least[part, which] = np.inf
                for option in range(count[kind]):
                    if rows[kind, 3, option] <= upper[level]:
                        paid = seconds[kind, option] + prices[which] * rows[kind, 2, option]
                        least[part, which] = min(least[part, which], paid)
        for part in range(len(numbers)):
            kind = numbers[part, 0]
            for option in range(count[kind]):
                if rows[kind, 0, option] < 0 or rows[kind, 3, option] > upper[level]:
                    continue
                bound = 0.0
                for which in range(len(prices)):
                    total = prices[which] * float(lower[level] - budget)
                    for other in range(len(numbers)):
                        total += numbers[other, 1] * least[other, which]
                    paid = seconds[kind, option] + prices[which] * rows[kind, 2, option]
                    bound = max(bound, total + paid - least[part, which])
                if bound <= limit_s:
                    rows[kind, 0, option] = -1 - rows[kind, 0, option]
    for part in range(len(numbers)):
        kind, kept = numbers[part, 0], 0
        for option in range(count[kind]):
            if rows[kind, 0, option] < 0:
                rows[kind, 0, kept] = -1 - rows[kind, 0, option]
                for field in range(1, 4):
                    rows[kind, field, kept] = rows[kind, field, option]
                seconds[kind, kept] = seconds[kind, option]
                kept += 1
        count[kind] = kept


@compiled(
    "i8(i8[:,::1], f8[::1], i8, i8[:,::1], f8[::1], f8[:,::1], i8[::1], i8[::1], i8, f8, f8[:,::1], "
    "f8[:,:,::1], i8[::1], b1, f8[:,:,::1], f8[:,:,::1], i8[:,:,::1], i8[:,::1], f8[:,::1])"
)
def candidates(  # noqa: C901, PLR0912 (as `sweep`)
    states: IntArray,
    seconds: FloatArray,
    count: int,
    options: IntArray,
    own_seconds: FloatArray,
    switch: FloatArray,
    lower: IntArray,
    upper: IntArray,
    budget: int,
    limit_s: float,
    prices: FloatArray,
    completion: FloatArray,
    rest_bytes: IntArray,
    has_bounds: bool,
    fastest: FloatArray,
    same: FloatArray,
    same_peak: IntArray,
    places: IntArray,
    values: FloatArray,
) -> int:
    """Extends states by the options of one more layer; returns how many may still fit and be in time.

    ``states`` [7, N] as in `LayerStates`; ``options`` [4, O] hold strategy, class, bytes and transient of the ``count``
    options; ``switch`` [C + 1, S]. ``prices`` [J, Q], ``completion`` [J, Q, C + 1] and ``rest_bytes`` [J] are for the
    layers still to come. Fills ``places`` [7, room] with new states, and ``values`` [2, room] with seconds and, if
    ``has_bounds``, the lower bound of the whole run. Left out are those that another one with the same option beats, as
    `sweep` tells, whose room to work in serves here too.
    """
    found = 0
    for option in range(count):
        strategy, own_group, own_peak = options[0, option], options[1, option], options[3, option]
        soonest, smallest, own_level = np.inf, budget + 1, 0
        for level in range(len(upper)):
            paid = completion[level, 0, own_group] if prices[level, 0] == 0 else 0.0
            soonest, smallest = min(soonest, paid), min(smallest, rest_bytes[level])
            own_level += upper[level] < own_peak
            for came in range(fastest.shape[0]):
                fastest[came, own_group, level] = np.inf
                same[came, own_group, level] = np.inf
        for state in range(states.shape[1]):
            taken = states[2, state] + options[2, option]
            if taken + smallest + own_peak > budget:
                break  # as do all behind it, which come in order of bytes
            came, peak, level = states[0, state], max(states[3, state], own_peak), max(states[6, state], own_level)
            spent = seconds[state] + (switch[states[1, state], strategy] + own_seconds[option])
            if level == len(upper) or spent + soonest > limit_s or taken + smallest + peak > budget:
                continue
            if level > 0 and fastest[came, own_group, level - 1] <= spent:
                continue
            if same[came, own_group, level] <= spent and same_peak[came, own_group, level] <= peak:
                continue
            if spent < same[came, own_group, level]:
                same[came, own_group, level] = spent
                same_peak[came, own_group, level] = peak
            for higher in range(level, len(upper)):
                if fastest[came, own_group, higher] <= spent:
                    break
                fastest[came, own_group, higher] = spent
            bound = np.inf
            for higher in range(level, len(upper)):
                reached = max(lower[higher], peak)
                if taken + rest_bytes[higher] + reached > budget:
                    continue
                excess = float(taken + reached - budget)
                least = 0.0
                for which in range(prices.shape[1]):
                    paid = completion[higher, which, own_group] + prices[higher, which] * excess
                    least = max(least, paid)
                    if spent + least > limit_s:
                        break
                bound = min(bound, least)
                if not has_bounds and spent + bound <= limit_s:
                    break
            if spent + bound <= limit_s and bound < np.inf:
                places[0, found] = came
                places[1, found] = own_group
                places[2, found] = taken
                places[3, found] = peak
                places[4, found] = state
                places[5, found] = strategy
                places[6, found] = level
                values[0, found] = spent
                values[1, found] = spent + bound
                found += 1
    return found


@compiled("i8(i8[::1], i8[:,::1], f8[::1], f8[:,::1], f8[:,:,::1], f8[:,:,::1], i8[:,:,::1])")
def sweep(  # noqa: C901, PLR0912 (one function compiles faster than two)
    order: IntArray,
    places: IntArray,
    seconds: FloatArray,
    detour: FloatArray,
    fastest: FloatArray,
    same: FloatArray,
    same_peak: IntArray,
) -> int:
    """Moves the unbeaten of the `candidates` to the front of ``order``, which lists them by bytes; returns how many.

    ``detour`` [C + 1, C + 1] is at most so much longer takes whatever follows from the first class than from the
    second. Room to work in, [entries, C + 1, J]: ``fastest`` so far at a level or below, ``same`` the fastest at the
    very level and ``same_peak`` its transient. Of equal bytes the faster one goes first, then the smaller transient.
    """
    for came in range(fastest.shape[0]):
        for left in range(fastest.shape[1]):
            for own in range(fastest.shape[2]):
                fastest[came, left, own] = np.inf
                same[came, left, own] = np.inf
    for place in range(1, len(order)):
        index, slot = order[place], place
        while slot > 0 and places[2, order[slot - 1]] == places[2, index]:
            before = order[slot - 1]
            if seconds[before] < seconds[index]:
                break
            if seconds[before] == seconds[index] and places[3, before] <= places[3, index]:
                break
            order[slot] = before
            slot -= 1
        order[slot] = index
    num_kept = 0
    for index in order:
        came, left, peak, own = places[0, index], places[1, index], places[3, index], places[6, index]
        beaten = False
        for turn in range(detour.shape[0] + 1):
            other = left if turn == 0 else turn - 1  # the own class beats most
            longest = seconds[index] - detour[other, left]
            beaten = own > 0 and fastest[came, other, own - 1] <= longest
            beaten |= same[came, other, own] <= longest and same_peak[came, other, own] <= peak
            if beaten:
                break
        if beaten:
            continue
        order[num_kept] = index
        num_kept += 1
        if seconds[index] < same[came, left, own]:
            same[came, left, own] = seconds[index]
            same_peak[came, left, own] = peak
        for higher in range(own, fastest.shape[2]):
            fastest[came, left, higher] = min(fastest[came, left, higher], seconds[index])
    return num_kept


@compiled("i8(b1[:,::1], f8[:,:,::1], i8[::1], i8[::1], i8[::1])")
def switch_classes(
    legal: BoolArray,
    switch: FloatArray,
    used: IntArray,
    group: IntArray,
    first: IntArray,
) -> int:
    """Gives the ``used`` strategies from which every legal receiver of all tables pays the same a number; how many.

    ``legal`` is [T, S] and ``switch`` [T, S, S]. Fills ``group`` [S], and ``first`` [S] with the first of each class.
    """
    found = 0
    for sender in used:
        own = 0
        while own < found:
            same = True
            for which in range(len(legal)):
                for receiver in used:
                    paid = switch[which, sender, receiver]
                    if legal[which, receiver] and paid != switch[which, first[own], receiver]:
                        same = False
                        break
                if not same:
                    break
            if same:
                break
            own += 1
        if own == found:
            first[found] = sender
            found += 1
        group[sender] = own
    return found


@compiled("void(f8[:,::1], i8[:,:,::1], i8[:,::1], i8[::1], i8[::1], b1[:,:,::1], b1[:,::1], b1[:,:,::1])")
def drop_beaten(
    seconds: FloatArray,
    num_bytes: IntArray,
    transient: IntArray,
    group: IntArray,
    table: IntArray,
    receives_less: BoolArray,
    legal: BoolArray,
    kept: BoolArray,
) -> None:
    """Keeps of the ``legal`` [K, S] strategies those than which no other of their class is better, or equal and first.

    ``num_bytes`` and ``kept`` are [F, K, S], for F numbers of microbatches in flight; ``kept`` comes with all legal
    ones. ``receives_less`` [T, S, S]: whether the first receives for no more than the second from any.
    """
    for kind in range(legal.shape[0]):
        less = receives_less[table[kind]]
        for own in range(legal.shape[1]):
            left = kept.shape[0] if legal[kind, own] else 0
            for other in range(legal.shape[1]):
                if left == 0:
                    break
                if other == own or not legal[kind, other] or group[other] != group[own]:
                    continue
                if seconds[kind, other] > seconds[kind, own] or transient[kind, other] > transient[kind, own]:
                    continue
                if not less[other, own]:
                    continue
                is_equal = less[own, other] and seconds[kind, other] == seconds[kind, own]
                is_equal &= transient[kind, other] == transient[kind, own]
                for flight in range(kept.shape[0]):
                    more = num_bytes[flight, kind, other] - num_bytes[flight, kind, own]
                    if kept[flight, kind, own] and (more < 0 or (more == 0 and not (is_equal and own < other))):
                        kept[flight, kind, own] = False
                        left -= 1


@compiled("i8(i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], f8[::1], i8[::1])")
def hull_slopes(
    kinds: IntArray, count: IntArray, rows: IntArray, seconds: FloatArray, slopes: FloatArray, hull: IntArray
) -> int:
    """Fills in the slopes, in seconds a byte, of the lower convex hulls of the options of these kinds; how many.

    ``rows`` [K, 4, O] as in `StageCosts`; ``slopes`` has room for all options, ``hull`` [O] is to work in.
    """
    found = 0
    for kind in kinds:
        num_bytes, own = rows[kind, 2], seconds[kind]
        for option in range(count[kind]):
            slot = option
            while slot > 0:
                before = hull[slot - 1]
                if num_bytes[before] < num_bytes[option]:
                    break
                if num_bytes[before] == num_bytes[option] and own[before] <= own[option]:
                    break
                hull[slot] = before
                slot -= 1
            hull[slot] = option
        size, least = 0, np.inf
        for place in range(count[kind]):
            option = hull[place]
            if own[option] >= least:
                continue
            least = own[option]
            while size > 1:
                last, before = hull[size - 1], hull[size - 2]
                slope = (own[before] - own[last]) / (num_bytes[last] - num_bytes[before])
                if slope > (own[last] - own[option]) / (num_bytes[option] - num_bytes[last]):
                    break
                size -= 1
            hull[size] = option
            size += 1
        for place in range(1, size):
            before, option = hull[place - 1], hull[place]
            slopes[found] = (own[before] - own[option]) / (num_bytes[option] - num_bytes[before])
            found += 1
    return found


@compiled(
    "void(i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], f8[::1], i8[::1], i8[::1], f8[:,::1], f8[:,:,::1], i8[:,::1])"
)
def priced_prefixes(
    kinds: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    prices: FloatArray,
    upper: IntArray,
    layers: IntArray,
    least: FloatArray,
    prefix: FloatArray,
    missing: IntArray,
) -> None:
    """Fills in the priced cost of the first layers, and how many of them have no option in a level; see `bounds`.

    ``kinds`` are those of the ``layers`` [L]; ``prefix`` [J, Q, L + 1] is in seconds and ``missing`` [J, L + 1], both
    with zeros before all layers. ``least`` [K, Q] is to work in.
    """
    for level in range(len(upper)):
        for kind in kinds:
            least[kind] = np.inf
            for option in range(count[kind]):
                if rows[kind, 3, option] <= upper[level]:
                    for which in range(len(prices)):
                        paid = seconds[kind, option] + prices[which] * rows[kind, 2, option]
                        least[kind, which] = min(least[kind, which], paid)
        for place in range(len(layers)):
            kind = layers[place]
            is_missing = least[kind, 0] == np.inf
            missing[level, place + 1] = missing[level, place] + is_missing
            for which in range(len(prices)):
                paid = 0.0 if is_missing else least[kind, which]
                prefix[level, which, place + 1] = prefix[level, which, place] + paid


@compiled("i8(i8[::1], i8[:,::1], i8[:,::1], i8, i8)")
def fitting_end(threshold: IntArray, prefix: IntArray, ended: IntArray, room: int, start: int) -> int:
    """The largest end of layers from ``start`` whose least bytes fit into the room; see `least_memory`."""
    end = start
    for row in range(len(threshold)):
        most = room - threshold[row] + prefix[row, start]
        while end + 1 < ended.shape[1] and ended[row, end + 1] <= most:
            end += 1
    return end


@compiled("void(f8[:,:,::1], i8[:,::1], f8[::1], i8[::1], i8, i8, i8, f8[:,::1])")
def run_bounds(
    prefix: FloatArray,
    missing: IntArray,
    prices: FloatArray,
    lower: IntArray,
    room: int,
    first_start: int,
    first_end: int,
    found: FloatArray,
) -> None:
    """Fills [starts, ends] with lower bounds in seconds of the layers start..end-1 on a stage; see `bounds`.

    Starts and ends count up from the first ones. Infinite for runs without layers.
    """
    for row in range(found.shape[0]):
        for column in range(found.shape[1]):
            start, end = first_start + row, first_end + column
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


@compiled("i8(f8[:,:,::1], i8[:,::1], f8[::1], i8[::1], i8, i8, f8, f8)")
def farthest(
    prefix: FloatArray,
    missing: IntArray,
    prices: FloatArray,
    lower: IntArray,
    room: int,
    start: int,
    transfer_s: float,
    limit_s: float,
) -> int:
    """The largest end whose `run_bounds` from ``start``, with the transfer, are within the limit, found by halving."""
    low, high = start, missing.shape[1] - 1
    while low < high:
        end = (low + high + 1) // 2
        within = False
        for level in range(len(lower)):
            if missing[level, end] > missing[level, start]:
                continue
            within = 0.0 + transfer_s <= limit_s
            for which in range(len(prices)):
                paid = prefix[level, which, end] - prefix[level, which, start]
                paid -= prices[which] * (room - lower[level])
                if paid + transfer_s > limit_s:
                    within = False
                    break
            if within:
                break
        if within:
            low = end
        else:
            high = end - 1
    return low


@compiled("f8(i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], b1, i8, f8, i8, f8[::1], f8[::1], f8[::1], i8[::1])")
def raise_prices(  # noqa: C901, PLR0912 (as `sweep`)
    kinds: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    again: bool,
    budget: int,
    target_s: float,
    rounds: int,
    prices: FloatArray,
    tried: FloatArray,
    excess: FloatArray,
    chosen: IntArray,
) -> float:
    """Finds prices of memory, as each layer of a run works, that bound its time well; the bound in seconds.

    ``again`` where the last layers of the run begin while the first one of the pass before still reduces.
    ``prices`` [n] come with where to begin and leave as the best found, by steps along the excess of the layers that
    are cheapest (Polyak's, towards ``target_s``). ``rows`` [K, 9, O] as in `stage_walk`; the rest is room to work in.
    """
    best, reach, stalled = -np.inf, 1.0, 0
    tried[:] = prices
    for _ in range(rounds):
        total = tried.sum()
        value, done = -total * budget, 0.0
        held = 0
        for layer in range(len(kinds)):
            kind = kinds[layer]
            before = tried[layer - 1] if layer > 0 else (tried[-1] if again else 0.0)
            after = tried[layer + 1] if layer + 1 < len(kinds) else 0.0
            least = np.inf
            for option in range(count[kind]):
                paid = seconds[kind, option] + total * rows[kind, 2, option] - done * rows[kind, 3, option]
                paid += tried[layer] * rows[kind, 8, option] + after * rows[kind, 6, option]
                paid += before * max(0, rows[kind, 7, option])
                if paid < least:
                    least, chosen[layer] = paid, option
            value += least
            done += tried[layer]
            held += rows[kind, 2, chosen[layer]]
        if value > best:
            best, stalled = value, 0
            prices[:] = tried
        else:
            stalled += 1
            if stalled == 10:
                reach, stalled = 0.7 * reach, 0
                tried[:] = prices
                if reach < 0.001:
                    break
                continue
        norm, freed = 0.0, 0
        for layer in range(len(kinds) - 1, -1, -1):
            kind, option = kinds[layer], chosen[layer]
            taken = held - freed + rows[kind, 8, option]
            if layer > 0:
                taken += rows[kinds[layer - 1], 6, chosen[layer - 1]]
            if layer + 1 < len(kinds) or again:
                behind = layer + 1 if layer + 1 < len(kinds) else 0
                taken += max(0, rows[kinds[behind], 7, chosen[behind]])
            freed += rows[kind, 3, option]
            excess[layer] = float(taken - budget)
            if tried[layer] > 0 or excess[layer] > 0:
                norm += excess[layer] * excess[layer]
        if norm == 0 or value >= target_s:
            break
        step = reach * (target_s - value) / norm
        for layer in range(len(kinds)):
            tried[layer] = max(0.0, tried[layer] + step * excess[layer])
    return best


@compiled("void(f8[:,::1], i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], b1, i8[::1], f8[:,:,::1], f8[::1])")
def priced_rests(
    rest: FloatArray,
    kinds: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    again: bool,
    table: IntArray,
    switch: FloatArray,
    prices: FloatArray,
) -> None:
    """Fills in the least priced cost in seconds of the layers from each position of a run to its end.

    ``rest`` [n + 1, C + 1] by the class before, zero in the last position; ``prices`` [n] as `raise_prices` finds them.
    """
    total = prices.sum()
    for position in range(len(kinds) - 1, -1, -1):
        kind = kinds[position]
        done = prices[:position].sum()
        before = prices[position - 1] if position > 0 else (prices[-1] if again else 0.0)
        after = prices[position + 1] if position + 1 < len(kinds) else 0.0
        rest[position] = np.inf
        for option in range(count[kind]):
            paid = seconds[kind, option] + total * rows[kind, 2, option] - done * rows[kind, 3, option]
            paid += prices[position] * rows[kind, 8, option] + after * rows[kind, 6, option]
            paid += before * max(0, rows[kind, 7, option]) + rest[position + 1, rows[kind, 1, option]]
            for entry in range(switch.shape[1]):
                whole = switch[table[kind], entry, rows[kind, 0, option]] + paid
                rest[position, entry] = min(rest[position, entry], whole)


@compiled(
    "void(f8[:,:,:,::1], i8[:,:,:,::1], i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], b1, i8[::1], f8[:,:,::1], f8[::1], "
    "i8[::1], i8[:,:,::1], i8[:,::1], f8[::1], f8[::1])"
)
def linked_rests(  # noqa: C901, PLR0912 (as `sweep`)
    rest: FloatArray,
    chosen: IntArray,
    kinds: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    again: bool,
    table: IntArray,
    entry_s: FloatArray,
    prices: FloatArray,
    rooms: IntArray,
    links: IntArray,
    levels: IntArray,
    entered: FloatArray,
    known: FloatArray,
) -> None:
    """Fills in the least priced cost in seconds of the layers from each position of a run to its end.

    ``rest`` [n + 1, A, R, C + 1] is by the level of what is gathered ahead, the highest level that the next reduction
    may take and the class before; ``chosen`` alike has the options of least cost. In the last position ``rest`` is
    zero. ``prices`` [n] as `raise_prices` finds them; ``rooms`` [n] is what a layer may hold and work with besides the
    least that all others hold then. ``links`` [K, 2, O] are levels of what options gather ahead and reduce, and
    ``levels`` [2, A] their bytes, rising from 0. ``entry_s`` [T, S, C + 1] is what entering takes from each class;
    ``entered`` [C + 1] and ``known`` [R] are room to work in.

    A cost holds where less is gathered ahead and where more may be reduced, too, so that it is noted once.
    """
    total, highest = prices.sum(), levels.shape[1] - 1
    for position in range(len(kinds) - 1, -1, -1):
        kind, own, picks = kinds[position], rest[position], chosen[position]
        done = prices[:position].sum()
        before = prices[position - 1] if position > 0 else (prices[-1] if again else 0.0)
        after = prices[position + 1] if position + 1 < len(kinds) else 0.0
        own[:] = np.inf
        for option in range(count[kind]):
            reduced, strategy, left_group = rows[kind, 7, option], rows[kind, 0, option], rows[kind, 1, option]
            room, most = rooms[position] - rows[kind, 2, option], 0
            left = room - rows[kind, 4, option]
            if left < 0 or (reduced >= 0 and room < rows[kind, 5, option]):
                continue
            paid = seconds[kind, option] + total * rows[kind, 2, option] - done * rows[kind, 3, option]
            paid += prices[position] * rows[kind, 8, option] + after * rows[kind, 6, option] + before * max(0, reduced)
            entered[:] = entry_s[table[kind], strategy] + paid
            if reduced >= 0:
                first, link, last = links[kind, 1, option], links[kind, 0, option], np.inf
                for ahead in range(highest, -1, -1):  # the less is gathered, the more is left
                    gathered = levels[0, ahead]
                    if left < gathered or room < rows[kind, 5, option] + gathered:
                        continue
                    while most < highest and levels[1, most + 1] <= left - gathered:
                        most += 1
                    tail = rest[position + 1, link, most, left_group]
                    if tail == last:
                        continue
                    last, costs, best = tail, own[ahead, first], picks[ahead, first]
                    for entry in range(len(entered)):  # without branches, so that several are compared at once
                        whole = entered[entry] + tail
                        is_less = whole < costs[entry]
                        costs[entry] = whole if is_less else costs[entry]
                        best[entry] = option if is_less else best[entry]
            else:
                known[:] = np.inf
                while most < highest and levels[1, most + 1] <= left:
                    most += 1
                for ahead in range(highest, -1, -1):
                    for level in range(most + 1):
                        tail = rest[position + 1, ahead, level, left_group]
                        is_new = tail != known[level] and (level == 0 or tail != known[level - 1])
                        known[level] = tail
                        if not is_new:
                            continue
                        costs, best = own[ahead, level], picks[ahead, level]
                        for entry in range(len(entered)):
                            whole = entered[entry] + tail
                            is_less = whole < costs[entry]
                            costs[entry] = whole if is_less else costs[entry]
                            best[entry] = option if is_less else best[entry]
        for ahead in range(highest, -1, -1):
            for level in range(highest + 1):
                for entry in range(len(entered)):
                    if level > 0 and own[ahead, level - 1, entry] < own[ahead, level, entry]:
                        own[ahead, level, entry] = own[ahead, level - 1, entry]
                        picks[ahead, level, entry] = picks[ahead, level - 1, entry]
                    if ahead < highest and own[ahead + 1, level, entry] < own[ahead, level, entry]:
                        own[ahead, level, entry] = own[ahead + 1, level, entry]
                        picks[ahead, level, entry] = picks[ahead + 1, level, entry]


@compiled("void(i8[:,:,:,::1], i8[::1], i8[:,:,::1], b1, i8[::1], i8[:,:,::1], i8[:,::1], i8, i8, i8[::1], f8[::1])")
def linked_excess(
    chosen: IntArray,
    kinds: IntArray,
    rows: IntArray,
    again: bool,
    rooms: IntArray,
    links: IntArray,
    levels: IntArray,
    entry: int,
    budget: int,
    options: IntArray,
    excess: FloatArray,
) -> None:
    """Fills in by how much a run of the options that `linked_rests` chose is above the budget as each layer works."""
    ahead, most, held, freed = 0, levels.shape[1] - 1, 0, 0
    for position in range(len(kinds)):
        kind = kinds[position]
        option = chosen[position, ahead, most, entry]
        options[position], is_sharded = option, rows[kind, 7, option] >= 0
        left = rooms[position] - rows[kind, 2, option] - rows[kind, 4, option]
        left -= levels[0, ahead] if is_sharded else 0
        may = levels.shape[1] - 1
        while levels[1, may] > left:
            may -= 1
        most = may if is_sharded else min(most, may)
        ahead = links[kind, 0, option] if is_sharded else ahead
        entry = rows[kind, 1, option]
        held += rows[kind, 2, option]
    for layer in range(len(kinds) - 1, -1, -1):
        taken = held - freed + rows[kinds[layer], 8, options[layer]]
        if layer > 0:
            taken += rows[kinds[layer - 1], 6, options[layer - 1]]
        if layer + 1 < len(kinds) or again:
            behind = layer + 1 if layer + 1 < len(kinds) else 0
            taken += max(0, rows[kinds[behind], 7, options[behind]])
        freed += rows[kinds[layer], 3, options[layer]]
        excess[layer] = float(taken - budget)


@compiled(
    "i8(i8[:,::1], f8[::1], i8, i8[:,::1], f8[::1], b1, f8[:,::1], i8, f8, f8[::1], i8, f8[:,:,:,::1], i8[::1], "
    "i8[:,::1], i8, i8, i8, f8[::1], f8[:,::1], i8[::1], f8[::1])"
)
def working_options(
    states: IntArray,
    seconds: FloatArray,
    count: int,
    options: IntArray,
    own_seconds: FloatArray,
    again: bool,
    switch: FloatArray,
    budget: int,
    limit_s: float,
    prices: FloatArray,
    position: int,
    rest: FloatArray,
    beyond: IntArray,
    levels: IntArray,
    least_held: int,
    rest_kept: int,
    rest_held: int,
    charges: FloatArray,
    cheapest: FloatArray,
    usable: IntArray,
    soonest: FloatArray,
) -> int:
    """Finds the options that may fit, and be in time, behind some of the states that `working_candidates` extends.

    Arguments as there. Fills ``usable`` [O] with them and ``soonest`` [O] with what all behind each take at least, and
    ``charges`` with the prices of all moments, of those before the layer, of its own and the next one, and of the last
    where the first reduction counts there, too. Returns how many. ``cheapest`` [2, C + 1] is to work in.
    """
    before, here = prices[:position].sum(), prices[position]
    is_last = position + 1 == len(prices)
    after = 0.0 if is_last else prices[position + 1]
    repeated = prices[-1] if again and not is_last else 0.0
    charges[0], charges[1], charges[2], charges[3], charges[4] = prices.sum(), before, here, after, repeated
    found, total, room_s = 0, charges[0], charges[0] * budget
    least, fullest = states[1].min(), states[2].min()
    cheapest[:] = np.inf
    for state in range(states.shape[1]):
        group, ahead = states[0, state], states[4, state]
        paid = seconds[state] + (total - before) * states[1, state] + before * states[2, state]
        paid += repeated * max(0, states[7, state])
        cheapest[0, group] = min(cheapest[0, group], paid + after * ahead)
        cheapest[1, group] = min(cheapest[1, group], paid + here * ahead)
    for option in range(count):
        is_sharded, held, working = options[7, option] >= 0, least + options[2, option], options[4, option]
        kept, ahead = options[2, option] - options[3, option], options[6, option] if is_sharded else 0
        if held + max(rest_held, working + rest_kept) > budget or fullest + kept + rest_kept > budget:
            continue
        more, link, level = len(beyond) - 1, levels.shape[1] - 1, levels.shape[1] - 1
        while beyond[more] > held - least_held:
            more -= 1
        while levels[0, link] > ahead:
            link -= 1
        while levels[1, level] > budget - held - working - rest_kept:
            level -= 1
        soonest[found] = rest[more, link, level, options[1, option]]
        entered = np.inf
        for group in range(cheapest.shape[1]):
            entered = min(entered, cheapest[int(is_sharded), group] + switch[group, options[0, option]])
        bound = entered + own_seconds[option] + soonest[found] + (total - before) * options[2, option]
        bound += here * working + before * kept + after * ahead
        if bound - room_s <= limit_s + 1e-9 * room_s:  # sums in another order than those of candidates
            usable[found] = option
            found += 1
    return found


@compiled(
    "i8(i8[:,::1], f8[::1], i8[::1], f8[::1], i8[:,::1], f8[::1], f8[::1], b1, f8[:,::1], i8, f8, f8[:,:,:,::1], "
    "i8[::1], i8[:,::1], i8, i8, i8, i8[:,::1], f8[:,::1])"
)
def working_candidates(
    states: IntArray,
    seconds: FloatArray,
    usable: IntArray,
    soonest: FloatArray,
    options: IntArray,
    own_seconds: FloatArray,
    charges: FloatArray,
    ends_again: bool,
    switch: FloatArray,
    budget: int,
    limit_s: float,
    rest: FloatArray,
    beyond: IntArray,
    levels: IntArray,
    least_held: int,
    rest_kept: int,
    rest_held: int,
    places: IntArray,
    values: FloatArray,
) -> int:
    """Extends states by the ``usable`` options of the layer at a position; how many may still fit and be in time.

    ``states`` [8, N] hold class, bytes held, bytes at the fullest moment so far and at that which waits for the next
    reduction, bytes gathered ahead, index of the state before, strategy, and bytes of the first reduction (-1 for
    none); ``options`` [9, O] as in `stage_walk`. ``ends_again`` behind the last layer where `raise_prices` has
    ``again``; ``soonest`` and ``charges`` as `working_options` fills them in.
    ``rest`` [E, A, R, C + 1] is `priced_rests` or `linked_rests` behind, by how much more, ``beyond`` [E], the layers
    so far hold than ``least_held``, the least; behind the layer at least ``rest_held`` bytes more are held, of which
    ``rest_kept`` are not freed. Fills ``places`` like states, ``values`` [2, room] with seconds and a lower bound.
    """
    found = 0
    total, before, here, after, repeated = charges
    for place in range(len(usable)):
        option = usable[place]
        own_group, reduced = options[1, option], options[7, option]
        kept = options[2, option] - options[3, option]
        for state in range(states.shape[1]):
            held, ahead = states[1, state] + options[2, option], states[4, state]
            if reduced < 0:
                fullest = max(states[2, state] + kept, held)
                waiting = max(states[3, state] + kept, held + options[4, option])
            else:
                fullest = max(
                    max(states[2, state], states[3, state] + reduced) + kept, held + options[5, option] + ahead
                )
                waiting = held + options[4, option] + ahead
                ahead = options[6, option]
            first = states[7, state] if states[7, state] >= 0 else reduced
            if ends_again:
                waiting += max(0, first)
            most = max(fullest, waiting)
            if held + rest_held > budget or most + rest_kept > budget:
                continue
            spent = seconds[state] + (switch[states[0, state], options[0, option]] + own_seconds[option])
            bound = spent + soonest[place] + (total - before - here) * held + before * most + here * waiting
            bound += after * ahead + repeated * max(0, first) - total * budget
            if bound > limit_s or spent > limit_s:
                continue
            more, link, level = len(beyond) - 1, levels.shape[1] - 1, levels.shape[1] - 1
            while beyond[more] > held - least_held:
                more -= 1
            while levels[0, link] > ahead:
                link -= 1
            while levels[1, level] > budget - waiting - rest_kept:
                level -= 1
            bound = spent + rest[more, link, level, own_group] + (total - before - here) * held + before * most
            bound += here * waiting
            bound += after * ahead + repeated * max(0, first) - total * budget
            if bound > limit_s:
                continue
            places[0, found] = own_group
            places[1, found] = held
            places[2, found] = fullest
            places[3, found] = waiting
            places[4, found] = ahead
            places[5, found] = state
            places[6, found] = options[0, option]
            places[7, found] = first
            values[0, found] = spent
            values[1, found] = max(bound, spent)
            found += 1
    return found


@compiled("i8(i8[::1], i8[:,::1], f8[::1], f8[:,::1], i8, i8[:,::1], f8[::1])")
def sweep_working(
    order: IntArray,
    places: IntArray,
    seconds: FloatArray,
    detour: FloatArray,
    width: int,
    kept: IntArray,
    spent: FloatArray,
) -> int:
    """Moves the first ``width`` unbeaten of the `working_candidates` to the front of ``order``; returns how many.

    ``order`` lists them by their bounds, which hardly any that beats another has larger; ``detour`` as in `sweep`.
    ``kept`` [6, room] and ``spent`` [room] are to work in.
    """
    num_kept = 0
    for index in order:
        beaten, held, group = False, places[1, index], places[0, index]
        fullest, waiting, first = places[2, index], places[3, index], places[7, index]
        gathered, in_s = held + places[4, index], seconds[index]
        for start in range(0, num_kept, SWEPT):
            end, rivals = min(start + SWEPT, num_kept), 0
            held_of, fullest_of, waiting_of = kept[0, start:end], kept[1, start:end], kept[2, start:end]
            first_of, gathered_of, spent_of = kept[3, start:end], kept[4, start:end], spent[start:end]
            for slot in range(end - start):  # without branches, of slices read in a row: many are compared at once
                no_worse = (held_of[slot] <= held) & (fullest_of[slot] <= fullest) & (waiting_of[slot] <= waiting)
                no_worse &= (first_of[slot] <= first) & (gathered_of[slot] <= gathered) & (spent_of[slot] <= in_s)
                rivals += no_worse
            if rivals == 0:
                continue
            for slot in range(start, end):
                if kept[0, slot] > held or kept[1, slot] > fullest or kept[2, slot] > waiting:
                    continue
                if kept[3, slot] > first or kept[4, slot] > gathered:
                    continue
                if spent[slot] + detour[kept[5, slot], group] <= in_s:
                    beaten = True
                    break
            if beaten:
                break
        if beaten:
            continue
        kept[0, num_kept], kept[1, num_kept], kept[2, num_kept] = held, fullest, waiting
        kept[3, num_kept], kept[4, num_kept], kept[5, num_kept] = first, gathered, group
        spent[num_kept] = in_s
        order[num_kept] = index
        num_kept += 1
        if num_kept == width:
            break
    return num_kept
