"""The interface of a parallelism dimension: one value with all of its properties, without torch.

A dimension divides the devices of a stage, one level of the decision tree for each dimension that a layer uses. The
file of its name in this package has everything specific to it, as one `Dimension`; search, costs, legality, pins,
reports and exports ask the values in `steelyard.plan.dimensions.DIMENSIONS` and name none of them. The file of the same
name in `steelyard.modules.dimensions` is its implementation, which parallelises a real layer.

The functions at the end serve several dimensions: those that divide data need samples that divide, and sum their
gradients over the ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from steelyard.levers.lever import Divided
from steelyard.model.chain import LayerType, ModelChain
from steelyard.units import Amount

Value = bool | int | str
"""A value of a mode."""


class Divides(Enum):
    """Part of the work or state that the ranks of a level divide."""

    SAMPLES = auto()
    TOKENS = auto()
    """Sequence of every sample, between layers and inside them."""
    TENSORS = auto()
    """Matrices of the layer, and so its work."""
    EXPERTS = auto()
    """Routed experts of a layer, over ranks that other levels use for its samples and tokens."""


class States(Enum):
    """Treatment of a layer's parameters, gradients and optimizer states over the ranks of a level."""

    REPLICATED = auto()
    SHARDED = auto()
    FOLLOWING = auto()
    """Sharded together with a level that shards, otherwise replicated."""
    DIVIDED = auto()
    """Parameters of its own part of the layer on each rank."""


class Placed(StrEnum):
    """Placement of the hidden state over the ranks of a level between two layers: a letter per axis of the mesh."""

    BATCH = "B"
    SEQUENCE = "S"
    """Neighbouring tokens on each rank."""
    HEAD_TAIL = "C"
    """Two pieces of the sequence on each rank, one from its head and one from its tail."""
    WHOLE = "R"


Phase = Literal["forward", "backward", "recomputation", "step"]
"""Phases of a microbatch: forward, backward, and the recomputation of remat. ``step``: once, after all microbatches."""
Over = Literal["level", "shards", "replicas", "experts", "expert shards", "expert replicas"]
"""Ranks that take part: those of the dimension's level, those that share or repeat the layer's states, those that
divide its routed experts, and those that share or repeat the states of a rank's experts."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


class Traffic(NamedTuple):
    """Identical collectives that a dimension needs in one phase.

    ``tensor_bytes`` is the size of the whole tensor that is gathered or reduced (for an all-to-all, of one rank's
    part), summed over the ``num_calls`` calls. ``over`` names the participating ranks.
    """

    phase: Phase
    collective: Collective
    tensor_bytes: Amount
    num_calls: int = 1
    over: Over = "level"
    beside_compute: bool = False
    """Whether they can overlap with the layer's computation."""
    num_waits: int = 0
    """Number of times the host must read results before it can launch further work."""


class Load(NamedTuple):
    """Data that the collectives of a layer under a strategy carry, on one rank and for one microbatch.

    Quantities that grow with the samples may cover several microbatch sizes at once.
    """

    strategy: "StrategyView"
    parameter_bytes: float
    """Bytes of all parameters that are gathered from shards, in compute precision."""
    gradient_bytes: float
    """Bytes of their gradients, as they are reduced."""
    traced: Mapping[Phase, tuple[tuple[Collective, int, Amount], ...]]
    """Collectives that the trace of the layer found: collective, number of calls, total bytes."""
    exchanging: tuple[Phase, ...]
    """Phases with exchanges or gathers of tokens: full remat repeats those of the forward pass, selective none."""
    key_value_bytes: Amount = 0.0
    """Bytes of keys and values of the whole sequences of the rank's samples."""
    attention_bytes: Amount = 0.0
    """Bytes of queries, keys, values and results of the rank's part of the sequences."""
    expert_parameter_bytes: float = 0.0
    """Bytes of a rank's routed experts if ranks divide them; ``parameter_bytes`` then excludes them."""
    expert_gradient_bytes: float = 0.0
    exchanged: Mapping[Phase, tuple[tuple[Collective, int, Amount], ...]] = MappingProxyType({})
    """Collectives that exchange tokens of divided experts, in the form of ``traced``, on the busiest rank."""
    part_sent: float = 1.0
    """Bytes sent relative to a copy of a token per selected expert: not 1 if it goes once to each place, or to all."""
    gathers_once: bool = False
    """Whether parameters are gathered once a step, regardless of the number of microbatches."""
    sends_to_all: bool = False
    """Whether tokens are gathered on all ranks that divide the experts, and the results reduced over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes on a rank that a dimension adds to those of the traced layer, for one microbatch.

    ``saved`` from the forward to the backward pass; ``forward`` and ``backward`` while the layer works there.
    """

    saved: Amount = 0.0
    forward: Amount = 0.0
    backward: Amount = 0.0


