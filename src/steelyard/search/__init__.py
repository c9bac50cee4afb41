"""Finds plans: strategy space (decision tree), frontiers, per-layer dynamic program, partition.

| module      | idea                                                                          |
|-------------|-------------------------------------------------------------------------------|
| `space`     | which strategies a layer may take: the decision tree                          |
| `frontier`  | the algebra of (bytes, seconds) pairs that nothing beats                      |
| `layers`    | one strategy per layer of a run: the dynamic program on frontiers             |
| `memory`    | least memory: what fits, and the nearest miss                                 |
| `bounds`    | lower bounds of stage times, by prices of memory                              |
| `partition` | cuts and strategies together, provably fastest for one pipeline setting       |
| `evaluate`  | time and bytes of a given choice, from the definition                         |
| `solve`     | the search over all pipeline settings, with reasons and proof                 |
"""

from steelyard.search.evaluate import Solution, StageCost, evaluate
from steelyard.search.frontier import Frontier, frontier, product, reduce, union
from steelyard.search.memory import NearestMiss, nearest_miss
from steelyard.search.partition import SettingResult, partition_exact
from steelyard.search.solve import SearchResult, SettingOutcome, search
from steelyard.search.space import SpaceOptions, enumerate_levels, enumerate_strategies

__all__ = [
    "Frontier",
    "NearestMiss",
    "SearchResult",
    "SettingOutcome",
    "SettingResult",
    "Solution",
    "SpaceOptions",
    "StageCost",
    "enumerate_levels",
    "enumerate_strategies",
    "evaluate",
    "frontier",
    "nearest_miss",
    "partition_exact",
    "product",
    "reduce",
    "search",
    "union",
]
