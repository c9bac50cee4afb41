"""Profile of a model, as versioned JSON: costs of one layer of each type, counted on fake tensors or measured.

Quantities of a layer that grow with the batch are affine in the samples of one rank: ``constant`` + ``per_sample`` ×
samples. Shapes are those of one rank: a layer of tensor-parallel degree 4 has a quarter of the heads.

Traced profiles (``method: traced``) have work (FLOP and bytes) that the cost model prices on a catalogue device.
Measured profiles (``method: measured``) also have seconds of layers and of collectives. Two measurements of the same
model and devices can be merged into one profile with the samples, shapes and collectives of both.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from steelyard.errors import InvalidProfileError
from steelyard.files import FilePart
from steelyard.hardware import DeviceType
from steelyard.limits import (
    MOST_DEVICES,
    Bytes,
    BytesPerS,
    Count,
    DeviceCount,
    FlopPerS,
    PositiveSeconds,
    Samples,
    Seconds,
    Tokens,
)
from steelyard.precision import LayerPrecision
from steelyard.profiles.shapes import Affine, AttentionCall, Product

RematChoice = Literal["selective", "full"]
"""Remat choices that recompute something."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


class Work(FilePart):
    """Work of one pass of a layer on a device.

    ``matmul_flop`` and ``attention_flop`` run on the matrix units. ``matmul_bytes`` are read and written by matmuls and
    attention, ``memory_bytes`` by all other operations. ``num_kernels`` counts kernel launches.
    ``low_precision_flop`` is the part of ``matmul_flop`` with 8-bit operands, ``fp32_flop`` that of fp32 adapters in a
    layer that computes in 16 bits, ``expert_weight_bytes`` the part of ``matmul_bytes`` that is weights of routed
    experts or their gradients, and ``expert_kernels`` the part of ``num_kernels`` that is launched separately for each
    of a rank's experts. ``products`` and ``attention`` are the shapes of matmuls and attention; convolutions and
    profiles from before shapes were recorded have none.
    """

    matmul_flop: Affine
    low_precision_flop: Affine = Field(default=Affine(), exclude_if=lambda line: line == Affine())
    fp32_flop: Affine = Field(default=Affine(), exclude_if=lambda line: line == Affine())
    attention_flop: Affine
    matmul_bytes: Affine
    expert_weight_bytes: float = 0.0
    memory_bytes: Affine
    num_kernels: Count
    expert_kernels: Annotated[Count, Field(exclude_if=lambda count: count == 0)] = 0
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionCall, ...] = ()

    def with_experts_over(self, degree: int) -> "Work":
        """Return the work of a rank that reads only the weights of 1 in ``degree`` experts."""
        left = self.expert_weight_bytes / degree
        fewer = self.matmul_bytes.constant - (self.expert_weight_bytes - left)
        own_kernels = self.expert_kernels // degree
        return self.model_copy(
            update={
                "num_kernels": self.num_kernels - (self.expert_kernels - own_kernels),
                "expert_kernels": own_kernels,
                "matmul_bytes": self.matmul_bytes.model_copy(update={"constant": fewer}),
                "expert_weight_bytes": left,
                "products": tuple(each.with_experts_over(degree) for each in self.products),
            }
        )


class CollectiveCount(FilePart):
    """Calls of one collective over the tensor-parallel ranks in one pass of a layer.

    ``tensor_bytes`` is the size of the whole tensor that is reduced or gathered, summed over the ``count`` calls.
    """

    kind: Collective
    count: Count
    tensor_bytes: Affine


class MeasuredTime(FilePart):
    """Seconds of one layer for ``samples`` samples on a rank, including tensor-parallel collectives.

    ``selective_s`` and ``full_s`` are the seconds that a remat choice adds to forward and backward pass together.
    """

    samples: Samples
    forward_s: PositiveSeconds
    backward_s: PositiveSeconds
    selective_s: Seconds | None = None
    """Absent if the choice does not apply to the layer or was not measured."""
    full_s: Seconds | None = None
    """Absent if it was not measured."""

    def faster(self, speed: float) -> Self:
        """Return the times on a rank that is ``speed`` times as fast."""
        return self.model_copy(
            update={name: seconds / speed for name, seconds in self if name.endswith("_s") and seconds is not None}
        )


