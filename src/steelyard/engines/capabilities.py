"""Plans that an engine can express, as data, and the parts of a given plan that exceed them.

An engine with ``mixes_layers`` runs every plan. Any other takes one strategy for the whole model: the same levels, sp
and ZeRO stage on every layer, experts divided identically in all layers that have some, one remat choice for all
blocks, and none for the embedding and the head, which no framework recomputes. `steelyard.planning.uniform` searches
plans of that form.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from steelyard.levers import Levers
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.family import Task
from steelyard.plan.dimensions import Value, dimension_named, modes
from steelyard.plan.dimensions.dimension import Dimension, Divides, Mode
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat, Strategy

Dimensions = frozenset[Dimension]
Allowed = Mapping[str, frozenset[Value]]
"""Values that a framework supports, by the key of a mode."""

SHOWN_STRATEGIES = 4
"""Number of strategies of a mix that a reason lists before it ends in …"""


def dimensions_of(*names: str) -> frozenset[Dimensions]:
    """Return the sets of dimensions, written as in ``fsdp+tp``, that may share a layer, and the empty set."""
    return frozenset(frozenset(dimension_named(dimension) for dimension in name.split("+")) for name in names) | {
        frozenset()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The plans that an engine can express. All fields after ``mixes_layers`` are for engines of one strategy."""

    mixes_layers: bool
    """Whether each layer may have its own strategy."""
    dimensions: frozenset[Dimensions] = frozenset()
    """Sets of parallelism dimensions that may share a layer."""
    modes: Allowed = field(default_factory=dict)
    """Allowed values of the modes of these dimensions; a mode that is not named has only its default."""
    modes_beside: Mapping[str, Allowed] = field(default_factory=dict)
    """Replacements of some of these values if a layer also uses another dimension, by the name of that dimension."""
    modes_piped: Allowed = field(default_factory=dict)
    """Replacements of some of these values if there are several stages."""
    modes_with_experts: Allowed = field(default_factory=dict)
    """Restrictions of some of these values in every layer of a model with experts."""
    shares_heads: bool = True
    """Whether tp may have more ranks than there are key-value heads, so that several ranks hold the same head."""
    experts_within_shards: bool = False
    """Whether experts are divided only over ranks that share the states of the rest of a layer."""
    experts_of: frozenset[str] | None = None
    """Model types whose experts may be divided; None: all."""
    never_divided: frozenset[str] = frozenset()
    """Model types whose matrices tensor parallelism never divides."""
    sharded_tasks: frozenset[Task] | None = None
    """Tasks of the models whose states may be sharded; None: all."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, beyond lack of support, why a layer cannot use a dimension, by the dimension's name."""
    remats: frozenset[Remat] = frozenset()
    """Remat choices that may apply to all blocks."""
    remats_first_blocks: bool = False
    """Whether only the first n blocks of every stage may be recomputed, with the same n on all stages."""
    remats_split: frozenset[Remat] | None = None
    """Remat choices under schedules with weight passes; None: those under other schedules."""
    levers_unsplit: frozenset[str] = frozenset()
    """Names of levers that the engine does not combine with weight passes."""
    schedules: frozenset[str] = frozenset()
    """Names of the pipeline schedules; empty if there are no pipelines. Pipelines may be cut anywhere."""
    pipes_tied: bool = True
    """Whether a head on another stage may share the embedding's matrix."""

    def pipeline_refusal(self, chain: ModelChain) -> str | None:
        """Return the part of a model that no pipeline of the framework may have, or None."""
        ends = {LayerRole.EMBEDDING, LayerRole.HEAD}
        tied = any(ends <= {chain.type_of(layer).role for layer, _ in each.copies} for each in chain.shared)
        return "a head that shares the embedding's matrix" if tied and not self.pipes_tied else None

    def runs(self, schedule: str) -> bool:
        """Return whether stages may run this schedule."""
        return self.mixes_layers or schedule in self.schedules

    def weight_pass_refusal(self, levers: Levers) -> str | None:
        """Return why weight passes are not possible with these levers; None if they are."""
        named = (f"--{lever.name} {lever}" for lever in levers.chosen if lever.name in self.levers_unsplit)
        return levers.weight_pass_refusal() or next(named, None)

    def divides_experts(self, chain: ModelChain) -> bool:
        """Return whether the experts of a model may be divided."""
        return self.experts_of is None or chain.family.model_type in self.experts_of

    def refusal_of(self, chain: ModelChain, strategy: Strategy) -> str | None:
        """Return the dimension of a strategy that the framework lacks in models of this type, or None."""
        model_type = chain.family.model_type
        if strategy.expert_degree > 1 and not self.divides_experts(chain):
            return f"ep in a model of type {model_type}"
        if strategy.tensor_degree > 1 and model_type in self.never_divided:
            return f"tp in a model of type {model_type}"
        if strategy.state_shards > 1 and self.sharded_tasks is not None and chain.family.task not in self.sharded_tasks:
            return f"fsdp in a model of type {model_type}"
        for dimension in strategy.dimensions if chain.has_experts else ():
            for mode in dimension.modes:
                value = strategy.mode(mode.key)
                if value not in self.modes_with_experts.get(mode.key, {value}):
                    return f"{mode.written(dimension, value)} in a model with experts"
        return None

    def allowed(self, mode: Mode, *, is_piped: bool) -> frozenset[Value]:
        """Return the allowed values of a mode in a layer without another dimension that changes them."""
        usual = self.modes.get(mode.key, frozenset({mode.default}))
        return self.modes_piped.get(mode.key, usual) if is_piped else usual

    def refusal(self, strategy: Strategy, *, is_piped: bool = False) -> str | None:
        """Return why the framework cannot give a layer this strategy, or None if it can."""
        if self.mixes_layers:
            return None
        dimensions = frozenset(strategy.dimensions)
        if dimensions not in self.dimensions:
            named = [
                f"{dimension.name}, {self.why_not[dimension.name]}"
                for dimension in strategy.dimensions
                if dimension.name in self.why_not
            ]
            if named:
                return named[0]
            names = " with ".join(sorted(dimension.name for dimension in dimensions))
            return f"{names} in one layer" if names else "layers that nothing divides"
        misplaced = self._misplaced(strategy)
        if misplaced is not None:
            return misplaced
        for dimension in strategy.dimensions:
            for mode in dimension.modes:
                value, beside = strategy.mode(mode.key), self._beside(mode.key, dimensions)
                is_other = is_piped and mode.key in self.modes_piped
                allowed = beside[1] if beside and not is_other else self.allowed(mode, is_piped=is_piped)
                if value not in allowed:
                    where = " in a pipeline" if is_other else f" together with {beside[0]}" if beside else ""
                    return mode.written(dimension, value) + where
        return None if strategy.remat in self.remats else f"{strategy.remat} remat"

    def offers(self, key: str, value: Value) -> bool:
        """Return whether a mode may have this value in some layer."""
        allowed = (self.modes, self.modes_piped, *self.modes_beside.values())
        return value == modes()[key][1].default or any(value in each.get(key, frozenset()) for each in allowed)

    def _misplaced(self, strategy: Strategy) -> str | None:
        """Return why the framework cannot use the ranks that a strategy gives its dimensions, or None if it can."""
        if any(level.dimension.divides is Divides.TENSORS for level in strategy.levels[:-1]):
            return "tensor parallelism over ranks that are not neighbours"
        experts, shards = strategy.expert_degree, strategy.state_shards
        if self.experts_within_shards and experts > shards:
            return f"experts over {experts} ranks, but only {shards} shard the states of the other layers"
        return None

    def _beside(self, key: str, dimensions: Dimensions) -> tuple[str, frozenset[Value]] | None:
        """Return the dimension of a layer that changes the allowed values of a mode, and these values."""
        found = ((name, allowed[key]) for name, allowed in self.modes_beside.items() if key in allowed)
        return next(((name, values) for name, values in found if dimension_named(name) in dimensions), None)


