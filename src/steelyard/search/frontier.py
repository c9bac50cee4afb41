r"""Pareto frontiers of memory and time: the points of a set of which none beats another.

A point is a pair (bytes, seconds); it beats another if it is no worse in both and better in one.

$$\mathrm{reduce}(X) = \{x \in X : \text{no point of } X \text{ beats } x\}$$

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 4.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """The different values of an array, rising: `np.unique`, in a third of the time and without loading `numpy.ma`."""
    rising = np.sort(values, axis=None)
    is_new = np.ones(len(rising), dtype=bool)
    is_new[1:] = rising[1:] != rising[:-1]
    return rising[is_new]


def reduce(num_bytes: IntArray, seconds: FloatArray) -> IntArray:
    """Indices of the points that no other beats, in order of rising bytes; of equal points the first."""
    order = np.lexsort((seconds, num_bytes))
    return order[_falls(seconds[order])]


def reduce_groups(group: IntArray, num_bytes: IntArray, transient_bytes: IntArray, seconds: FloatArray) -> IntArray:
    """Indices of the points that no point of their own group beats in bytes, transient bytes and seconds together.

    The result is ordered by group, then bytes, then seconds; of equal points the first is kept. With one value of
    ``transient_bytes`` throughout, this is `reduce` for every group at once.
    """
    if len(group) == 0:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((transient_bytes, seconds, num_bytes, group))
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order[0]] - 1))
    rank = _rank(seconds)[order]
    rank -= np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order))) * len(order)
    transients = transient_bytes[order]  # the ranks of a later group now lie below all ranks of an earlier one
    kept = np.zeros(len(order), dtype=bool)
    for value in sorted(set(transients.tolist())):
        within = np.flatnonzero(transients <= value)
        unbeaten = _falls(rank[within]) & (transients[within] == value)
        kept[within[unbeaten]] = True
    return order[kept]


def _rank(values: FloatArray) -> IntArray:
    """For each value, how many different values are smaller."""
    order = np.argsort(values)
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.cumsum(np.diff(values[order], prepend=values[order[0]]) > 0)
    return rank


def _falls(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each value is smaller than all before it."""
    if len(values) == 0:
        return np.zeros(0, dtype=bool)
    least = np.minimum.accumulate(values)
    return np.concatenate(([True], values[1:] < least[:-1]))
