"""How far measured step times lie from predicted ones, from the errors of runs that are like the one predicted.

What runs are like it is a matter of where its costs come from. ``low`` and ``high`` are measured over predicted time:
nine in ten runs of a source of which nothing was known lie between them. ``typical`` is the median of
|predicted / measured − 1|. All are found by ``benchmarks/intervals.py``, which writes the table below; its sources,
command, date and what part of the runs of each source that was left out lay inside stand in ``benchmarks/README.md``.

| made from                  | runs                                                                            |
|----------------------------|---------------------------------------------------------------------------------|
| catalogue                  | published runs, each source predicted by rates that were fitted without it      |
| catalogue, beyond its fit  | published runs on devices or with divided experts, of which none was fitted     |
| one measured run           | those of the catalogue, each scaled by another of its model, device, framework  |
| three measured runs        | the same, scaled by the median of three others                                  |
| measured profile           | plans of 2 and of 4 CPU processes of one machine                                |

A profile of one device whose links are assumed counts as the catalogue, whose links they are.

Not known: errors of a measured profile on GPUs, and of devices that are slower in some way that no such run was.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.plan.prediction import CostSource, Interval
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors of the runs that are like each other."""

    words: str
    """What the costs of such runs were made from."""
    typical: float
    low: float
    high: float


CATALOGUE = Spread(words="catalogue", typical=0.073, low=0.818, high=1.440)
BEYOND_FIT = Spread(words="catalogue, beyond its fit", typical=0.203, low=0.652, high=2.069)
SCALED = Spread(words="one measured run", typical=0.062, low=0.806, high=1.241)
SCALED_BY_SEVERAL = Spread(words="three measured runs", typical=0.055, low=0.856, high=1.249)
MEASURED = Spread(words="measured profile", typical=0.063, low=0.871, high=1.094)

AS_GOOD = 0.07
"""Two plans of one job err alike. One that is predicted slower than another by no more than this fraction is as good:
of those predicted further apart nine in ten are measured in that order, in sources that were left out."""

SEVERAL = 3
"""Measured runs from which on their median is known to be better than one of them."""


def spread_of(source: CostSource, strategies: Iterable[Strategy]) -> Spread | None:
    """The errors of runs like a plan of these strategies with these costs; None where none is known."""
    if source.is_measured and not source.links_assumed:
        return MEASURED
    if source.rates is None:
        return None
    if source.time_factor != 1.0:
        return SCALED if source.num_calibrating < SEVERAL else SCALED_BY_SEVERAL
    divides_experts = any(strategy.expert_degree > 1 for strategy in strategies)
    return BEYOND_FIT if source.rates.is_assumed or divides_experts else CATALOGUE


def interval_of(source: CostSource, strategies: Iterable[Strategy], step_time_s: float) -> Interval | None:
    """Where nine in ten runs like this one would lie, in seconds of a step; None where no such runs are known."""
    spread = spread_of(source, strategies)
    if spread is None:
        return None
    return Interval(
        low_s=step_time_s * spread.low,
        high_s=step_time_s * spread.high,
        typical=spread.typical,
        like=spread.words,
        as_good=AS_GOOD,
    )
