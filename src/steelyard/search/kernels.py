"""Inner loops of the search, compiled by numba: everything that runs once per state, per layer or per cut.

The kernels are loops over plain arrays, with shape and meaning as in the modules that call them. The same loops in
numpy would spend most of their time on calls, with arrays of a few dozen numbers. Sorting is left to numpy, and the
caller passes the arrays to fill in, because both would take longer to compile than to run.

A wheel contains the compiled kernels, for any processor of its architecture (`hatch_build.py`). In a source checkout
numba compiles them on first use (about three seconds) and caches them on disk next to this file or, if that is
read-only, in the user's cache directory. Without both they run uncompiled, tens of times slower, with one warning.

Shapes: K layer types, O options of a layer type (padded), S strategies, F numbers of microbatches in flight, C switch
classes and one more row for "no layer before", T different switch tables, J levels of transient peak, Q prices, L
layers of the model, n layers of a run, V weighted means of moments.
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
Number = TypeVar("Number", np.int64, np.float64)
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

SIGNATURES: dict[str, str] = {}
"""Signatures by kernel name, for which the wheel's kernels are compiled."""
_IN_WHEEL = f"{__package__}.compiled_kernels" if __package__ else ""


def compiled(signature: str) -> Callable[[Kernel], Kernel]:
    """Compile a kernel of this signature, in numba's notation, or replace it by the wheel's kernel."""

    def decorate(kernel: Kernel) -> Kernel:
        SIGNATURES[kernel.__name__] = signature
        if _IN_WHEEL and find_spec(_IN_WHEEL):
            return cast("Kernel", getattr(import_module(_IN_WHEEL), kernel.__name__))
        if find_spec("numba"):
            from numba import njit

            return cast("Kernel", njit(cache=True, error_model="numpy")(kernel))
        if len(SIGNATURES) == 1:
            logging.getLogger(__name__).warning("the search is slow because it is not compiled: pip install numba")
        return kernel

    return decorate


@compiled(
    "void(f8[:,:,:,::1], i8[:,::1], i8[:,::1], i8[::1], i8[::1], i8[:,:,::1], "
    "f8[:,::1], i8[:,::1], f8[:,:,::1], i8[::1], i8[:,::1], f8[:,:,::1], f8[::1], i8[::1], f8[::1], f8[::1])"
)
def completions(  # noqa: C901, PLR0912 (as `sweep`)
    rest: FloatArray,
    least: IntArray,
    others: IntArray,
    layer_types: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    buffers: IntArray,
    weights: FloatArray,
    table: IntArray,
    entry: IntArray,
    entry_s: FloatArray,
    prices: FloatArray,
    upper: IntArray,
    paid_bytes: FloatArray,
    priced: FloatArray,
) -> None:
    """Fill in the minimum priced cost and the minimum bytes of the layers from each position of a run to its end.

    ``rest`` [n + 1, J, Q, C + 1] is in seconds, by the class before; ``least`` [n + 1, J] in bytes; ``others`` [2,
    n + 1] the maximum bytes that these layers free and the minimum that they keep; all come with zeros in the last
    position. ``rows`` [K, 7, O] as in `StageCosts`, ``entry`` [T, S] and ``entry_s`` [T, C + 1, D] as in `Switches`.
    Level j allows options that reach at most ``upper[j]`` after all later layers have freed all that they can; results
    are infinite (2^60 bytes) if some layer has no such option. The last levels, of as many as ``weights``
    [n + 1, V, 3] has, price the weighted mean of moments and of ``buffers`` [B, 3] (see `layers`). Work space:
    ``paid_bytes`` [O], and ``priced`` [D], the minimum cost of the options with the same entry number.
    """
    num_plain = len(upper) - weights.shape[1]
    for position in range(len(layer_types) - 1, -1, -1):
        layer_type, freed = layer_types[position], others[0, position + 1]
        most, kept = -(2**60), 2**60
        for option in range(count[layer_type]):
            most = max(most, rows[layer_type, 4, option])
            kept = min(kept, rows[layer_type, 2, option] - rows[layer_type, 4, option])
        others[0, position] = freed + most if count[layer_type] > 0 else freed
        others[1, position] = min(others[1, position + 1] + kept, 2**60)
        for level in range(len(upper)):
            smallest = 2**60
            for option in range(count[layer_type]):
                if rows[layer_type, 3, option] - freed <= upper[level] and rows[layer_type, 2, option] < smallest:
                    smallest = rows[layer_type, 2, option]
            smallest += least[position + 1, level]
            least[position, level] = smallest if smallest < 2**60 else 2**60
            for option in range(count[layer_type]):
                paid_bytes[option] = rows[layer_type, 2, option]
                if level >= num_plain:
                    now, then = weights[position, level - num_plain], weights[position + 1, level - num_plain]
                    paid_bytes[option] += (then[0] - now[0]) * rows[layer_type, 3, option]
                    paid_bytes[option] -= now[0] * rows[layer_type, 4, option]
                    for which in range(1, 3):
                        buffer = buffers[rows[layer_type, 5, option], which]
                        paid_bytes[option] += (then[which] - now[which]) * buffer
            for which in range(len(prices)):
                for own in range(len(priced)):
                    priced[own] = np.inf
                for option in range(count[layer_type]):
                    if rows[layer_type, 3, option] - freed <= upper[level]:
                        own = entry[table[layer_type], rows[layer_type, 0, option]]
                        paid = seconds[layer_type, option] + prices[which] * paid_bytes[option]
                        paid += rest[position + 1, level, which, rows[layer_type, 1, option]]
                        priced[own] = min(priced[own], paid)
                for before in range(entry_s.shape[1]):
                    best = np.inf
                    for own in range(len(priced)):
                        paid = entry_s[table[layer_type], before, own] + priced[own]
                        best = min(best, paid)
                    rest[position, level, which, before] = best


