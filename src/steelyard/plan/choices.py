"""What could be chosen instead of a plan, as data: trade-offs, baselines, and what was left out of the search.

These values travel from `steelyard.planning`, which finds them, to `steelyard.report`, which shows them, and are what
``--json`` prints. Memory is bytes per device, the allocator's slack included; times are those of the simulator.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from steelyard.levers.lever import Result
from steelyard.plan.part import PlanPart, notebook_html
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import CostSource, margin_text
from steelyard.units import GIB, format_bytes

Verdict = Literal["not offered", "illegal", "dominated", "undominated"]


class FrontierPoint(PlanPart):
    """The fastest plan of all that take at most this memory."""

    memory_bytes: int
    step_time_s: float
    tokens_per_s: float
    num_stages: int
    num_microbatches: int
    setting: str
    strategies: str
    is_chosen: bool = False
    """The fastest plan within the budget: what `steelyard plan --simplify 0` chooses."""


class DevicePoint(PlanPart):
    """The fastest plan on a number of devices, or the reason why there is none."""

    num_devices: int
    cluster: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    cost_per_billion_tokens: float | None = None
    """In the currency of the price; absent where no price was given."""
    price_per_hour: float | None = None
    """Of all devices of an offer."""
    is_worth_having: bool | None = None
    """Of an offer, whether no other is at least as fast for no more money a token."""
    num_stages: int | None = None
    num_microbatches: int | None = None
    setting: str | None = None
    strategies: str | None = None
    reason: str = ""
    """Why nothing fits; empty where something does."""


class TradeOffs(PlanPart):
    """Time against memory on one cluster, and time and money against the number of devices."""

    model: str
    cluster: str
    seq_len: int
    global_batch: int
    precision: str
    budget_bytes: int
    margin_bytes: int = 0
    """What each device has beside it and is left free, where a plan fits so."""
    price_per_device_hour: float | None = None
    points: tuple[FrontierPoint, ...] = ()
    """Most memory and least time first."""
    is_complete: bool = True
    """No plan worth having is missing between the first and the last point."""
    devices: tuple[DevicePoint, ...] = ()
    offers: tuple[DevicePoint, ...] = ()
    """Parts of the cluster by time and money, the cheapest tokens first."""
    profile: CostSource | None = None
    """Where the costs came from."""

    @property
    def device_bytes(self) -> int:
        """What a device has, the margin that is left free included."""
        return self.budget_bytes + self.margin_bytes

    @property
    def limit_text(self) -> str:
        """What the chosen plan was searched within: the budget, or all there is where no plan leaves the margin."""
        if any(point.is_chosen and point.memory_bytes > self.budget_bytes for point in self.points):
            return (
                f"{format_bytes(self.device_bytes)} per device, of which no plan leaves "
                f"{format_bytes(self.margin_bytes)} free"
            )
        left = margin_text(self.budget_bytes, self.margin_bytes)
        return f"{format_bytes(self.budget_bytes)} per device" + (f", {left}" if left else "")

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return notebook_html(self)


class StrategyVerdict(PlanPart):
    """Whether a strategy could be of use to a layer type in a pipeline configuration, and if not, why."""

    kind: str
    """Empty where the reason holds for all of them."""
    strategy: str
    verdict: Verdict
    reason: str = ""
    """What forbids it, or the strategy that is no worse in anything; empty for one that is undominated."""


class NotSearched(PlanPart):
    """Values of a configuration that were never searched, and why."""

    what: str
    """stages, microbatches or schedule."""
    values: str
    """As in ``3, 5–7``."""
    reason: str


class ComparedBaseline(PlanPart):
    """The best plan under a restriction, next to the plan that is explained."""

    name: str
    """The restriction: ``without tp``."""
    step_time_s: float | None = None
    """Absent where nothing fits."""
    slowdown: float | None = None
    """Its step time over that of the plan, minus one; negative where it is faster."""
    is_bound: bool = False
    """Whether the search was ended before it had proven its plan, so that the best one may be faster."""
    missing_bytes: int | None = None
    """Bytes per device that the nearest plan lacks; absent where one fits, or no memory would help."""
    setting: str = ""
    strategies: str = ""
    reason: str = ""
    """Why nothing was searched; empty where it was."""


class WhyNot(PlanPart):
    """The best plan that does what was asked for, or why there is none; or a plan of the user's own, priced."""

    asked: str
    plan: Plan | None = None
    reasons: tuple[str, ...] = ()
    """What stands in the way; empty where nothing does."""
    beyond: str = ""
    """What was searched for it that the search of the plan leaves out."""


class Recut(PlanPart):
    """A plan in which the node of a slow rank has stages of its own, priced with these stages as slow as the rank."""

    step_time_s: float
    layers: tuple[int, ...]
    """Of each stage."""
    is_slow: tuple[bool, ...]
    """Whether a stage lies on the node of the slow rank."""
    setting: str
    strategies: str


