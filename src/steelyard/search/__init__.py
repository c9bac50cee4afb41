"""Search for plans: strategy space (decision tree), frontiers, per-layer dynamic program, partition.

| module               | idea                                                                                |
|----------------------|-------------------------------------------------------------------------------------|
| `space`              | strategies that a layer may take: the decision tree                                 |
| `layers`             | one strategy per layer of a run: the dynamic program on frontiers                   |
| `bounds`             | lower bounds of seconds and bytes of runs of layers; the nearest miss               |
| `step_bounds`        | lower bounds of the step time from times and bytes of layers alone                  |
| `runs`               | runs of layers that a stage may hold, and their exact minimum times                 |
| `pipeline_dp`        | join of runs, stage after stage, into the fastest pipeline                          |
| `partition`          | cuts and strategies together, provably fastest for one pipeline configuration       |
| `cross_layer_inputs` | values that layers read besides the output before them: conditions on their sources |
| `balance`            | other ways to cut: even, memory-balanced, Galvatron-BMW                             |
| `evaluate`           | time and bytes of a given choice, by definition; equal strategies grouped           |
| `solve`              | the search over all pipeline configurations, with reasons and proof                 |
| `reasons`            | illegal and dominated strategies, and the ones that dominate them                   |
| `tradeoff`           | time against memory, in the requested number of steps                               |
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
