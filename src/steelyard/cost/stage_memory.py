r"""The most bytes that a rank of a stage holds, found by walking through its passes layer by layer.

The search adds up what layers hold and puts the largest short-lived memory on top, since it must price a layer without
knowing the others. A finished plan is known whole: when layer $l$ of a stage works in a backward pass, the layers
behind it have freed what they saved, and in the first backward pass those before it have no gradients yet. With $n$
other microbatches in flight

$$M = \sum_j (p_j + o_j) + \sum_{j \in G} g_j + n \sum_j b_j + \sum_{j < l} (b_j + k_j) + b_l + u_l + \text{buffers}$$

and the bound is the largest $M$ over all passes and layers. Interleaved, the other chunks of the stage add what they
hold between their passes. The buffers are the gradient that arrived for a backward pass, the last that was sent, and
what arrives ahead; an activation that was sent, or arrived and is not what the first layer saves, counts in $b$. A
framework may have more of them (`Execution.buffers_every_microbatch`).

| symbol | bytes            | meaning                                                                               |
|--------|------------------|---------------------------------------------------------------------------------------|
| $p, o$ | 4 N / f, 8 N / f | parameters and optimizer states                                                       |
| $g$    | 4 N / f          | gradients, of the layers $G$ that have worked backwards before                        |
| $b$    | traced           | saved by one microbatch                                                               |
| $k$    | q N              | the copy that computes, of layers that keep one                                       |
| $u$    | see `_forward_bytes`, `_backward_bytes`, `LayerMemory` | what the layer needs while it works           |

Not modelled: what a redistribution between two layouts takes beyond its result.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from steelyard.cost.inputs import sample_bytes, side_bytes
from steelyard.cost.layer_memory import LayerMemory, layer_memory
from steelyard.cost.setting import MASTER_BYTES, Setting
from steelyard.model.chain import LayerRole
from steelyard.plan.shared import num_slices
from steelyard.plan.strategy import Remat, Strategy
from steelyard.schedules import Pass, Phase, PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayers:
    """The layers of one part of the pipeline, a stage or one of its chunks, with what enters and leaves it."""

    layers: tuple[LayerMemory, ...]
    received: int
    """The activation of a microbatch that comes from the part before; 0 on the first."""
    sent: int
    """The activation of a microbatch that goes to the next part; 0 on the last."""
    received_is_saved: bool
    """Whether the first layer works on the very tensor that arrived."""
    token_bytes: int
    """Token ids or images, and labels, of the whole step."""
    side_bytes: int
    """What all layers read beside the hidden state."""


class _Moment(NamedTuple):
    """The state of a part as one of its passes begins: microbatches in flight beside the pass's own, what was done."""

    in_flight: int
    is_backward: bool
    is_first: bool
    """Whether no backward pass has ended yet."""
    is_last_backward: bool
    follows_forward: bool
    finds_ahead: bool
    """Whether a backward pass before gathered the last sharded layer ahead."""


class _Pause(NamedTuple):
    """The state of a part while another chunk of its stage works."""

    in_flight: int
    has_gradients: bool
    is_done: bool
    """Whether all its backward passes have ended."""
    follows_forward: bool
    is_ahead: bool
    """Whether its last sharded layer was gathered ahead."""


_SLICES_HELD = 3
"""The sum, what is added to it, and the same in the order of the rows where a matrix is divided twice."""


class _Working(NamedTuple):
    """A stage as one of its chunks begins a pass."""

    chunk: int
    moment: _Moment
    target: int | None
    """The chunk of which the first sharded layer to work gathers the last one ahead; None where it gathers none."""
    pauses: tuple[_Pause, ...]
    """The states of all chunks, of the one that works too."""


_Sent = tuple[tuple[int, int], ...]
"""Of each chunk the forward and the backward passes that were done before."""


