"""Prediction intervals of step times, from the errors of runs in the same class as the predicted one.

The class follows from the source of the costs, the model and the strategies. ``low`` and ``high`` are ratios of
measured to predicted time: nine in ten runs of a held-out source lie between them. ``typical`` is the median of
|predicted / measured − 1|. ``benchmarks/intervals.py`` computes them and writes the table below; sources, command, date
and the coverage of each held-out source are in ``benchmarks/intervals.md``.

| class                     | runs                                                                                  |
|---------------------------|---------------------------------------------------------------------------------------|
| dense 16-bit              | published runs in 16 bits, each source predicted by rates that were fitted without it |
| 8-bit                     | published runs of dense models whose linear layers multiply in 8 bits or fewer        |
| long context              | published runs of dense models with context parallelism, in either                    |
| experts                   | published runs of models with experts                                                 |
| adapters                  | published runs in which adapters alone are trained                                    |
| one measured run          | dense models, each scaled by another run of its model, device and framework           |
| three measured runs       | the same, scaled by the median of three others                                        |
| measured profile          | plans of 2 and of 4 CPU processes of one machine                                      |

A run belongs to the last matching class of the first five. For an engine with runs in a class, only these count if they
are more informative: `OF_ENGINES`. A profile of one device with assumed links counts as the catalogue, because the
links are the catalogue's. There are too few runs of dense models on devices with assumed rates.

Not known: errors of a measured profile on GPUs, of runs outside all classes, of models other than decoders of text,
and of this project's own runtime on GPUs, because published runs use other engines.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from steelyard.cost.job import Job, layer_precision
from steelyard.model.family import Task
from steelyard.plan.prediction import Interval
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Prediction errors of one class of runs."""

    words: str
    """Description of the class."""
    typical: float
    low: float
    high: float


DENSE = Spread(words="dense 16-bit", typical=0.072, low=0.839, high=1.303)
EXPERTS = Spread(words="experts", typical=0.138, low=0.761, high=1.585)
EIGHT_BIT = Spread(words="8-bit", typical=0.065, low=0.717, high=1.427)
LONG_CONTEXT = Spread(words="long context", typical=0.074, low=0.787, high=1.313)
ADAPTERS = Spread(words="adapters", typical=0.088, low=0.697, high=1.889)
SCALED = Spread(words="one measured run", typical=0.060, low=0.810, high=1.235)
SCALED_BY_SEVERAL = Spread(words="three measured runs", typical=0.052, low=0.859, high=1.244)
MEASURED = Spread(words="measured profile", typical=0.063, low=0.871, high=1.094)

OF_ENGINES: dict[tuple[str, str], tuple[float, float, float] | None] = {
    ("dense 16-bit", "megatron"): None,
    ("dense 16-bit", "megatron-bridge"): None,
    ("dense 16-bit", "torchtitan"): (0.088, 0.836, 1.365),
    ("8-bit", "megatron-bridge"): (0.050, 0.728, 1.159),
    ("8-bit", "torchtitan"): None,
    ("long context", "megatron-bridge"): (0.068, 0.787, 1.313),
    ("long context", "torchtitan"): None,
    ("experts", "megatron"): None,
    ("experts", "megatron-bridge"): None,
    ("experts", "torchtitan"): None,
    ("adapters", "automodel"): None,
    ("adapters", "megatron-bridge"): None,
}
"""``typical``, ``low`` and ``high`` per class and engine with runs: of these runs alone if there are 20 or more from
several sources and their interval covers held-out runs, of all runs but wider if it covers too few, else None. Runs of
NeMo count as Megatron-Bridge's, which adopted its recipes; those of Megatron-Core and Primus as Megatron-LM's."""

AS_GOOD = 0.06
"""Fraction of the step time within which two plans are ties, because two plans of one job have similar errors. Of plans
predicted further apart, nine in ten are measured in the predicted order, in held-out sources."""

SEVERAL = 3
"""Number of measured runs from which their median is known to be better than a single run."""


def spread_of(job: Job, strategies: Iterable[Strategy]) -> Spread | None:
    """Return the errors of the class of a plan with these strategies, over all engines; None if none are known."""
    source = job.cost_source()
    if source.is_measured and not source.links_assumed:
        return MEASURED
    if source.rates is None:
        return None
    if source.time_factor != 1.0:
        return SCALED if source.num_calibrating < SEVERAL else SCALED_BY_SEVERAL
    if job.chain.family.task is not Task.CAUSAL_LM:  # of which no published runs are compared
        return None
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
    """Return the errors of a class for an engine: of its own runs, or of all runs, marked if it has none itself."""
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
    """Return the interval that holds nine in ten runs of this class, in seconds per step; None without such runs."""
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
