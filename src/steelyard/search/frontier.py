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


def reduce_groups(group: IntArray, first: FloatArray, second: FloatArray) -> IntArray:
    """Indices of the points that no point of their own group beats; ordered by group, then ``first``.

    Of equal points the first is kept.
    """
    order = np.lexsort((second, first, group))
    rank = np.unique(second, return_inverse=True)[1][order]
    number = np.unique(group, return_inverse=True)[1][order]
    return order[_falls(rank - number * len(order))]  # all ranks of a later group are below those of an earlier one


def _falls(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each value is smaller than all before it."""
    return np.append(True, values[1:] < np.minimum.accumulate(values)[:-1])[: len(values)]