def stage_terms(parts: Sequence[PartLayers], index: int, setting: Setting, *, tied: int = 0) -> dict[str, int]:
    """The bytes of tensors by term at the moment when a rank of stage ``index`` holds most.

    ``parts`` are the stage, or its chunks in the order of the model; ``tied`` is what summing the gradients of shared
    parameters takes when the backward passes have ended.
    """
    layers = [layer for part in parts for layer in part.layers]
    sums = [_layer_sums(part, setting) for part in parts]
    best = _Held(
        gradients=sum(layer.kept_gradients for layer in layers),
        copies=0,
        activations=0,
        working=tied + sum(own.last_reduced + part.side_bytes for part, own in zip(parts, sums, strict=True)),
        buffers=0,
    )
    sharded = tuple(min(len(own.sharded), 2) for own in sums)
    keeps_sends = _keeps_sends(setting)
    for (chunk, moment, target, pauses), passed in _moments(index, setting.pipeline, sharded, keeps_sends):
        sent = _sent_bytes(parts, passed) if keeps_sends else 0
        ahead = 0 if target is None else sums[target].ahead
        paused = [_paused(*each) for place, each in enumerate(zip(parts, sums, pauses, strict=True)) if place != chunk]
        beside = _Held(*map(sum, zip(_Held(0, 0, 0, 0, sent), *paused, strict=True)))
        room = sum(best) - sum(beside)
        for held in _held_in_pass(parts[chunk], sums[chunk], moment, ahead):
            if sum(held) > room:
                best, room = _Held(*map(operator.add, held, beside)), sum(held)
    always = {
        "parameters": sum(layer.shard for layer in layers),
        "optimizer": sum(layer.states - layer.shard for layer in layers),
        "working set": best.working + sum(part.token_bytes for part in parts),
        "pipeline buffers": best.buffers + _buffer_bytes(parts, index, setting),
    }
    found = always | {
        "gradients": best.gradients,
        "gathered parameters": best.copies,
        "activations": best.activations,
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes > 0}


def _buffer_bytes(parts: Sequence[PartLayers], index: int, setting: Setting) -> int:
    """Buffers for what arrives that are there throughout, or may be at any time."""
    if setting.job.execution.buffers_every_microbatch:
        return setting.pipeline.num_microbatches * sum(part.received + part.sent for part in parts)
    activations, gradients = setting.pipeline.schedule.received_ahead(setting.pipeline, index)
    return activations * max(part.received for part in parts) + gradients * max(part.sent for part in parts)


class _Held(NamedTuple):
    """Bytes of what is not always there."""

    gradients: int
    copies: int
    activations: int
    working: int
    buffers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSums:
    """What each of the layers of a part finds in those before and behind it."""

    sharded: tuple[int, ...]
    """The places of sharded layers."""
    kept_gradients: tuple[int, ...]
    """[n + 1] of the layers from each place on"""
    reduced: tuple[int, ...]
    """[n + 1] the buffer of the nearest sharded layer from each place on"""
    gathered: tuple[int, ...]
    """[n + 1] the copy of the nearest sharded layer before each place"""
    prefetched: tuple[int, ...]
    """[n + 1] the same where it is to be gathered again for the backward pass, else 0"""
    received: int
    """What an activation that arrived takes beside what layers save; less than none where its buffer counts apart."""
    sent: int
    """What an activation that was sent takes with its microbatch; none where all sends count together."""
    arriving: int
    """What the gradient that arrives for a backward pass takes; none where its buffer counts apart."""
    kept: int
    """The gradient that was sent last; none where all sends count together."""
    in_flight: int
    """What a microbatch holds between its forward and its backward pass."""
    is_amid: tuple[bool, ...]
    """Of places with the same layer twice before and behind: what is held rises or falls evenly through them, so that
    it is most at one of the others."""

    @property
    def last_reduced(self) -> int:
        """The buffer of the layer that reduces last in a backward pass."""
        return self.reduced[0]

    @property
    def ahead(self) -> int:
        """The parameters of the last sharded layer."""
        return self.gathered[-1]


