"""How far predicted step times typically lie from measured ones, by what they were made from.

The median of |predicted / measured − 1|, of the runs in ``benchmarks/README.md``, where each figure stands with its
command and date; of two figures there (as fitted and left out) the larger one is taken:

| made from             | runs                                                                              |
|-----------------------|-----------------------------------------------------------------------------------|
| catalogue             | published runs: as fitted, and each source predicted by rates fitted without it    |
| one measured run      | the same, each run scaled by another of its source                                |
| measured profile      | plans of 2 and of 4 CPU processes                                                 |

Not known: the error for a device of which no published run was among those.
"""

from steelyard.plan.cost_source import CostSource

CATALOGUE, SCALED, MEASURED = 0.088, 0.047, 0.074


def typical_error(source: CostSource) -> float | None:
    """The typical error of a step time from these costs, as a fraction; None where none was ever measured."""
    if source.is_measured:
        return MEASURED
    if source.time_factor != 1.0:
        return SCALED
    return None if source.rates is None or source.rates.is_assumed else CATALOGUE