class Recomputation(FilePart):
    """A layer under one remat choice: its bytes, and the additional work of its backward pass.

    The bytes replace the fields of the same name in `LayerProfile`.
    """

    remat: RematChoice
    work: Work
    collectives: tuple[CollectiveCount, ...] = ()
    saved_bytes: Affine
    forward_transient_bytes: Affine
    backward_transient_bytes: Affine


Shape = Mapping[str, int]
"""Degrees, by name, that change the shapes of a layer on a rank: tp, and sp alongside tp."""


class LayerProfile(FilePart):
    """One layer type under the degrees that change its shapes; degrees of 1 are omitted.

    ``num_params``: parameters on one rank before data sharding, ``expert_params`` of them in routed experts;
    ``frozen_params`` and ``frozen_expert_params``: the part that is not trained. ``saved_bytes``: saved for backward
    without remat, including the input; ``input_bytes``: input activation. ``forward_transient_bytes`` and
    ``backward_transient_bytes``: peak of short-lived memory beyond saved activations, parameters and their gradients.
    ``recomputations``: one entry per remat choice of the layer. ``buffer_bytes``: buffers that are not trained, and
    AdamW's step count of each parameter.
    """

    kind: str
    degrees: dict[str, Annotated[int, Field(ge=2, le=MOST_DEVICES)]] = Field(default_factory=dict)
    num_params: Bytes
    expert_params: Bytes = 0
    frozen_params: Bytes = Field(default=0, exclude_if=lambda count: count == 0)
    frozen_expert_params: Bytes = Field(default=0, exclude_if=lambda count: count == 0)
    forward: Work
    backward: Work
    forward_collectives: tuple[CollectiveCount, ...] = ()
    backward_collectives: tuple[CollectiveCount, ...] = ()
    saved_bytes: Affine
    input_bytes: Affine
    forward_transient_bytes: Affine
    backward_transient_bytes: Affine
    recomputations: tuple[Recomputation, ...]
    buffer_bytes: Bytes = 0
    key_value_bytes: Affine = Affine()
    """Bytes of keys and values that attention reads."""
    attention_bytes: Affine = Affine()
    """Bytes of queries, keys, values and outputs of attention."""
    adapter_inputs: Affine = Field(default=Affine(), exclude_if=lambda line: line == Affine())
    """Entries of the inputs of all adapters, counted for each adapter separately."""
    shared_adapter_inputs: Affine = Field(default=Affine(), exclude_if=lambda line: line == Affine())
    """Entries of tensors that are saved only for adapters, each counted once even if several adapters read it."""
    square_flop: Affine | None = None
    """Attention FLOP of a forward pass if every query attended to every key; absent in older profiles."""
    divided_experts: tuple["LayerProfile", "LayerProfile"] | None = None
    """The layer under expert parallelism, on a rank that computes as many token-expert pairs as its own tokens have and
    on a rank that computes twice as many. Absent without routed experts."""
    times: tuple[MeasuredTime, ...] = ()
    """Measured times in ascending order of samples, without duplicates."""

    def __hash__(self) -> int:
        work = self.forward.matmul_flop.per_sample, self.forward.matmul_bytes.constant  # the latter differs by ep
        return hash((self.kind, len(self.degrees), self.num_params, work))

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward pass: there is none if the layer and all layers before it are frozen."""
        return self.frozen_params < self.num_params or self.backward.num_kernels > 0

    @property
    def trained(self) -> "LayerProfile":
        """The layer with only its trained parameters."""
        if not self.frozen_params:
            return self
        left = {"num_params": self.num_params - self.frozen_params, "frozen_params": 0, "frozen_expert_params": 0}
        return self.model_copy(update=left | {"expert_params": self.expert_params - self.frozen_expert_params})

    @property
    def shape_text(self) -> str:
        """Degrees as text, ``tp 4, sp 4``, or ``undivided``."""
        return ", ".join(f"{name} {degree}" for name, degree in self.degrees.items()) or "undivided"

    @model_validator(mode="after")
    def _times_in_order(self) -> Self:
        sizes = [time.samples for time in self.times]
        if any(low >= high for low, high in pairwise(sizes)):
            raise InvalidProfileError(
                field=f"layers.{self.kind}.times",
                found=f"measurements for {sizes} samples ({self.shape_text})",
                expected="each sample count once, in ascending order",
                hint="sort the measurements and remove duplicates",
            )
        return self

    def with_divided_experts(self, degree: int, imbalance: float) -> "LayerProfile":
        """Return the layer with experts divided over ``degree`` ranks, on a rank with ``imbalance`` times the pairs.

        Work and bytes are interpolated linearly between the counts for an imbalance of 1 and of 2. Peaks are convex, so
        the line is an upper bound between these. Collectives are those for 1; products read only the weights of the
        rank's own experts. Raises `InvalidProfileError` if nothing was counted.
        """
        if self.divided_experts is None:
            raise InvalidProfileError(
                field=f"layers.{self.kind}.divided_experts",
                found=f"nothing counted ({self.shape_text})",
                expected="counts of a rank with sharded experts",
                hint="trace or profile the model again",
            )
        even, twice = self.divided_experts
        names = ("saved_bytes", "forward_transient_bytes", "backward_transient_bytes")
        lines = {name: _between(getattr(even, name), getattr(twice, name), imbalance) for name in names}

        def work(one: Work, two: Work) -> Work:
            names = ("matmul_flop", "low_precision_flop", "attention_flop", "matmul_bytes", "memory_bytes")
            lines = {name: _between(getattr(one, name), getattr(two, name), imbalance) for name in names}
            is_alike = len(one.products) == len(two.products)  # not if products merged in one differ in the other
            pairs = zip(one.products, two.products, strict=True) if is_alike else ()
            products = tuple(each.between(other, imbalance) for each, other in pairs)
            return one.model_copy(update={**lines, "products": products}).with_experts_over(degree)

        works = {name: work(getattr(even, name), getattr(twice, name)) for name in _DIRECTIONS}
        again = tuple(
            one.model_copy(
                update={name: _between(getattr(one, name), getattr(other, name), imbalance) for name in names}
                | {"work": work(one.work, other.work)}
            )
            for one, other in zip(even.recomputations, twice.recomputations, strict=True)
        )
        return even.model_copy(update={**lines, **works, "recomputations": again, "times": self.times})

    def recomputation(self, remat: str) -> Recomputation:
        """Return the layer under a remat choice. Raises `InvalidProfileError` if the profile has no entry for it."""
        for entry in self.recomputations:
            if entry.remat == remat:
                return entry
        raise InvalidProfileError(
            field=f"layers.{self.kind}.recomputations",
            found=f"no entry for remat {remat} ({self.shape_text})",
            expected="an entry for every remat choice of the strategies",
            hint="trace or profile the model again",
        )

    def recomputation_s(self, remat: str, samples: float) -> float:
        """Measured seconds that a remat choice adds to forward and backward together, at ``samples`` as in `time_s`.

        Raises `InvalidProfileError` if they were not measured.
        """
        measured = self.time_s(samples)
        seconds = measured.full_s if remat == "full" else measured.selective_s
        if seconds is None:
            raise InvalidProfileError(
                field=f"layers.{self.kind}.times",
                found=f"no seconds of remat {remat} ({self.shape_text})",
                expected="measured seconds for every remat choice of the strategies",
                hint="profile the model again",
            )
        return seconds

    def reaches(self, samples: float) -> bool:
        """Return whether the measured times cover this number of samples on a rank, which may be below one."""
        whole = 1 if 0 < samples < 1 else samples
        return bool(self.times) and self.times[0].samples <= whole * 2 and samples <= 2 * self.times[-1].samples

    def time_s(self, samples: float) -> MeasuredTime:
        """Measured seconds at ``samples``, linear between measured sizes.

        Extrapolates from the last two sizes up to twice the largest size, with at least a quarter of its time per
        sample, and from the first two sizes down to half the smallest size, with at least its time per sample. Raises
        `InvalidProfileError` outside this range. A fraction of a sample, as on a rank with part of the tokens, is
        within range if one sample is.
        """
        sizes = [time.samples for time in self.times]
        if not self.reaches(samples):
            raise InvalidProfileError(
                field=f"layers.{self.kind}.times",
                found=f"measurements for {sizes} samples ({self.shape_text})",
                expected=f"measurements near {samples:g} samples per rank",
                hint="profile with more micro-batch sizes (steelyard profile --samples …)",
            )
        upper = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
        low, high = self.times[upper - 1], self.times[upper]
        return MeasuredTime(
            samples=max(1, round(samples)),
            forward_s=_at(samples, (low, low.forward_s), (high, high.forward_s)),
            backward_s=_at(samples, (low, low.backward_s), (high, high.backward_s)),
            selective_s=_known_at(samples, (low, low.selective_s), (high, high.selective_s)),
            full_s=_known_at(samples, (low, low.full_s), (high, high.full_s)),
        )


_DIRECTIONS = ("forward", "backward")


def _between(one: Affine, two: Affine, place: float) -> Affine:
    """Interpolate at ``place`` on the line that is ``one`` at 1 and ``two`` at 2."""
    return Affine(
        constant=one.constant + (place - 1) * (two.constant - one.constant),
        per_sample=one.per_sample + (place - 1) * (two.per_sample - one.per_sample),
    )


def _known_at(
    samples: float, low: tuple[MeasuredTime, float | None], high: tuple[MeasuredTime, float | None]
) -> float | None:
    """Interpolate as `_at`; None if either time is unknown."""
    if low[1] is None or high[1] is None:
        return None
    return _at(samples, (low[0], low[1]), (high[0], high[1]))


def _at(samples: float, low: tuple[MeasuredTime, float], high: tuple[MeasuredTime, float]) -> float:
    """Interpolate seconds at ``samples`` between two sizes; proportional to the samples if the sizes are equal."""
    near, near_s = low if samples < low[0].samples else high
    distance = high[0].samples - low[0].samples
    if distance <= 0:
        return near_s * samples / near.samples
    part = (samples - low[0].samples) / distance
    least_s = 0.0 if 0 <= part <= 1 else (1.0 if part < 0 else 0.25) * near_s * samples / near.samples
    return max((1 - part) * low[1] + part * high[1], least_s)


MOST_MISFIT = 0.3
"""Relative error of a collective's fit above which a profile reports it."""


