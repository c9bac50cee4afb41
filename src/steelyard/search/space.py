r"""Strategy space: every way in which the $G$ devices of one stage may share the work of one layer.

A layer takes one leaf of the papers' decision tree: an ordered factorisation $G = d_1 d_2 \cdots d_j$ in which every
factor is at least 2 and has its own parallelism dimension, the outermost level first. Beyond the papers, a level that
shards may have degree 1 if another level follows it (``fsdp1-cp8``). The rules are

1. groups are equal, so the degrees divide $G$ (any $G$: primes of the count, not only powers of two);
2. a parallelism dimension appears on one level only;
3. order matters: tensor parallelism may use neighbouring or strided ranks; each dimension defines what it cannot be
   combined with or nested in (`steelyard.plan.dimensions`);
4. in the papers' space only one dimension divides samples in one layer (this prunes the tree).

Each leaf is then combined with the modes that its dimensions allow and with the remat choices.

Source: Miao et al. 2022 (arXiv 2211.13878), section 3.2; Wang et al. 2023 (arXiv 2307.02031) for remat as a leaf.
Not modelled here: divisibility by heads, width, vocabulary and batch, which `cost` marks as illegal per layer type.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from steelyard.model.chain import LayerType
from steelyard.plan.dimensions import DIMENSIONS, Dimension, Value, modes
from steelyard.plan.dimensions.dimension import (
    Divides,
    Level,
    Levels,
    Mode,
    States,
    degree_of,
    has_following,
    shard_levels,
)
from steelyard.plan.strategy import Remat, Strategy, divisors


def paper_dimensions() -> tuple[Dimension, ...]:
    """Return the dimensions of Galvatron's decision tree."""
    return tuple(dimension for dimension in DIMENSIONS.values() if dimension.is_of_papers)