class Level(NamedTuple):
    """One level of the decision tree: ``degree`` groups of ranks that share one parallelism ``dimension``."""

    dimension: "Dimension"
    degree: int

    def __str__(self) -> str:
        return f"{self.dimension.name}{self.degree}"


Levels = tuple[Level, ...]


class StrategyView(Divided, Protocol):
    """The part of a `steelyard.plan.strategy.Strategy` that dimensions read; a strategy consists of dimensions."""

    @property
    def levels(self) -> Levels: ...
    @property
    def parallel(self) -> str: ...
    @property
    def keeps_whole(self) -> bool: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def sample_degree(self) -> int: ...
    @property
    def sequence_degree(self) -> int: ...
    @property
    def head_degree(self) -> int: ...
    @property
    def expert_state_shards(self) -> int: ...
    def level(self, dimension: "Dimension", /) -> Level | None: ...
    def degree(self, dimension: "Dimension", /) -> int: ...
    def mode(self, key: str, /) -> Value: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes that a strategy divides besides the layer: samples of a microbatch over a stage, and tokens of each."""

    microbatch_samples: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Reason why the parts of a strategy contradict each other, for any layer."""

    field: str
    expected: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A choice that comes with a dimension. ``texts`` maps each value to its text after the levels.

    The first value is the default, with an empty text. A text that begins with + is attached to the levels
    (``tp4+sp``), another one is separate (``fsdp8 zero2``). ``pin`` maps the words of a pin to the values.
    """

    key: str
    texts: Mapping[Value, str]
    pin: Mapping[str, Value]
    offered: Callable[[Levels], tuple[Value, ...]] | None = None
    """Values that are possible with given levels, if these are not all."""
    of_papers: tuple[Value, ...] | None = None
    """Values in the decision tree of Galvatron, if these are not all."""

    def written(self, dimension: "Dimension", value: Value) -> str:
        """Return a value in words, ``zero 2`` or ``tp without sp``."""
        if isinstance(value, bool):
            return f"{dimension} {'with' if value else 'without'} {self.key}"
        return f"{self.key} {value}"

    def choices(self, levels: Levels) -> tuple[Value, ...]:
        """Return the values that may be chosen with these levels."""
        return tuple(self.texts) if self.offered is None else self.offered(levels)

    @property
    def default(self) -> Value:
        """Value of strategies that do not set the mode."""
        return next(iter(self.texts))


def needs_nothing(_load: Load) -> Working:
    """Return no additional bytes, for dimensions whose memory is in the trace of the layer, or that need none."""
    return Working()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dimension:
    """A parallelism dimension: each field is one of its properties."""

    name: str
    title: str
    """Long name, ``tensor parallelism``."""
    divides: Divides
    """Part of the work or state that the ranks divide."""
    states: States
    """Treatment of parameters, gradients and optimizer states."""
    illegal: Callable[[LayerType, "StrategyView", Batch], str | None]
    """Reason why a strategy with this dimension cannot divide a layer of a type, or None if it can."""
    traffic: Callable[[Load], Iterator[Traffic]]
    """Collectives in each phase of a step."""
    placement: Callable[["StrategyView"], Placed]
    """Placement of the hidden state between two layers."""
    words: Callable[["StrategyView"], str]
    """Work of the ranks in words, ``samples over 8 ranks, a copy of the parameters on each``."""
    term: str
    """Use of its seconds in a prediction, in words."""
    hue: str
    """Colour of these seconds in a report, from `steelyard.report.html.palette`."""
    working: Callable[[Load], Working] = needs_nothing
    """Bytes that its collectives keep and need while a layer works."""
    modes: tuple[Mode, ...] = ()
    """Further choices that come with it."""
    contradiction: Callable[[Levels, Mapping[str, Value]], Contradiction | None] = lambda _levels, _modes: None
    """Reason why it may not stand alongside or inside the other levels; None if it may."""
    not_worth: Callable[[Levels, int | None], str] = lambda _levels, _devices_per_node: ""
    """Reason why such levels, on nodes of this size, are not searched unless a pin asks for them; empty if they are."""
    not_worth_for: Callable[["StrategyView", int | None, tuple[LayerType, ...]], str] = lambda *_: ""
    """Reason why a strategy is not searched, given also the layer types of the model; empty if it is."""
    serves: Callable[[ModelChain], str] = lambda _chain: ""
    """Reason why no layer of a model can be divided by it, for any degree; empty if one can."""
    shape: Callable[["StrategyView"], Mapping[str, int]] = lambda _strategy: {}
    """Degrees, by name, that change the shape of a layer on a rank."""
    head_degree: Callable[["StrategyView"], int] = lambda _strategy: 1
    """Number of ranks over which it divides the heads of attention."""
    keeps_gathered: Callable[["StrategyView"], bool] = lambda _strategy: False
    """Whether shards gathered for the forward pass stay gathered until the backward pass."""
    keeps_whole: Callable[["StrategyView"], bool] = lambda _strategy: False
    """Whether they stay gathered throughout a step, and gradients are reduced at its end."""
    stays_in_node: bool = False
    """Whether its groups stay inside a node, because they communicate inside every layer."""
    is_of_papers: bool = False
    """Whether the decision tree of Galvatron has it."""
    plain_name: str = ""
    """Common name of plans with this dimension alone and no pipeline; empty if there is none."""

    @property
    def is_level(self) -> bool:
        """Whether it has its own ranks, rather than using those of other levels."""
        return self.divides is not Divides.EXPERTS

    @property
    def divides_data(self) -> bool:
        """Whether the ranks of a level work on different samples or tokens, so that their gradients are summed."""
        return self.divides in (Divides.SAMPLES, Divides.TOKENS)

    def __str__(self) -> str:
        return self.name


def indivisible_samples(_layer_type: LayerType, strategy: StrategyView, batch: Batch) -> str | None:
    """Return why the samples of a microbatch cannot be divided over the ranks, or None; nothing is ever rounded."""
    if batch.microbatch_samples % strategy.sample_degree == 0:
        return None
    return (
        f"data degree {strategy.sample_degree} ({strategy.parallel}) does not divide "
        f"the {batch.microbatch_samples} samples of a microbatch"
    )


def summed_once(load: Load) -> Iterator[Traffic]:
    """Yield the all-reduces of each rank's shard of gradients over all ranks with the same states, once a step."""
    shards, expert_shards = load.strategy.state_shards, load.strategy.expert_state_shards
    ranks: tuple[tuple[Over, float], ...] = (
        ("replicas", load.gradient_bytes / shards),
        ("expert replicas", load.expert_gradient_bytes / expert_shards),
    )
    for over, num_bytes in ranks:
        if num_bytes:
            yield Traffic(phase="step", collective="all_reduce", tensor_bytes=num_bytes, over=over, beside_compute=True)


