r"""Pareto frontiers of memory and time, and the three operations that build them.

A point is a pair (bytes, seconds); it beats another if it is no worse in both and better in one. A frontier is a set
of points of which none beats another, kept with bytes rising and seconds falling. On frontiers $A$ and $B$

$$\mathrm{reduce}(X) = \{x \in X : \text{no point of } X \text{ beats } x\}$$
$$A \cup B = \mathrm{reduce}(A + B) \qquad A \times B = \mathrm{reduce}\{(b_a + b_b,\; s_a + s_b)\}$$

so that alternatives are a union and things done together are a product. Union is idempotent, commutative and
associative with `EMPTY` as its unit; product is commutative and associative with the point (0, 0) as its unit, and
distributes over union. Bytes are exact (int64); seconds are float64, so product laws hold up to their rounding.

| field     | unit  | meaning                                                                                  |
|-----------|-------|------------------------------------------------------------------------------------------|
| `bytes`   | bytes | strictly rising                                                                          |
| `seconds` | s     | strictly falling                                                                         |
| `origin`  | –     | where each point came from: in `frontier`, its index in the input; in `union`, its index |
|           |       | in the concatenation of the operands; in `product`, $i_a \cdot |B| + i_b$                |

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 4.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """Points of which none beats another; see the module for the fields. Build one with `frontier`."""

    bytes: IntArray
    seconds: FloatArray
    origin: IntArray

    def __len__(self) -> int:
        return len(self.bytes)

    def __eq__(self, other: object) -> bool:
        """Whether the points are the same, wherever they came from."""
        if not isinstance(other, Frontier):
            return NotImplemented
        return np.array_equal(self.bytes, other.bytes) and np.array_equal(self.seconds, other.seconds)

    __hash__ = None  # type: ignore[assignment]

    def at(self, budget_bytes: int) -> int | None:
        """The index of the fastest point within the budget, or None where nothing fits."""
        position = int(np.searchsorted(self.bytes, budget_bytes, side="right"))
        return position - 1 if position else None


def frontier(num_bytes: ArrayLike, seconds: ArrayLike) -> Frontier:
    """The points that no other point beats; of equal points the first is kept."""
    all_bytes = np.asarray(num_bytes, dtype=np.int64)
    all_seconds = np.asarray(seconds, dtype=np.float64)
    kept = reduce(all_bytes, all_seconds)
    return Frontier(bytes=all_bytes[kept], seconds=all_seconds[kept], origin=kept)


def reduce(num_bytes: IntArray, seconds: FloatArray) -> IntArray:
    """Indices of the points that no other beats, in order of rising bytes; of equal points the first."""
    order = np.lexsort((seconds, num_bytes))
    return order[_falls(seconds[order])]


def union(*frontiers: Frontier) -> Frontier:
    """The alternatives of all frontiers together."""
    if not frontiers:
        return EMPTY
    return frontier(
        np.concatenate([each.bytes for each in frontiers]), np.concatenate([each.seconds for each in frontiers])
    )


def product(left: Frontier, right: Frontier) -> Frontier:
    """One choice from each side, bytes and seconds added."""
    return frontier(np.add.outer(left.bytes, right.bytes).ravel(), np.add.outer(left.seconds, right.seconds).ravel())


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


EMPTY = frontier([], [])