def paper_values() -> dict[str, tuple[Value, ...]]:
    """Return the values of modes in Galvatron's decision tree, for modes that it restricts."""
    return {key: mode.of_papers for key, (_, mode) in modes().items() if mode.of_papers is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceOptions:
    """Options that select the leaves of the decision tree.

    ``max_degrees`` bounds the degrees of dimensions, by name. ``devices_per_node`` bounds the span of groups of
    dimensions that stay in a node (a degree times those of the levels inside it), which also keeps strided groups
    inside a node. ``aligned_only`` keeps the leaves whose levels are whole axes of the stage mesh, as the runtime
    requires.
    """

    dimensions: tuple[Dimension, ...] = field(default_factory=paper_dimensions)
    modes: Mapping[str, tuple[Value, ...]] = field(default_factory=paper_values)
    """Values offered by mode; modes that are not named have all values."""
    remats: tuple[Remat, ...] = (Remat.NONE, Remat.SELECTIVE, Remat.FULL)
    mixes_samples: bool = False
    """Whether two dimensions may divide the samples of one layer, which the papers' rules forbid."""
    max_degrees: Mapping[str, int] = field(default_factory=dict)
    devices_per_node: int | None = None
    aligned_only: bool = True
    layers: tuple[LayerType, ...] = ()
    """Layer types that the strategies are for."""
    insists: Callable[[Strategy], bool] | None = None
    """Test for strategies that are offered although their dimension considers them not worth a search; None for
    none."""


def enumerate_strategies(num_devices: int, options: SpaceOptions | None = None) -> tuple[Strategy, ...]:
    """Return all strategies for a stage of ``num_devices`` devices, fewest levels first, in a deterministic order."""
    options = options or SpaceOptions()
    return tuple(
        strategy
        for levels in _levels_in(num_devices, options.dimensions, options.devices_per_node)
        if not any(_refusals_of_levels(levels, options))
        for strategy in _leaves(levels, options)
    )


def enumerate_levels(num_devices: int, dimensions: tuple[Dimension, ...]) -> tuple[Levels, ...]:
    """Return the unpruned tree: every ordered product of degrees, each with its own dimension, over all devices."""
    return tuple(_levels_in(num_devices, dimensions, None))


def _levels_in(num_devices: int, dimensions: tuple[Dimension, ...], devices_per_node: int | None) -> Iterator[Levels]:
    """Yield the tree without groups that have to stay in a node and would not (`_reach`)."""
    for levels in _products_in(num_devices, dimensions, devices_per_node):
        yield levels
        if has_following(levels) and not shard_levels(levels):
            place = next(each for each, level in enumerate(levels) if level.dimension.states is States.FOLLOWING)
            sharding = (dimension for dimension in dimensions if dimension.states is States.SHARDED)
            for dimension in sharding:
                yield (*levels[:place], Level(dimension=dimension, degree=1), *levels[place:])


def _products_in(num_devices: int, dimensions: tuple[Dimension, ...], devices_per_node: int | None) -> Iterator[Levels]:
    """Yield the levels of that tree with degrees of 2 or more."""
    levelled = tuple(dimension for dimension in dimensions if dimension.is_level)
    products = [tuple(_ordered_factorisations(num_devices, depth)) for depth in range(len(levelled) + 1)]
    own = {
        dimension: {degree: Level(dimension=dimension, degree=degree) for degree in divisors(num_devices)}
        for dimension in levelled
    }
    for depth, found in enumerate(products):
        for order in itertools.permutations(levelled, depth):
            made = [own[dimension] for dimension in order]
            near = [
                place
                for place, dimension in enumerate(order)
                if dimension.stays_in_node and devices_per_node is not None
            ]
            for degrees in found:
                if not near or math.prod(degrees[near[0] :]) <= (devices_per_node or 0):
                    yield tuple(levels[degree] for levels, degree in zip(made, degrees, strict=True))


def _ordered_factorisations(number: int, depth: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``number`` as a product of ``depth`` factors of 2 or more, largest first factor first."""
    if depth == 0:
        if number == 1:
            yield ()
        return
    for first in reversed(divisors(number)[1:]):
        for rest in _ordered_factorisations(number // first, depth - 1):
            yield (first, *rest)


def mixing(levels: Levels, options: SpaceOptions) -> str | None:
    """Return why these levels are not in the space, whatever the modes, or None if they are."""
    dimensions = [level.dimension for level in levels]
    sharing = [dimension.name for dimension in dimensions if dimension.divides is Divides.SAMPLES]
    if len(sharing) > 1 and not options.mixes_samples:
        return f"{' and '.join(sorted(sharing))} are not mixed in one layer"
    found = (dimension.contradiction(levels, {}) for dimension in dimensions)
    return next((f"the order of its levels; expected {each.expected}" for each in found if each is not None), None)


def _refusals_of_levels(levels: Levels, options: SpaceOptions) -> Iterator[str | None]:
    """Yield the reasons of `refusal` that hold for every leaf of these levels."""
    yield _reach(levels, options)
    yield mixing(levels, options)
    if options.insists is None:
        for level in levels:
            yield level.dimension.not_worth(levels, options.devices_per_node)


def _reach(levels: Levels, options: SpaceOptions) -> str | None:
    """Return why these degrees are not offered, or None if they are."""
    for position, level in enumerate(levels):
        most, node = options.max_degrees.get(level.dimension.name), options.devices_per_node
        if most is not None and level.degree > most:
            return f"{level.dimension} {level.degree} is above the largest allowed, {most}"
        if node is not None and level.dimension.stays_in_node and (span := degree_of(levels[position:])) > node:
            return f"a {level.dimension} group would span {span} ranks, but a node has {node}"
    return None


def _leaves(levels: Levels, options: SpaceOptions) -> Iterator[Strategy]:
    """Yield the offered leaves with these levels: all modes of their dimensions, each with all remat choices.

    Remat is a reason to refuse a leaf only if ``options.insists`` is given.
    """

    def is_offered(leaf: Strategy) -> bool:
        return not any(_refusals_of_leaf(leaf, options))

    used = {level.dimension for level in levels}
    choices = [
        [(mode.key, value) for value in _values(levels, mode, options)]
        for dimension in options.dimensions
        if dimension in used or (levels and not dimension.is_level)
        for mode in dimension.modes
    ]
    for pairs in itertools.product(*choices):
        first = Strategy.of(levels, Remat.NONE, **dict(pairs))
        leaves = (first.with_remat(remat) for remat in options.remats)
        if options.insists is not None:
            yield from filter(is_offered, leaves)
        elif is_offered(first):
            yield from leaves


def _values(levels: Levels, mode: Mode, options: SpaceOptions) -> tuple[Value, ...]:
    allowed = options.modes.get(mode.key)
    possible = mode.choices(levels)
    return possible if allowed is None else tuple(value for value in allowed if value in possible)


def refusal(strategy: Strategy, options: SpaceOptions) -> str | None:
    """Return why a strategy is not offered under these options, or None if it is."""
    return next((reason for reason in _refusals(strategy, options) if reason), None)


def _refusals(strategy: Strategy, options: SpaceOptions) -> Iterator[str | None]:
    left_out = sorted(
        {dimension.name for dimension in strategy.dimensions} - {dimension.name for dimension in options.dimensions}
    )
    yield f"{', '.join(left_out)} is left out of the search" if left_out else None
    for dimension in strategy.dimensions:
        for mode in dimension.modes:
            value = strategy.mode(mode.key)
            if value not in options.modes.get(mode.key, (value,)):
                yield f"{mode.written(dimension, value)} is left out of the search"
    if strategy.remat not in options.remats:
        yield f"remat={strategy.remat} is left out of the search"
    yield mixing(strategy.levels, options)
    yield _reach(strategy.levels, options)
    yield from _refusals_of_leaf(strategy, options)


def _refusals_of_leaf(strategy: Strategy, options: SpaceOptions) -> Iterator[str | None]:
    """Yield the reasons of `refusal` that are specific to a leaf, beyond its levels and the options' choices."""
    if options.aligned_only and not strategy.is_aligned:
        yield f"the levels of {strategy.parallel} are not consecutive axes of the stage mesh"
    if options.insists is None or not options.insists(strategy):
        for dimension in strategy.dimensions:
            yield dimension.not_worth(strategy.levels, options.devices_per_node)
            yield dimension.not_worth_for(strategy, options.devices_per_node, options.layers)
