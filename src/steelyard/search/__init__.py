"""Finds plans: strategy space (decision tree), frontiers, per-layer dynamic program, partition.

| module               | idea                                                                                |
|----------------------|-------------------------------------------------------------------------------------|
| `space`              | which strategies a layer may take: the decision tree                                |
| `layers`             | one strategy per layer of a run: the dynamic program on frontiers                   |
| `bounds`             | what runs of layers take at least, in seconds and in bytes; the nearest miss        |
| `step_bounds`        | what no pipeline is faster than, by times and bytes of layers alone                 |
| `runs`               | which runs of layers a stage may hold, and their exact least times                  |
| `pipeline_dp`        | joining runs, stage after stage, into the fastest pipeline                          |
| `partition`          | cuts and strategies together, provably fastest for one pipeline configuration       |
| `cross_layer_inputs` | values that layers read besides the output before them: conditions on their sources |
| `balance`            | other ways to cut: even, memory-balanced, Galvatron-BMW                             |
| `evaluate`           | time and bytes of a given choice, from the definition; equal strategies grouped     |
| `solve`              | the search over all pipeline configurations, with reasons and proof                 |
| `reasons`            | which strategies are illegal or dominated, and by which                             |
| `tradeoff`           | time against memory, in as many steps as are asked for                              |
| `problem`            | cost tables as versioned files                                                      |
"""

from steelyard.search.cross_layer_inputs import partition_exact
from steelyard.search.evaluate import evaluate
from steelyard.search.partition import ConfigResult, NearestMiss
from steelyard.search.solve import TIME_LIMIT_S, ConfigOutcome, OnDemand, SearchResult, search
from steelyard.search.space import (
    SpaceOptions,
    enumerate_levels,
    enumerate_strategies,
    mixing,
    paper_dimensions,
    refusal,
)

__all__ = [
    "TIME_LIMIT_S",
    "ConfigOutcome",
    "ConfigResult",
    "NearestMiss",
    "OnDemand",
    "SearchResult",
    "SpaceOptions",
    "enumerate_levels",
    "enumerate_strategies",
    "evaluate",
    "mixing",
    "paper_dimensions",
    "partition_exact",
    "refusal",
    "search",
]
