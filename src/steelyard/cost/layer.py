r"""Time and memory of one layer under one strategy, term by term; everything else in this package adds these up.

Time of one microbatch on one rank, with $c$ compute and $d$ communication beside it:

$$t = \sum_\text{forward, backward} \big(c + \text{tp} + \text{exposed}(c, d)\big), \qquad
\text{exposed}(c, d) = \kappa \min(c, d) + \max(c, d) - \min(c, d) - c$$

and once a step: gradient all-reduce of replicated layers behind one backward pass, and the optimizer. On devices where
communication has no stream of its own (CPU processes), exposed is $d$.

Bytes of one rank, with $N$ parameters after tp, sharded $f$ ways, $q$ bytes of a parameter in compute. They describe
`steelyard.runtime`: FSDP2's `fully_shard` for fsdp, all such layers of a stage sharing one communication context, and a
`steelyard.modules.replicated` layer where $f = 1$ (dp, tp alone, one device):

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master)                                       |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward where f = 1 |
| optimizer    | 8 N / f      | always (two AdamW moments), with counts of steps and buffers that are not trained |
| gathered     | q N          | f = 1 and q < 4, ZeRO-2: the copy that computes, from forward to backward |
| activations  | traced, and `Kind.working` | per microbatch in flight; what the remat choice keeps of them |
| working set  | see `_transient_bytes` | while the layer runs                             |

A head whose loss compares all samples gathers the features of all ranks and scatters their gradients (``pairs``).

A head tied to the embedding is a layer like any other: the runtime gives it a matrix of its own, and once a step the
two gradients are added (``tied``).

Not modelled: that a layer's all-gather starts late where the layer before is not told to prefetch it; the scratch of a
redistribution between two layouts; the two temporaries of an AdamW step, which are smaller than any working set.

Source: Rajbhandari et al. 2020 (ZeRO); Miao et al. 2022, section 4 (overlap slowdown).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple, cast

from steelyard.cost.communication import Group, num_places
from steelyard.cost.compute import ComputeTime, compute_time, launch_s, optimizer_s, wait_s, work_s
from steelyard.cost.execution import Execution, StateBytes
from steelyard.cost.inputs import sample_bytes
from steelyard.cost.setting import MASTER_BYTES, Job, Setting
from steelyard.errors import InvalidProfileError
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.model.routing import Routing
from steelyard.plan.kinds import Kind
from steelyard.plan.kinds.data import data_levels, degree_of, replica_levels, shard_levels
from steelyard.plan.kinds.kind import Divides, Levels, Load, Over, Phase, States, Traffic, Working, needs_nothing
from steelyard.plan.legality import illegal_reason
from steelyard.plan.shared import SLICES_PER_TP_RANK
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import CollectiveCount, CollectiveKind, LayerProfile, Work
from steelyard.schedules import PipelineConfig

_RECOMPUTED_INPUTS = 4
"""What the first norm of a block makes of its input, in inputs: a copy in fp32, which is two of bf16, and two more."""

Calls = dict[Phase, tuple[tuple[CollectiveKind, int, float], ...]]
"""Collectives of a layer: kind, number of calls, bytes of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, for one microbatch where they depend on samples."""

    params: int
    """Entries that are trained, of those that a rank computes with once they are gathered."""
    shards: int
    shard: int
    """The rank's parameters in fp32."""
    trained_shard: int
    """Those of them that are trained."""
    copy: int
    """All parameters as the layer computes on them; 0 where those are the ones that are trained."""
    keeps_copy: bool
    kept_gradients: int
    """What is kept from one microbatch to the next."""
    made_gradients: int
    """What one backward pass makes beside the gradients that are kept."""
    cut_gradients: int = 0
    """The rank's part of gradients that are made whole, cut out of them."""
    scratch: int
    """What a sharded layer's gradients are copied to once more while they are reduced: all by gloo, none by NCCL."""
    holds_new: bool = False
    """Whether autograd still holds the new gradients as FSDP reduces them: of an embedding and a head."""
    buffers: int = 0
    """Tensors that are kept and not trained, and AdamW's counts of steps."""
    saved: int
    input: int
    reducing: int = 0
    """What is left of the layer's work when the last of its gradients is made, beside the gradient of its input."""
    forward: int
    backward: int
    has_backward: bool = True

    @property
    def states(self) -> int:
        """Parameters and optimizer states, and what is kept beside them."""
        return self.shard + 2 * self.trained_shard + self.buffers

    @property
    def drops_copy(self) -> bool:
        """Whether a copy that was kept is gone before the gradients are reduced."""
        return self.keeps_copy and self.shards > 1

    @property
    def freed(self) -> int:
        """What the backward pass of an embedding or head has freed when FSDP reduces its gradients."""
        return max(0, self.saved - self.input) if self.holds_new and self.shards > 1 else 0

    @property
    def reduced(self) -> int:
        """The buffer that gradients are reduced from, and that those of a replicated layer are kept in."""
        return MASTER_BYTES * self.params

    def reduction_bytes(self, *, is_first: bool) -> int:
        """What the layer itself takes as its gradients are reduced, in the first backward pass of a step or later."""
        if not self.params:
            return 0
        total = self.input + self.reducing
        if self.shards > 1:
            made, scratch = self.made_gradients, self.scratch
            return (
                total + self.reduced + (made + scratch if self.holds_new else max(made, scratch)) + self.trained_shard
            )
        return total + self.made_gradients + self.cut_gradients + (self.reduced if is_first else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank as the search adds them up."""

    static_bytes: dict[str, int]
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int

    @property
    def static_sum(self) -> int:
        """All static bytes."""
        return sum(self.static_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(LayerBytes):
    """Seconds and bytes of one layer on one rank. ``forward_s`` and ``backward_s`` are of one microbatch."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    once_s: dict[str, float]
    """Once a step, whatever the number of microbatches."""

    @property
    def microbatch_s(self) -> float:
        """Forward and backward of one microbatch."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


def layer_cost(kind: LayerKind, strategy: Strategy, setting: Setting, known: "KnownPasses | None" = None) -> LayerCost:
    """The cost of a layer of this kind under a legal strategy.

    ``known`` saves work between strategies of one kind and setting that differ in remat alone. Raises
    `InvalidProfileError` where the profile lacks the layer at this tensor-parallel degree.
    """
    layer = layer_profile(kind, strategy, setting, imbalance=1.0)
    samples = rank_samples(strategy, setting)
    passes = _passes(layer, strategy, setting, samples, {} if known is None else known)
    forward, backward = _microbatch_time(layer, layer_profile(kind, strategy, setting), passes, setting, samples)
    if layer.gathered_entries:
        forward["pairs"], backward["pairs"] = pairs_s(layer, strategy, setting)
    sent = passes.sent
    once = _once_time(layer, sent, setting, forward, backward)
    if setting.job.chain.sums_tied and kind.role is not LayerRole.BLOCK:
        once["tied"] = tied_s(kind, strategy, setting)
    factor = setting.job.time_factor
    held = layer_bytes(kind, strategy, setting)
    return LayerCost(
        forward_s={name: factor * seconds for name, seconds in forward.items()},
        backward_s={name: factor * seconds for name, seconds in backward.items()},
        once_s={name: factor * seconds for name, seconds in once.items()},
        static_bytes=held.static_bytes,
        activation_bytes=held.activation_bytes,
        transient_bytes=held.transient_bytes,
    )


def layer_bytes(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerBytes:
    """What the search adds up of the memory of a layer, whatever lies beside it; a profile without times is enough.

    For a framework with states of its own its largest short-lived memory is what its passes work with.
    """
    memory, layer, execution = (
        layer_memory(kind, strategy, setting),
        layer_profile(kind, strategy, setting),
        setting.job.execution,
    )
    if isinstance(execution.states, StateBytes):
        experts = layer.expert_params
        static = execution.states.kept_bytes(layer.num_params, strategy, execution.shard_degree, expert_params=experts)
        transient = max(memory.forward, memory.backward)
    else:
        static = _static_bytes(kind, memory, strategy, setting)
        transient = _transient_bytes(kind, layer, memory, strategy, setting)
    return LayerBytes(static_bytes=static, activation_bytes=memory.saved, transient_bytes=transient)


def layer_memory(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerMemory:
    """The bytes of a layer of this kind under a legal strategy, each as the walk through a stage needs it.

    The job remembers them: settings have layers in common.
    """
    shards, tokens, samples = strategy.state_shards, strategy.token_degree, rank_samples(strategy, setting)
    place = kind.name, samples, setting.pipeline.num_microbatches > 1
    key = (*place, strategy.tensor_degree, shards, tokens, strategy.variants, strategy.remat)
    found = setting.job.known_memory.get(key)
    if found is None:
        found = setting.job.known_memory[key] = _layer_memory(kind, strategy, setting)
    return cast(LayerMemory, found)


def _layer_memory(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerMemory:
    job, layer = setting.job, layer_profile(kind, strategy, setting)
    held = layer if strategy.remat is Remat.NONE else layer.recomputation(strategy.remat)
    samples, needed = rank_samples(strategy, setting), working_bytes(layer, strategy, setting)
    params, shards = held_params(layer.trained, strategy), strategy.state_shards
    computed, made = job.compute_bytes * held_params(layer, strategy), job.compute_bytes * params
    trained_shard = MASTER_BYTES * sharded_params(layer.trained, strategy)
    keeps_whole = setting.pipeline.num_microbatches > 1 and job.execution.keeps_whole_gradients(strategy)
    made_whole = strategy.tensor_degree if kind.role is LayerRole.EMBEDDING else 1  # DTensor makes a tp embedding's so
    entered = int(layer.input_bytes.at(samples))
    return LayerMemory(
        params=params,
        shards=shards,
        shard=MASTER_BYTES * sharded_params(layer, strategy),
        trained_shard=trained_shard,
        copy=0 if shards == 1 and job.compute_bytes == MASTER_BYTES else computed,
        keeps_copy=strategy.keeps_gathered and (shards == 1 or layer.has_backward),
        kept_gradients=trained_shard + (made if keeps_whole else 0),
        made_gradients=made * made_whole,
        cut_gradients=made if made_whole > 1 else 0,
        scratch=MASTER_BYTES * params if shards > 1 and job.cluster.device.backend.copies_what_it_scatters else 0,
        holds_new=kind.role is not LayerRole.BLOCK,
        buffers=layer.buffer_bytes,
        saved=int(held.saved_bytes.at(samples) + needed.saved),
        input=entered,
        reducing=_RECOMPUTED_INPUTS * entered if strategy.remat is Remat.FULL else 0,
        forward=int(held.forward_transient_bytes.at(samples) + needed.forward),
        backward=int(held.backward_transient_bytes.at(samples) + needed.backward),
        has_backward=layer.has_backward,
    )


def pairs_s(layer: LayerProfile, strategy: Strategy, setting: Setting) -> tuple[float, float]:
    """Seconds to gather what a loss compares of the samples of all ranks, and to scatter the sums of its gradients.

    Under remat the backward pass gathers it once more.
    """
    job = setting.job
    group = levels_group(strategy, data_levels(strategy.levels), setting.devices_per_stage)
    num_bytes = layer.gathered_entries * job.compute_bytes
    gather_s = job.collective_s("all_gather", num_bytes, group)
    again_s = 0.0 if strategy.remat is Remat.NONE else gather_s
    return gather_s, again_s + job.collective_s("reduce_scatter", num_bytes, group)


def exposed_s(compute_s: float, communication_s: float, slowdown: float) -> float:
    """Seconds that communication adds to the compute it runs beside, when each slows the other by ``slowdown``."""
    shorter, longer = sorted((compute_s, communication_s))
    return slowdown * shorter + (longer - shorter) - compute_s


def levels_group(strategy: Strategy, levels: Levels, span: int) -> Group:
    """The shape of the process groups over neighbouring levels of a strategy, in a stage of ``span`` ranks.

    Of one rank where there are no such levels.
    """
    stride = 1
    for level in reversed(strategy.levels):
        if level in levels:
            return Group(size=degree_of(levels), stride=stride, span=span)
        stride *= level.degree
    return Group(size=1, stride=1, span=span)


def _group_of_experts(over: Over, strategy: Strategy, span: int) -> Group:
    """The shape of the groups that divide routed experts, the innermost of the data ranks, or share or repeat them."""
    data = levels_group(strategy, data_levels(strategy.levels), span)
    sizes = (strategy.expert_degree, strategy.expert_state_shards, strategy.expert_replicas)
    place = ("experts", "expert shards", "expert replicas").index(over)
    return data._replace(size=sizes[place], stride=data.stride * prod(sizes[:place]))


def layer_profile(
    kind: LayerKind, strategy: Strategy, setting: Setting, *, imbalance: float | None = None
) -> LayerProfile:
    """The profile of a layer of this kind in the shape that the strategy gives it; `InvalidProfileError` if none.

    Where ranks divide its experts, of the one that most tokens take, ``imbalance`` times the mean (None: the job's).
    """
    layer = setting.job.layer(kind.name, strategy.shape, expert_degree=strategy.expert_degree, imbalance=imbalance)
    if layer is None:
        degrees = " ".join(f"{name} {degree}" for name, degree in strategy.shape.items()) or "one rank"
        raise InvalidProfileError(
            field=f"layers.{kind.name}",
            found=f"no entry for {degrees}",
            expected="an entry for every shape that the strategies give a layer",
            hint="profile or trace the model with these degrees",
        )
    return layer


def refusal(kind: LayerKind, strategy: Strategy, setting: Setting) -> str | None:
    """Why no plan of this setting may run a layer of this kind so: forbidden, or beyond what the profile measured."""
    return illegal_reason(kind, strategy, setting.batch) or unmeasured_reason(kind, strategy, setting)


def unmeasured_reason(kind: LayerKind, strategy: Strategy, setting: Setting) -> str | None:
    """Why the measured times of a layer say nothing of it here; None where they do, or where none were measured."""
    layer = setting.job.layer(kind.name, strategy.shape)
    if layer is None or not layer.times or layer.reaches(rank_samples(strategy, setting)):
        return None
    sizes = [time.samples for time in layer.times]
    return (
        f"{rank_samples(strategy, setting):g} samples on a rank: the profile measured {', '.join(map(str, sizes))} and "
        f"holds for {sizes[0] / 2:g} to {2 * sizes[-1]}"
    )


def rank_samples(strategy: Strategy, setting: Setting) -> float:
    """Samples of a microbatch on a rank; of samples whose tokens are divided, the part.

    A rank with a part of the tokens does that part of a sample's work, of attention too: head-tail order divides it
    equally.
    """
    samples = setting.microbatch_samples // strategy.sample_degree
    return samples if strategy.token_degree == 1 else samples / strategy.token_degree


def held_params(layer: LayerProfile, strategy: Strategy) -> int:
    """Parameters that a rank computes with, once they are gathered."""
    return layer.num_params - layer.expert_params + layer.expert_params // strategy.expert_degree


def sharded_params(layer: LayerProfile, strategy: Strategy) -> int:
    """Parameters of a rank's shard: what it trains.

    Experts are sharded over the ranks that are left of a shard group; where their own groups are larger, not at all.
    """
    dense, experts = layer.num_params - layer.expert_params, layer.expert_params
    shards = strategy.state_shards
    if strategy.expert_degree == 1:
        return -(-layer.num_params // shards)
    return -(-dense // shards) - (-experts // max(shards, strategy.expert_degree))


def layer_load(layer: LayerProfile, strategy: Strategy, setting: Setting) -> Load:
    """What the collectives of a layer carry."""
    job, samples = setting.job, rank_samples(strategy, setting)
    whole = setting.microbatch_samples // strategy.sample_degree
    held, experts = _held_apart(layer, strategy)
    trained, trained_experts = _held_apart(layer.trained, strategy) if layer.frozen_params else (held, experts)
    reduced = job.compute_bytes if job.execution.keeps_whole_gradients(strategy) else job.execution.reduce_bytes
    traced, exchanged = job.once(
        layer, (strategy.remat, samples), lambda: _calls(layer, strategy.remat, samples, job.imbalance)
    )
    return Load(
        strategy=strategy,
        parameter_bytes=(held - experts) * job.compute_bytes,
        gradient_bytes=(trained - trained_experts) * reduced,
        expert_parameter_bytes=experts * job.compute_bytes,
        expert_gradient_bytes=trained_experts * reduced,
        traced=traced,
        exchanged=exchanged,
        part_sent=_part_sent(strategy, setting),
        exchanging=("forward", "backward", *(("recomputation",) if strategy.remat is Remat.FULL else ())),
        key_value_bytes=layer.key_value_bytes.at(whole),
        attention_bytes=layer.attention_bytes.at(samples),
    )


def _part_sent(strategy: Strategy, setting: Setting) -> float:
    """Of the tokens that are exchanged, one for each expert, the part that is sent."""
    if strategy.expert_degree == 1 or not setting.job.execution.sends_once:
        return 1.0
    group = _group_of_experts("experts", strategy, setting.devices_per_stage)
    routing = Routing.of(setting.job.chain.config)
    return routing.places(num_places(group, setting.job.cluster)) / routing.top_k


def _held_apart(layer: LayerProfile, strategy: Strategy) -> tuple[int, int]:
    """Parameters that a rank computes with, and how many of them are of experts that ranks divide."""
    held = held_params(layer, strategy)
    return held, 0 if strategy.expert_degree == 1 else held - (layer.num_params - layer.expert_params)


def _calls(layer: LayerProfile, remat: Remat, samples: float, imbalance: float) -> tuple[Calls, Calls]:
    """The collectives in the trace of a layer by phase, those that exchange tokens of experts apart."""
    collectives: dict[Phase, tuple[CollectiveCount, ...]] = {
        "forward": layer.forward_collectives,
        "backward": layer.backward_collectives,
    }
    if remat is not Remat.NONE:
        collectives["recomputation"] = layer.recomputation(remat).collectives
    traced: Calls = {}
    exchanged: Calls = {}
    for phase, found in collectives.items():
        sent = [(each.kind, each.count, each.tensor_bytes.at(samples)) for each in found]
        traced[phase] = tuple(call for call in sent if call[0] != "all_to_all")
        exchanged[phase] = tuple((name, count, imbalance * size) for name, count, size in sent if name == "all_to_all")
    return traced, exchanged


def working_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting) -> Working:
    """What the kinds of a strategy add to the saved and the short-lived bytes of the traced layer."""
    kinds = [kind for kind in strategy.kinds if kind.working is not needs_nothing]
    if not kinds:
        return Working()
    load = layer_load(layer, strategy, setting)
    found = [kind.working(load) for kind in kinds]
    return Working(
        saved=sum(each.saved for each in found if layer.has_backward),
        forward=sum(each.forward for each in found),
        backward=sum(each.backward for each in found if layer.has_backward),
    )


class Passes(NamedTuple):
    """Of a layer under a strategy, what its forward and backward pass compute and all that is sent."""

    compute: ComputeTime
    sent: "_Sent"


KnownPasses = dict[tuple[Levels, tuple[tuple[str, object], ...]], Passes]
"""Of a kind of layer in a setting, by levels and variants of strategies without remat."""


def _passes(layer: LayerProfile, strategy: Strategy, setting: Setting, samples: float, known: KnownPasses) -> Passes:
    plain = known.get((strategy.levels, strategy.variants))
    if plain is not None:
        return Passes(plain.compute, _Sent(layer, strategy, setting, beyond=plain.sent))
    compute = setting.job.once(layer, ("compute", samples), lambda: compute_time(layer, samples, setting.job))
    found = Passes(compute, _Sent(layer, strategy, setting))
    if strategy.remat is Remat.NONE:
        known[strategy.levels, strategy.variants] = found
    return found


def _microbatch_time(
    layer: LayerProfile, busiest: LayerProfile, passes: Passes, setting: Setting, samples: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Terms of forward and backward; ``busiest`` is the layer on the rank that computes most, whom the others await."""
    compute, sent = passes
    strategy = sent.strategy
    forward = {"compute": compute.forward_s}
    backward = {"compute": compute.backward_s}
    lost_s = held_up_s(strategy, setting)
    for kind in strategy.kinds:
        if sent.is_in_line(kind) and not (compute.includes_shape and kind.shape(strategy)):
            forward[kind.name] = sent.in_line_s(kind, "forward")
            backward[kind.name] = sent.in_line_s(kind, "backward")
    if strategy.expert_degree > 1:
        forward["imbalance"], backward["imbalance"] = _imbalance_s(layer, busiest, compute, samples, setting.job)
    _add_host(forward, compute.forward_launch_s + lost_s * num_calls(layer.forward_collectives))
    _add_host(backward, compute.backward_launch_s + lost_s * num_calls(layer.backward_collectives))
    if strategy.remat is not Remat.NONE:
        backward["remat"] = _recomputation_s(busiest, sent, setting, samples)
    for level in strategy.levels:
        kind = level.kind
        if kind.states is States.SHARDED:
            hooks_s = setting.job.profile.sharding_s(strategy.state_shards) / 2
            forward[kind.name] = hooks_s + _beside(sum(forward.values()), sent.beside_s(kind, "forward"), setting)
            backward[kind.name] = hooks_s + _beside(sum(backward.values()), sent.beside_s(kind, "backward"), setting)
    return forward, backward


def _imbalance_s(
    layer: LayerProfile, busiest: LayerProfile, compute: ComputeTime, samples: float, job: Job
) -> tuple[float, float]:
    """Seconds, forward and backward, that the rank which computes most takes longer than the mean.

    Of measured layers, which were not measured so, in proportion to the FLOP.
    """
    if layer.times:
        more = (_more_flop(getattr(busiest, name), getattr(layer, name), samples) for name in ("forward", "backward"))
        return next(more) * compute.forward_s, next(more) * compute.backward_s
    most = compute_time(busiest, samples, job)
    return most.forward_s - compute.forward_s, most.backward_s - compute.backward_s


def _more_flop(most: Work, mean: Work, samples: float) -> float:
    """By what part one rank's FLOP exceed the mean."""
    most_flop, mean_flop = (work.matmul_flop.at(samples) + work.attention_flop.at(samples) for work in (most, mean))
    return most_flop / mean_flop - 1 if mean_flop else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _SentByKind:
    """Seconds of the collectives that one kind asks for in a layer, by phase."""

    waits: bool
    """Whether the layer waits for any of them."""
    in_line_s: dict[Phase, float] = field(default_factory=dict)
    beside_s: dict[Phase, float] = field(default_factory=dict)
    """Of what can run beside compute, by itself."""
    num_calls: dict[Phase, int] = field(default_factory=dict)
    """Of those in line."""
    last_s: float = 0.0
    """Of what runs beside the last backward pass of a step and no other, by itself."""
    once: list[Traffic] = field(default_factory=list)
    """What is sent once a step."""

    def copy(self) -> "_SentByKind":
        """The same, to which more is added."""
        own = {name: getattr(self, name).copy() for name in ("in_line_s", "beside_s", "num_calls")}
        return replace(self, **own)


class _Sent:
    """Seconds of the collectives that the kinds of a strategy ask for in one layer.

    ``beyond`` are those of the strategy without remat, which repeats some and changes no other. Kinds that divide
    samples send states alone, which neither remat nor the number of samples changes: the job remembers theirs.
    """

    def __init__(
        self, layer: LayerProfile, strategy: Strategy, setting: Setting, *, beyond: "_Sent | None" = None
    ) -> None:
        self.strategy, self._job = strategy, setting.job
        self._kinds: dict[Kind, _SentByKind] = {}
        load: Load | None = None
        for kind in strategy.kinds:
            known = None if beyond is None else beyond._kinds[kind]
            if kind.divides is not Divides.SAMPLES:
                load = load or layer_load(layer, strategy, setting)
                self._kinds[kind] = _sent_by(kind, layer, load, setting, known)
            else:
                self._kinds[kind] = known or _states_sent_by(kind, layer, strategy, setting)

    def is_in_line(self, kind: Kind) -> bool:
        """Whether a layer waits for collectives of this kind."""
        return self._kinds[kind].waits

    def in_line_s(self, kind: Kind, phase: Phase) -> float:
        """Seconds that a layer waits in a phase."""
        sent = self._kinds[kind]
        seconds = sent.in_line_s.get(phase, 0.0)
        if kind.divides is not Divides.TENSORS:
            return seconds
        exposed, jitter_s = 1 - self._job.execution.hidden_tp, self._job.efficiency.jitter_s
        return exposed * seconds + sent.num_calls.get(phase, 0) * jitter_s * (self.strategy.degree(kind) - 1) ** 2

    def beside_s(self, kind: Kind, phase: Phase) -> float:
        """Seconds of what can run beside compute in a phase, by itself."""
        return self._kinds[kind].beside_s.get(phase, 0.0)

    def last_s(self, kind: Kind) -> float:
        """Seconds of what runs beside the last backward pass of a step and no other, by itself."""
        return self._kinds[kind].last_s

    def once(self, kind: Kind) -> Sequence[Traffic]:
        """What is sent once a step."""
        return self._kinds[kind].once


def _states_sent_by(kind: Kind, layer: LayerProfile, strategy: Strategy, setting: Setting) -> _SentByKind:
    def made() -> _SentByKind:
        return _sent_by(kind, layer, layer_load(layer, strategy, setting), setting, None)

    return setting.job.once(layer, (kind, strategy, setting.devices_per_stage), made)


def _sent_by(kind: Kind, layer: LayerProfile, load: Load, setting: Setting, beyond: _SentByKind | None) -> _SentByKind:
    job, strategy = setting.job, load.strategy
    waits_for_last = kind.states is States.SHARDED and job.execution.keeps_whole_gradients(strategy)
    found = beyond.copy() if beyond else _SentByKind(waits=bool(kind.shape(strategy)))
    for each in kind.traffic(load):
        if beyond is not None and each.phase != "recomputation":
            continue
        if each.phase == "backward" and not layer.has_backward:
            continue
        found.waits = found.waits or not each.beside_compute
        if each.phase == "step":
            found.once.append(each)
            continue
        group = traffic_group(each.over, kind, strategy, setting.devices_per_stage)
        call_s = job.collective_s(each.collective, each.tensor_bytes / each.count, group)
        seconds = each.count * call_s + each.num_waits * wait_s(job)
        if waits_for_last and each.collective == "reduce_scatter":
            found.last_s += seconds
            continue
        into = found.beside_s if each.beside_compute else found.in_line_s
        into[each.phase] = into.get(each.phase, 0.0) + seconds
        if not each.beside_compute:
            found.num_calls[each.phase] = found.num_calls.get(each.phase, 0) + each.count
    return found


@lru_cache(maxsize=65536)
def traffic_group(over: Over, kind: Kind, strategy: Strategy, span: int) -> Group:
    """The groups of ranks that collectives of a kind go over, in a stage of ``span`` ranks."""
    if "expert" in over:
        return _group_of_experts(over, strategy, span)
    levels = strategy.levels
    own = tuple(level for level in levels if level.kind is kind)
    taking = {"level": own, "shards": shard_levels(levels), "replicas": replica_levels(levels)}[over]
    return levels_group(strategy, taking, span)


def _recomputation_s(layer: LayerProfile, sent: _Sent, setting: Setting, samples: float) -> float:
    """Seconds that the remat choice adds to a microbatch: measured, or of the work and collectives repeated."""
    job, strategy = setting.job, sent.strategy
    measured = layer.recomputation_s(strategy.remat, samples) if layer.times else None
    again = layer.recomputation(strategy.remat)
    terms = {"compute": work_s(again.work, samples, job) if measured is None else measured}
    for kind in strategy.kinds:
        if sent.is_in_line(kind) and not (measured is not None and kind.shape(strategy)):
            terms[kind.name] = sent.in_line_s(kind, "recomputation")
    if measured is None:
        _add_host(terms, launch_s(again.work, again.collectives, job))
    return sum(terms.values())


def held_up_s(strategy: Strategy, setting: Setting) -> float:
    """What the host loses per tensor-parallel collective where it also serves a pipeline between nodes."""
    between_nodes = setting.pipeline.num_stages > 1 and setting.job.cluster.num_nodes > 1
    return setting.job.execution.pipelined_collective_s * strategy.tensor_degree if between_nodes else 0.0


def num_calls(collectives: tuple[CollectiveCount, ...]) -> int:
    """How many collectives these are."""
    return sum(each.count for each in collectives)


def _add_host(terms: dict[str, float], launch_s: float) -> None:
    """Adds what the device waits for the host where launching takes longer than what is launched."""
    waits_s = launch_s - sum(terms.values())
    if waits_s > 0:
        terms["host"] = waits_s


def _once_time(
    layer: LayerProfile,
    sent: _Sent,
    setting: Setting,
    forward: dict[str, float],
    backward: dict[str, float],
) -> dict[str, float]:
    """Seconds, once a step, of the optimizer and of reducing the gradients that several ranks make parts of.

    Where a framework shards the optimizer (ZeRO-1) the gradients are scattered and the new parameters gathered.
    """
    job, execution, strategy = setting.job, setting.job.execution, sent.strategy
    terms = {"optimizer": optimizer_s(_stepped(layer.trained, strategy, execution), job)}
    for kind in strategy.kinds:
        reduce_s = gather_s = 0.0
        for each in sent.once(kind):
            group = traffic_group(each.over, kind, strategy, setting.devices_per_stage)
            shards = execution.optimizer_shards(group.size) if group.size > 1 else 1
            if shards == 1:
                reduce_s += each.count * job.collective_s(each.collective, each.tensor_bytes / each.count, group)
            else:
                owners = group._replace(size=min(shards, group.size))
                reduction: CollectiveKind = "reduce_scatter" if owners.size == group.size else "all_reduce"
                pieces = execution.shard_pieces
                new_bytes = each.tensor_bytes * job.compute_bytes / execution.reduce_bytes
                gather_s += pieces * job.collective_s("all_gather", new_bytes / pieces, owners)
                reduce_s += pieces * job.collective_s(reduction, each.tensor_bytes / pieces, group)
        if sent.once(kind):
            terms[kind.name] = _beside(sum(backward.values()), reduce_s, setting)
            terms[kind.name] += _beside(sum(forward.values()), gather_s, setting)
        if sent.last_s(kind):
            gather_s, others_s = sent.beside_s(kind, "backward"), sum(backward.values()) - backward.get(kind.name, 0.0)
            hidden_s = _beside(others_s, gather_s, setting)
            terms[kind.name] = _beside(others_s, gather_s + sent.last_s(kind), setting) - hidden_s
    return terms


def _stepped(layer: LayerProfile, strategy: Strategy, execution: Execution) -> float:
    """Parameters that the optimizer of a rank steps."""
    if strategy.expert_degree == 1:
        return _sharded(layer, strategy) / execution.optimizer_shards(strategy.replicas)
    experts = layer.expert_params / (strategy.expert_degree * strategy.expert_state_shards)
    dense = _sharded(layer, strategy) - experts
    replicas, of_experts = strategy.replicas, strategy.expert_replicas
    return dense / execution.optimizer_shards(replicas) + experts / execution.optimizer_shards(of_experts)


def _sharded(layer: LayerProfile, strategy: Strategy) -> float:
    """Parameters of a rank's shard on average."""
    if strategy.expert_degree == 1:
        return layer.num_params / strategy.state_shards
    return sharded_params(layer, strategy)


def tied_s(kind: LayerKind, strategy: Strategy, setting: Setting, *, alike: bool = False) -> float:
    """Seconds, once a step, to gather the gradient of a tied matrix and to exchange it between two stages, in slices.

    ``alike`` where all copies are divided alike: then, and in frameworks with buffers of their own, each rank exchanges
    its part and gathers nothing.
    """
    job = setting.job
    if not job.chain.sums_tied or kind.role is LayerRole.BLOCK:
        return 0.0
    matrix_bytes = MASTER_BYTES * job.chain.vocab_size * job.chain.hidden_size
    distance = (setting.pipeline.num_stages - 1) * setting.devices_per_stage
    pair = Group(size=2, stride=distance, span=job.cluster.num_devices)
    if alike or job.execution.keeps_own_buffers:
        shards = job.execution.states.tied_shards(strategy)
        return job.collective_s("all_reduce", matrix_bytes / shards, pair) if setting.pipeline.num_stages > 1 else 0.0
    dividing = tuple(level for level in strategy.levels if level.kind.divides is Divides.TENSORS)
    taking = dividing, shard_levels(strategy.levels)
    tensor, data = (levels_group(strategy, each, setting.devices_per_stage) for each in taking)
    count = SLICES_PER_TP_RANK * strategy.tensor_degree
    seconds = job.collective_s("all_gather", matrix_bytes / tensor.size / count, data)
    seconds += job.collective_s("all_gather", matrix_bytes / count, tensor)
    if setting.pipeline.num_stages > 1:
        seconds += job.collective_s("all_reduce", matrix_bytes / count, pair)
    return count * seconds


def _beside(compute_s: float, communication_s: float, setting: Setting) -> float:
    if not setting.job.overlaps:
        return communication_s
    return exposed_s(compute_s, communication_s, setting.job.profile.overlap_slowdown)


def _static_bytes(kind: LayerKind, memory: LayerMemory, strategy: Strategy, setting: Setting) -> dict[str, int]:
    working = sample_bytes(kind, strategy, setting)
    if kind.role is LayerRole.EMBEDDING and memory.shards > 1 and setting.pipeline.num_microbatches > 1:
        working += memory.reduced
    return {
        "parameters": memory.shard,
        "gradients": memory.kept_gradients,
        "optimizer": 2 * memory.trained_shard + memory.buffers,
        **({"working set": working} if working else {}),
        **({"gathered parameters": memory.copy} if memory.keeps_copy and memory.copy else {}),
    }


def _transient_bytes(
    kind: LayerKind, layer: LayerProfile, memory: LayerMemory, strategy: Strategy, setting: Setting
) -> int:
    """Largest short-lived memory while the layer runs: in its forward, its backward, or as its gradients are reduced.

    Forward: working activations, the parameters in compute precision and the buffer they were gathered in. Backward:
    working activations (with what remat recomputes), the parameters with the buffer for the next layer's, their
    gradients in compute precision, and the reduction buffer of another layer (`_reducing_bytes`).
    Reduction: as the walk has it (`LayerMemory.reduction_bytes`), with what is gathered ahead of a sharded block in
    place of a kept copy. As FSDP reduces the gradients of an embedding or a head, another layer may be gathered ahead.
    """
    several, is_sharded = setting.pipeline.num_microbatches > 1, memory.shards > 1
    copy = 0 if memory.keeps_copy else memory.copy
    buffer = memory.copy if is_sharded else 0
    if not memory.has_backward:
        return copy + buffer + memory.forward
    gradients = _new_gradient_bytes(kind, layer, memory, strategy, setting)
    forward = copy + buffer + memory.forward
    backward = copy + buffer + memory.backward + gradients + _reducing_bytes(kind, layer, strategy, setting)
    reduction = memory.reduction_bytes(is_first=False) + (buffer if copy else 0)
    if is_sharded and memory.holds_new:
        gathers = copy and (kind.role is LayerRole.HEAD or several)
        reduction = memory.input + memory.reducing + gradients + memory.reduced + memory.scratch
        reduction += buffer if gathers else 0
    return max(forward, backward, reduction)


def _reducing_bytes(kind: LayerKind, layer: LayerProfile, strategy: Strategy, setting: Setting) -> int:
    """The buffer of the reduction before, which FSDP holds until the next one.

    Behind a block there is a block or the head, whose own working set is the larger then: it is taken as large as this
    layer's. Behind the head there is nothing but the last layer of the backward pass before: a block, or the embedding,
    which counts its own (`_static_bytes`).
    """
    if kind.role is not LayerRole.HEAD:
        return MASTER_BYTES * held_params(layer, strategy)
    if setting.pipeline.num_microbatches == 1:
        return 0
    job, ranks = setting.job, strategy.data_degree
    return MASTER_BYTES * job.once(job.profile, ranks, lambda: _most_block_params(job, ranks))


def _most_block_params(job: Job, data_degree: int) -> int:
    """Of the blocks that were traced the most parameters that a rank computes with."""
    blocks = {each.name: each for each in job.chain.kinds if each.role is LayerRole.BLOCK}
    found = [(blocks[each.kind], each) for each in job.profile.layers if each.kind in blocks]
    return max(_least_held_params(block, each, data_degree) for block, each in found)


def _least_held_params(kind: LayerKind, layer: LayerProfile, data_degree: int) -> int:
    """Parameters that a rank computes with where it holds as few experts as its data ranks allow.

    Of a layer whose strategy is not known: where experts are not divided, the walk through the stage finds what is
    missing, and the search goes on within less.
    """
    ranks = gcd(kind.num_experts, data_degree) if kind.num_experts else 1
    return layer.num_params - layer.expert_params + layer.expert_params // ranks


def _new_gradient_bytes(
    kind: LayerKind, layer: LayerProfile, memory: LayerMemory, strategy: Strategy, setting: Setting
) -> int:
    """Gradients that one backward pass makes beside those that are kept between microbatches.

    A sharded layer reduces them to a shard that is then added to the kept one. The buffer of a replicated layer, which
    counts as kept, is made only when the first backward pass has made all gradients: in fp32 it stands for them.
    """
    is_single = setting.pipeline.num_microbatches == 1
    if memory.shards == 1:
        return 0 if is_single and setting.job.compute_bytes == MASTER_BYTES else memory.made_gradients
    times = strategy.tensor_degree if kind.role is LayerRole.EMBEDDING else 1
    return memory.made_gradients + (0 if is_single else times * int(MASTER_BYTES * _sharded(layer.trained, strategy)))


def pipeline_buffer_bytes(setting: Setting) -> int:
    """Bytes of what stages exchange beside what layers save, where it is divided over all ranks of a stage.

    That of the stage with most: its outputs of the microbatches in flight, the gradient that arrived and the last that
    was sent of every chunk, and what arrives ahead (`steelyard.cost.stage_memory`). Under torch's own stages
    (`Execution.buffers_every_microbatch`) every stage but the first has a buffer for the activation of every microbatch
    (those in flight are also the first layer's saved input), every stage but the last one for its gradient, and it
    keeps its outputs in flight; where torch waits for sends only when the step ends, all that it ever sent.
    """
    pipeline, ranks = setting.pipeline, setting.devices_per_stage
    count, stages = pipeline.num_microbatches, pipeline.num_stages
    if stages == 1 or setting.job.execution.keeps_own_buffers:
        return 0
    if not setting.job.execution.buffers_every_microbatch:
        return _most_exchanged(pipeline) * setting.activation_bytes // ranks
    if pipeline.schedule.keeps_sends:
        return 4 * pipeline.num_chunks * count * setting.activation_bytes // ranks
    kept = count if stages > 2 else pipeline.in_flight(0)
    return (count + kept) * setting.activation_bytes // ranks


@lru_cache(maxsize=4096)
def _most_exchanged(pipeline: PipelineConfig) -> int:
    return max(_num_exchanged(pipeline, stage) for stage in range(pipeline.num_stages))


def _num_exchanged(pipeline: PipelineConfig, stage: int) -> int:
    """Activations and gradients, most at once, that a stage has of others or for them beside what layers save."""
    is_last = stage == pipeline.num_stages - 1
    receiving, sending = pipeline.num_chunks - (stage == 0), pipeline.num_chunks - is_last
    ahead = sum(pipeline.schedule.received_ahead(pipeline, stage))
    return (pipeline.in_flight(stage) + 1 if sending else 0) + receiving + ahead
