r"""A run record: what a training run measured beside what its plan predicted, as versioned JSON; and its slow ranks.

A rank is slow where it computes for longer than predicted compared with the others,
$r_i > (1 + \sigma)\,\operatorname{median} r$:

| symbol   | argument | meaning                                                                                |
|----------|----------|----------------------------------------------------------------------------------------|
| $r_i$    | ``work`` | own computation of rank i, its waiting left out, over that predicted for its stage     |
| $\sigma$ | ``share`` | how much longer is allowed                                                             |

The median (the lower of two) leaves out what a prediction misses on all ranks alike. Without a prediction a rank is
compared with those of its own stage.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast

from steelyard.limits import Bytes, Count, DeviceCount, Factor, PositiveSeconds, Seconds
from steelyard.units import format_seconds

SLOW_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """Seconds of a step in which a rank computes and waits for nobody."""

    rank: int
    stage: int
    host: str
    own_s: float
    pool: str = ""
    """Of devices, where a plan is over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that computes ``factor`` times as long as predicted next to the others."""

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
    """Those that are slower by more than ``share``, the slowest first; ``predicted_s`` is of each stage."""
    if share <= 0 or not work:
        return ()
    ratios = [each.own_s / _expected_s(each, work, predicted_s) for each in work]
    typical = statistics.median_low(ratios)
    found = [
        SlowRank(rank=each.rank, stage=each.stage, host=each.host, factor=ratio / typical, pool=each.pool)
        for each, ratio in zip(work, ratios, strict=True)
        if ratio > (1 + share) * typical
    ]
    return tuple(sorted(found, key=lambda each: -each.factor))


def _expected_s(one: OwnWork, work: Sequence[OwnWork], predicted_s: Sequence[float] | None) -> float:
    if predicted_s is not None:
        return predicted_s[one.stage]
    return statistics.median_low(each.own_s for each in work if each.stage == one.stage)


class RecordPart(BaseModel):
    """Common to all parts of a record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class StepRecord(RecordPart):
    """One training step: mean loss of the global batch and seconds of the slowest rank."""

    step: Count
    loss: float
    time_s: Seconds
    grad_norm: float


class RankRecord(RecordPart):
    """What one process measured. ``peak_bytes`` is the most that its tensors held, found as ``memory_method`` says."""

    rank: Count
    stage: Count
    peak_bytes: Bytes
    memory_method: str
    num_params: Bytes
    """Parameters this rank holds (its shards)."""
    busy_s: Seconds | None = None
    """Seconds of a step, the median, in which the rank worked and did not wait for another stage; absent in records
    that were written before it was measured."""
    own_s: Seconds | None = None
    """Seconds of a step, the median, in which the rank computed and waited for nobody, its own stage included; absent
    in records that were written before it was measured."""
    host: str = ""
    imbalance: float | None = None
    """Pairs of tokens and experts on the busiest rank of this one's expert groups over their mean, of its layers and of
    the timed steps; absent where it holds no divided experts."""


class RunRecord(RecordPart):
    """A finished run. ``median_step_s`` leaves out the first ``num_warmup_steps`` steps, which allocate and warm up."""

    version: Literal[1] = 1
    model_name: str
    config_hash: str
    device: str
    num_devices: DeviceCount
    strategies: tuple[str, ...]
    """The strategy that the runtime applied to each layer, as it reads it back from the modules it made."""
    num_warmup_steps: Count
    median_step_s: PositiveSeconds
    tokens_per_s: float
    steps: Annotated[tuple[StepRecord, ...], FailFast()]
    ranks: Annotated[tuple[RankRecord, ...], FailFast()]
    allocator: str = ""
    """What PyTorch's allocator of GPU memory was set to; empty where it was not, and on a CPU, which has none."""
    mfu: float | None = None
    """Model FLOP utilisation of the median step; absent where the devices' peak rate is not known."""
    predicted_step_s: PositiveSeconds | None = None
    predicted_time_factor: Factor = 1.0
    """What the prediction had been multiplied by after an earlier run."""
    predicted_imbalance: float | None = None
    """What was assumed of how uneven routing is; absent for models without experts."""
    predicted_busy_s: tuple[Seconds, ...] | None = None
    """Per stage the seconds of a step in which it works, as the plan predicted."""
    predicted_own_s: tuple[Seconds, ...] | None = None
    """Per stage the seconds of a step in which a rank computes itself."""
    predicted_peak_bytes: tuple[Bytes, ...] | None = None
    """Per stage, as the plan predicted."""

    def __str__(self) -> str:
        predicted = "" if self.predicted_step_s is None else f", {format_seconds(self.predicted_step_s)} predicted"
        took = f"{len(self.steps)} steps, {format_seconds(self.median_step_s)} each (median{predicted})"
        return f"{self.model_name} on {self.num_devices} × {self.device}: {took}"
