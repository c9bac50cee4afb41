"""Measurement of the layers of each type as the runtime runs them: forward and backward seconds by number of samples.

All processes run a short chain (embedding, two blocks, head) at the same time, cut at the borders of its layers: each
layer meets the caches that its neighbours leave, and processors that are shared between processes are shared in the
measurement as well. Tensor-parallel groups are real and take neighbouring ranks. Every layer is a replica over a group
of one rank, so the seconds include what the runtime does around it but not its collectives. Gradients accumulate, as
over the microbatches of a step. The time added by a remat choice is measured with that choice set at once in all layers
that may take it.

The seconds of a layer are the mean over the faster half of the repetitions and over the ranks, scaled so that the chain
takes as long as on its slowest rank, because a step waits for that one: if processes share processors, some finish
early and leave theirs idle.

Positions and masks, which a stage makes once per microbatch, count with the embedding.

Legend of shapes: B samples of this rank, S sequence length, s sequence of this rank (S/tp under sp), H hidden size.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils import _pytree as pytree

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, materialize_layer, prepare_model
from steelyard.modules.dimensions import divide_layer
from steelyard.modules.freezing import rest_in
from steelyard.modules.layers import (
    BlockLayer,
    ChainLayer,
    Flow,
    LayerContext,
    SharedInputSource,
    as_flow,
    build_layer,
    shared_inputs_of,
    tensors_of,
)
from steelyard.modules.levers import change_layer
from steelyard.modules.model_inputs import decoder_inputs, random_samples
from steelyard.modules.own_pieces import OwnBatch, OwnModel
from steelyard.modules.replicated import activation_dtype, replicate_over, shard_over
from steelyard.plan.strategy import Remat, Strategy
from steelyard.precision import LayerPrecision
from steelyard.profiler.clock import Stopwatch, barrier, fast_half_columns, fast_half_mean, num_repetitions, over_ranks
from steelyard.profiles.profile import MeasuredTime

_NUM_OF_A_TYPE = 2
"""Number of blocks of a type; embeddings and heads have one of each type."""
_NUM_MICROBATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortChain:
    """A few layers of a model with parameters on a device, ready to run as the runtime runs them."""

    layer_types: tuple[str, ...]
    layers: tuple[ChainLayer, ...]
    side: SharedInputSource
    seq_len: int
    dtype: torch.dtype
    chain: ModelChain
    places: tuple[int, ...]
    """Places of the layers in the chain of the model."""
    device: torch.device
    strategy: Strategy
    """Strategy that divides the layers' shapes, of one level at most."""
    own: OwnModel | None = None
    """User's own module that the layers belong to."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of all layers."""
        return [each for layer in self.layers for each in layer.parameters() if each.requires_grad]

    def microbatch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer and the labels [B, S], the same on all ranks.

        The input is token ids [B, S] or a hidden state [B, s, H].
        """
        generator = torch.Generator().manual_seed(samples)
        if self.own is not None:  # its layers read samples themselves
            inputs = labels = torch.zeros(samples)
        else:
            inputs, labels = random_samples(self.chain, samples, self.seq_len, generator)
        if self.places[0] == 0:
            return inputs.to(self.device), labels.to(self.device)
        sequence, *rest = self.chain.flow_shapes(self.places[0] - 1, self.seq_len)[0]
        shape = (samples, sequence // self.strategy.sequence_degree, *rest)
        hidden = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return hidden, labels.to(self.device)

    def entering(self, number: int, flow: Flow) -> Flow:
        """Return a layer's input for the output ``flow`` of the layer before: as many hidden states as it reads.

        Other inputs, which other layers may make in the model, are made here. An input needs a gradient if it does in
        the model.
        """
        place = self.places[number]
        waiting = tensors_of(flow)  # a compiled block gives no gradient to a tensor still being communicated
        tensors = [(each.wait() if isinstance(each, AsyncCollectiveTensor) else each).detach() for each in waiting]
        if not place:
            return tensors[0]
        wanted, parts = self.chain.type_of(place - 1).num_streams, self.strategy.sequence_degree
        read = [tensors[min(each, len(tensors) - 1)] for each in range(wanted)]
        given, options = self.chain.read(place, self.seq_len), {"dtype": self.dtype, "device": self.device}
        if wanted > 1 and given[0].shape != given[1].shape:  # the decoder's state differs in length from the encoder's
            read[1:] = [torch.randn((len(read[0]), *each.shape), **options) for each in given[1:wanted]]
        for each in given[wanted:]:
            dtype = getattr(torch, each.whole) if each.whole else self.dtype
            made = torch.zeros if each.whole else torch.randn
            read.append(made((len(read[0]), each.shape[0] // parts, *each.shape[1:]), dtype=dtype, device=self.device))
        for tensor, each in zip(read, given, strict=True):
            tensor.requires_grad_(each.needs_gradient and tensor.is_floating_point())
        return as_flow(tuple(read))


def layer_meshes(degree: int, device_type: str) -> DeviceMesh:
    """Return the world as axes ``data``, ``shape`` (neighbouring ranks) and ``one`` (of size 1); a collective call."""
    sizes = (dist.get_world_size() // degree, degree, 1)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("data", "shape", "one"))


def build_short_chain(
    chain: ModelChain,
    layer_types: Collection[str],
    *,
    strategy: Strategy,
    seq_len: int,
    precision: LayerPrecision,
    device: torch.device,
    mesh: DeviceMesh,
    shard_mesh: DeviceMesh | None = None,
    own: OwnModel | None = None,
) -> ShortChain:
    """Build one layer of each of ``layer_types`` (two of a block) with first weights on ``device``, under ``strategy``.

    Layers are sharded over the one axis of ``shard_mesh`` if it is given, and else are replicas without others. ``own``
    is the user's own module that the chain is of; a copy of it is divided.
    """
    picked = [layer for layer in chain.first_of_each_type(_NUM_OF_A_TYPE) if chain.type_of(layer).name in layer_types]
    if own is None:
        model = build_meta_model(chain)
        prepare_model(model, chain)
    else:
        model = own = OwnModel(copy.deepcopy(own.module), own.split, own.loss, own.sample)
    layers = []
    for place in picked:
        materialize_layer(model, chain, place, seed=0, device=device)
        layers.append(layer := build_layer(model, chain, place, Remat.NONE))
        divide_layer(layer, chain, strategy, mesh["shape"])
        change_layer(layer, chain)
        if chain.freeze is not None:
            rest_in(layer, activation_dtype(precision))
        if shard_mesh is not None:
            shard_over(layer, shard_mesh, precision, reshard_after_forward=True)
        else:
            replicate_over(layer, mesh["one"], precision)
    return ShortChain(
        layer_types=tuple(chain.type_of(layer).name for layer in picked),
        layers=tuple(layers),
        side=shared_inputs_of(layers, model, chain, device),
        seq_len=seq_len,
        dtype=activation_dtype(precision),
        chain=chain,
        places=tuple(picked),
        device=device,
        strategy=strategy,
        own=own,
    )


Laps = dict[tuple[int, Remat], list[list[float]]]
"""Seconds of each layer on this rank, forward then backward, of every repetition: by samples and remat choice."""


def measure_laps(short: ShortChain, samples: Sequence[int], *, budget_s: float, least: int) -> Laps:
    """Return the repetitions for each number of samples; a collective call.

    ``budget_s`` is divided so that every number of samples gets equally many repetitions, ``least`` at least. The time
    added by a remat choice is measured only at the middle number: it is a part of the forward pass once more, and the
    same fraction of it at every number.
    """
    counts = sorted(set(samples))
    middle = middle_of(counts)
    repetition_laps(short, counts[0])
    found: Laps = {}
    for count in counts:
        share_s = budget_s * count / (sum(counts) + 2 * middle)
        for remat in Remat if count == middle else (Remat.NONE,):
            choosing = [layer for layer in short.layers if _may_choose(layer, remat)]
            for layer in choosing:
                layer.remat = remat
            if any(layer.compiled is not None for layer in short.layers):
                repetition_laps(short, count)  # each number of samples is compiled separately
            found[count, remat] = _rows(short, count, budget_s=share_s, least=least)
            for layer in choosing:
                layer.remat = Remat.NONE
    return found


def middle_of(samples: Sequence[int]) -> int:
    """Return the middle one of several numbers of samples."""
    counts = sorted(set(samples))
    return counts[len(counts) // 2]


def times_of(short: ShortChain, rounds: Sequence[Laps]) -> dict[str, tuple[MeasuredTime, ...]]:
    """Return the times of each layer type in the chain, from all repetitions of all rounds; a collective call."""
    times = {key: _times_by_type(short, [row for each in rounds for row in each[key]], key[1]) for key in rounds[0]}
    counts = sorted({count for count, _ in times})
    plain = {count: times[count, Remat.NONE] for count in counts}
    added: dict[Remat, float] = {}
    for (count, remat), slower in times.items():
        if remat is not Remat.NONE and slower:
            # relative to the forward pass, for all layer types that take it together: for one type it is a difference
            # of two close numbers, and for a short head less than their noise
            before = [plain[count][layer_type] for layer_type in slower]
            added_s = sum(map(sum, slower.values())) - sum(map(sum, before))
            added[remat] = max(added_s, 0.0) / sum(forward_s for forward_s, _ in before)
    return {
        layer_type: tuple(
            MeasuredTime(
                samples=count,
                forward_s=forward_s,
                backward_s=backward_s,
                full_s=forward_s * added[Remat.FULL],
                selective_s=forward_s * added[Remat.SELECTIVE] if isinstance(layer, BlockLayer) else None,
            )
            for count in counts
            for forward_s, backward_s in [plain[count][layer_type]]
        )
        for layer_type, layer in zip(short.layer_types, short.layers, strict=True)
    }


def _may_choose(layer: ChainLayer, remat: Remat) -> bool:
    """Return whether a layer may take a remat choice: selective remat, which keeps matrix products, is for blocks."""
    return remat is not Remat.SELECTIVE or isinstance(layer, BlockLayer)


def _times_by_type(short: ShortChain, rows: Sequence[Sequence[float]], remat: Remat) -> dict[str, tuple[float, float]]:
    """Return forward and backward seconds of each layer type that may take a remat choice, under that choice."""
    slowest_s = over_ranks([sum(row) for row in rows], short.device, dist.ReduceOp.MAX)
    summed = over_ranks(fast_half_columns(rows, slowest_s), short.device, dist.ReduceOp.SUM)
    stretch = fast_half_mean(slowest_s) / sum(summed)
    laps_s = [seconds * stretch for seconds in summed]
    laps = zip(laps_s[: len(short.layers)], laps_s[len(short.layers) :], strict=True)
    found: dict[str, list[tuple[float, float]]] = {}
    for name, layer, lap in zip(short.layer_types, short.layers, laps, strict=True):
        if _may_choose(layer, remat):
            found.setdefault(name, []).append(lap)
    return {name: (fmean(lap[0] for lap in own), fmean(lap[1] for lap in own)) for name, own in found.items()}


def run_microbatch(short: ShortChain, entering: Tensor, labels: Tensor, watch: Stopwatch) -> None:
    """Run one microbatch with a mark after each layer: forward in order, then backward reversed."""
    watch.mark()
    context = LayerContext(
        side=short.side(short.seq_len, short.dtype, short.device),
        labels_BS=labels,
        num_targets=labels.numel(),
        decoder_ids=decoder_inputs(labels, short.side.model_config, short.chain.features) if labels.dim() > 1 else None,
        batch=None if short.own is None else _read(short, short.own, len(labels)),
    )
    inputs: list[Flow] = []
    outputs: list[Flow] = []
    hidden: Flow = entering
    with loss_parallel() if short.strategy.tensor_degree > 1 else nullcontext():
        for number, layer in enumerate(short.layers):
            inputs.append(short.entering(number, hidden))
            outputs.append(layer(inputs[-1], context))
            hidden = outputs[-1]
            watch.mark()
        gradients = [
            torch.randn_like(each) if each.dim() and each.requires_grad else None for each in tensors_of(hidden)
        ]
        while outputs:
            made, states = tensors_of(outputs.pop()), short.chain.type_of(short.places[len(outputs)]).num_streams
            entered = list(zip(made[:states], gradients[:states], strict=True))
            entered += [(each, torch.zeros_like(each)) for each in made[states:]]
            trained = [(each, gradient) for each, gradient in entered if each.requires_grad]
            if trained:
                torch.autograd.backward(*map(list, zip(*trained, strict=True)))
            gradients = [each.grad for each in tensors_of(inputs.pop())]
            watch.mark()


def _read(short: ShortChain, own: OwnModel, samples: int) -> dict[int, OwnBatch]:
    """Return inputs of the layers of a user's own module: its sample, repeated as often as needed."""

    def repeated(each: Tensor) -> Tensor:
        return each.detach()[torch.arange(samples) % len(each)]

    read = pytree.tree_map_only(Tensor, repeated, own.sample)
    side = short.side(short.seq_len, short.dtype, short.device)
    batch = OwnBatch(read, own.split, side.of_samples, dtype=short.dtype, device=short.device)
    return dict.fromkeys(short.places, batch)


def _rows(short: ShortChain, samples: int, *, budget_s: float, least: int) -> list[list[float]]:
    """Return the laps of as many repetitions as the budget allows."""
    first = repetition_laps(short, samples)
    once_s = _NUM_MICROBATCHES * over_ranks([sum(first)], short.device, dist.ReduceOp.MAX)[0]
    num_more = num_repetitions(once_s, budget_s - once_s, least=least - 1)
    return [first, *(repetition_laps(short, samples) for _ in range(num_more))]


def repetition_laps(short: ShortChain, samples: int) -> list[float]:
    """Seconds of each layer per microbatch, forward then backward, on this rank, from a few microbatches in a row."""
    entering, labels = short.microbatch(samples)
    watch = Stopwatch(short.device)
    barrier(short.device)
    total_s = [0.0] * (2 * len(short.layers))
    for _ in range(_NUM_MICROBATCHES):
        run_microbatch(short, entering, labels, watch)
        laps = watch.laps_s()
        in_order = laps[: len(short.layers)] + laps[: len(short.layers) - 1 : -1]
        total_s = [total + lap for total, lap in zip(total_s, in_order, strict=True)]
    return [total / _NUM_MICROBATCHES for total in total_s]
