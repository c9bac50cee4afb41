"""Jobs: model, profile, cluster and batch, which costs depend on besides the layer, its strategy and the pipeline.

A `JobConfig` adds one pipeline configuration, or several at once. Besides the hidden state, a rank also reads:

| bytes          | of                                                                     | lives                    |
|----------------|------------------------------------------------------------------------|--------------------------|
| `sample_bytes` | token ids, images or features on an embedding, labels on the head      | the whole step           |
| `side_bytes`   | positions, rotary embeddings and masks, made by every forward pass     | per microbatch in flight |
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import Group, collective_time
from steelyard.cost.efficiency import Efficiency, catalogue_rates, efficiency_of
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidPlanError
from steelyard.hardware import Cluster, Device, Link, joined_pools
from steelyard.levers import NO_LEVERS, Effects, Levers
from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import CostSource, ProfileFile
from steelyard.plan.strategy import Strategy
from steelyard.precision import LayerPrecision, Precision
from steelyard.profiles.profile import Collective, LayerProfile, Profile, Shape
from steelyard.schedules import PipelineConfig
from steelyard.units import Amount, Whole, at_each, hashable

LINEAR_PEAKS: Mapping[Precision, str] = {"fp8": "fp8", "fp8-block": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Dtype whose peak linear layers approach, for precisions that only linear layers use."""
_OVER_FP8 = 2
"""Most that linear layers in 4 bits reach over those in 8. GB300's peak is 3 times as high: by it 7 of its published
runs are predicted 12 % too fast, by twice the rate 4 % too slow."""
COMPUTE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, **dict.fromkeys(LINEAR_PEAKS, 2)}
"""Bytes of a parameter during compute, and of an activation entry between layers."""
Made = TypeVar("Made")

ASSUMED_IMBALANCE = 1.2
"""Expert load imbalance: load of the busiest expert rank relative to the mean. Assumed; training reports the measured
value."""


def layer_precision(precision: Precision) -> LayerPrecision:
    """Return the precision that a layer computes in: bf16 if only inputs of linear layers have fewer bits."""
    return "bf16" if precision in LINEAR_PEAKS else cast(LayerPrecision, precision)