def unsupported(plan: Plan, capabilities: Capabilities) -> tuple[str, ...]:
    """Return the reasons why a framework with these capabilities cannot express a plan; empty if it can run it."""
    return () if capabilities.mixes_layers else tuple(_reasons(plan, plan.chain(), capabilities))


def _reasons(plan: Plan, chain: ModelChain, capabilities: Capabilities) -> Iterator[str]:
    bases = [strategy.without_remat() for strategy in plan.strategies]
    sparse = {base for layer, base in enumerate(bases) if chain.type_of(layer).num_experts}
    if len({base.with_whole_experts() for base in bases}) > 1 or len(sparse) > 1:
        yield f"strategies that differ between layers ({_counted(bases)})"
    blocks = block_layers(chain)
    remats = {layer: strategy.remat for layer, strategy in enumerate(plan.strategies)}
    ends = [layer for layer, remat in remats.items() if layer not in blocks and remat is not Remat.NONE]
    if ends:
        yield f"remat of the {' and the '.join(map(chain.layer_name, ends))}"
    choices = [remats[layer] for layer in blocks]
    if capabilities.remats_first_blocks and set(choices) == {Remat.NONE, Remat.FULL}:
        if first_blocks_recomputed(plan) is None:
            yield f"remat of blocks that are not the first n of every stage ({_counted(choices)})"
    elif len(set(choices)) > 1:
        yield f"remat that differs between blocks ({_counted(choices)})"
    refusals = (capabilities.refusal(strategy, is_piped=plan.num_stages > 1) for strategy in plan.strategies)
    yield from dict.fromkeys(filter(None, refusals))
    if not capabilities.shares_heads and (shared := plan.shared_heads(chain)) is not None:
        yield f"tp {shared[0]} over {shared[2]} {shared[1]}"
    of_type = (capabilities.refusal_of(chain, strategy) for strategy in plan.strategies)
    yield from dict.fromkeys(filter(None, of_type))
    if len(set(plan.stage_sizes)) > 1:
        yield f"stages of different numbers of devices ({', '.join(map(str, plan.stage_sizes))})"
    if plan.num_stages > 1 and not capabilities.schedules:
        yield f"a pipeline ({plan.num_stages} stages)"
    elif plan.num_stages > 1 and (reason := capabilities.pipeline_refusal(chain)):
        yield f"a pipeline ({plan.num_stages} stages) and {reason}"
    elif plan.num_stages > 1 and plan.schedule not in capabilities.schedules:
        yield f"the {plan.schedule} schedule"
    elif plan.num_stages > 1 and plan.pipeline.schedule.splits_backward:
        known = capabilities.remats if capabilities.remats_split is None else capabilities.remats_split
        yield from (f"{remat} remat under {plan.schedule}" for remat in sorted({*choices} - known))
        refusal = capabilities.weight_pass_refusal(plan.chosen_levers)
        yield from () if refusal is None else (f"{plan.schedule} with {refusal}",)


def block_layers(chain: ModelChain) -> tuple[int, ...]:
    """Return the layers of the chain that are blocks, in order."""
    return tuple(layer for layer in range(chain.num_layers) if chain.type_of(layer).role is LayerRole.BLOCK)


def first_blocks_recomputed(plan: Plan) -> int | None:
    """Return n if the first n blocks of every stage are recomputed in full; None if the plan has another form.

    Stages of n or fewer blocks recompute all of them.
    """
    blocks, strategies = set(block_layers(plan.chain())), plan.strategies
    parts = [[strategies[layer].remat is Remat.FULL for layer in part.layers if layer in blocks] for part in plan.parts]
    count = max(map(sum, parts), default=0)
    fits = all(recomputed == (index < count) for part in parts for index, recomputed in enumerate(part))
    return count if fits else None


def _counted(values: Iterable[object]) -> str:
    counts: dict[str, int] = {}
    for value in values:
        counts[str(value)] = counts.get(str(value), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{text} ×{count}" for text, count in most[:SHOWN_STRATEGIES]]
    return ", ".join(shown + ["…"] * (len(most) > SHOWN_STRATEGIES))
