"""What a parallelism dimension is: one value that answers whatever is asked of it, without torch.

A dimension divides the devices of a stage, one level of the decision tree for each dimension that a layer uses. All
that is particular to it stands in the file of its name in this package, as one `Dimension`; search, costs, legality,
pins, reports and exports ask the values in `steelyard.plan.dimensions.DIMENSIONS` and name none of them. What makes a
real layer so is the dimension's twin, the file of the same name in `steelyard.modules.dimensions`.

The functions at the end answer for several dimensions: those that divide data need samples that divide, and sum their
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
    """What the ranks of a level hold different parts of."""

    SAMPLES = auto()
    TOKENS = auto()
    """The sequence of every sample, between layers and inside them."""
    TENSORS = auto()
    """The layer's matrices, and so its work."""
    EXPERTS = auto()
    """The routed experts of a layer, over ranks that other levels use for its samples and tokens."""


class States(Enum):
    """What becomes of a layer's parameters, gradients and optimizer states over the ranks of a level."""

    REPLICATED = auto()
    SHARDED = auto()
    FOLLOWING = auto()
    """Sharded together with a level that shards, else replicated."""
    DIVIDED = auto()
    """Each rank has parameters of its own: those of its part of the layer."""


class Placed(StrEnum):
    """How the hidden state lies over the ranks of a level, between two layers: a letter for each axis of the mesh."""

    BATCH = "B"
    SEQUENCE = "S"
    """Neighbouring tokens on each rank."""
    HEAD_TAIL = "C"
    """A piece from the head of the sequence and one from its tail on each rank."""
    WHOLE = "R"