class SlowNode(PlanPart):
    """A slow rank of a run: a step as predicted, with the rank as slow as it was, without its node, and cut for it."""

    rank: str
    """Which, where, and how slow."""
    step_time_s: float
    slowed_step_s: float
    without_step_s: float | None = None
    """Absent where no plan fits without it."""
    lost: Literal["node", "device"] = "node"
    """What it goes without: of a pool of one node a device."""
    cluster: str = ""
    setting: str = ""
    strategies: str = ""
    recut: Recut | None = None
    """Absent where none was searched, and where the best plan found leaves the node out, or takes it alone."""


class Explanation(PlanPart):
    """Why a plan and not another one: each baseline was searched again under its restriction."""

    binds: str
    """What a faster plan would need, in a sentence."""
    rivals: tuple[ComparedBaseline, ...] = ()
    budgets: tuple[ComparedBaseline, ...] = ()
    """The best plans with a little more and a little less memory per device."""
    notes: tuple[str, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    """Of the recorded run that was given."""
    why_not: WhyNot | None = None
    not_searched: tuple[NotSearched, ...] = ()
    """Pipeline configurations that were never searched."""
    verdicts: tuple[StrategyVerdict, ...] = ()
    """What became of every strategy of the tree, in the pipeline configuration of the plan."""


class PlanStudy(PlanPart):
    """What a report shows around a plan: its baselines, and time against memory, as far as the time for it reached."""

    scope: str
    """Among what was searched, in words; empty where nothing was."""
    explanation: Explanation
    points: tuple[FrontierPoint, ...] = ()
    """Most memory and least time first."""
    is_complete: bool = False
    """No plan worth having is missing between the first and the last point."""
    left_out: tuple[str, ...] = ()
    """The baselines for which there was no time."""


class Axis(PlanPart):
    """What one control of an exploration changes: its values in words and as options of the command line."""

    name: str
    words: tuple[str, ...]
    values: tuple[int, ...]
    """As numbers, in tokens, samples, devices or bytes; software by its place."""
    options: tuple[str, ...]
    """What asks `steelyard plan` for each value."""
    own: int
    """The place of what was asked for."""


class ExploredPoint(PlanPart):
    """The fastest plan found at one place of the axes, or why there is none."""

    place: tuple[int, int, int, int]
    """On each axis."""
    plan: int | None = None
    """Its place among the plans; absent where nothing fits."""
    reason: str = ""
    """Why there is no plan; empty where there is one."""


class Exploration(PlanPart):
    """Plans solved over software and levers, sequence length or batch, devices, and memory."""

    model: str
    cluster: str
    precision: str
    command: str
    """Asks `steelyard plan` for what all points have in common."""
    axes: tuple[Axis, Axis, Axis, Axis]
    """Software and levers; sequence length or batch; devices; memory per device. All but the first rise."""
    margin_bytes: int
    """What a device has beside the budget of the request and is left free, where a plan fits so."""
    plans: tuple[Plan, ...]
    points: tuple[ExploredPoint, ...]
    """What was solved; places without a point were not reached before the time was up."""
    left_out: tuple[str, ...] = ()
    """Engines and levers that were not tried, each with the reason."""
    price_per_device_hour: float | None = None

    @property
    def num_places(self) -> int:
        """How many points there are if the time suffices for all."""
        return math.prod(len(axis.words) for axis in self.axes)


RESULTS: tuple[Result, ...] = ("exact", "rounding", "other updates", "fewer trained parameters")
"""What changes make of training, the least first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a change does."""

    options: str
    """As the command line takes it; empty for the request itself."""
    result: Result
    """What it makes of what is trained."""
    least_bytes: int | None
    """Fewest of a device in which there is a plan; None where no plan is legal."""
    saved_bytes: int
    """How many fewer than without it."""
    step_s: float
    """Of the fastest plan that fits; infinite where none does."""
    slowdown: float
    """Step time over that of the request without a limit of memory, minus one."""
    missing_bytes: int
    """What a device lacks; 0 where a plan fits."""

    @property
    def fits(self) -> bool:
        """Whether some plan does."""
        return self.step_s < math.inf

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts the best first: of those that fit by the cost of a GiB, of others by what is missing."""
        if not self.fits:
            return (1, self.missing_bytes)
        saved = max(self.saved_bytes, 1) / GIB
        cost = self.slowdown / saved if self.slowdown > 0 else self.slowdown * saved
        return (0, self.options.count("--"), cost, RESULTS.index(self.result))

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return notebook_html(self)


class Found(NamedTuple):
    """What advice there is."""

    own: Advice
    """Of the request itself."""
    changes: tuple[Advice, ...]
    """The best first."""
    left_out: tuple[str, ...]
    """Changes that cannot be had, each with the reason."""
    untried: tuple[str, ...]
    """Changes for which no time was left."""

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return notebook_html(self)
