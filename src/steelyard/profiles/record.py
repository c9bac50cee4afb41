r"""Run records, as versioned JSON: measurements of a training run and the predictions of its plan; and slow ranks.

A rank is slow if its computation exceeds the prediction by more than that of other ranks,
$r_i > (1 + \sigma)\,\operatorname{median} r$:

| symbol   | argument | meaning                                                                                |
|----------|----------|----------------------------------------------------------------------------------------|
| $r_i$    | ``work`` | own computation of rank i, without waiting, over that predicted for its stage          |
| $\sigma$ | ``share`` | tolerance                                                                              |

The median (the lower of two) cancels prediction errors common to all ranks. Without a prediction a rank is compared
with the ranks of its stage.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, FailFast

from steelyard.files import FilePart
from steelyard.limits import Bytes, Count, DeviceCount, Factor, PositiveSeconds, Seconds
from steelyard.units import format_seconds

SLOW_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """Seconds of a step in which a rank computes without waiting for other ranks."""

    rank: int
    stage: int
    host: str
    own_s: float
    pool: str = ""
    """Device group of the rank, if the plan uses several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank whose computation over its prediction is ``factor`` times the median of all ranks."""

    rank: int
    stage: int
    host: str
    factor: float
    pool: str = ""

    def __str__(self) -> str:
        stage = f"stage {self.stage} in {self.pool}" if self.pool else f"stage {self.stage}"
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank} ({stage}){where} computes {self.factor:.1f} × as long"


def slow_ranks(work: Sequence[OwnWork], predicted_s: Sequence[float] | None, share: float) -> tuple[SlowRank, ...]:
    """Return the ranks that are slower by more than ``share``, slowest first; ``predicted_s`` is per stage."""
    if share <= 0 or not work:
        return ()
    stages = {each.stage for each in work}
    expected_s = predicted_s or {
        stage: statistics.median_low(each.own_s for each in work if each.stage == stage) for stage in stages
    }
    ratios = [each.own_s / expected_s[each.stage] for each in work]
    typical = statistics.median_low(ratios)
    found = [
        SlowRank(rank=each.rank, stage=each.stage, host=each.host, factor=ratio / typical, pool=each.pool)
        for each, ratio in zip(work, ratios, strict=True)
        if ratio > (1 + share) * typical
    ]
    return tuple(sorted(found, key=lambda each: -each.factor))


class RecordPart(FilePart):
    """Base of all parts of a record, in which a loss need not be finite."""

    model_config = ConfigDict(allow_inf_nan=True)


class StepRecord(RecordPart):
    """One training step: mean loss of the global batch and seconds of the slowest rank."""

    step: Count
    loss: float
    time_s: Seconds
    grad_norm: float


class RankRecord(RecordPart):
    """Measurements of one process. ``peak_bytes`` is the peak memory of its tensors, measured by ``memory_method``."""

    rank: Count
    stage: Count
    peak_bytes: Bytes
    memory_method: str
    num_params: Bytes
    """Parameters of this rank (its shards)."""
    busy_s: Seconds | None = None
    """Median seconds of a step in which the rank did not wait for another stage; absent in older records."""
    own_s: Seconds | None = None
    """Median seconds of a step in which the rank computed without waiting for any rank, including those of its stage;
    absent in older records."""
    host: str = ""
    imbalance: float | None = None
    """Token-expert pairs of the busiest rank in this rank's expert groups relative to the mean, over its layers and the
    timed steps; absent without expert parallelism."""


class RunRecord(RecordPart):
    """A finished run. ``median_step_s`` excludes the first ``num_warmup_steps`` steps, which allocate and warm up."""

    version: Literal[1] = 1
    model_name: str
    config_hash: str
    device: str
    num_devices: DeviceCount
    strategies: tuple[str, ...]
    """Strategy that the runtime applied to each layer, read back from its modules."""
    num_warmup_steps: Count
    median_step_s: PositiveSeconds
    tokens_per_s: float
    steps: Annotated[tuple[StepRecord, ...], FailFast()]
    ranks: Annotated[tuple[RankRecord, ...], FailFast()]
    allocator: str = ""
    """Settings of PyTorch's GPU memory allocator; empty if there were none, and on a CPU."""
    mfu: float | None = None
    """Model FLOP utilisation of the median step; absent if the devices' peak rate is unknown."""
    predicted_step_s: PositiveSeconds | None = None
    predicted_time_factor: Factor = 1.0
    """Calibration factor of the prediction, from an earlier run."""
    predicted_imbalance: float | None = None
    """Assumed expert load imbalance; absent for models without experts."""
    predicted_busy_s: tuple[Seconds, ...] | None = None
    """Predicted seconds of a step in which each stage works."""
    predicted_own_s: tuple[Seconds, ...] | None = None
    """Predicted seconds of a step in which a rank of each stage computes by itself."""
    predicted_peak_bytes: tuple[Bytes, ...] | None = None
    """Predicted peak memory of each stage."""

    def __str__(self) -> str:
        predicted = "" if self.predicted_step_s is None else f", {format_seconds(self.predicted_step_s)} predicted"
        took = f"{len(self.steps)} steps, {format_seconds(self.median_step_s)} each (median{predicted})"
        return f"{self.model_name} on {self.num_devices} × {self.device}: {took}"
