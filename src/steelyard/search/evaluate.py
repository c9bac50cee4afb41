"""Time and bytes of a choice of cuts and strategies, computed by the definition in `CostTables`.

Every search reports the values computed here, so the reported step time is the sum that was minimised, term by term.

Layers of one type are interchangeable within a stage: any order of their strategies takes the same time except for the
resharding between them, and about the same memory. `group_equal_strategies` groups equal strategies, for readable
plans, if the result is no slower and fits.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Predicted time (one microbatch) and peak memory of one stage, term by term."""

    first_layer: int
    num_layers: int
    in_flight: int
    layer_s: float
    switch_s: float
    side_s: float
    """redistribution of cross-layer inputs that layers of this stage read"""
    transfer_s: float
    static_bytes: int
    activation_bytes: int
    transient_bytes: int
    overhead_bytes: int

    @property
    def time_s(self) -> float:
        """Seconds of one microbatch on this stage."""
        return self.transfer_s + self.layer_s + self.switch_s + self.side_s

    @property
    def total_bytes(self) -> int:
        """Peak memory per device in bytes."""
        return self.overhead_bytes + self.static_bytes + self.activation_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Cuts, one strategy per layer, and their cost.

    ``boundaries`` are the first layers of the stages and, last, the number of layers; ``strategies`` are indices into
    the strategies of the tables.
    """

    boundaries: tuple[int, ...]
    strategies: tuple[int, ...]
    stages: tuple[StageCost, ...]
    step_s: float

    @property
    def peak_bytes(self) -> int:
        """Peak memory per device of the fullest stage in bytes."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def known(self) -> "Solution | None":
        """The solution itself; None for the placeholder without a plan."""
        return self if self.strategies else None


def evaluate(tables: CostTables, boundaries: Sequence[int], strategies: Sequence[int]) -> Solution:
    """Return time and memory of this choice. Raises `InvalidProblemError` if the tables do not allow it."""
    _check(tables, boundaries, strategies)
    stages = tuple(
        _stage_cost(tables, stage, range(start, end), strategies)
        for stage, (start, end) in enumerate(itertools.pairwise(boundaries))
    )
    times = [stage.time_s for stage in stages]
    return Solution(
        boundaries=tuple(boundaries),
        strategies=tuple(strategies),
        stages=stages,
        step_s=sum(times) + (tables.num_passes - 1) * max(times),
    )


def _stage_cost(tables: CostTables, stage: int, layers: range, strategies: Sequence[int]) -> StageCost:
    layer_types = tables.run_types(layers)
    pairs = [(layer_type, strategies[layer]) for layer_type, layer in zip(layer_types, layers, strict=True)]
    in_flight = tables.pipeline.in_flight(stage)
    static, overhead, layout = tables.static_of(in_flight), tables.overhead_of(stage), tables.layout_of
    if stage > 0 and tables.received is not None:
        received = tables.received.num_bytes(stage, in_flight)
        overhead += int(received[layout[strategies[layers.start - 1]], layout[strategies[layers.start]]])
    return StageCost(
        first_layer=layers.start,
        num_layers=len(layers),
        in_flight=in_flight,
        layer_s=sum(float(tables.time_s[pair]) for pair in pairs),
        switch_s=sum(
            float(tables.switch_s[tables.layers[layer], layout[strategies[layer - 1]], layout[strategies[layer]]])
            for layer in layers
            if layer > 0
        ),
        side_s=sum(
            (
                float(side.seconds[strategies[side.source], strategies[reader]])
                for side in tables.cross_layer_inputs
                for reader in side.readers
                if reader in layers
            ),
            start=0.0,
        ),
        transfer_s=tables.received_s(stage),
        static_bytes=sum(int(static[pair]) for pair in pairs),
        activation_bytes=in_flight * sum(int(tables.activation_bytes[pair]) for pair in pairs),
        transient_bytes=int(tables.transient_of(layer_types, [strategies[layer] for layer in layers], in_flight)),
        overhead_bytes=overhead,
    )


def _check(tables: CostTables, boundaries: Sequence[int], strategies: Sequence[int]) -> None:
    num_layers = len(tables.layers)
    rising = all(a < b for a, b in itertools.pairwise(boundaries))
    if (
        len(boundaries) != tables.pipeline.num_stages + 1
        or boundaries[0] != 0
        or boundaries[-1] != num_layers
        or not rising
    ):
        raise InvalidProblemError(
            field="boundaries",
            found=str(tuple(boundaries)),
            expected=f"{tables.pipeline.num_stages + 1} rising layer numbers from 0 to {num_layers}",
        )
    sizes = [end - start for start, end in itertools.pairwise(boundaries)]
    if any(size < tables.least_layers(stage) for stage, size in enumerate(sizes)):
        raise InvalidProblemError(
            field="boundaries",
            found=str(tuple(boundaries)),
            expected="a layer in addition to the model's ends on their stages, so that no chunk is empty",
        )
    if len(strategies) != num_layers:
        raise InvalidProblemError(
            field="strategies", found=f"{len(strategies)} strategies", expected=f"one for each of {num_layers} layers"
        )
    legal = [tables.legal_on(stage) for stage, size in enumerate(sizes) for _ in range(size)]
    for layer, (layer_type, strategy) in enumerate(zip(tables.layers, strategies, strict=True)):
        if not 0 <= strategy < len(tables.strategies) or not legal[layer][layer_type, strategy]:
            raise InvalidProblemError(
                field="strategies",
                found=f"strategy {strategy} for layer {layer}",
                expected=f"one that is legal for the layer type {tables.layer_types[layer_type]!r}",
            )


def group_equal_strategies(tables: CostTables, solution: Solution, room_bytes: int = 0) -> Solution:
    """Return the solution with the strategies of every run of equal layers grouped.

    It is unchanged if grouping makes it slower, or if grouping takes more memory than before and than ``room_bytes``.
    """
    chosen = list(solution.strategies)
    runs = [
        list(run)
        for stage in solution.stages
        for _, run in groupby(
            range(stage.first_layer, stage.first_layer + stage.num_layers), key=tables.layers.__getitem__
        )
    ]
    for start, end in ((run[0], run[-1] + 1) for run in runs):
        order = list(dict.fromkeys(chosen[start:end]))
        if start > 0 and chosen[start - 1] in order:
            order.remove(chosen[start - 1])
            order.insert(0, chosen[start - 1])
        chosen[start:end] = sorted(chosen[start:end], key=order.index)
    tidy = evaluate(tables, solution.boundaries, chosen)
    is_no_worse = tidy.peak_bytes <= max(room_bytes, solution.peak_bytes)
    return tidy if is_no_worse and tidy.step_s <= solution.step_s * (1 + 1e-12) else solution
