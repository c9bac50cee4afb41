r"""Bytes of one rank for one layer, with $N$ parameters after tp, sharded $f$ ways, $q$ bytes of one in compute.

They describe `steelyard.runtime`: FSDP2's `fully_shard` for fsdp, all such layers of a stage sharing one communication
context, and a `steelyard.modules.replicated` layer where $f = 1$ (dp, tp alone, one device):

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master)                                       |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward where f = 1 |
| optimizer    | 8 N / f      | always (two AdamW moments), with counts of steps and buffers that are not trained |
| gathered     | q N          | f = 1 and q < 4, ZeRO-2: the copy that computes, from forward to backward |
| activations  | traced, and `Kind.working` | per microbatch in flight; what the remat choice keeps of them |
| working set  | see `beside_work` | while the layer runs                             |

Not modelled: the two temporaries of an AdamW step, which are smaller than any working set.

Source: Rajbhandari et al. 2020 (ZeRO).
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.amounts import hashable
from steelyard.cost.execution import StateBytes
from steelyard.cost.inputs import sample_bytes
from steelyard.cost.layer_load import (
    held_params,
    layer_load,
    layer_profile,
    mean_shard_params,
    rank_samples,
    sharded_params,
)
from steelyard.cost.setting import MASTER_BYTES, AnySetting, Job, Setting
from steelyard.limits import MOST_BYTES
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.kinds.kind import Working, needs_nothing
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import LayerProfile
from steelyard.schedules import PipelineConfig
from steelyard.units import Amount, Whole

_RECOMPUTED_INPUTS = 4
"""What the first norm of a block makes of its input, in inputs: a copy in fp32, which is two of bf16, and two more."""
_BEYOND_BYTES = 16 * MOST_BYTES
"""More than any sum of bytes that could matter, and few enough to add up."""
_NEVER = -(2**12) * MOST_BYTES
"""Bytes of a moment that does not come about, which is the fullest beside no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of one layer on one rank that neither the samples of a microbatch nor remat change."""

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
    def frees_saved(self) -> bool:
        """Whether all that was saved but the input is gone before the gradients are reduced."""
        return self.holds_new and self.shards > 1

    @property
    def reduced(self) -> int:
        """The buffer that gradients are reduced from, and that those of a replicated layer are kept in."""
        return MASTER_BYTES * self.params

    def reduced_states(self, *, is_first: bool) -> int:
        """Gradients and their buffers as they are reduced, in the first backward pass of a step or later."""
        if self.shards > 1:
            made, scratch = self.made_gradients, self.scratch
            return self.reduced + (made + scratch if self.holds_new else max(made, scratch)) + self.trained_shard
        return self.made_gradients + self.cut_gradients + (self.reduced if is_first else 0)


_STATES = tuple(each.name for each in fields(LayerStates))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory(LayerStates):
    """Bytes of one layer on one rank, for one microbatch where they depend on samples."""

    saved: int
    input: int
    reducing: int = 0
    """What is left of the layer's work when the last of its gradients is made, beside the gradient of its input."""
    forward: int
    backward: int

    @property
    def freed(self) -> int:
        """What the backward pass of an embedding or head has freed when FSDP reduces its gradients."""
        return max(0, self.saved - self.input) if self.frees_saved else 0

    def reduction_bytes(self, *, is_first: bool) -> int:
        """What the layer itself takes as its gradients are reduced, in the first backward pass of a step or later."""
        return self.input + self.reducing + self.reduced_states(is_first=is_first) if self.params else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank as the search adds them up."""

    static_bytes: dict[str, int]
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int


def layer_bytes(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerBytes:
    """What the search adds up of the memory of a layer, whatever lies beside it; a profile without times is enough.

    For a framework with states of its own its largest short-lived memory is what its passes work with.
    """
    memory, static = layer_memory(kind, strategy, setting), static_bytes(kind, strategy, setting)
    read = sample_bytes(kind, strategy, setting)
    beside = beside_work(kind, strategy, setting)
    return LayerBytes(
        static_bytes=static | ({"working set": static.get("working set", 0) + read} if read else {}),
        activation_bytes=memory.saved,
        transient_bytes=int(transient_bytes(beside, memory.forward, memory.backward, memory.input + memory.reducing)),
    )


def layer_memory(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerMemory:
    """The bytes of a layer of this kind under a legal strategy, each as the walk through a stage needs it.

    The job remembers them: settings have layers in common.
    """
    states = layer_states(kind, strategy, setting)
    key = rank_samples(strategy, setting), strategy.token_degree, strategy.remat
    return setting.job.once(states, key, lambda: _layer_memory(states, kind, strategy, setting))


def _layer_memory(states: LayerStates, kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerMemory:
    layer, samples = layer_profile(kind, strategy, setting), rank_samples(strategy, setting)
    lines, needed = np.reshape(work_lines(layer, strategy.remat), (2, 4)), work_needed(layer, strategy, setting)
    saved, entered, forward, backward = work_bytes(lines, samples, needed).tolist()
    return LayerMemory(
        **{name: getattr(states, name) for name in _STATES},
        saved=saved,
        input=entered,
        reducing=recomputed_inputs(strategy) * entered,
        forward=forward,
        backward=backward,
    )


def layer_states(kind: LayerKind, strategy: Strategy, setting: AnySetting) -> LayerStates:
    """What no number of samples changes of `layer_memory`; one value for all strategies that have the same."""
    key = kind.name, setting.has_several, strategy.tensor_degree, strategy.state_shards, strategy.variants
    return setting.job.once(setting.job.profile, key, lambda: _layer_states(kind, strategy, setting))


def _layer_states(kind: LayerKind, strategy: Strategy, setting: AnySetting) -> LayerStates:
    job, layer = setting.job, layer_profile(kind, strategy, setting)
    params, shards = held_params(layer.trained, strategy), strategy.state_shards
    computed, made = job.compute_bytes * held_params(layer, strategy), job.compute_bytes * params
    trained_shard = MASTER_BYTES * sharded_params(layer.trained, strategy)
    keeps_whole = setting.has_several and job.execution.keeps_whole_gradients(strategy)
    made_whole = strategy.tensor_degree if kind.role is LayerRole.EMBEDDING else 1  # DTensor makes a tp embedding's so
    return LayerStates(
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
        has_backward=layer.has_backward,
    )


def work_lines(layer: LayerProfile, remat: Remat) -> tuple[float, ...]:
    """Bytes that a layer saves, of its input, and that its forward and backward work take: four numbers of no samples,
    and four of each.
    """
    held = layer if remat is Remat.NONE else layer.recomputation(remat)
    lines = held.saved_bytes, layer.input_bytes, held.forward_transient_bytes, held.backward_transient_bytes
    return *(line.constant for line in lines), *(line.per_sample for line in lines)


def work_needed(layer: LayerProfile, strategy: Strategy, setting: AnySetting) -> tuple[Amount, ...]:
    """What the kinds of a strategy add to these four; the job remembers it."""
    samples = hashable(rank_samples(strategy, setting))
    key = "needed", samples, strategy.token_degree, strategy.remat, strategy.variants
    needed = setting.job.once(layer, key, lambda: working_bytes(layer, strategy, setting))
    return needed.saved, 0.0, needed.forward, needed.backward


def needs_more(strategy: Strategy) -> bool:
    """Whether that is anything."""
    return any(kind.working is not needs_nothing for kind in strategy.kinds)


def work_bytes(
    lines: NDArray[np.float64], samples: Amount, needed: NDArray[np.float64] | tuple[Amount, ...]
) -> NDArray[np.int64]:
    """[4, …] these bytes for a microbatch, for ``lines`` of `work_lines` [2, 4, …] and ``needed`` [4, …]."""
    found = np.clip(lines[0] + lines[1] * samples + needed, -_BEYOND_BYTES, _BEYOND_BYTES)
    whole: NDArray[np.int64] = found.astype(np.int64)
    return whole


def recomputed_inputs(strategy: Strategy) -> int:
    """What is left of computing the layer again when its gradients are reduced, in inputs."""
    return _RECOMPUTED_INPUTS if strategy.remat is Remat.FULL else 0


def working_bytes(layer: LayerProfile, strategy: Strategy, setting: AnySetting) -> Working:
    """What the kinds of a strategy add to the saved and the short-lived bytes of the traced layer."""
    if not needs_more(strategy):
        return Working()
    load = layer_load(layer, strategy, setting)
    found = [kind.working(load) for kind in strategy.kinds]
    return Working(
        saved=sum(each.saved for each in found if layer.has_backward),
        forward=sum(each.forward for each in found),
        backward=sum(each.backward for each in found if layer.has_backward),
    )


class BesideWork(NamedTuple):
    """What a layer takes beside what grows with the samples: of one strategy, or arrays of several."""

    forward: Whole
    backward: Whole
    reduction: Whole
    """As its gradients are reduced."""


def transient_bytes(beside: BesideWork, forward: Whole, backward: Whole, reducing: Whole) -> Whole:
    """Largest short-lived memory while a layer runs: forward, backward, or as its gradients are reduced."""
    passes = np.maximum(beside.forward + forward, beside.backward + backward)
    found: Whole = np.maximum(passes, beside.reduction + reducing)
    return found


def static_bytes(kind: LayerKind, strategy: Strategy, setting: AnySetting) -> dict[str, int]:
    """By term what a rank holds of a layer for a whole step, samples left out."""
    states, execution = layer_states(kind, strategy, setting), setting.job.execution
    if isinstance(execution.states, StateBytes):
        layer = layer_profile(kind, strategy, setting)
        experts = layer.expert_params
        return execution.states.kept_bytes(layer.num_params, strategy, execution.shard_degree, expert_params=experts)
    reduces_on = kind.role is LayerRole.EMBEDDING and states.shards > 1 and setting.has_several
    return {
        "parameters": states.shard,
        "gradients": states.kept_gradients,
        "optimizer": 2 * states.trained_shard + states.buffers,
        **({"working set": states.reduced} if reduces_on else {}),
        **({"gathered parameters": states.copy} if states.keeps_copy and states.copy else {}),
    }


def beside_work(kind: LayerKind, strategy: Strategy, setting: AnySetting) -> BesideWork:
    """What does not grow with the samples of the memory that a layer takes while it runs.

    Forward: the parameters in compute precision and the buffer they were gathered in, beside working activations.
    Backward: the parameters with the buffer for the next layer's, their gradients in compute precision, and the
    reduction buffer of another layer (`_reducing_bytes`), beside working activations (with what remat recomputes).
    Reduction: as the walk has it (`LayerMemory.reduction_bytes`), with what is gathered ahead of a sharded block in
    place of a kept copy. As FSDP reduces the gradients of an embedding or a head, another layer may be gathered ahead.
    """
    if setting.job.execution.keeps_own_buffers:
        return BesideWork(0, 0, _NEVER)
    states = layer_states(kind, strategy, setting)
    copy, is_sharded = 0 if states.keeps_copy else states.copy, states.shards > 1
    buffer = states.copy if is_sharded else 0
    if not states.has_backward:
        return BesideWork(copy + buffer, _NEVER, _NEVER)
    layer = layer_profile(kind, strategy, setting)
    gradients = _new_gradient_bytes(kind, layer, states, strategy, setting)
    backward = copy + buffer + gradients + _reducing_bytes(kind, layer, strategy, setting)
    if is_sharded and states.holds_new:
        gathers = copy and (kind.role is LayerRole.HEAD or setting.has_several)
        reduction = gradients + states.reduced + states.scratch + (buffer if gathers else 0)
    else:
        reduction = states.reduced_states(is_first=False) + (buffer if copy else 0) if states.params else _NEVER
    return BesideWork(copy + buffer, backward, reduction)


def _reducing_bytes(kind: LayerKind, layer: LayerProfile, strategy: Strategy, setting: AnySetting) -> int:
    """The buffer of the reduction before, which FSDP holds until the next one.

    Behind a block there is a block or the head, whose own working set is the larger then: it is taken as large as this
    layer's. Behind the head there is nothing but the last layer of the backward pass before: a block, or the embedding,
    which counts its own (`_static_bytes`).
    """
    if kind.role is not LayerRole.HEAD:
        return MASTER_BYTES * held_params(layer, strategy)
    if not setting.has_several:
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
    kind: LayerKind, layer: LayerProfile, states: LayerStates, strategy: Strategy, setting: AnySetting
) -> int:
    """Gradients that one backward pass makes beside those that are kept between microbatches.

    A sharded layer reduces them to a shard that is then added to the kept one. The buffer of a replicated layer, which
    counts as kept, is made only when the first backward pass has made all gradients: in fp32 it stands for them.
    """
    if states.shards == 1:
        return 0 if not setting.has_several and setting.job.compute_bytes == MASTER_BYTES else states.made_gradients
    times = strategy.tensor_degree if kind.role is LayerRole.EMBEDDING else 1
    return states.made_gradients + (
        0 if not setting.has_several else times * int(MASTER_BYTES * mean_shard_params(layer.trained, strategy))
    )


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
