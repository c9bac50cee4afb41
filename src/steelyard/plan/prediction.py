"""What the planner expects of a plan: time and memory of each stage, how sure it is, and what it was held beside."""

from pydantic import Field

from steelyard.hardware import Backend
from steelyard.limits import MOST_DEVICES, MOST_PER_S, Bytes, PositiveSeconds, Seconds
from steelyard.plan.certificate import Certificate
from steelyard.plan.cost_source import CostSource
from steelyard.plan.margin import margin_text
from steelyard.plan.part import PlanPart
from steelyard.units import format_seconds

OWN_TERMS = ("compute", "remat", "host", "optimizer")
"""Terms of time in which a rank computes by itself; those of parallelism dimensions wait for others."""


class StagePrediction(PlanPart):
    """What one stage is predicted to take: seconds of a microbatch and bytes per rank, each term by its name.

    Of all its chunks together.
    """

    time_s: dict[str, Seconds]
    memory_bytes: dict[str, Bytes]

    @property
    def total_time_s(self) -> float:
        """Seconds that one microbatch occupies the stage, once-a-step work spread over the microbatches."""
        return sum(self.time_s.values())

    @property
    def total_bytes(self) -> int:
        """Upper bound of the bytes on one rank."""
        return sum(self.memory_bytes.values())


class Alternative(PlanPart):
    """A candidate that lost, and why."""

    description: str
    reason: str
    step_time_s: Seconds | None = None
    """Absent where it was not computed exactly."""
    is_bound: bool = False
    """Whether the configuration was not searched to the end, so that its best plan may be faster."""
    memory_bytes: Bytes | None = None
    """Of its fullest device; absent where it was not computed exactly."""


class Baseline(PlanPart):
    """The best plan of a simple way to train that needs no planner, on the same costs."""

    name: str
    step_time_s: Seconds | None = None
    """Absent where none of them fits."""
    missing_bytes: Bytes | None = None
    """Bytes per device that the nearest one lacks, where none fits."""
    setting: str = ""
    strategies: str = ""


class Interval(PlanPart):
    """Where nine in ten runs lie that are like a predicted one, and how far plans must differ to be told apart."""

    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)
    typical: float = Field(ge=0)
    """The median of |predicted / measured − 1| of such runs."""
    like: str
    """What the costs of such runs were made from, as `steelyard.cost.accuracy` has it."""
    as_good: float = Field(ge=0)
    """By what fraction a plan of the same job may be predicted slower and still be as good as this one."""

    def __str__(self) -> str:
        return (
            f"predicted, typically ± {self.typical:.0%}; 9 in 10 such runs: "
            f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        )


class PoolUse(PlanPart):
    """A pool of devices that was at hand: what it was taken to be, and how many stages lie in it."""

    name: str
    num_devices: int = Field(ge=1, le=MOST_DEVICES)
    num_stages: int = Field(ge=0, le=MOST_DEVICES)
    """0 where it is left out."""
    budget_bytes: Bytes
    margin_bytes: Bytes = 0
    profile: CostSource
    reason: str | None = None
    """Why it is left out."""


class Prediction(PlanPart):
    """What the planner expects of a plan, and how sure it is that no plan is better."""

    step_time_s: PositiveSeconds
    tokens_per_s_per_device: float = Field(ge=0, le=MOST_PER_S)
    mfu: float | None = Field(default=None, ge=0, le=MOST_PER_S)
    """Model FLOP utilisation; absent where the device's peak is not known."""
    mfu_attention: str = ""
    """How attention is counted in it, as the model has it: ``causal``; empty in plans that were written before."""
    warnings: tuple[str, ...] = ()
    """What is allowed and should be known all the same: sequences longer than the model was made for."""
    budget_bytes: Bytes
    """What a device may hold."""
    margin_bytes: Bytes = 0
    """What each device has beside it and is left free, for the allocator's sake."""
    stages: tuple[StagePrediction, ...]
    certificate: Certificate
    lower_bound_s: Seconds
    profile: CostSource
    """Where the costs came from."""
    backend: Backend | None = None
    """What the devices communicate with; absent in plans that were written before it was said."""
    interval: Interval | None = None
    """Absent where no measured runs are like this one, and in plans that were written before it was said."""
    alternatives: tuple[Alternative, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    """The best plain plans; none where they were not searched."""
    pools: tuple[PoolUse, ...] | None = None
    """The pools at hand, those used first in the order of their ranks; absent where all devices are alike."""

    @property
    def costs(self) -> str:
        """Where the costs come from; of unlike pools those that are used, each with its own where they differ."""
        names: dict[str, list[str]] = {}
        for pool in self.pools or ():
            if pool.num_stages:
                names.setdefault(str(pool.profile), []).append(pool.name)
        if len(names) < 2:
            return str(self.profile)
        return "; ".join(f"on {' and '.join(on)} {text}" for text, on in names.items())

    def stage_budgets(self) -> tuple[int, ...]:
        """Bytes that a device of each stage may hold."""
        if self.pools is None:
            return (self.budget_bytes,) * len(self.stages)
        return tuple(pool.budget_bytes for pool in self.pools for _ in range(pool.num_stages))

    def stage_margins(self) -> tuple[int, ...]:
        """Bytes of a device of each stage that are left free beside them."""
        if self.pools is None:
            return (self.margin_bytes,) * len(self.stages)
        return tuple(pool.margin_bytes for pool in self.pools for _ in range(pool.num_stages))

    def left_bytes(self) -> tuple[int, ...]:
        """What a device of each stage leaves of its budget; negative where it does not fit."""
        pairs = zip(self.stages, self.stage_budgets(), strict=True)
        return tuple(budget - stage.total_bytes for stage, budget in pairs)

    @property
    def fullest(self) -> int:
        """The stage whose devices have least left of their budget."""
        left = self.left_bytes()
        return left.index(min(left))

    @property
    def device_bytes(self) -> int:
        """What a device has, the margin that is left free included."""
        return self.budget_bytes + self.margin_bytes

    @property
    def margin_text(self) -> str:
        """What is left free beside the budget, where something is."""
        return margin_text(self.budget_bytes, self.margin_bytes)

    @property
    def accuracy(self) -> str:
        """How far a step typically turns out from its prediction."""
        return "predicted; no such runs to compare" if self.interval is None else str(self.interval)

    @property
    def time_factor(self) -> float:
        """What all times were multiplied by after a measured run; 1 where there was none."""
        return self.profile.time_factor

    def is_as_good(self, step_time_s: float | None) -> bool:
        """Whether another plan of this job, of this step time, is predicted too close to be told which is faster."""
        if step_time_s is None or self.interval is None:
            return False
        return max(step_time_s, self.step_time_s) <= min(step_time_s, self.step_time_s) * (1 + self.interval.as_good)