def _layer_sums(part: PartLayers, setting: Setting) -> _LayerSums:
    layers, apart = part.layers, setting.job.execution.buffers_every_microbatch
    received = (0 if apart else part.received) - (part.received if part.received_is_saved else 0)
    sent = 0 if _keeps_sends(setting) else part.sent
    kept, reduced, gathered, prefetched = [0], [0], [0], [0]
    for layer in reversed(layers):
        kept.append(kept[-1] + layer.kept_gradients)
        reduced.append(layer.reduced if layer.shards > 1 and layer.params else reduced[-1])
    for layer in layers:
        gathered.append(layer.copy if layer.shards > 1 else gathered[-1])
        again = 0 if layer.keeps_copy or not layer.has_backward else layer.copy
        prefetched.append(again if layer.shards > 1 else prefetched[-1])
    return _LayerSums(
        sharded=tuple(place for place, layer in enumerate(layers) if layer.shards > 1),
        kept_gradients=tuple(reversed(kept)),
        reduced=tuple(reversed(reduced)),
        gathered=tuple(gathered),
        prefetched=tuple(prefetched),
        received=received,
        sent=sent,
        arriving=0 if apart else part.sent,
        kept=0 if _keeps_sends(setting) else part.received,
        in_flight=sum(layer.saved for layer in layers) + part.side_bytes + received + sent,
        is_amid=tuple(
            2 <= place < len(layers) - 2
            and layers[place - 2] is layers[place - 1] is layer is layers[place + 1] is layers[place + 2]
            for place, layer in enumerate(layers)
        ),
    )


def _keeps_sends(setting: Setting) -> bool:
    """Whether what a stage sent stays until the step ends."""
    return setting.job.execution.buffers_every_microbatch and setting.pipeline.schedule.keeps_sends


def _sent_bytes(parts: Sequence[PartLayers], passed: _Sent) -> int:
    """All that a stage has sent in these passes."""
    pairs = zip(parts, passed, strict=True)
    return sum(forwards * part.sent + backwards * part.received for part, (forwards, backwards) in pairs)


@lru_cache(maxsize=4096)
def _moments(
    index: int, pipeline: PipelineConfig, num_sharded: tuple[int, ...], keeps_sends: bool
) -> tuple[tuple[_Working, _Sent], ...]:
    """The states of `_all_moments` that hold most: none alike has as much in flight, and sent where ``keeps_sends``."""
    alike: dict[object, dict[tuple[int, ...], tuple[_Working, _Sent]]] = {}
    for (chunk, moment, target, pauses), passed in _all_moments(index, pipeline, num_sharded).items():
        in_flight = [moment.in_flight, *(pause.in_flight for pause in pauses)]
        counts = (*in_flight, *(itertools.chain(*passed) if keeps_sends else ()))
        likeness = chunk, moment[1:], target, *(pause[1:] for pause in pauses), *map(bool, in_flight)
        rivals = alike.setdefault(likeness, {})
        if not any(all(map(operator.ge, rival, counts)) for rival in rivals):
            for rival in [rival for rival in rivals if all(map(operator.le, rival, counts))]:
                del rivals[rival]
            rivals[counts] = _Working(chunk, moment, target, pauses), passed
    return tuple(state for rivals in alike.values() for state in rivals.values())