@compiled(
    "i8(i8[:,::1], f8[::1], i8, i8[:,::1], f8[::1], f8[:,::1], i8[:,::1], i8[:,::1], i8[:,::1], b1, b1, "
    "i8[::1], i8[::1], i8, f8, f8[:,::1], f8[:,:,::1], f8[:,::1], i8[::1], i8[::1], b1, f8[:,:,::1], i8[:,:,:,::1], "
    "i8[:,::1], f8[:,::1])"
)
def candidates(  # noqa: C901, PLR0912, PLR0915 (as `sweep`)
    states: IntArray,
    seconds: FloatArray,
    count: int,
    options: IntArray,
    own_seconds: FloatArray,
    switch: FloatArray,
    received: IntArray,
    buffers: IntArray,
    joined: IntArray,
    repeats: bool,
    is_last: bool,
    lower: IntArray,
    upper: IntArray,
    budget: int,
    limit_s: float,
    prices: FloatArray,
    completion: FloatArray,
    weights: FloatArray,
    rest_bytes: IntArray,
    others: IntArray,
    has_bounds: bool,
    same: FloatArray,
    known: IntArray,
    places: IntArray,
    values: FloatArray,
) -> int:
    """Extend states by the options of one more layer; return the number that may still fit and meet the limit.

    ``states`` [8, N] as in `LayerStates`; ``options`` [7, O] as in `StageCosts`, of ``count`` options; ``switch``
    [C + 1, S] seconds and ``received`` [C + 1, S] bytes that a stage receives, empty after its first layer.
    ``buffers`` [B, 3], ``joined`` and ``repeats`` as in `StageCosts`; ``is_last``: whether this layer ends
    its stage. ``prices`` [J + V, Q], ``completion`` [J + V, Q, C + 1], ``weights`` [V, 3] and ``rest_bytes`` [J + V]
    are for the layers still to come, as are ``others``: the maximum bytes that they free, the minimum that they keep,
    and the minimum transient bytes of the last one. ``places`` [8, room] receives the new states, and ``values``
    [2, room] their seconds and, if
    ``has_bounds``, the lower bound of the whole run. States that another one with the same option beats are left out,
    as in `sweep`, whose work space is used here too.
    """
    found, freed = 0, others[0]
    for option in range(count):
        strategy, own_group = options[0, option], options[1, option]
        soonest, smallest = np.inf, budget + 1
        for level in range(len(upper)):
            paid = completion[level, 0, own_group] if prices[level, 0] == 0 else 0.0
            soonest, smallest = min(soonest, paid), min(smallest, rest_bytes[level])
            for came in range(same.shape[1]):
                same[came, 0, level] = np.inf
        least_peak = options[3, option] if is_last or freed == 0 else lower[0]
        for state in range(states.shape[1]):
            taken, before = states[2, state] + options[2, option], states[7, state]
            if taken + smallest + least_peak > budget:
                break  # all later states, in order of bytes, are too large too
            if len(received) > 0:
                taken += received[states[1, state], strategy]
            spent = seconds[state] + (switch[states[1, state], strategy] + own_seconds[option])
            if spent + soonest > limit_s:
                continue
            size, peak = joined[before, options[5, option]], options[3, option] + buffers[before, 0]
            more, beside = 0, 0
            if is_last:
                size, beside = 0, max(buffers[options[5, option], 2] - buffers[before, 2], 0)
                if repeats and buffers[before, 2] == 0:
                    taken, beside = taken + beside, 0
            else:
                more, beside = buffers[size, 1] - buffers[before, 1], buffers[size, 2] - buffers[before, 2]
                if repeats:
                    more, beside = more + beside, 0
                else:
                    peak += buffers[size, 2]
            taken += more
            peak = max(peak, states[3, state] + beside - options[4, option])
            least_peak_then = peak if is_last else max(peak - freed, others[2])
            if taken + peak + others[1] > budget:
                continue
            level, came, beaten = 0, states[0, state], False
            while level + 1 < len(upper) and upper[level] < peak:
                level += 1
            for own in range(level + 1):
                if same[came, 0, own] <= spent and known[0, came, 0, own] <= taken + peak:
                    beaten |= known[1, came, 0, own] == size
            if beaten:
                continue
            if spent < same[came, 0, level] and more == 0:  # later states may take less than one that grew
                same[came, 0, level] = spent
                known[0, came, 0, level], known[1, came, 0, level] = taken + peak, size
            bound = np.inf
            for higher in range(len(upper)):
                if upper[higher] < least_peak_then or rest_bytes[higher] == 2**60:
                    continue
                reached = max(lower[higher], least_peak_then)
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
            for mean in range(0 if is_last or spent + bound > limit_s else len(weights)):
                ahead, left, row = buffers[size, 1], buffers[size, 2], len(upper) + mean
                paid_bytes = taken - (1 - weights[mean, 1]) * ahead - (repeats - weights[mean, 2]) * left - budget
                paid_bytes += weights[mean, 0] * (peak - (1 - repeats) * left)
                for which in range(prices.shape[1]):
                    bound = max(bound, completion[row, which, own_group] + prices[row, which] * paid_bytes)
                if spent + bound > limit_s:
                    break
            if spent + bound <= limit_s and bound < np.inf:
                places[0, found] = states[0, state]
                places[1, found] = own_group
                places[2, found] = taken
                places[3, found] = peak
                places[4, found] = state
                places[5, found] = strategy
                places[6, found] = level
                places[7, found] = size
                values[0, found] = spent
                values[1, found] = spent + bound
                found += 1
    return found