def tuned_over_experts(engine: Engine, device: Device) -> float:
    """Speed of an engine's other linear layers relative to matmuls of experts."""
    return engine.execution.tuned_linear_speedup if "fp8" in device.peak_flop_per_s else 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Identical devices for stages of a job, with the costs of its layers on them.

    ``budget_bytes`` is the memory that a plan may use per device, ``margin_bytes`` the memory that is kept free.
    ``rates`` replaces the device's calibrated efficiency. All times are multiplied by ``time_factor``, which comes from
    ``num_calibrating`` measured runs. ``profile_file`` is the file that the profile was read from, if any.
    """

    cluster: Cluster
    profile: Profile
    budget_bytes: int
    margin_bytes: int = 0
    rates: Efficiency | None = None
    time_factor: float = 1.0
    num_calibrating: int = 0
    profile_file: ProfileFile | None = None
    outer_link: Link | None = None
    """Link from a device to those of other groups, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    layers: dict[tuple[str, frozenset[tuple[str, int]], int, float], LayerProfile | None] = field(default_factory=dict)
    made: dict[Hashable, object] = field(default_factory=dict)
    collectives: dict[tuple[Collective, Group], Callable[[float], float]] = field(default_factory=dict)
    collective_s: dict[tuple[Collective, Hashable, Group], Amount] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Model, batch and devices: everything that all pipeline configurations share.

    ``groups`` are the available device groups: one if all devices are identical. A stage lies in one group, so its
    costs come from the job on that group alone (`by_group`).

    ``global_batch`` counts samples of ``seq_len`` tokens. ``engine`` runs the job, with these ``levers``. ``imbalance``
    is the load of the busiest expert rank relative to the mean under expert parallelism.
    """

    chain: ModelChain
    groups: tuple[DeviceGroup, ...]
    seq_len: int
    global_batch: int
    precision: Precision
    engine: Engine = NATIVE
    imbalance: float = ASSUMED_IMBALANCE
    levers: Levers = NO_LEVERS

    @cached_property
    def by_group(self) -> "tuple[Job, ...]":
        """Jobs on each of the groups alone."""
        return tuple(replace(self, groups=(each,)) for each in self.groups) if self.is_mixed else (self,)

    @classmethod
    def over(cls, jobs: "Sequence[Job]") -> "Job":
        """Return one job on the groups of all these jobs, which shares their cached costs."""
        if len(jobs) == 1:
            return jobs[0]
        found = replace(jobs[0], groups=tuple(each.group for each in jobs))
        found.__dict__["by_group"] = tuple(jobs)
        return found

    def only(self, names: Sequence[str]) -> "Job":
        """Return the job on the groups of these names, in this order. Raises `InvalidPlanError` if one is unknown."""
        known = {each.cluster.name: each for each in self.by_group}
        for name in names:
            if name not in known:
                raise InvalidPlanError(
                    field="cluster",
                    found=f"the device group {name!r}",
                    expected="one of " + ", ".join(known),
                    hint="plan for the available device groups",
                )
        return Job.over([known[name] for name in names])

    def used_by(self, plan: Plan) -> "Job":
        """Return the job on the groups that a plan uses, in the order of its ranks. Raises as `only`."""
        return self.only(plan.cluster.split("+")) if self.is_mixed else self

    def jobs(self, plan: Plan) -> "tuple[Job, ...]":
        """Return the job of each stage of a plan. Raises as `only`."""
        used = self.used_by(plan).by_group
        borders = [*accumulate(each.cluster.num_devices for each in used)][:-1]
        return tuple(used[bisect_right(borders, stage.ranks[0])] for stage in plan.stages)

    def on(self, **changes: Any) -> "Job":
        """Return the job with these fields of its one group changed."""
        return replace(self, groups=(replace(self.group, **changes),))

    @property
    def is_mixed(self) -> bool:
        """Whether there are several groups."""
        return len(self.groups) > 1

    @property
    def execution(self) -> Execution:
        """Execution model of the engine."""
        return self.engine.execution

    @cached_property
    def effects(self) -> Effects:
        """Effects of the levers other than on the work of layers."""
        return self.engine.effects(self.levers)

    @property
    def hardware(self) -> Cluster:
        """Cluster of all groups."""
        return joined_pools([each.cluster for each in self.groups], [each.outer_link for each in self.groups])

    @cached_property
    def budget_bytes(self) -> int:
        """Memory of a device that a plan may use, in bytes; the largest over several groups."""
        return max(each.budget_bytes for each in self.groups)

    @cached_property
    def group(self) -> DeviceGroup:
        """The device group. This and the properties below require a job on one group."""
        (only,) = self.groups
        return only

    @cached_property
    def cluster(self) -> Cluster:
        """Cluster of the group."""
        return self.group.cluster

    @cached_property
    def profile(self) -> Profile:
        """Measured or traced costs of the layers."""
        return self.group.profile

    @cached_property
    def margin_bytes(self) -> int:
        """Memory of a device that is kept free, in bytes."""
        return self.group.margin_bytes

    @cached_property
    def time_factor(self) -> float:
        """Factor on all predicted times."""
        return self.group.time_factor

    @cached_property
    def _known(self) -> "_Known":
        return _Known()

    def layer(
        self, layer_type: str, shape: Shape, *, expert_degree: int = 1, imbalance: float | None = None
    ) -> LayerProfile | None:
        """Return the profile of a layer type in a shape, or None if there is none.

        If ``expert_degree`` ranks divide its experts, it is that of a rank with ``imbalance`` times the token-expert
        pairs of its own tokens (None: the job's imbalance).
        """
        uneven = self.imbalance if imbalance is None else imbalance
        key = layer_type, frozenset(shape.items()), expert_degree, uneven
        known = self._known.layers
        if key not in known:
            found = self.profile.layer(layer_type, shape)
            if found is not None and expert_degree > 1:
                found = found.with_divided_experts(expert_degree, uneven)
            known[key] = found
        return known[key]

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return ``make()``, cached by ``key``: a value that depends only on the key and the job, except its budget."""
        known = self._known.made.get(key)
        if known is None:
            known = self._known.made[key] = make()
        return cast(Made, known)

    @overload
    def collective_s(self, collective: Collective, tensor_bytes: float, group: Group) -> float: ...
    @overload
    def collective_s(self, collective: Collective, tensor_bytes: Amount, group: Group) -> Amount: ...
    def collective_s(self, collective: Collective, tensor_bytes: Amount, group: Group) -> Amount:
        """Seconds of one collective on the cluster; 0 if the group has one rank. Raises as `collective_time`."""
        if group.size == 1:
            return 0.0
        key = collective, hashable(tensor_bytes), group
        seconds = self._known.collective_s.get(key)
        if seconds is None:
            seconds = self._known.collective_s[key] = at_each(tensor_bytes, self._collective(collective, group))
        return seconds

    def _collective(self, collective: Collective, group: Group) -> Callable[[float], float]:
        known = self._known.collectives.get((collective, group))
        if known is None:
            known = collective_time(collective, group, self.cluster, self.profile, self.efficiency.links)
            self._known.collectives[collective, group] = known
        return lambda tensor_bytes: known(tensor_bytes) if tensor_bytes else 0.0

    def within(self, budget_bytes: int, *, margin_bytes: int = 0) -> "Job":
        """Return the job with another budget, sharing its cached costs because none depends on the budget."""
        found = self.on(budget_bytes=budget_bytes, margin_bytes=margin_bytes)
        found.__dict__["_known"] = self._known
        return found

    def cost_source(self) -> CostSource:
        """Return the source of the costs: the profile, the factor, and the catalogue's entry if its rates are used."""
        identity = self.profile.identity
        has_rates = not self.cluster.device.needs_profile
        priced_by_catalogue = self.assumes_links or not (identity.is_measured or self.group.rates)
        rates = catalogue_rates(self.cluster.device.name) if has_rates and priced_by_catalogue else None
        divides_experts = any(layer_type.num_experts for layer_type in self.chain.layer_types)
        return CostSource(
            **identity.model_dump(),
            time_factor=self.time_factor,
            num_calibrating=self.group.num_calibrating,
            rates=rates,
            links_assumed=self.assumes_links,
            file=self.group.profile_file,
            imbalance=self.imbalance if divides_experts else None,
        )

    @property
    def assumes_links(self) -> bool:
        """Whether layers were measured on fewer devices, so the links are those that the cluster states."""
        return self.profile.identity.is_measured and self.profile.identity.num_devices < self.cluster.num_devices

    @property
    def has_measured_links(self) -> bool:
        """Whether the links were measured, on as many devices as the cluster has."""
        return self.profile.identity.is_measured and not self.assumes_links

    @cached_property
    def efficiency(self) -> Efficiency:
        """Fractions of data-sheet rates that devices and links reach."""
        network = self.cluster.inter_link
        return self.group.rates or efficiency_of(self.cluster.device.name, network.name if network else "")

    @property
    def peak_flop_per_s(self) -> float:
        """Dense matmul peak of a device in FLOP/s, in the dtype of everything except low-precision linear inputs."""
        return self.cluster.device.peak(layer_precision(self.precision), self.engine.precisions)

    @cached_property
    def linear_speedup(self) -> float:
        """Speed of linear layers relative to the reached fraction of `peak_flop_per_s`."""
        device = self.cluster.device
        found = tuned_over_experts(self.engine, device)
        peak = LINEAR_PEAKS.get(self.precision)
        if peak is not None:
            of_fp8 = device.peak_flop_per_s.get("fp8", math.inf)  # a cluster file may leave it out
            reached = min(device.peak(peak, self.engine.precisions), _OVER_FP8 * of_fp8)
            found *= reached / device.peak("bf16") * self.execution.fp8_share
        return found

    @cached_property
    def low_precision_speedup(self) -> float:
        """Speed of products of 8-bit operands relative to other linear layers."""
        device, low = self.cluster.device, self.effects.low_precision
        return device.peak(low.peak) / device.peak("bf16") if low else 1.0

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient entry while ranks sum gradients."""
        return min(self.execution.reduce_bytes, self.effects.weight_bytes)

    @property
    def compute_bytes(self) -> int:
        """Bytes per parameter and activation entry while a layer computes."""
        return COMPUTE_BYTES[self.precision]

    @property
    def overlaps(self) -> bool:
        """Whether sharded-data communication overlaps compute: on GPUs it has its own streams, on CPUs it has none."""
        return self.execution.overlaps_data and self.cluster.device.is_gpu


@dataclass(frozen=True, kw_only=True, eq=False)
class JobConfig:
    """A pipeline configuration of a job, or M of them that differ only in the number of microbatches.

    Times of layers are arrays [M]; everything else is that of ``pipeline``, one of the M.
    """

    job: Job
    pipeline: PipelineConfig
    stage_size: int | None = None
    """Ranks per stage, if stages differ."""
    counts: tuple[int, ...] = ()
    """[M] numbers of microbatches; empty for only the pipeline's."""

    @cached_property
    def devices_per_stage(self) -> int:
        """Ranks per stage."""
        return self.stage_size or self.job.cluster.num_devices // self.pipeline.num_stages

    @property
    def has_several(self) -> bool:
        """Whether there are several microbatches."""
        return self.pipeline.num_microbatches > 1

    @property
    def is_piped(self) -> bool:
        """Whether there are several stages."""
        return self.pipeline.num_stages > 1

    @cached_property
    def microbatch_samples(self) -> int:
        """Samples of a microbatch over all ranks of a stage."""
        return self.job.global_batch // self.pipeline.num_microbatches

    @cached_property
    def samples(self) -> NDArray[np.float64]:
        """Samples [M] of a microbatch for each number of microbatches: whole numbers."""
        counts = np.array(self.counts or [self.pipeline.num_microbatches])
        return (self.job.global_batch // counts).astype(np.float64)

    @cached_property
    def batch(self) -> Batch:
        """Samples and tokens that strategies divide."""
        return Batch(microbatch_samples=self.microbatch_samples, seq_len=self.job.seq_len)

    @cached_property
    def activation_bytes(self) -> int:
        """Maximum bytes of activations between two layers for one microbatch, over all ranks of a stage.

        Some layers have fewer: half between an encoder's layers (one hidden state, not two), fewer in late Swin stages.
        """
        job = self.job
        states = job.chain.most_in_states(job.seq_len)
        return self.microbatch_samples * (states + job.chain.most_past(job.seq_len)) * job.compute_bytes


def stage_configs(plan: Plan, job: Job) -> tuple[JobConfig, ...]:
    """Return the configuration of each stage of a plan; identical stages share one."""
    stages = list(zip(job.jobs(plan), plan.stage_sizes, strict=True))
    made = {each: JobConfig(job=each[0], pipeline=plan.pipeline, stage_size=each[1]) for each in stages}
    return tuple(made[each] for each in stages)


class Strategies(NamedTuple):
    """Degrees of S strategies, as arrays [S] of the `Strategy` attributes of the same name."""

    sample_degree: NDArray[np.int64]
    token_degree: NDArray[np.int64]
    sequence_degree: NDArray[np.int64]


AnyStrategy = Strategy | Strategies


_TOKEN_BYTES = 8
_IMAGE_ENTRY_BYTES = 4


def sample_bytes(layer_type: LayerType, strategy: AnyStrategy, config: JobConfig) -> Whole:
    """Bytes that a rank reads for a layer of this type in a step: ids, images, labels of all microbatches.

    There is one more token id than the sequence has, because inputs and labels are the same tensor, shifted by one.
    Not counted for frameworks with their own buffers.
    """
    if layer_type.role is LayerRole.BLOCK or config.job.execution.keeps_own_buffers:
        return 0
    samples = config.pipeline.num_microbatches * (config.microbatch_samples // strategy.sample_degree)
    chain = config.job.chain
    image, own = chain.image, chain.sample_bytes
    if own is not None:
        return samples * own
    if chain.features and layer_type == chain.type_of(0):
        return samples * _IMAGE_ENTRY_BYTES * math.prod(chain.features.shape)
    if image is None:
        return samples * _TOKEN_BYTES * (config.job.seq_len + 1)
    return samples * (_IMAGE_ENTRY_BYTES * math.prod(image) if layer_type.role is LayerRole.EMBEDDING else _TOKEN_BYTES)


def side_bytes(layer_types: set[LayerType], config: JobConfig) -> int:
    """Bytes of tensors that a forward pass shares between layers of these types: positions, rotary embeddings, masks.

    A fused kernel needs a mask of one byte per entry, and only for a sliding window. Eager attention needs a mask that
    is added to the scores for each layer type.
    """
    job, chain = config.job, config.job.chain
    if chain.sample_bytes is not None:
        whole, of_sample = chain.side_bytes
        return whole + config.microbatch_samples * (chain.sample_bytes + of_sample)
    attention = {
        layer_type.attention for layer_type in layer_types if layer_type.role is LayerRole.BLOCK and chain.rotary_size
    }
    num_rotary = len(attention) if chain.family.rotary_by_attention else bool(attention)
    rotary = 2 * num_rotary * chain.rotary_size * job.compute_bytes
    window = int(chain.text_config.get("sliding_window") or 0)
    slides = "sliding_attention" in attention and 0 < window < job.seq_len
    mask = int(slides) if chain.family.fused_attention else len(attention) * job.compute_bytes
    return job.seq_len * (_TOKEN_BYTES + rotary + mask * job.seq_len)