def _all_moments(index: int, pipeline: PipelineConfig, num_sharded: tuple[int, ...]) -> dict[_Working, _Sent]:
    """The distinct states in which a stage begins a pass, and what was done before when each was there last.

    ``num_sharded`` counts the sharded layers of each chunk, 2 for more.
    """
    found: dict[_Working, _Sent] = {}
    begin = _Pause(in_flight=0, has_gradients=False, is_done=False, follows_forward=False, is_ahead=False)
    pauses = [begin for _ in num_sharded]
    passed = [(0, 0) for _ in num_sharded]
    forwards: list[int] = []
    """The chunks of the forward passes so far that have sharded layers."""
    in_flight: list[list[int]] = [[] for _ in num_sharded]
    """How many of them came before each forward pass of a chunk that waits for its backward pass."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    for phase, chunk, _ in _passes(index, pipeline):
        is_backward = phase is backward
        assert is_backward or phase is forward, f"the walk knows no pass of the phase {phase}"
        before, target = pauses[chunk], None
        if is_backward:
            num_before = in_flight[chunk].pop()
            target = _gathered_ahead(chunk, forwards[num_before - 1] if num_before else None, num_sharded)
        else:
            in_flight[chunk].append(len(forwards))
            forwards += [chunk] if num_sharded[chunk] else []
        is_last = is_backward and passed[chunk][1] + 1 == pipeline.num_microbatches
        moment = _Moment(
            in_flight=before.in_flight - is_backward,
            is_backward=is_backward,
            is_first=not before.has_gradients,
            is_last_backward=is_last,
            follows_forward=before.follows_forward,
            finds_ahead=before.is_ahead,
        )
        found[_Working(chunk, moment, target, tuple(pauses))] = tuple(passed)
        passed[chunk] = (passed[chunk][0] + (not is_backward), passed[chunk][1] + is_backward)
        pauses[chunk] = _Pause(
            in_flight=before.in_flight + (-1 if is_backward else 1),
            has_gradients=before.has_gradients or is_backward,
            is_done=is_last,
            follows_forward=not is_backward,
            is_ahead=False,
        )
        if target is not None and not pauses[target].is_done:
            pauses[target] = pauses[target]._replace(is_ahead=True)
    return found


def _gathered_ahead(chunk: int, before: int | None, num_sharded: Sequence[int]) -> int | None:
    """The chunk whose last sharded layer FSDP gathers as the first one of ``chunk`` works backwards, None for none.

    That is the chunk ``before``, of the nearest forward pass of the step with sharded layers before the one that ends
    here, whether its microbatch is in flight or done. A layer that is at work itself is not gathered again.
    """
    is_at_work = before == chunk and num_sharded[chunk] == 1
    return before if num_sharded[chunk] and not is_at_work else None


def _passes(index: int, pipeline: PipelineConfig) -> Iterable[Pass]:
    """The passes of a stage; without a pipeline each microbatch goes forward and backward before the next."""
    if pipeline.num_stages > 1:
        return pipeline.passes(index)
    phases = (Phase.FORWARD, Phase.BACKWARD)
    return [Pass(phase, 0, microbatch) for microbatch in range(pipeline.num_microbatches) for phase in phases]


def _paused(part: PartLayers, sums: _LayerSums, pause: _Pause) -> _Held:
    """What a chunk holds between its passes."""
    copies = 0
    for layer in part.layers:
        begun = pause.in_flight > 0 or pause.has_gradients
        stays = pause.in_flight > 0 and pause.follows_forward if layer.shards > 1 else begun and not pause.is_done
        copies += layer.copy if layer.keeps_copy and stays else 0
    return _Held(
        gradients=sums.kept_gradients[0] if pause.has_gradients else 0,
        copies=copies,
        activations=pause.in_flight * sums.in_flight,
        working=(sums.last_reduced if pause.has_gradients else 0) + (sums.ahead if pause.is_ahead else 0),
        buffers=sums.kept if pause.has_gradients else 0,
    )


def _held_in_pass(part: PartLayers, sums: _LayerSums, moment: _Moment, ahead: int) -> Iterator[_Held]:
    """What is held at the fullest moment of each layer in one pass, without those amid layers like them.

    ``ahead`` are the bytes that the first sharded layer gathers ahead in a backward pass. In a backward pass the next
    layer to work is gathered, and the layer that worked before still reduces, until this one does if it is sharded.
    """
    layers = part.layers
    activations = moment.in_flight * sums.in_flight + (sums.sent if moment.is_backward else 0)
    activations += part.side_bytes + sums.received
    buffers = (0 if moment.is_first else sums.kept) + (sums.arriving if moment.is_backward else 0)
    copies = sum(layer.copy for layer in layers if layer.keeps_copy and _stays(layer, moment))
    gradients = 0 if moment.is_first else sums.kept_gradients[0]
    for place, layer in enumerate(layers):
        copies += layer.copy if layer.keeps_copy and not _stays(layer, moment) else 0
        activations += layer.saved
        if sums.is_amid[place]:
            continue
        if not moment.is_backward:
            working = _forward_bytes(layer, sums, place) + _waiting_bytes(sums, place, moment)
            working += _reducing_bytes(sums, len(layers), moment)
            yield _Held(gradients, copies, activations, working, buffers)
            continue
        if not layer.has_backward:
            continue
        if moment.is_first:
            gradients = sums.kept_gradients[place + 1]
        prefetched = _prefetched_bytes(sums, place, moment, ahead)
        reducing = _reducing_bytes(sums, place + 1, moment)
        yield _Held(gradients, copies, activations, _backward_bytes(layer) + prefetched + reducing, buffers)
        rest = copies - (layer.copy if layer.drops_copy else 0)
        working = layer.reduction_bytes(is_first=moment.is_first) + prefetched
        working += reducing if layer.shards == 1 or not layer.params else 0
        yield _Held(gradients, rest, activations - layer.freed, working, buffers)


def _stays(layer: LayerMemory, moment: _Moment) -> bool:
    """Whether the copy that computes lives throughout the pass, and not only once the layer has worked, or until then.

    That of a sharded layer lives from its forward pass to the next backward pass, that of a replicated layer from the
    first forward pass of a step to the last backward pass; one that is frozen keeps it until the step ends.
    """
    if layer.shards > 1:
        return not moment.is_backward and moment.in_flight > 0 and moment.follows_forward
    if not layer.params:
        return True
    if moment.is_backward:
        return not moment.is_last_backward
    return moment.in_flight > 0 or not moment.is_first


def _forward_bytes(layer: LayerMemory, sums: _LayerSums, place: int) -> int:
    """Working activations, for a sharded layer its parameters, and the buffer of the last gathering.

    FSDP holds what it gathered in until the next sharded layer has its parameters, or the forward pass ends.
    """
    gathered, before = 0 if layer.keeps_copy else layer.copy, sums.gathered[place]
    if layer.shards == 1:
        return layer.forward + gathered + before
    return gathered + layer.copy + max(layer.forward, before)


def _backward_bytes(layer: LayerMemory) -> int:
    """While autograd works: activations, parameters and new gradients, without what its neighbours take."""
    return layer.backward + layer.made_gradients + (0 if layer.keeps_copy else layer.copy)


def _prefetched_bytes(sums: _LayerSums, place: int, moment: _Moment, ahead: int) -> int:
    """The parameters that FSDP gathers ahead in a backward pass, of the sharded layer that works next.

    It does so as a sharded layer begins to work; after the first one comes the last one of the forward pass before
    (`_gathered_ahead`), which then waits for the next pass.
    """
    if not sums.sharded:
        return 0
    if place > sums.sharded[-1]:
        return sums.ahead if moment.finds_ahead else 0
    return ahead if place <= sums.sharded[0] else sums.prefetched[place]


def _waiting_bytes(sums: _LayerSums, place: int, moment: _Moment) -> int:
    """The same in a forward pass: what the backward pass before it gathered for the last sharded layer."""
    is_waiting = moment.finds_ahead and bool(sums.sharded) and place < sums.sharded[-1]
    return sums.ahead if is_waiting else 0


def _reducing_bytes(sums: _LayerSums, first: int, moment: _Moment) -> int:
    """The buffer of the last reduction before the layers from ``first`` on, which FSDP holds until the next one.

    Within a backward pass that is the nearest sharded layer behind. Before the first layer that reduces it is the one
    that reduced last in the backward pass before.
    """
    behind = sums.reduced[first]
    return behind if behind or moment.is_first else sums.last_reduced


def tied_bytes(parts: Sequence[range], strategies: Sequence[Strategy], stage: int, setting: Setting) -> int:
    """What a rank of a stage needs to sum the gradients of the vocabulary's matrix: slices of it in fp32.

    ``parts`` are the layers of each part of the pipeline, ``strategies`` those of all layers.
    """
    chain = setting.job.chain
    mine = {layer for part in parts[stage :: setting.pipeline.num_stages] for layer in part}
    most = 0
    for shared in chain.summed:
        count = num_slices(shared, strategies, chain)
        copies = [layer for layer, _ in shared.copies if layer in mine]
        if copies and count is not None and chain.kind_of(copies[0]).role is not LayerRole.BLOCK:
            width = -(-chain.hidden_size // count)
            most = max(most, _SLICES_HELD * MASTER_BYTES * chain.vocab_size * width)
    return most


def hidden_bytes(layer: int, strategy: Strategy, setting: Setting) -> int:
    """A rank's share of what flows out of a layer of this strategy, for one microbatch: all streams."""
    return _share_bytes(setting.job.chain.num_flowing(layer, setting.job.seq_len), strategy, setting)