Phase = Literal["forward", "backward", "recomputation", "step"]
"""Of a microbatch: forward, backward, and what remat repeats. ``step``: once, when all microbatches are done."""
Over = Literal["level", "shards", "replicas", "experts", "expert shards", "expert replicas"]
"""The ranks of the dimension's level, those that share or repeat the layer's states, those that divide its routed
experts, and those that share or repeat the states of a rank's experts."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


class Traffic(NamedTuple):
    """Collectives that a dimension asks for in one phase, all alike.

    ``tensor_bytes`` is the size of the whole tensor that is gathered or reduced (of an all-to-all, of one rank's part),
    summed over the ``num_calls`` calls. ``over`` says which ranks take part.
    """

    phase: Phase
    collective: Collective
    tensor_bytes: Amount
    num_calls: int = 1
    over: Over = "level"
    beside_compute: bool = False
    """Whether it can run while the layer computes."""
    num_waits: int = 0
    """How often the host must read what came of them before it can launch on."""


class Load(NamedTuple):
    """What a layer under a strategy gives its collectives to carry, on one rank and for one microbatch.

    What grows with the samples may be of several microbatch sizes at once.
    """

    strategy: "StrategyView"
    parameter_bytes: float
    """Of all parameters that are gathered of shards, as they compute."""
    gradient_bytes: float
    """Of their gradients, as they are reduced."""
    traced: Mapping[Phase, tuple[tuple[Collective, int, Amount], ...]]
    """Collectives that the trace of the layer found: collective, number of calls, bytes of all of them."""
    exchanging: tuple[Phase, ...]
    """The phases in which tokens are exchanged or gathered: full remat repeats those of the forward pass, selective
    none."""
    key_value_bytes: Amount = 0.0
    """Keys and values of the whole sequences of the rank's samples."""
    attention_bytes: Amount = 0.0
    """Queries, keys, values and results of the rank's part of the sequences."""
    expert_parameter_bytes: float = 0.0
    """Of the routed experts that a rank holds where ranks divide them; they are no part of ``parameter_bytes`` then."""
    expert_gradient_bytes: float = 0.0
    exchanged: Mapping[Phase, tuple[tuple[Collective, int, Amount], ...]] = MappingProxyType({})
    """Collectives by which divided experts get their tokens, as ``traced``, on the rank that gets most."""
    part_sent: float = 1.0
    """Of these bytes, what is sent where a token goes once to each place that has experts of it, or to all."""
    gathers_once: bool = False
    """Whether parameters are gathered once a step, whatever the number of microbatches."""
    sends_to_all: bool = False
    """Whether tokens are gathered on all ranks that divide the experts, and the results reduced over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes on a rank that a dimension adds to those of a layer as it was traced, for one microbatch.

    ``saved`` from the forward to the backward pass; ``forward`` and ``backward`` while the layer works there.
    """

    saved: Amount = 0.0
    forward: Amount = 0.0
    backward: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the decision tree: ``degree`` groups of ranks that share one parallelism ``dimension``."""

    dimension: "Dimension"
    degree: int

    def __str__(self) -> str:
        return f"{self.dimension.name}{self.degree}"


Levels = tuple[Level, ...]


class StrategyView(Divided, Protocol):
    """What dimensions read of a strategy (`steelyard.plan.strategy.Strategy`, which is made of dimensions)."""

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
    """What a strategy divides beside the layer: samples of a microbatch over all ranks of a stage, tokens of each."""

    microbatch_samples: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Why the parts of a strategy do not go together, whatever layer it is for."""

    field: str
    expected: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A choice that comes with a dimension. ``texts`` has the values with how each is written behind the levels.

    The first value is the default and is written as nothing. A text that begins with + stands directly behind the
    levels (``tp4+sp``), another one apart (``fsdp8 zero2``). ``pin`` has the values as a pin writes them.
    """

    key: str
    texts: Mapping[Value, str]
    pin: Mapping[str, Value]
    offered: Callable[[Levels], tuple[Value, ...]] | None = None
    """The values that levels leave to choose from, where these are not all."""
    of_papers: tuple[Value, ...] | None = None
    """The values that the decision tree of Galvatron has, where these are not all."""

    def written(self, dimension: "Dimension", value: Value) -> str:
        """A value in words, ``zero 2`` or ``tp without sp``."""
        if isinstance(value, bool):
            return f"{dimension} {'with' if value else 'without'} {self.key}"
        return f"{self.key} {value}"

    def choices(self, levels: Levels) -> tuple[Value, ...]:
        """The values that may be chosen with these levels."""
        return tuple(self.texts) if self.offered is None else self.offered(levels)

    @property
    def default(self) -> Value:
        """The value of strategies that say nothing."""
        return next(iter(self.texts))


def needs_nothing(_load: Load) -> Working:
    """For dimensions whose memory the trace of the layer shows, and those that need none."""
    return Working()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dimension:
    """A parallelism dimension: each field answers a question about it."""

    name: str
    title: str
    """The long name, ``tensor parallelism``."""
    divides: Divides
    """What each rank holds a part of."""
    states: States
    """What becomes of parameters, gradients and optimizer states."""
    illegal: Callable[[LayerType, "StrategyView", Batch], str | None]
    """Why a layer of a type cannot be divided so under a strategy that uses this dimension, or None where it can."""
    traffic: Callable[[Load], Iterator[Traffic]]
    """What is sent, in which phase of a step."""
    placement: Callable[["StrategyView"], Placed]
    """Where the hidden state between two layers lies."""
    words: Callable[["StrategyView"], str]
    """What the ranks do, ``samples over 8 ranks, a copy of the parameters on each``."""
    term: str
    """What its seconds in a prediction are spent on, in words."""
    hue: str
    """The colour of these seconds in a report, of those in `steelyard.report.html.palette`."""
    working: Callable[[Load], Working] = needs_nothing
    """What its collectives keep and need while a layer works."""
    modes: tuple[Mode, ...] = ()
    """What else may be chosen with it."""
    contradiction: Callable[[Levels, Mapping[str, Value]], Contradiction | None] = lambda _levels, _modes: None
    """Why it may not stand beside or inside the other levels; None where it may."""
    not_worth: Callable[[Levels, int | None], str] = lambda _levels, _devices_per_node: ""
    """Given levels and devices of a node: why such levels are not searched unless a pin asks for them; empty where they
    are."""
    not_worth_for: Callable[["StrategyView", int | None, tuple[LayerType, ...]], str] = lambda *_: ""
    """The same of a strategy, given the layer types that the model has."""
    serves: Callable[[ModelChain], str] = lambda _chain: ""
    """Why no layer of a model could be divided so, whatever the degree; empty where one could."""
    shape: Callable[["StrategyView"], Mapping[str, int]] = lambda _strategy: {}
    """Degrees, by name, that change the shape of a layer on a rank."""
    head_degree: Callable[["StrategyView"], int] = lambda _strategy: 1
    """Ways in which it divides the heads of attention."""
    keeps_gathered: Callable[["StrategyView"], bool] = lambda _strategy: False
    """Whether shards that were gathered for the forward pass stay so until the backward pass."""
    keeps_whole: Callable[["StrategyView"], bool] = lambda _strategy: False
    """Whether they stay so throughout a step, and gradients are reduced when it ends."""
    stays_in_node: bool = False
    """Whether its groups are kept inside a node, since they communicate inside every layer."""
    is_of_papers: bool = False
    """Whether the decision tree of Galvatron has it."""
    plain_name: str = ""
    """What its users call plans of it alone, without a pipeline; empty where they do not."""

    @property
    def is_level(self) -> bool:
        """Whether it takes ranks of its own, and not those of other levels."""
        return self.divides is not Divides.EXPERTS

    @property
    def divides_data(self) -> bool:
        """Whether the ranks of a level work on different samples or tokens, so that their gradients are summed."""
        return self.divides in (Divides.SAMPLES, Divides.TOKENS)

    def __str__(self) -> str:
        return self.name


def indivisible_samples(_layer_type: LayerType, strategy: StrategyView, batch: Batch) -> str | None:
    """Why the samples of a microbatch cannot be divided over the ranks; nothing is ever rounded."""
    if batch.microbatch_samples % strategy.sample_degree == 0:
        return None
    return (
        f"data degree {strategy.sample_degree} ({strategy.parallel}) does not divide "
        f"the {batch.microbatch_samples} samples of a microbatch"
    )


def summed_once(load: Load) -> Iterator[Traffic]:
    """The sum of the gradients over all ranks that hold the same states, once a step, of each rank's shard."""
    shards, expert_shards = load.strategy.state_shards, load.strategy.expert_state_shards
    ranks: tuple[tuple[Over, float], ...] = (
        ("replicas", load.gradient_bytes / shards),
        ("expert replicas", load.expert_gradient_bytes / expert_shards),
    )
    for over, num_bytes in ranks:
        if num_bytes:
            yield Traffic(phase="step", collective="all_reduce", tensor_bytes=num_bytes, over=over, beside_compute=True)


def has_following(levels: Levels) -> bool:
    """Whether some of the levels are sharded wherever another one shards."""
    return any(level.dimension.states is States.FOLLOWING for level in levels)


@lru_cache(maxsize=4096)
def replica_levels(levels: Levels) -> Levels:
    """The levels over which a layer's states are the same, outermost first."""
    sharded = any(level.dimension.states is States.SHARDED for level in levels)
    return tuple(
        level
        for level in levels
        if level.dimension.states is States.REPLICATED or (level.dimension.states is States.FOLLOWING and not sharded)
    )


@lru_cache(maxsize=4096)
def shard_levels(levels: Levels) -> Levels:
    """The levels over which a layer's states are sharded, outermost first."""
    sharded = any(level.dimension.states is States.SHARDED for level in levels)
    return tuple(
        level
        for level in levels
        if level.dimension.states is States.SHARDED or (level.dimension.states is States.FOLLOWING and sharded)
    )


@lru_cache(maxsize=4096)
def degree_of(levels: Levels) -> int:
    """The product of the degrees."""
    return prod(level.degree for level in levels)


@lru_cache(maxsize=4096)
def data_levels(levels: Levels) -> Levels:
    """The levels whose ranks work on different samples or tokens, outermost first."""
    return tuple(level for level in levels if level.dimension.divides_data)


def is_power_of_four_times(degree: int, nearest: int) -> bool:
    """Whether a degree is 1, 4, 16, … times the nearest one."""
    times, rest = divmod(degree, nearest)
    return not rest and not times & (times - 1) and times.bit_length() % 2 == 1


def are_neighbours(levels: Levels, some: Levels) -> bool:
    """Whether ``some`` of the levels stand next to each other."""
    places = [levels.index(level) for level in some]
    return not places or places[-1] - places[0] == len(places) - 1
