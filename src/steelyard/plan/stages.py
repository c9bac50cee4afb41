"""The stages of a pipeline with a strategy for each of their layers, and the rules for a legal strategy of a layer.

`illegal_reason` serves user-written plans and every candidate of a search; the rules of a parallelism dimension are in
its own file (`steelyard.plan.dimensions`). `num_slices` defines how the gradients of a shared parameter's copies are
summed: the runtime sums them this way, and the cost model counts it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from steelyard.errors import InvalidPlanError, nearest
from steelyard.files import FilePart
from steelyard.limits import MOST_DEVICES, MOST_LAYERS
from steelyard.model.chain import LayerRole, LayerType, ModelChain, SharedWeight
from steelyard.plan.dimensions import DIMENSIONS, modes
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.strategy import Remat, Strategy, parse_parallel, shape_strategies

SLICES_PER_RANK = 4
"""Slices per tensor-parallel rank; three in fp32 need less than a rank's part of a matrix in its own backward pass."""


def num_slices(shared: SharedWeight, strategies: Sequence[Strategy], chain: ModelChain) -> int | None:
    """Return the number of slices in which gradients are gathered whole and summed, or None if each rank sums its own
    parts.

    Ranks need no other parts if all copies are divided identically. Vocabulary matrices are divided by rows only, so
    slices of their columns can be gathered; parameters shared by blocks are small and gathered at once. ``strategies``
    are those of all layers.
    """
    used = [strategies[layer] for layer, _ in shared.copies]
    if len({strategy.levels for strategy in used}) == 1:
        return None
    if any(chain.type_of(layer).role is LayerRole.BLOCK for layer, _ in shared.copies):
        return 1
    return SLICES_PER_RANK * max(strategy.tensor_degree for strategy in used)


_PRODUCTS = {
    LayerRole.EMBEDDING: "an embedding has none",
    LayerRole.HEAD: "those of the head are the logits, most of its memory",
}


def illegal_reason(layer_type: LayerType, strategy: Strategy, batch: Batch) -> str | None:
    """Return why ``strategy`` cannot run a layer of this ``layer_type``, or None if it can.

    Nothing is ever rounded: a degree that does not divide is illegal.
    """
    for each in DIMENSIONS.values():
        if each in strategy.dimensions:
            found = each.illegal(layer_type, strategy, batch)
            if found is not None:
                return found
    if strategy.remat is Remat.SELECTIVE and layer_type.role is not LayerRole.BLOCK:
        return f"selective remat keeps matrix products, so it is only for blocks: {_PRODUCTS[layer_type.role]}"
    if not strategy.is_aligned:
        return f"the levels of {strategy.parallel} are not consecutive axes of the stage mesh"
    return None


def legal_shapes(layer_type: LayerType, degree: int, seq_len: int) -> Iterator[Strategy]:
    """Yield the strategies that give a layer type distinct shapes at a degree; none if the degree is illegal."""
    batch = Batch(microbatch_samples=degree, seq_len=seq_len)
    for strategy in shape_strategies(degree):
        if illegal_reason(layer_type, strategy, batch) is None:
            yield strategy


LayerPlace = Annotated[int, Field(ge=-1, lt=MOST_LAYERS)]


RankPlace = Annotated[int, Field(ge=-1, lt=MOST_DEVICES)]