@compiled("i8(i8[::1], i8[:,::1], f8[::1], i8, f8[:,::1], f8, f8[:,:,::1], f8[:,:,::1], i8[:,:,:,::1], i8[:,::1])")
def sweep(  # noqa: C901, PLR0912 (one function compiles faster than two)
    order: IntArray,
    places: IntArray,
    seconds: FloatArray,
    sizes: int,
    detour: FloatArray,
    slack_s: float,
    fastest: FloatArray,
    same: FloatArray,
    known: IntArray,
    classes: IntArray,
) -> int:
    """Move the unbeaten `candidates` to the front of ``order``, which lists them by bytes; return their number.

    ``detour`` [C + 1, C + 1] is the maximum additional time of whatever follows from the first class instead of the
    second; states within ``slack_s`` of another one count as beaten. Only states of one entry and one of the ``sizes``
    of buffers are compared. Work space, [entries times B, C + 1, J]: ``fastest`` so far at a level or below, ``same``
    the fastest at exactly the level, and in ``known`` its bytes with its transient. ``classes`` [entries times B,
    C + 2]: the number of classes of unbeaten states so far, and then these. Of equal bytes the faster state comes
    first, then the one with the smaller transient; with a slack the one with the smaller transient beats others from
    there on.
    """
    for index in order:
        classes[places[0, index] * sizes + places[7, index], 0] = 0
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
        entry, left, own, size = places[0, index], places[1, index], places[6, index], places[7, index]
        came, peak, longest = entry * sizes + size, places[2, index] + places[3, index], seconds[index] + slack_s
        beaten, is_new = False, True
        for turn in range(classes[came, 0], 0, -1):
            other = classes[came, turn]
            within = longest - detour[other, left]
            beaten = own > 0 and fastest[came, other, own - 1] <= within
            beaten |= same[came, other, own] <= within and known[0, came, other, own] <= peak
            is_new &= other != left
            if beaten:
                break
        if beaten:
            continue
        order[num_kept] = index
        num_kept += 1
        if classes[came, 0] == 0:
            same[came] = np.inf
        if is_new:
            classes[came, 0] += 1
            classes[came, classes[came, 0]] = left
            fastest[came, left] = np.inf
        ahead_s = same[came, left, own] - seconds[index]
        if ahead_s > 0 or (-slack_s < ahead_s and peak < known[0, came, left, own]):
            same[came, left, own] = seconds[index]
            known[0, came, left, own] = peak
        for higher in range(own, fastest.shape[2]):
            fastest[came, left, higher] = min(fastest[came, left, higher], seconds[index])
    return num_kept


