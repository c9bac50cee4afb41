"""What of a pin no strategy could have, whatever the stages and whatever is searched: asked of the dimensions that it
names.

Each thing that is wanted is tried alone, then all together, as the smallest strategy that has it. All that is asked for
is the chain of layers, so that a pin is refused before the model is traced.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

from steelyard.errors import InvalidPlanError, UserError
from steelyard.model.chain import LayerType
from steelyard.plan.dimensions import Dimension, dimension_named, level_dimensions, variants
from steelyard.plan.dimensions.dimension import Batch, Divides, Level
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, Strategy, parse_parallel
from steelyard.planning.pins import Pin, pins_of
from steelyard.planning.request import PlanRequest

SHOWN_REASONS = 3
Wanted = tuple[tuple[str, str], ...]
_MOST_TRIED = 64
"""Degrees up to it are tried to see whether a layer has anything that a dimension could divide."""


def refuse_impossible(request: PlanRequest) -> None:
    """Raise `UserError` for the first pin of a request that no strategy can have, with the reasons."""
    for pin in pins_of(request.decisions, request.chain):
        if reasons := impossible(request, pin):
            raise unmet(pin, reasons)


def unmet(pin: Pin, reasons: Sequence[str]) -> UserError:
    """What to tell the user of a pin that no strategy meets."""
    return UserError(
        field="--pin",
        found=repr(pin.text),
        expected=f"what some strategy of these layers may have ({'; '.join(reasons[:SHOWN_REASONS])})",
        hint="pin something else, or leave these layers to the search",
    )


def impossible(request: PlanRequest, pin: Pin) -> tuple[str, ...]:
    """Why no strategy can have what the pin asks for; empty where no such strategy is illegal by itself."""
    named = {dimension for key, value in pin.wanted if value != "1" and (dimension := _dimension_of(key)) is not None}
    serves = tuple(
        f"{dimension}: {reason}" for dimension in _by_name(named) if (reason := dimension.serves(request.chain))
    )
    if serves:
        return serves
    parts = [*((pair,) for pair in pin.wanted), pin.wanted]
    return next((reasons for wanted in parts if (reasons := _reasons(request, pin, wanted))), ())


def reasons_of(layers: Sequence[LayerType], reason_of: Callable[[LayerType], str | None]) -> tuple[str, ...]:
    """What forbids a strategy, naming the layers where it is not the same for all of them."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        if (reason := reason_of(layer)) is not None:
            found.setdefault(reason, []).append(layer.name)
    return tuple(
        reason if len(names) == len(layers) else f"for the {', '.join(names)} layers: {reason}"
        for reason, names in found.items()
    )


def _by_name(dimensions: set[Dimension]) -> list[Dimension]:
    return sorted(dimensions, key=lambda dimension: dimension.name)


def _reasons(request: PlanRequest, pin: Pin, wanted: Wanted) -> tuple[str, ...]:
    strategy = _smallest(wanted)
    if strategy is None or not strategy.levels:
        return ()
    chain = request.chain
    covered = [layer_type for layer, layer_type in enumerate(chain.layers) if pin.covers(layer)]
    layers = [chain.layer_types[layer_type] for layer_type in dict.fromkeys(covered)]
    if pin.first is None and not all(dimension.is_level for dimension in strategy.dimensions):
        layers = [layer for layer in layers if _is_divisible(layer, wanted, request)] or layers
    if found := reasons_of(layers, lambda layer: _illegal(layer, strategy, wanted, request)):
        return found
    count = request.cluster.num_devices if request.objective == "time" else 0
    if count % strategy.num_devices:
        return (f"{strategy} takes {strategy.num_devices} ranks, which do not divide the {count} devices",)
    return ()


def _dimension_of(key: str) -> Dimension | None:
    """The parallelism dimension that a pin's key is about."""
    if key in variants():
        return variants()[key][0]
    return next((dimension for dimension in level_dimensions() if dimension.name == key), None)


def _smallest(wanted: Wanted) -> Strategy | None:
    """The strategy of fewest devices that has all that is wanted, None where its parts contradict each other."""
    levels = [
        Level(dimension=dimension_named(key), degree=int(value)) for key, value in wanted if _is_degree(key, value)
    ]
    levels += [level for key, value in wanted if key == "parallel" for level in parse_parallel(value)]
    chosen = {key: variants()[key][1].pin[value] for key, value in wanted if key in variants()}
    for key, value in chosen.items():
        dimension, variant = variants()[key]
        if value == variant.default:
            continue
        if dimension.is_level and all(level.dimension is not dimension for level in levels):
            levels.append(Level(dimension=dimension, degree=2))
        if not dimension.is_level and not any(level.dimension.divides_data for level in levels):
            samples = next(each for each in level_dimensions() if each.divides is Divides.SAMPLES)
            levels.append(Level(dimension=samples, degree=int(value)))
    for order in permutations(levels):
        try:
            return Strategy.of(order, Remat.NONE, **chosen)
        except InvalidPlanError:
            continue
    return None


def _is_degree(key: str, value: str) -> bool:
    return value != "1" and any(dimension.name == key for dimension in level_dimensions())


def _illegal(layer: LayerType, strategy: Strategy, wanted: Wanted, request: PlanRequest) -> str | None:
    """Why a layer cannot be divided so; of samples, those of the whole batch, where it is them that are divided."""
    divides_samples = any(
        (dimension := _dimension_of(key)) and dimension.divides is Divides.SAMPLES for key, _ in wanted
    )
    samples = request.global_batch if divides_samples and request.global_batch else strategy.sample_degree
    assert request.seq_len is not None, "lengths are tried one by one"
    return illegal_reason(layer, strategy, Batch(microbatch_samples=samples, seq_len=request.seq_len))


def _is_divisible(layer: LayerType, wanted: Wanted, request: PlanRequest) -> bool:
    """Whether the dimensions that take ranks of other levels could divide the layer at some degree."""
    beside = [key for key, _ in wanted if (dimension := _dimension_of(key)) and not dimension.is_level]
    tried = (_smallest(((key, str(degree)),)) for key in beside for degree in range(2, _MOST_TRIED + 1))
    return any(each is not None and _illegal(layer, each, (), request) is None for each in tried)