class CollectiveProfile(FilePart):
    """Measured cost of one collective over ``group_size`` ranks: seconds = latency + tensor bytes / rate.

    ``strided`` groups consist of ranks at a fixed stride. ``max_relative_error`` is the largest error of the fit over
    the measured sizes.
    """

    kind: Collective
    group_size: int = Field(ge=2, le=MOST_DEVICES)
    strided: bool
    latency_s: Seconds
    bytes_per_s: BytesPerS
    max_relative_error: float = Field(ge=0)

    def time_s(self, num_bytes: float) -> float:
        """Seconds for a tensor of ``num_bytes`` bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s


class ProfileIdentity(FilePart):
    """Model, devices and origin of a profile: part of every key it is stored under, shown with every plan."""

    method: Literal["traced", "measured"]
    model_name: str
    config_hash: str
    differences: tuple[str, ...] | None = None
    """Changed or frozen parts of the model (`ModelChain.differences`); absent if there are none."""
    seq_len: Tokens
    precision: LayerPrecision
    device: str
    device_kind: DeviceType | None = None
    """Device type of the measurement; absent in traced profiles and in older ones."""
    packages: tuple[str, ...] | None = None
    """Packages besides torch and transformers whose kernels were counted; absent if the counts of traced layers hold on
    GPUs and CPUs alike."""
    num_devices: DeviceCount
    driver: str = "none"
    """Versions of the software between PyTorch and a GPU; ``none`` for a CPU."""
    torch: str
    transformers: str
    created: str

    @property
    def is_measured(self) -> bool:
        """Whether it has seconds measured on its devices, not only counts."""
        return self.method == "measured"


class ShardingTime(FilePart):
    """Measured seconds that sharding a layer over ``group_size`` ranks adds to a microbatch, excluding its collectives.

    Caused by hooks and copies, and by processes that share cores and wait for each other at every layer.
    """

    group_size: int = Field(ge=2, le=MOST_DEVICES)
    seconds: Seconds


class Profile(FilePart):
    """All data of the cost model about a model on a device."""

    version: Literal[3] = 3
    identity: ProfileIdentity
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    collectives: tuple[CollectiveProfile, ...] = ()
    optimizer_s_per_param: Seconds | None = None
    """Measured seconds of an AdamW step per parameter of a rank; absent in a traced profile."""
    optimizers: Mapping[str, Seconds] = Field(default_factory=dict)
    """Seconds per parameter of other measured optimizers, by name."""
    bf16_flop_per_s: FlopPerS | None = Field(default=None, exclude_if=lambda rate: rate is None)
    """Measured rate of matrix products in bf16 on a CPU, whose layers may compute in another precision; absent for
    GPUs, whose peak is known, and in older profiles."""
    step_overhead_s: Seconds = 0.0
    """Measured seconds of a step that no layer accounts for (loop, loss reduction)."""
    sharding: tuple[ShardingTime, ...] = ()
    """Overhead of sharding a layer on a CPU, by group size; absent for GPUs, whose hosts run ahead of them."""
    overlap_slowdown: float = Field(default=1.3, ge=1.0, le=100)
    """Slowdown of compute and communication that overlap; 1.3 as in Galvatron (Miao et al. 2022)."""
    busy_speeds: tuple[Annotated[float, Field(ge=1e-3, le=1e3)], ...] = ()
    """Speed of a process while 1, 2, … processes compute, relative to its speed while all compute, as they did when
    layers were measured. Processes of a host share its cores; absent if each process has its own device."""
    reserved_over_allocated: float | None = Field(default=None, ge=1, le=100)
    """Peak reserved memory of a GPU's allocator over peak allocated memory while layers were measured."""

    @model_validator(mode="after")
    def _speeds_of_every_number(self) -> Self:
        speeds = self.busy_speeds
        if speeds and (
            len(speeds) != self.identity.num_devices or speeds[-1] != 1.0 or list(speeds) != sorted(speeds)[::-1]
        ):
            raise InvalidProfileError(
                field="busy_speeds",
                found=str(list(speeds)),
                expected=f"{self.identity.num_devices} numbers in descending order, the last one 1",
                hint="profile the model again",
            )
        return self

    def __str__(self) -> str:
        of, shapes = self.identity, len(self.layers)
        where = f"measured on {of.num_devices} × {of.device}" if of.is_measured else "traced"
        layer_types = ", ".join(dict.fromkeys(layer.kind for layer in self.layers))
        what = ", ".join((of.model_name, *(of.differences or ())))
        return f"{what}, {of.seq_len} tokens, {of.precision}, {where}: {layer_types} in {shapes} shapes"

    def stage_speeds(self, num_stages: int) -> tuple[float, ...]:
        """Return the speed of a stage while 1, 2, … stages compute; empty if stages do not share cores."""
        if num_stages == 1 or not self.busy_speeds:
            return ()
        per_stage = self.identity.num_devices // num_stages
        return self.busy_speeds[per_stage - 1 :: per_stage]

    def for_devices(self, count: int) -> Self:
        """Return the profile for ``count`` of the measured devices; itself unless ``count`` divides their number.

        Processes that share cores are faster because fewer of them compute (``busy_speeds``). Collectives stay as
        measured, with all groups of a size active at once, which are more groups than fewer devices have.
        """
        measured = self.identity.num_devices
        if not self.identity.is_measured or count >= measured or measured % count:
            return self
        speed = self.busy_speeds[count - 1] if self.busy_speeds else 1.0
        layers = tuple(
            layer.model_copy(update={"times": tuple(time.faster(speed) for time in layer.times)})
            for layer in self.layers
            if not any(count % degree for degree in layer.degrees.values())
        )
        optimizer_s, bf16_rate = self.optimizer_s_per_param, self.bf16_flop_per_s
        return self.model_copy(
            update={
                "identity": self.identity.model_copy(update={"num_devices": count}),
                "layers": layers,
                "collectives": tuple(
                    each
                    for each in self.collectives
                    if count % each.group_size == 0 and not (each.strided and each.group_size == count)
                ),
                "optimizer_s_per_param": None if optimizer_s is None else optimizer_s / speed,
                "optimizers": {word: seconds / speed for word, seconds in self.optimizers.items()},
                "bf16_flop_per_s": None if bf16_rate is None else bf16_rate * speed,
                "sharding": tuple(each for each in self.sharding if count % each.group_size == 0),
                "busy_speeds": tuple(each / speed for each in self.busy_speeds[:count]) if count > 1 else (),
            }
        )

    @property
    def misfits(self) -> tuple[str, ...]:
        """Collectives whose fit is off by more than `MOST_MISFIT` at some size, with the error."""
        return tuple(
            f"{each.kind} over {each.group_size}{' strided' if each.strided else ''} ranks "
            f"{each.max_relative_error:.0%}"
            for each in self.collectives
            if each.max_relative_error > MOST_MISFIT
        )

    def sharding_s(self, group_size: int) -> float:
        """Seconds that sharding over so many ranks adds to a microbatch, at the nearest measured size; 0 if none."""
        nearest = min(self.sharding, key=lambda each: abs(math.log(each.group_size / group_size)), default=None)
        return nearest.seconds if nearest else 0.0

    @property
    def shapes(self) -> frozenset[frozenset[tuple[str, int]]]:
        """Shapes, as sets of degrees, in which some layer type was traced or measured."""
        return frozenset(frozenset(layer.degrees.items()) for layer in self.layers)

    def layer(self, layer_type: str, shape: Shape) -> LayerProfile | None:
        """Return the profile of a layer type under these degrees, or None if it was not traced or measured."""
        return next((layer for layer in self.layers if layer.kind == layer_type and layer.degrees == shape), None)

    def collective(self, collective: Collective, group_size: int, *, strided: bool) -> CollectiveProfile | None:
        """Return the measured collective, or the non-strided one if the strided one was not measured, or vice versa."""
        matches = [c for c in self.collectives if c.kind == collective and c.group_size == group_size]
        exact = [c for c in matches if c.strided == strided]
        return next(iter(exact or matches), None)


