r"""Bytes of one rank for one layer type, under several strategies at once: what `steelyard.cost.memory` adds up.

They describe `steelyard.runtime`: FSDP2's `fully_shard` for fsdp, all such layers of a stage sharing one communication
context, and a `steelyard.modules.replicated` layer where $f = 1$ (dp, tp alone, one device). With $N$ parameters after
tp, sharded $f$ ways, and $q$ bytes of one in compute:

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master); of those that are not trained q N / f |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward where f = 1 |
| the same     | 4 N          | ZeRO-1, from the first backward to the last: in the type in which they are reduced |
| optimizer    | 8 N / f      | always (`Effects.state_bytes`: two AdamW moments), with counts of steps and buffers |
| step         | `Effects.buffer_bytes` | of what lies in host memory, while the optimizer steps; no activations then |
| fetched      | 4 N / f      | with `Effects.parameters_on_host`, on a GPU: a shard that arrives           |
| the same     | `MatrixUpdate.buffer_bytes` | of the model's largest hidden matrix, on any of its layers            |
| gathered     | q N          | f = 1 and q < 4, ZeRO-2: the copy that computes, from forward to the last backward |
| activations  | traced, and `Dimension.working` | per microbatch in flight; what the remat choice keeps of them |
| working set  | traced, with the parameters and new gradients of the layer | while the layer runs |

Source: Rajbhandari et al. 2020 (ZeRO). Not modelled: the two temporaries of an AdamW step, which are smaller than any
working set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.job import Job, JobConfig, Strategies, sample_bytes
from steelyard.cost.layer_load import (
    held_params,
    hidden_matrices,
    layer_load,
    layer_profile,
    matrix_params,
    rank_samples,
    sharded_params,
)
from steelyard.levers import Effects
from steelyard.limits import MOST_BYTES
from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.dimensions.dimension import Working, needs_nothing
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import LayerProfile
from steelyard.profiles.shapes import Affine

_RECOMPUTED_INPUTS = 4
"""What the first norm of a block makes of its input, in inputs: a copy in fp32, which is two of bf16, and two more."""
_BEYOND_BYTES = 16 * MOST_BYTES
"""More than any sum of bytes that could matter, and few enough to add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of one layer on one rank that neither the samples of a microbatch nor remat change."""

    params: int
    """Entries that are trained, of those that a rank computes with once they are gathered."""
    shards: int
    is_sharded: bool
    """Whether FSDP gathers it, which it does on a single rank as well where parameters come from the host."""
    shard: int
    """The rank's parameters: those that are trained, others as the layer computes on them."""
    trained_shard: int
    """Those of them that are trained."""
    copy: int
    """What of the parameters the layer computes on is a copy of those that are kept, in the type that computes."""
    keeps_copy: bool
    keeps_whole: bool = False
    """Whether the copy and whole gradients stay from the first of several microbatches to the last."""
    kept_gradients: int
    """What is kept from one microbatch to the next."""
    reduced: int
    """The buffer that gradients are reduced from, and that those of a replicated layer are kept in."""
    made_gradients: int
    """What one backward pass makes beside the gradients that are kept."""
    cut_gradients: int = 0
    """The rank's part of gradients that are made whole, cut out of them."""
    scratch: int
    """What a sharded layer's gradients are copied to once more while they are reduced: all by gloo, none by NCCL."""
    holds_new: bool = False
    """Whether autograd still holds the new gradients as FSDP reduces them: of an embedding and a head."""
    optimizer: int
    """What the optimizer keeps, with counts of steps, and tensors that are kept and not trained; of a model with
    adapters, most of whose such tensors are quantized weights, these are of ``shard``."""
    has_backward: bool = True
    host: int = 0
    """What lies in the memory of the host."""
    buffer: int = 0
    """What of that, and of an update of matrices, is on the device while the optimizer steps, at most."""
    fetched: int = 0
    """What is on the device as parameters come from the host, beside what they are gathered to."""

    def reduced_states(self, *, is_first: bool) -> int:
        """Gradients and their buffers as they are reduced, in the first backward pass of a step or later."""
        if self.keeps_whole:
            if is_first:
                return self.made_gradients + self.kept_gradients
            return self.reduced + self.holds_new * self.made_gradients + self.cut_gradients + self.trained_shard
        if self.is_sharded:
            made, scratch = self.made_gradients, self.scratch
            return self.reduced + (made + scratch if self.holds_new else max(made, scratch)) + self.trained_shard
        return self.made_gradients + self.cut_gradients + (self.reduced if is_first else 0)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The rank's parameters, gradients and optimizer states kept, the copy, whether it stays, and for the whole
        step, the shards, whether FSDP moves it, what a backward pass makes and reduces, gradients in the first
        reduction and later ones; whether it trains, frees and works backwards; what the optimizer and what a pass has
        of the host's."""
        first, later = (self.reduced_states(is_first=each) for each in (True, False))
        kept = self.shard, self.kept_gradients, self.optimizer, self.copy
        how = self.keeps_copy, self.keeps_whole, self.shards, self.is_sharded
        trains, frees_saved = self.params > 0 and self.has_backward, self.holds_new and self.is_sharded
        moves = trains, frees_saved, self.has_backward, self.buffer, self.fetched
        return (*kept, *how, self.made_gradients, self.reduced, first, later, *moves)


