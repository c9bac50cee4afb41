"""The parts of a pipeline: ranks, and a strategy for each of their layers."""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from steelyard.errors import InvalidPlanError, nearest
from steelyard.limits import MOST_DEVICES, MOST_LAYERS
from steelyard.plan.kinds import variants
from steelyard.plan.part import PlanPart
from steelyard.plan.strategy import Remat, Strategy, parse_parallel

LayerPlace = Annotated[int, Field(ge=-1, lt=MOST_LAYERS)]


RankPlace = Annotated[int, Field(ge=-1, lt=MOST_DEVICES)]


class LayerRun(PlanPart):
    """Consecutive layers that share one strategy. ``layers`` is the first and the last layer, both included.

    Variants of the kinds of parallelism in ``parallel`` (``sp``, ``zero``, …) are keys of their own beside these.
    """

    model_config = ConfigDict(extra="allow")

    layers: tuple[LayerPlace, LayerPlace]
    parallel: str
    remat: Remat = Remat.NONE

    @property
    def strategy(self) -> Strategy:
        """The strategy of these layers; raises `InvalidPlanError` naming the key that does not belong."""
        own = self.model_extra or {}
        known = (*type(self).model_fields, *variants())
        for key in own:
            if key not in known:
                expected = "one of " + ", ".join(known)
                found = f"the unknown key {key!r}"
                raise InvalidPlanError(field=key, found=found, expected=expected, hint=nearest(key, known))
        return Strategy.of(parse_parallel(self.parallel), self.remat, **own)

    @classmethod
    def of(cls, first: int, last: int, strategy: Strategy) -> Self:
        """Layers ``first`` to ``last`` under ``strategy``."""
        own: dict[str, Any] = dict(strategy.variants)
        return cls(layers=(first, last), parallel=strategy.parallel, remat=strategy.remat, **own)


class StagePlan(PlanPart):
    """A part of the pipeline: its ranks (first and last, both included) and its layers in order.

    The whole of a stage, or one of its chunks where the schedule takes several.
    """

    ranks: tuple[RankPlace, RankPlace]
    runs: tuple[LayerRun, ...] = Field(min_length=1)

    @property
    def num_devices(self) -> int:
        """Ranks of its stage."""
        return self.ranks[1] - self.ranks[0] + 1

    @property
    def first_layer(self) -> int:
        """Its first layer."""
        return self.runs[0].layers[0]

    @property
    def last_layer(self) -> int:
        """Its last layer, included."""
        return self.runs[-1].layers[1]

    @property
    def layers(self) -> range:
        """All its layers, by their place in the model."""
        return range(self.first_layer, self.last_layer + 1)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategy of each of its layers in order."""
        counts = [(run.strategy, run.layers[1] + 1 - run.layers[0]) for run in self.runs]
        return tuple(strategy for strategy, count in counts for _ in range(count))


def fold_runs(first_layer: int, strategies: tuple[Strategy, ...]) -> tuple[LayerRun, ...]:
    """Runs of equal neighbouring strategies, counted from ``first_layer``."""
    runs: list[LayerRun] = []
    start = 0
    for index in range(1, len(strategies) + 1):
        if index == len(strategies) or strategies[index] != strategies[start]:
            runs.append(LayerRun.of(first_layer + start, first_layer + index - 1, strategies[start]))
            start = index
    return tuple(runs)