@compiled(
    "void(f8[:,::1], i8[:,:,::1], i8[:,:,::1], i8[:,::1], i8[:,::1], i8[:,::1], i8[::1], i8[::1], b1[:,:,::1], "
    "i8[:,::1], b1[:,::1], b1[:,:,::1])"
)
def drop_beaten(
    seconds: FloatArray,
    num_bytes: IntArray,
    stays: IntArray,
    transient: IntArray,
    buffer: IntArray,
    apart: IntArray,
    group: IntArray,
    table: IntArray,
    receives_less: BoolArray,
    entry: IntArray,
    legal: BoolArray,
    kept: BoolArray,
) -> None:
    """Keep the ``legal`` [K, S] strategies that no other of their class beats, nor equals and precedes.

    ``num_bytes``, ``stays`` (the bytes left once the layer has worked) and ``kept`` are [F, K, S], for F numbers of
    microbatches in flight; ``kept`` comes with all legal ones. ``receives_less`` [T, D, D]: whether the first ``entry``
    [T, S] receives for no more than the second from any class; ``apart`` [B, B]: maximum additional bytes of buffers
    with the first instead of the second, -1 if they depend on the next layer.
    """
    for layer_type in range(legal.shape[0]):
        less, enters = receives_less[table[layer_type]], entry[table[layer_type]]
        for own in range(legal.shape[1]):
            left = kept.shape[0] if legal[layer_type, own] else 0
            for other in range(legal.shape[1]):
                if left == 0:
                    break
                if other == own or not legal[layer_type, other] or group[other] != group[own]:
                    continue
                worth = apart[buffer[layer_type, other], buffer[layer_type, own]]
                if seconds[layer_type, other] > seconds[layer_type, own] or worth < 0:
                    continue
                if not less[enters[other], enters[own]] or transient[layer_type, other] > transient[layer_type, own]:
                    continue
                is_equal = buffer[layer_type, other] == buffer[layer_type, own]
                is_equal &= less[enters[own], enters[other]] and seconds[layer_type, other] == seconds[layer_type, own]
                is_equal &= transient[layer_type, other] == transient[layer_type, own]
                for flight in range(kept.shape[0]):
                    more = num_bytes[flight, layer_type, other] + worth - num_bytes[flight, layer_type, own]
                    left_over = stays[flight, layer_type, other] + worth - stays[flight, layer_type, own]
                    if more > 0 or left_over > 0 or not kept[flight, layer_type, own]:
                        continue
                    if more < 0 or left_over < 0 or not (is_equal and own < other):
                        kept[flight, layer_type, own] = False
                        left -= 1


