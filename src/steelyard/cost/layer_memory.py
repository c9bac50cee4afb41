r"""Bytes of one rank for one layer type, under several strategies at once; `steelyard.cost.memory` adds them up.

They describe `steelyard.runtime`: FSDP2's `fully_shard` for fsdp, with one communication context for all such layers of
a stage, and a `steelyard.modules.replicated` layer if $f = 1$ (dp, tp alone, one device). With $N$ parameters after tp,
sharded $f$ ways, and $q$ bytes per parameter in compute:

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master); frozen parameters q N / f |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward if f = 1 |
| gradients    | 4 N          | ZeRO-1, from the first backward to the last, in the dtype of the reduction |
| optimizer    | 8 N / f      | always (`Effects.state_bytes`: two AdamW moments), with counts of steps and buffers |
| step         | `Effects.buffer_bytes` | states in host memory, during the optimizer step; no activations then |
| fetched      | 4 N / f      | with `Effects.parameters_on_host`, on a GPU: a shard that arrives           |
| step         | `MatrixUpdate.buffer_bytes` | for the model's largest hidden matrix, on any of its layers           |
| gathered     | q N          | f = 1 and q < 4, ZeRO-2: the compute-dtype copy, from forward to the last backward |
| activations  | traced, and `Dimension.working` | per microbatch in flight; the part that the remat choice saves |
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

from steelyard.cost.context import communicator_bytes
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
from steelyard.plan.dimensions.dimension import Value, Working, needs_nothing
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import LayerProfile
from steelyard.profiles.shapes import Affine

_RECOMPUTED_INPUTS = 4
"""Tensors that the first norm of a block makes, in multiples of its input: an fp32 copy, twice bf16, and two more."""
_BEYOND_BYTES = 16 * MOST_BYTES
"""Larger than any relevant sum of bytes, and small enough to add up without overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of one layer on one rank that are independent of remat and of the samples of a microbatch."""

    params: int
    """Number of trained parameters that a rank computes with after gathering."""
    shards: int
    is_sharded: bool
    """Whether FSDP gathers it, which also happens on a single rank if parameters come from the host."""
    shard: int
    """Parameters of the rank: trained ones as stored, frozen ones in the compute dtype."""
    trained_shard: int
    """Trained part of ``shard``."""
    copy: int
    """Compute-dtype copy of the parameters; 0 if the layer computes on the kept ones."""
    keeps_copy: bool
    keeps_whole: bool = False
    """Whether the copy and whole gradients stay from the first of several microbatches to the last."""
    kept_gradients: int
    """Gradients that are kept from one microbatch to the next."""
    reduced: int
    """Buffer that gradients are reduced from; a replicated layer keeps its gradients in it."""
    made_gradients: int
    """New gradients of one backward pass, in addition to the kept ones."""
    cut_gradients: int = 0
    """The rank's slice of gradients that are computed whole."""
    scratch: int
    """Second copy of a sharded layer's gradients during their reduction: full with gloo, none with NCCL."""
    holds_new: bool = False
    """Whether autograd still holds the new gradients while FSDP reduces them, as for embedding and head."""
    optimizer: int
    """Optimizer states, step counts and buffers that are not trained. In a model with adapters the buffers, mostly
    quantized weights, are in ``shard`` instead."""
    has_backward: bool = True
    host: int = 0
    """Bytes in host memory."""
    buffer: int = 0
    """Maximum bytes on the device during the optimizer step: states from host memory, or a matrix update."""
    fetched: int = 0
    """Additional bytes on the device while parameters arrive from the host, without the gathered copy."""

    def reduced_states(self, *, is_first: bool) -> int:
        """Bytes of gradients and buffers during reduction, in the first backward pass of a step or in a later one."""
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
        """Values for a column of `LayerRow.states`.

        In order: kept parameters, gradients and optimizer states, the compute-dtype copy; whether the copy stays,
        whether it stays for the whole step, shards, whether FSDP gathers it; new gradients, reduction buffer, bytes in
        the first reduction and in later ones; whether it trains, frees saved tensors before its reduction and has a
        backward pass; bytes from the host during the optimizer step and during a pass.
        """
        first, later = (self.reduced_states(is_first=each) for each in (True, False))
        kept = self.shard, self.kept_gradients, self.optimizer, self.copy
        how = self.keeps_copy, self.keeps_whole, self.shards, self.is_sharded
        trains, frees_saved = self.params > 0 and self.has_backward, self.holds_new and self.is_sharded
        moves = trains, frees_saved, self.has_backward, self.buffer, self.fetched
        return (*kept, *how, self.made_gradients, self.reduced, first, later, *moves)