def made_bytes(layer: int, strategy: Strategy, setting: Setting) -> int:
    """The same without what flows past the layer."""
    return _share_bytes(setting.job.chain.num_made(layer, setting.job.seq_len), strategy, setting)


def _share_bytes(num_entries: int, strategy: Strategy, setting: Setting) -> int:
    """A rank's share of so many entries of every sample of a microbatch."""
    samples = setting.microbatch_samples // strategy.sample_degree
    return samples * num_entries * setting.job.compute_bytes // strategy.sequence_degree


def part_layers(parts: Sequence[range], strategies: Sequence[Strategy], index: int, setting: Setting) -> PartLayers:
    """What part ``index`` of a pipeline with these layers in its parts, and these strategies of layers, consists of."""
    places, chain = parts[index], setting.job.chain
    first, last = places[0], places[-1]
    is_last = index == len(parts) - 1
    before = strategies[first - 1] if index else None
    if before is not None and before.num_devices != strategies[first].num_devices:
        before, arrives_in_parts = strategies[first], True
    else:
        arrives_in_parts = False
    known: dict[tuple[int, Strategy], LayerMemory] = {}
    for place in places:
        key = chain.layers[place], strategies[place]
        if key not in known:
            known[key] = layer_memory(chain.kinds[key[0]], key[1], setting)
    layers = [known[chain.layers[place], strategies[place]] for place in places]
    sent = 0 if is_last else hidden_bytes(last, strategies[last], setting)
    made = 0 if is_last else made_bytes(last, strategies[last], setting)
    backward = backward_sending(layers[-1], strategies[last], made)
    layers[-1] = replace(layers[-1], backward=backward)
    for place, waiting in chain.num_read_behind(places, setting.job.seq_len):
        added = _share_bytes(waiting, strategies[places[place]], setting)
        layers[place] = replace(layers[place], backward=layers[place].backward + added)
    return PartLayers(
        layers=tuple(layers),
        received=0 if before is None else hidden_bytes(first - 1, before, setting),
        sent=sent,
        received_is_saved=before is not None and before.hidden == strategies[first].hidden and not arrives_in_parts,
        token_bytes=sum(sample_bytes(chain.kind_of(place), strategies[place], setting) for place in places),
        side_bytes=side_bytes({chain.kind_of(place) for place in places}, setting),
    )


def backward_sending(layer: LayerMemory, strategy: Strategy, made: int) -> int:
    """What the last layer of a part works with without its output and the gradient of that, which are the pipeline's.

    While full remat computes the layer again, what it works with has the gradient alone.
    """
    copies = 1 if strategy.remat is Remat.FULL else 2
    return max(0, layer.backward - copies * made)