@compiled("i8(i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], f8[::1], i8[::1])")
def hull_slopes(
    layer_types: IntArray, count: IntArray, rows: IntArray, seconds: FloatArray, slopes: FloatArray, hull: IntArray
) -> int:
    """Fill in the slopes, in seconds per byte, of the options' lower convex hulls; return their number.

    ``rows`` [K, 4, O] as in `StageCosts`; ``slopes`` has a place for every option, ``hull`` [O] is work space.
    """
    found = 0
    for layer_type in layer_types:
        num_bytes, own = rows[layer_type, 2], seconds[layer_type]
        for option in range(count[layer_type]):
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
        for place in range(count[layer_type]):
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
    "void(i8[::1], i8[::1], i8[:,:,::1], f8[:,::1], f8[::1], i8[::1], i8[::1], i8[::1], i8[:,:,::1], i8[:,::1], "
    "f8[:,::1], f8[:,:,::1], f8[:,:,::1], i8[:,::1])"
)
def priced_prefixes(
    layer_types: IntArray,
    count: IntArray,
    rows: IntArray,
    seconds: FloatArray,
    prices: FloatArray,
    upper: IntArray,
    layers: IntArray,
    lasts: IntArray,
    reach: IntArray,
    working: IntArray,
    least: FloatArray,
    prefix: FloatArray,
    ended: FloatArray,
    missing: IntArray,
) -> None:
    """Fill in the priced cost of the first layers, and the number of them without an option in a level; see `bounds`.

    ``layer_types`` are those of the ``layers`` [L], and ``lasts`` [K] their types at the end of a stage. ``reach``
    [2, K, O] is the minimum level of options of inner and of last layers, and ``working`` [K, O] the bytes that last
    layers pay for in addition. ``prefix`` [J, Q, L + 1] is in seconds, ``ended`` the same with the last one ending a
    stage, and ``missing`` [J, L + 1] counts inner layers; all come with zeros before all layers. ``least`` [K, Q] is
    work space. ``ended`` rises: a run costs at most as much as every longer one.
    """
    for level in range(len(upper)):
        for turn in range(2):
            for each in layer_types:
                layer_type = each if turn == 0 else lasts[each]
                least[layer_type] = np.inf
                for option in range(count[layer_type]):
                    if reach[turn, layer_type, option] <= upper[level]:
                        num_bytes = rows[layer_type, 2, option] + turn * working[layer_type, option]
                        for which in range(len(prices)):
                            paid = seconds[layer_type, option] + prices[which] * num_bytes
                            least[layer_type, which] = min(least[layer_type, which], paid)
            if turn == 0:
                for place in range(len(layers)):
                    layer_type = layers[place]
                    is_missing = least[layer_type, 0] == np.inf
                    missing[level, place + 1] = missing[level, place] + is_missing
                    for which in range(len(prices)):
                        paid = 0.0 if is_missing else least[layer_type, which]
                        prefix[level, which, place + 1] = prefix[level, which, place] + paid
        for which in range(len(prices)):
            cheapest = np.inf
            for place in range(len(layers) - 1, -1, -1):
                paid = prefix[level, which, place] + least[lasts[layers[place]], which]
                cheapest = min(cheapest, paid)
                ended[level, which, place + 1] = cheapest


@compiled("void(f8[:,:,::1], f8[:,:,::1], i8[:,::1], f8[::1], i8[::1], i8, i8, i8, f8[:,::1])")
def run_bounds(
    prefix: FloatArray,
    ended: FloatArray,
    missing: IntArray,
    prices: FloatArray,
    lower: IntArray,
    room: int,
    first_start: int,
    first_end: int,
    found: FloatArray,
) -> None:
    """Fill [starts, ends] with lower bounds in seconds of the layers start..end-1 on a stage; see `bounds`.

    Starts and ends count up from the first ones. Infinite for runs without layers.
    """
    for row in range(found.shape[0]):
        for column in range(found.shape[1]):
            start, end = first_start + row, first_end + column
            bound = np.inf
            for level in range(len(lower)):
                if start >= end or missing[level, end - 1] > missing[level, start]:
                    continue
                least = 0.0
                for which in range(len(prices)):
                    paid = ended[level, which, end] - prefix[level, which, start]
                    paid -= prices[which] * (room - lower[level])
                    least = max(least, paid)
                bound = min(bound, least)
            found[row, column] = bound
