"""What a cost depends on beside the layer and its strategy: model, profile, cluster, batch and one pipeline setting."""

from dataclasses import dataclass
from functools import cached_property

from steelyard.hardware import Cluster
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Precision, Schedule
from steelyard.profiles.profile import Profile

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a parameter while a layer computes, and of an activation between layers."""
MASTER_BYTES = 4
"""Bytes of a parameter as the optimizer keeps it, and of a gradient as it is reduced."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained on what: everything that does not change while pipeline settings are compared.

    ``global_batch`` counts samples of ``seq_len`` tokens; ``budget_bytes`` is what one device may hold.
    """

    chain: ModelChain
    profile: Profile
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: Precision
    budget_bytes: int

    @property
    def compute_bytes(self) -> int:
        """Bytes per parameter and activation entry while a layer computes."""
        return COMPUTE_BYTES[self.precision]

    @property
    def overlaps(self) -> bool:
        """Whether sharded-data communication runs beside compute: on GPUs it has streams of its own, on CPUs not."""
        return not self.cluster.device.needs_profile


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One pipeline setting of a job: stages, microbatches, schedule."""

    job: Job
    num_stages: int
    num_microbatches: int
    schedule: Schedule

    @property
    def devices_per_stage(self) -> int:
        """Ranks of each stage."""
        return self.job.cluster.num_devices // self.num_stages

    @property
    def microbatch_samples(self) -> int:
        """Samples of a microbatch over all ranks of a stage."""
        return self.job.global_batch // self.num_microbatches

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of the hidden state of one microbatch over all ranks of a stage."""
        job = self.job
        return self.microbatch_samples * job.seq_len * job.chain.hidden_size * job.compute_bytes
