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
| working set  | see `_transient_bytes` | while the layer runs                             |

Not modelled: the two temporaries of an AdamW step, which are smaller than any working set.

Source: Rajbhandari et al. 2020 (ZeRO).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import cast

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
from steelyard.cost.setting import MASTER_BYTES, Job, Setting
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.kinds.kind import Working, needs_nothing
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import LayerProfile
from steelyard.schedules import PipelineConfig

_RECOMPUTED_INPUTS = 4
"""What the first norm of a block makes of its input, in inputs: a copy in fp32, which is two of bf16, and two more."""


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
    return memory.made_gradients + (
        0 if is_single else times * int(MASTER_BYTES * mean_shard_params(layer.trained, strategy))
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
