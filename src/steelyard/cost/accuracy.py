"""How far measured step times lie from predicted ones, from the errors of runs that are like the one predicted.

What runs are like it is a matter of where its costs come from and of what is trained how. ``low`` and ``high`` are
measured over predicted time: nine in ten runs of a source of which nothing was known lie between them. ``typical`` is
the median of |predicted / measured − 1|. All are found by ``benchmarks/intervals.py``, which writes the table below;
its sources, command, date and what part of the runs of each source that was left out lay inside stand in
``benchmarks/intervals.md``.

| like                      | runs                                                                                  |
|---------------------------|---------------------------------------------------------------------------------------|
| dense 16-bit              | published runs in 16 bits, each source predicted by rates that were fitted without it |
| 8-bit                     | published runs of dense models whose linear layers multiply in 8 bits or fewer        |
| long context              | published runs of dense models with context parallelism, in either                    |
| experts                   | published runs of models with experts                                                 |
| adapters                  | published runs in which adapters alone are trained                                    |
| one measured run          | dense models, each scaled by another run of its model, device and framework           |
| three measured runs       | the same, scaled by the median of three others                                        |
| measured profile          | plans of 2 and of 4 CPU processes of one machine                                      |

A run is of the last of the first five that it belongs to. Of an engine that has runs of its own in a class these count
alone where they tell more: `OF_ENGINES`. A profile of one device whose links are assumed counts as the
catalogue, whose links they are. Of dense models on devices whose rates are assumed too few runs are known.

Not known: errors of a measured profile on GPUs, of what differs from all these, and of this project's own runtime on
GPUs: published runs are of other engines.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from steelyard.cost.job import Job, layer_precision
from steelyard.plan.prediction import Interval
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors of the runs that are like each other."""

    words: str
    """What such runs are."""
    typical: float
    low: float
    high: float


DENSE = Spread(words="dense 16-bit", typical=0.076, low=0.846, high=1.256)
EXPERTS = Spread(words="experts", typical=0.147, low=0.714, high=1.798)
EIGHT_BIT = Spread(words="8-bit", typical=0.062, low=0.717, high=1.427)
LONG_CONTEXT = Spread(words="long context", typical=0.074, low=0.787, high=1.313)
ADAPTERS = Spread(words="adapters", typical=0.144, low=0.691, high=1.669)
SCALED = Spread(words="one measured run", typical=0.060, low=0.810, high=1.234)
SCALED_BY_SEVERAL = Spread(words="three measured runs", typical=0.052, low=0.859, high=1.242)
MEASURED = Spread(words="measured profile", typical=0.063, low=0.871, high=1.094)

OF_ENGINES: dict[tuple[str, str], tuple[float, float, float] | None] = {
    ("dense 16-bit", "megatron"): None,
    ("dense 16-bit", "megatron-bridge"): None,
    ("dense 16-bit", "torchtitan"): (0.090, 0.844, 1.357),
    ("8-bit", "megatron-bridge"): (0.050, 0.728, 1.159),
    ("8-bit", "torchtitan"): None,
    ("long context", "megatron-bridge"): (0.067, 0.787, 1.313),
    ("long context", "torchtitan"): None,
    ("experts", "megatron"): None,
    ("experts", "megatron-bridge"): None,
    ("experts", "torchtitan"): None,
    ("adapters", "automodel"): None,
    ("adapters", "megatron-bridge"): None,
}
"""By class and engine, for those that have runs: ``typical``, ``low`` and ``high`` of these alone where 20 runs or more
of several sources hold what was left out of them, of all but wider where those hold too few, else None. Runs of NeMo
count as Megatron-Bridge's, which took its recipes over, those of Megatron-Core and Primus as Megatron-LM's."""

AS_GOOD = 0.06
"""Two plans of one job err alike. One that is predicted slower than another by no more than this fraction is as good:
of those predicted further apart nine in ten are measured in that order, in sources that were left out."""

SEVERAL = 3
"""Measured runs from which on their median is known to be better than one of them."""


def spread_of(job: Job, strategies: Iterable[Strategy]) -> Spread | None:
    """The errors of runs like a plan of these strategies, by any engine; None where none are known."""
    source = job.cost_source()
    if source.is_measured and not source.links_assumed:
        return MEASURED
    if source.rates is None:
        return None
    if source.time_factor != 1.0:
        return SCALED if source.num_calibrating < SEVERAL else SCALED_BY_SEVERAL
    is_low = job.precision != layer_precision(job.precision) or job.effects.low_precision is not None
    classes = (
        (job.chain.has_adapters, ADAPTERS),
        (job.chain.has_experts, EXPERTS),
        (any(strategy.token_degree > 1 for strategy in strategies), LONG_CONTEXT),
        (is_low, EIGHT_BIT),
        (not source.rates.is_assumed, DENSE),
    )
    return next((spread for is_of_class, spread in classes if is_of_class), None)


def of_engine(spread: Spread, engine: str) -> Spread:
    """The errors of a class as those of an engine: of its own runs, or of all, which are others' where it has none."""
    if spread not in (ADAPTERS, EXPERTS, LONG_CONTEXT, EIGHT_BIT, DENSE):
        return spread
    name = engine.partition("+")[0]
    if (spread.words, name) not in OF_ENGINES:
        return replace(spread, words=f"{spread.words}, other engines")
    own = OF_ENGINES[spread.words, name]
    if own is None:
        return spread
    typical, low, high = own
    return Spread(words=f"{spread.words}, {name}", typical=typical, low=low, high=high)


def interval_of(job: Job, strategies: Iterable[Strategy], step_time_s: float) -> Interval | None:
    """Where nine in ten runs like this one would lie, in seconds of a step; None where no such runs are known."""
    spread = spread_of(job, strategies)
    if spread is None:
        return None
    spread = of_engine(spread, job.engine.name)
    return Interval(
        low_s=step_time_s * spread.low,
        high_s=step_time_s * spread.high,
        typical=spread.typical,
        like=spread.words,
        as_good=AS_GOOD,
    )