class LayerRun(FilePart):
    """Consecutive layers that share one strategy. ``layers`` is the first and the last layer, both included.

    Modes of the parallelism dimensions in ``parallel`` (``sp``, ``zero``, …) are additional keys.
    """

    model_config = ConfigDict(extra="allow")

    layers: tuple[LayerPlace, LayerPlace]
    parallel: str
    remat: Remat = Remat.NONE

    @property
    def strategy(self) -> Strategy:
        """Strategy of these layers. Raises `InvalidPlanError` naming the unknown key, if there is one."""
        own = self.model_extra or {}
        known = (*type(self).model_fields, *modes())
        for key in own:
            if key not in known:
                expected = "one of " + ", ".join(known)
                found = f"the unknown key {key!r}"
                raise InvalidPlanError(field=key, found=found, expected=expected, hint=nearest(key, known))
        return Strategy.of(parse_parallel(self.parallel), self.remat, **own)

    @classmethod
    def of(cls, first: int, last: int, strategy: Strategy) -> Self:
        """Build the run of layers ``first`` to ``last`` under ``strategy``."""
        own: dict[str, Any] = dict(strategy.modes)
        return cls(layers=(first, last), parallel=strategy.parallel, remat=strategy.remat, **own)


Runs = Annotated[tuple[LayerRun, ...], Field(min_length=1)]


class StagePlan(FilePart):
    """A stage of the pipeline: its ranks (first and last, both included), and the runs of its layers in order.

    Under a schedule with several chunks per stage, ``chunks`` has the runs of each chunk in place of ``runs``.
    """

    ranks: tuple[RankPlace, RankPlace]
    runs: Runs | None = None
    chunks: Annotated[tuple[Runs, ...], Field(min_length=2)] | None = None

    @property
    def num_devices(self) -> int:
        """Number of ranks."""
        return self.ranks[1] - self.ranks[0] + 1

    @property
    def parts(self) -> "tuple[StagePart, ...]":
        """Parts of the model on the stage: one, or one per chunk."""
        return tuple(StagePart(ranks=self.ranks, runs=runs) for runs in self.chunks or (self.runs or (),))

    @model_serializer(mode="wrap")
    def _in_one_form(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Consecutive layers on the ranks of a stage: all of its layers, or those of one chunk."""

    ranks: tuple[int, int]
    runs: tuple[LayerRun, ...]

    @property
    def num_devices(self) -> int:
        """Number of ranks of the stage."""
        return self.ranks[1] - self.ranks[0] + 1

    @property
    def first_layer(self) -> int:
        """Index of the first layer."""
        return self.runs[0].layers[0]

    @property
    def last_layer(self) -> int:
        """Index of the last layer, included."""
        return self.runs[-1].layers[1]

    @property
    def layers(self) -> range:
        """Indices of all layers in the model."""
        return range(self.first_layer, self.last_layer + 1)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Strategy of each layer, in order."""
        counts = [(run.strategy, run.layers[1] + 1 - run.layers[0]) for run in self.runs]
        return tuple(strategy for strategy, count in counts for _ in range(count))


def count_groups(parts: Sequence[StagePart]) -> int:
    """Number of runs of neighbouring layers with one strategy.

    A stage or chunk that repeats the strategies of the one before it, with any numbers of layers, adds none.
    """
    orders = groupby(tuple(run.strategy for run in part.runs) for part in parts)
    return len(list(groupby(strategy for order, _ in orders for strategy in order)))


def stages_of(parts: Sequence[StagePart]) -> tuple[StagePlan, ...]:
    """Build the stages that hold these parts, which are in layer order."""
    runs: dict[tuple[int, int], list[tuple[LayerRun, ...]]] = {}
    for part in parts:
        runs.setdefault(part.ranks, []).append(part.runs)
    return tuple(
        StagePlan(ranks=ranks, chunks=tuple(own)) if len(own) > 1 else StagePlan(ranks=ranks, runs=own[0])
        for ranks, own in runs.items()
    )


def fold_runs(first_layer: int, strategies: tuple[Strategy, ...]) -> tuple[LayerRun, ...]:
    """Fold equal neighbouring strategies into runs of layers, counted from ``first_layer``."""
    runs: list[LayerRun] = []
    start = 0
    for index in range(1, len(strategies) + 1):
        if index == len(strategies) or strategies[index] != strategies[start]:
            runs.append(LayerRun.of(first_layer + start, first_layer + index - 1, strategies[start]))
            start = index
    return tuple(runs)