def layer_states(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> LayerStates:
    """What no number of samples changes of a layer's bytes; one value for all strategies that have the same."""
    key = (
        "states of",
        layer_type.name,
        config.has_several,
        strategy.tensor_degree,
        strategy.state_shards,
        strategy.modes,
    )
    return config.job.once(key, lambda: _layer_states(layer_type, strategy, config))


def _layer_states(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> LayerStates:
    job, layer = config.job, layer_profile(layer_type, strategy, config)
    params, shards = held_params(layer.trained, strategy), strategy.state_shards
    weight_bytes = job.effects.weight_bytes
    streams = job.effects.parameters_on_host
    is_sharded = shards > 1 or streams
    computed = job.compute_bytes * (held_params(layer, strategy) if is_sharded else params)
    made = job.compute_bytes * params
    trained_shard = weight_bytes * sharded_params(layer.trained, strategy)
    made_whole = (
        strategy.tensor_degree if layer_type.role is LayerRole.EMBEDDING else 1
    )  # DTensor makes a tp embedding's so
    keeps_whole = config.has_several and strategy.keeps_whole
    has_adapters = job.chain.has_adapters
    host = math.ceil(job.effects.host_bytes * (trained_shard // weight_bytes))
    is_again = layer_type.role is LayerRole.HEAD and job.chain.tied_embeddings and job.execution.shares_frozen_head
    held = without_tied(layer, job, strategy) if is_again and layer.frozen_params else layer
    resting = job.compute_bytes * (sharded_params(held, strategy) - sharded_params(held.trained, strategy))
    stays_whole = job.execution.keeps_parameters and is_sharded and strategy.keeps_gathered
    shard = trained_shard + (job.compute_bytes * held_params(held, strategy) if stays_whole else resting)
    kept_gradients, fetched = trained_shard, 0
    if streams:
        fetched = (shard if job.cluster.device.is_gpu else 0) + (computed if shards == 1 else 0)
        host, shard, kept_gradients = host + shard + kept_gradients, 0, 0
    if keeps_whole:
        kept_gradients = weight_bytes * params * made_whole
    elif config.has_several and not is_sharded and has_adapters:
        kept_gradients += weight_bytes * _whole_params(layer_type, layer, strategy, config)
    elif config.has_several and job.execution.keeps_whole_gradients(strategy):
        kept_gradients += made
    copies = job.cluster.device.backend.copies_what_it_scatters
    return LayerStates(
        params=params,
        shards=shards,
        is_sharded=is_sharded,
        shard=shard + (layer.buffer_bytes if has_adapters else 0),
        trained_shard=trained_shard,
        copy=0 if stays_whole or (not is_sharded and job.compute_bytes == weight_bytes) else computed,
        keeps_copy=strategy.keeps_gathered and not streams and (shards == 1 or layer.has_backward or keeps_whole),
        keeps_whole=keeps_whole,
        kept_gradients=kept_gradients,
        reduced=weight_bytes * params,
        made_gradients=made * made_whole,
        cut_gradients=made if made_whole > 1 else 0,
        scratch=weight_bytes * params if is_sharded and (shards == 1 or copies) else 0,
        holds_new=layer_type.role is not LayerRole.BLOCK,
        optimizer=_optimizer_bytes(trained_shard // weight_bytes, layer_type, layer, job)
        + (0 if has_adapters else layer.buffer_bytes),
        has_backward=layer.has_backward,
        host=host,
        buffer=max(min(host, job.effects.buffer_bytes), _matrix_buffer_bytes(job) if params else 0),
        fetched=fetched,
    )


def without_tied(layer: LayerProfile, job: Job, strategy: Strategy) -> LayerProfile:
    """Return the head without the matrix that the embedding has."""
    shared = min(job.chain.vocab_size * job.chain.hidden_size // strategy.tensor_degree, layer.num_params)
    fewer = {"num_params": layer.num_params - shared, "frozen_params": max(0, layer.frozen_params - shared)}
    return layer.model_copy(update=fewer)


def _whole_params(layer_type: LayerType, layer: LayerProfile, strategy: Strategy, config: JobConfig) -> int:
    """Trained parameters that tensor-parallel ranks have whole, and sum the gradients of at the end of a step: of
    adapters many are, of layers without any so few that they are not counted."""
    undivided, degree = config.job.layer(layer_type.name, {}), strategy.tensor_degree
    if degree == 1 or undivided is None:
        return 0
    return max(0, degree * layer.trained.num_params - undivided.trained.num_params) // (degree - 1)


def _adapter_copies(layer: LayerProfile, strategy: Strategy, job: Job) -> Affine:
    """Bytes that adapters keep of inputs of their own, beyond those that they would share."""
    if (
        job.execution.adapters != "autocast"
        or job.compute_bytes == job.effects.weight_bytes
        or strategy.state_shards > 1
    ):
        return Affine()
    return (layer.adapter_inputs + layer.shared_adapter_inputs * -1) * job.compute_bytes


def _optimizer_bytes(num_params: int, layer_type: LayerType, layer: LayerProfile, job: Job) -> int:
    """Bytes that the optimizer keeps of so many trained parameters of a layer."""
    effects = job.effects
    kept = math.ceil(effects.state_bytes * num_params) + effects.layer_state_bytes
    kept -= saved_in_matrices(num_params, layer_type, layer, job)
    return min(kept, math.ceil(Effects().state_bytes * num_params))


def saved_in_matrices(num_params: int, layer_type: LayerType, layer: LayerProfile, job: Job) -> int:
    """Bytes that the optimizer keeps less of these parameters where it keeps less of hidden matrices."""
    update = job.effects.matrices
    if update is None:
        return 0
    fewer = job.effects.state_bytes - update.state_bytes
    return math.floor(fewer * (matrix_params(layer_type, layer) * num_params // max(1, layer.trained.num_params)))


def _matrix_buffer_bytes(job: Job) -> int:
    """Bytes that updating a hidden matrix takes beside what is kept, of the largest of the model.

    A stage takes them once all gradients are made, those of its first layer last, which may have no such matrix.
    """
    update = job.effects.matrices
    if update is None:
        return 0

    def of_model() -> int:
        layers = ((each, job.layer(each.name, {})) for each in job.chain.layer_types)
        sides = (hidden_matrices(each, layer) for each, layer in layers if layer is not None)
        return math.ceil(max((update.buffer_bytes_of(m, n) for of_type in sides for m, n, _ in of_type), default=0))

    return job.once("largest matrix", of_model)


def working_bytes(layer: LayerProfile, strategy: Strategy, config: JobConfig) -> Working:
    """What the dimensions of a strategy add to the saved and the short-lived bytes of the traced layer."""
    load = layer_load(layer, strategy, config)
    found = [dimension.working(load) for dimension in strategy.dimensions]
    return Working(
        saved=sum(each.saved for each in found if layer.has_backward),
        forward=sum(each.forward for each in found),
        backward=sum(each.backward for each in found if layer.has_backward),
    )


IntTable = NDArray[np.int64]


class RowWork(NamedTuple):
    """[S] what grows with the samples, of one microbatch."""

    saved: IntTable
    input: IntTable
    reducing: IntTable
    """What is left of the layer's work when the last of its gradients is made, beside the gradient of its input."""
    forward: IntTable
    backward: IntTable
    read: IntTable
    """As `sample_bytes` has it."""
    on_host: IntTable
    """What it saves in the memory of the host, and has on the device while it works; ``saved`` is none of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRow:
    """A layer type under S strategies, one or more, which are legal for it; arrays are [S]."""

    layer_type: LayerType
    chosen: Sequence[Strategy]
    numbers: Strategies
    states: IntTable
    """[17, S] as `LayerStates.numbers` has them."""
    lines: NDArray[np.float64]
    """[2, 4, S] bytes that a layer saves, of its input, and that its forward and backward work take: of no samples, and
    of each."""
    inputs: IntTable
    """What is left of computing the layer again when its gradients are reduced, in inputs."""
    needy: tuple[tuple[Strategy, IntTable], ...]
    """Those whose dimensions need more than was traced: one of all that need as much, and the places of these."""

    @classmethod
    def of(cls, layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> Self:
        """The same for all configurations of a job that have one microbatch, or all that have several."""
        key = "row", layer_type.name, config.has_several, tuple(chosen)
        return config.job.once(key, lambda: cls._of(layer_type, chosen, config))

    @classmethod
    def _of(cls, layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> Self:
        once, has_several = config.job.once, config.has_several
        name = layer_type.name
        cells = [once(("cell", name, each, has_several), partial(_cell, layer_type, each, config)) for each in chosen]
        numbers = np.array([each.numbers for each in cells]).T
        inputs, needs, *degrees = numbers
        alike: dict[object, list[int]] = {}
        for place in np.flatnonzero(needs).tolist():
            each = chosen[place]
            layer = layer_profile(layer_type, each, config)
            alike.setdefault((layer, each.sample_degree, each.token_degree, each.remat, each.modes), []).append(place)
        return cls(
            layer_type=layer_type,
            chosen=chosen,
            numbers=Strategies(*degrees),
            states=np.array([each.states for each in cells]).T,
            lines=np.array([each.lines for each in cells]).T.reshape(2, 4, -1),
            inputs=inputs,
            needy=tuple((chosen[places[0]], np.array(places)) for places in alike.values()),
        )

    def work(self, config: JobConfig) -> RowWork:
        """In a configuration with as many microbatches, one or several."""
        samples = rank_samples(self.numbers, config.microbatch_samples)
        needed = np.zeros((4, len(self.chosen)))
        for strategy, places in self.needy:
            layer = layer_profile(self.layer_type, strategy, config)
            of_rank = rank_samples(strategy, config.microbatch_samples)
            key = "needed", layer, of_rank, strategy.token_degree, strategy.remat, strategy.modes
            more = config.job.once(key, partial(working_bytes, layer, strategy, config))
            needed[:, places] = np.vstack((more.saved, 0.0, more.forward, more.backward))
        found = np.clip(self.lines[0] + self.lines[1] * samples + needed, -_BEYOND_BYTES, _BEYOND_BYTES)
        saved, entered, forward, backward = found.astype(np.int64)
        on_host = np.zeros_like(saved)
        if config.job.effects.saves_on_host and self.layer_type.role is LayerRole.BLOCK:
            saved, on_host = on_host, saved
        read = np.broadcast_to(sample_bytes(self.layer_type, self.numbers, config), saved.shape).astype(np.int64)
        return RowWork(saved, entered, self.inputs * entered, forward + on_host, backward + on_host, read, on_host)


class _Cell(NamedTuple):
    """What no number of samples changes of a layer type under a strategy."""

    states: tuple[int, ...]
    lines: tuple[float, ...]
    numbers: tuple[int, ...]
    """`LayerRow.inputs`, whether it is needy, and what `Strategies` has."""


def _cell(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> _Cell:
    layer, remat = layer_profile(layer_type, strategy, config), strategy.remat
    held = layer if remat is Remat.NONE else layer.recomputation(remat)
    lines = [held.saved_bytes, layer.input_bytes, held.forward_transient_bytes, held.backward_transient_bytes]
    kept = 3 if remat is Remat.FULL else 0  # recomputed, what is saved is there as the layer works backwards
    lines[kept] = lines[kept] + _adapter_copies(layer, strategy, config.job)
    inputs = _RECOMPUTED_INPUTS if remat is Remat.FULL else 0
    is_needy = any(dimension.working is not needs_nothing for dimension in strategy.dimensions)
    return _Cell(
        states=layer_states(layer_type, strategy, config).numbers,
        lines=(*(line.constant for line in lines), *(line.per_sample for line in lines)),
        numbers=(inputs, is_needy, strategy.sample_degree, strategy.token_degree, strategy.sequence_degree),
    )