def has_following(levels: Levels) -> bool:
    """Return whether some of the levels are sharded whenever another one shards."""
    return any(level.dimension.states is States.FOLLOWING for level in levels)


@lru_cache(maxsize=4096)
def shard_levels(levels: Levels) -> Levels:
    """Return the levels that shard a layer's states, outermost first."""
    shards = any(level.dimension.states is States.SHARDED for level in levels)
    sharded = (States.SHARDED, States.FOLLOWING) if shards else ()
    return tuple(level for level in levels if level.dimension.states in sharded)


@lru_cache(maxsize=4096)
def replica_levels(levels: Levels) -> Levels:
    """Return the levels that replicate a layer's states, outermost first."""
    others = (level for level in levels if level not in shard_levels(levels))
    return tuple(level for level in others if level.dimension.states is not States.DIVIDED)


@lru_cache(maxsize=4096)
def degree_of(levels: Levels) -> int:
    """Return the product of the degrees."""
    return prod(level.degree for level in levels)


@lru_cache(maxsize=4096)
def data_levels(levels: Levels) -> Levels:
    """Return the levels whose ranks work on different samples or tokens, outermost first."""
    return tuple(level for level in levels if level.dimension.divides_data)


def is_power_of_four_times(degree: int, nearest: int) -> bool:
    """Return whether a degree is 1, 4, 16, … times the nearest one."""
    times, rest = divmod(degree, nearest)
    return not rest and not times & (times - 1) and times.bit_length() % 2 == 1


def are_neighbours(levels: Levels, some: Levels) -> bool:
    """Return whether ``some`` of the levels are adjacent."""
    places = [levels.index(level) for level in some]
    return not places or places[-1] - places[0] == len(places) - 1