def layer_states(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> LayerStates:
    """Return the bytes of a layer that are independent of the samples, cached for strategies with equal states."""
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
    held = own_params(layer_type, layer, strategy, config)
    params, shards = held_params(layer.trained, strategy), strategy.state_shards
    weight_bytes = job.effects.weight_bytes
    streams, steps_on_host = job.effects.parameters_on_host, job.effects.steps_on_host
    is_sharded = shards > 1 or streams
    computed = job.compute_bytes * held_params(layer if is_sharded else held.trained, strategy)
    made = job.compute_bytes * params
    trained_shard = weight_bytes * sharded_params(held.trained, strategy)
    made_whole = (
        strategy.tensor_degree if layer_type.role is LayerRole.EMBEDDING else 1
    )  # DTensor computes the gradient of a tp embedding whole
    keeps_whole = config.has_several and strategy.keeps_whole
    has_adapters = job.chain.has_adapters
    host = math.ceil(job.effects.host_bytes * (trained_shard // weight_bytes))
    resting = job.compute_bytes * (sharded_params(held, strategy) - sharded_params(held.trained, strategy))
    stays_whole = job.execution.keeps_parameters and is_sharded and strategy.keeps_gathered
    shard = trained_shard + (job.compute_bytes * held_params(held, strategy) if stays_whole else resting)
    kept_gradients, fetched = weight_bytes * sharded_params(layer.trained, strategy), 0
    reduced = weight_bytes * params
    if layer_type.role is LayerRole.EMBEDDING and not is_sharded and params:
        # the head's gradient waits for this one, and both for their sum; their buffer, counted in the head, comes last
        tied = min(tied_params(layer_type, strategy, config), params)
        kept_gradients, reduced = kept_gradients - weight_bytes * tied, reduced - 2 * weight_bytes * tied
        made += 2 * job.compute_bytes * tied
    computes_on_kept = not is_sharded and (steps_on_host or job.compute_bytes == weight_bytes)
    if streams:
        fetched = (shard if job.cluster.device.is_gpu else 0) + (computed if shards == 1 else 0)
        host, shard, kept_gradients = host + shard + kept_gradients, 0, 0
    elif steps_on_host:
        computed_shard = job.compute_bytes * (trained_shard // weight_bytes)
        host += trained_shard + kept_gradients + computed_shard
        shard, kept_gradients = shard - trained_shard + (0 if stays_whole else computed_shard), 0
    if keeps_whole:
        kept_gradients = job.reduce_bytes * params * made_whole
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
        copy=0 if stays_whole or computes_on_kept else computed,
        keeps_copy=strategy.keeps_gathered and not streams and (shards == 1 or layer.has_backward or keeps_whole),
        keeps_whole=keeps_whole,
        kept_gradients=kept_gradients,
        reduced=reduced,
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


def tied_params(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> int:
    """Number of a rank's entries of the matrix that embedding and head keep once; 0 if each has its own.

    Our runtime keeps it once on a single device. The other engines do on one stage; those without buffers of their own
    have no pipelines for such models.
    """
    job = config.job
    if layer_type.role is LayerRole.BLOCK or not job.chain.ties_ends or job.effects.parameters_on_host:
        return 0
    if job.execution.keeps_own_buffers:
        keeps_once = not config.is_piped
    else:
        keeps_once = job.execution.shares_head or job.cluster.num_devices == 1
    return keeps_once * (job.chain.vocab_size * job.chain.hidden_size // strategy.tensor_degree)


def own_params(layer_type: LayerType, layer: LayerProfile, strategy: Strategy, config: JobConfig) -> LayerProfile:
    """Return a layer without the parameters that it keeps with another: the matrix of a tied head.

    Shards of a trained matrix are counted in both layers, because engines keep the matrix gathered between them, which
    is not counted.
    """
    tied = tied_params(layer_type, strategy, config) if layer_type.role is LayerRole.HEAD else 0
    has_own_buffers = config.job.execution.keeps_own_buffers
    if not tied or (strategy.state_shards > 1 and layer.trained.num_params and not has_own_buffers):
        return layer
    shared = min(tied, layer.num_params)
    fewer = {"num_params": layer.num_params - shared, "frozen_params": max(0, layer.frozen_params - shared)}
    return layer.model_copy(update=fewer)


def _whole_params(layer_type: LayerType, layer: LayerProfile, strategy: Strategy, config: JobConfig) -> int:
    """Number of trained parameters that tensor-parallel ranks replicate, whose gradients are summed at the end of a
    step. Many adapter parameters are replicated; in layers without adapters they are too few to be counted."""
    undivided, degree = config.job.layer(layer_type.name, {}), strategy.tensor_degree
    if degree == 1 or undivided is None:
        return 0
    return max(0, degree * layer.trained.num_params - undivided.trained.num_params) // (degree - 1)


def _adapter_copies(layer: LayerProfile, strategy: Strategy, job: Job) -> Affine:
    """Bytes of separate input copies that adapters save, beyond those of a shared copy."""
    if (
        job.execution.adapters != "autocast"
        or job.compute_bytes == job.effects.weight_bytes
        or strategy.state_shards > 1
    ):
        return Affine()
    return (layer.adapter_inputs + layer.shared_adapter_inputs * -1) * job.compute_bytes


def _optimizer_bytes(num_params: int, layer_type: LayerType, layer: LayerProfile, job: Job) -> int:
    """Bytes of optimizer states of ``num_params`` trained parameters of a layer."""
    effects = job.effects
    kept = math.ceil(effects.state_bytes * num_params) + effects.layer_state_bytes
    kept -= saved_in_matrices(num_params, layer_type, layer, job)
    return min(kept, math.ceil(Effects().state_bytes * num_params))


def saved_in_matrices(num_params: int, layer_type: LayerType, layer: LayerProfile, job: Job) -> int:
    """Bytes of optimizer states saved by smaller states of hidden matrices."""
    update = job.effects.matrices
    if update is None:
        return 0
    fewer = job.effects.state_bytes - update.state_bytes
    return math.floor(fewer * (matrix_params(layer_type, layer) * num_params // max(1, layer.trained.num_params)))


def _matrix_buffer_bytes(job: Job) -> int:
    """Bytes of temporaries to update the model's largest hidden matrix.

    A stage needs them after all gradients are made, the last by its first layer, which may have no such matrix.
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
    """Return the bytes that the dimensions of a strategy add to the traced layer's saved and short-lived bytes."""
    load = layer_load(layer, strategy, config)
    found = [dimension.working(load) for dimension in strategy.dimensions]
    return Working(
        saved=sum(each.saved for each in found if layer.has_backward),
        forward=sum(each.forward for each in found),
        backward=sum(each.backward for each in found if layer.has_backward),
    )


IntTable = NDArray[np.int64]


class RowWork(NamedTuple):
    """Bytes [S] of one microbatch that grow with the samples."""

    saved: IntTable
    input: IntTable
    reducing: IntTable
    """Working memory that remains when the last gradient of the layer is made, without the gradient of its input."""
    forward: IntTable
    backward: IntTable
    read: IntTable
    """Bytes of `sample_bytes`."""
    on_host: IntTable
    """Bytes saved in host memory, and on the device while the layer runs; not part of ``saved``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRow:
    """A layer type under one or more legal strategies; arrays are [S]."""

    layer_type: LayerType
    chosen: Sequence[Strategy]
    numbers: Strategies
    states: IntTable
    """[17, S] `LayerStates.numbers` of each strategy."""
    lines: NDArray[np.float64]
    """[2, 4, S] constant and per-sample bytes: saved, input, forward and backward working memory."""
    inputs: IntTable
    """Recomputation buffers still live during gradient reduction, in multiples of the layer's input size."""
    needy: tuple[tuple[Strategy, tuple[Value, ...], IntTable], ...]
    """Strategies whose dimensions need more than was traced: one per group of equal needs, the modes that these depend
    on, and the indices of the group."""
    communicators: IntTable
    """Bytes of the communicators that the layer uses."""

    @classmethod
    def of(cls, layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> Self:
        """Return the row, shared by all configurations of a job with one microbatch, or with several."""
        key = "row", layer_type.name, config.has_several, tuple(chosen)
        return config.job.once(key, lambda: cls._of(layer_type, chosen, config))

    @classmethod
    def _of(cls, layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> Self:
        once, has_several = config.job.once, config.has_several
        name = layer_type.name
        cells = [once(("cell", name, each, has_several), partial(_cell, layer_type, each, config)) for each in chosen]
        numbers = np.array([each.numbers for each in cells]).T
        inputs, needs, communicators, *degrees = numbers
        alike: dict[object, tuple[Strategy, tuple[Value, ...], list[int]]] = {}
        for place in np.flatnonzero(needs).tolist():
            each = chosen[place].with_whole_experts()  # their division changes nothing that a dimension needs
            layer = layer_profile(layer_type, each, config)
            needing = (dimension for dimension in each.dimensions if dimension.working is not needs_nothing)
            modes = tuple([each.mode(mode.key) for dimension in needing for mode in dimension.modes])
            key = layer, each.sample_degree, each.token_degree, each.remat, modes
            alike.setdefault(key, (each, modes, []))[2].append(place)
        return cls(
            layer_type=layer_type,
            chosen=chosen,
            numbers=Strategies(*degrees),
            states=np.array([each.states for each in cells]).T,
            lines=np.array([each.lines for each in cells]).T.reshape(2, 4, -1),
            inputs=inputs,
            communicators=communicators,
            needy=tuple((strategy, modes, np.array(places)) for strategy, modes, places in alike.values()),
        )

    def work(self, config: JobConfig) -> RowWork:
        """Return the bytes in a configuration, which must have one or several microbatches as the row does."""
        samples = rank_samples(self.numbers, config.microbatch_samples)
        needed = np.zeros((4, len(self.chosen)))
        for strategy, modes, places in self.needy:
            layer = layer_profile(self.layer_type, strategy, config)
            of_rank = rank_samples(strategy, config.microbatch_samples)
            key = "needed", layer, of_rank, strategy.token_degree, strategy.remat, modes
            more = config.job.once(key, partial(working_bytes, layer, strategy, config))
            needed[0, places], needed[2, places], needed[3, places] = more.saved, more.forward, more.backward
        found = np.clip(self.lines[0] + self.lines[1] * samples + needed, -_BEYOND_BYTES, _BEYOND_BYTES)
        saved, entered, forward, backward = found.astype(np.int64)
        on_host = np.zeros_like(saved)
        if config.job.effects.saves_on_host and self.layer_type.role is LayerRole.BLOCK:
            saved, on_host = on_host, saved
        read = np.broadcast_to(sample_bytes(self.layer_type, self.numbers, config), saved.shape).astype(np.int64)
        return RowWork(saved, entered, self.inputs * entered, forward + on_host, backward + on_host, read, on_host)


class _Cell(NamedTuple):
    """Values of a layer type under a strategy that are independent of the samples."""

    states: tuple[int, ...]
    lines: tuple[float, ...]
    numbers: tuple[int, ...]
    """`LayerRow.inputs`, whether the strategy is in `LayerRow.needy`, `LayerRow.communicators`, and the fields of
    `Strategies`."""


def _cell(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> _Cell:
    layer, remat = layer_profile(layer_type, strategy, config), strategy.remat
    held = layer if remat is Remat.NONE else layer.recomputation(remat)
    lines = [held.saved_bytes, layer.input_bytes, held.forward_transient_bytes, held.backward_transient_bytes]
    kept = 3 if remat is Remat.FULL else 0  # under full remat they exist only in the backward pass
    lines[kept] = lines[kept] + _adapter_copies(layer, strategy, config.job)
    inputs = _RECOMPUTED_INPUTS if remat is Remat.FULL else 0
    is_needy = any(dimension.working is not needs_nothing for dimension in strategy.dimensions)
    plain = strategy.without_remat()  # remat repeats collectives in the same groups
    groups = partial(communicator_bytes, layer_type, plain, config)
    communicators = config.job.once(("groups", layer_type.name, plain), groups)
    degrees = strategy.sample_degree, strategy.token_degree, strategy.sequence_degree
    return _Cell(
        states=layer_states(layer_type, strategy, config).numbers,
        lines=(*(line.constant for line in lines), *(line.per_sample for line in lines)),
        numbers=(inputs, is_needy, communicators, *degrees),
    )