_MAY_DIFFER = "created"


def merge_profiles(a: Profile, b: Profile) -> Profile:
    """Merge two profiles; if both have an entry, that of ``b`` (the later one) is kept.

    Raises `InvalidProfileError`, which names the first differing field, if the identities differ in more than the date.
    """
    first, second = a.identity.model_dump(), b.identity.model_dump()
    for field, found in second.items():
        is_known = None not in (found, first[field])
        if field != _MAY_DIFFER and is_known and found != first[field]:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=repr(found),
                expected=f"{first[field]!r}, the value of the profile that it is merged into",
                hint="merge only profiles of one model on one machine; keep the others in separate files",
            )
    layers = {_layer_key(layer): layer for layer in a.layers}
    for later in b.layers:
        earlier = layers.get(_layer_key(later), later)
        times = {time.samples: time for time in (*earlier.times, *later.times)}
        in_order = tuple(times[samples] for samples in sorted(times))
        layers[_layer_key(later)] = later.model_copy(update={"times": in_order})
    collectives = {
        (collective.kind, collective.group_size, collective.strided): collective
        for collective in (*a.collectives, *b.collectives)
    }
    optimizer_s = b.optimizer_s_per_param
    return b.model_copy(
        update={
            "layers": tuple(layers.values()),
            "collectives": tuple(collectives.values()),
            "optimizer_s_per_param": a.optimizer_s_per_param if optimizer_s is None else optimizer_s,
            "optimizers": {**a.optimizers, **b.optimizers},
            "bf16_flop_per_s": b.bf16_flop_per_s or a.bf16_flop_per_s,
            "busy_speeds": b.busy_speeds or a.busy_speeds,
            "sharding": b.sharding or a.sharding,
            "reserved_over_allocated": b.reserved_over_allocated or a.reserved_over_allocated,
        }
    )


def _layer_key(layer: LayerProfile) -> Hashable:
    return layer.kind, frozenset(layer.degrees.items())
