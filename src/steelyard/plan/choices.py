"""Alternatives to a plan, as data: trade-offs, baselines, advice, what the search left out, and plans for other hosts.

`steelyard.planning` computes these values, `steelyard.report` shows them, and ``--json`` prints them. Memory is bytes
per device, allocator slack included; times come from the simulator. `Replan` is the interface through which the runtime
of an elastic run asks the search for a new plan, without importing it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from steelyard.files import FilePart
from steelyard.levers.lever import Result
from steelyard.plan.plan import Plan, notebook_html
from steelyard.plan.prediction import CostSource, margin_text
from steelyard.units import GIB, format_bytes

ANY_PLAN = "any plan"
"""Name of the baseline without a restriction."""
Verdict = Literal["not offered", "illegal", "dominated", "undominated"]


class FrontierPoint(FilePart):
    """Fastest plan within a memory limit."""

    memory_bytes: int
    step_time_s: float
    tokens_per_s: float
    num_stages: int
    num_microbatches: int
    setting: str
    strategies: str
    is_chosen: bool = False
    """Whether this is the fastest plan within the budget, the one that `steelyard plan --simplify 0` chooses."""


class DevicePoint(FilePart):
    """Fastest plan on a number of devices, or the reason why there is none."""

    num_devices: int
    cluster: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    cost_per_billion_tokens: float | None = None
    """Cost in the currency of the price; None if no price was given."""
    price_per_hour: float | None = None
    """Price of all devices of an offer."""
    is_worth_having: bool | None = None
    """Whether no other offer is at least as fast at no higher cost per token; None outside offers."""
    num_stages: int | None = None
    num_microbatches: int | None = None
    setting: str | None = None
    strategies: str | None = None
    reason: str = ""
    """Reason why nothing fits; empty if a plan fits."""


class TradeOffs(FilePart):
    """Step time against memory on one cluster, and time and cost against the number of devices."""

    model: str
    cluster: str
    seq_len: int
    global_batch: int
    precision: str
    budget_bytes: int
    margin_bytes: int = 0
    """Bytes of each device reserved in addition to the budget; used only if nothing fits otherwise."""
    price_per_device_hour: float | None = None
    points: tuple[FrontierPoint, ...] = ()
    """Points in order of falling memory and rising step time."""
    is_complete: bool = True
    """Whether no Pareto-optimal plan is missing between the first and the last point."""
    devices: tuple[DevicePoint, ...] = ()
    offers: tuple[DevicePoint, ...] = ()
    """Parts of the cluster with their time and cost, cheapest tokens first."""
    profile: CostSource | None = None
    """Source of the costs."""

    @property
    def device_bytes(self) -> int:
        """Bytes of a device, reserved bytes included."""
        return self.budget_bytes + self.margin_bytes

    @property
    def limit_text(self) -> str:
        """Memory limit of the chosen plan, in words: the budget, or the whole device if no plan keeps the reserve."""
        if any(point.is_chosen and point.memory_bytes > self.budget_bytes for point in self.points):
            return (
                f"{format_bytes(self.device_bytes)} per device; no plan leaves the reserved "
                f"{format_bytes(self.margin_bytes)} free"
            )
        left = margin_text(self.budget_bytes, self.margin_bytes)
        return f"{format_bytes(self.budget_bytes)} per device" + (f", {left}" if left else "")

    _repr_html_ = notebook_html


class StrategyVerdict(FilePart):
    """Whether a strategy could be useful for a layer type in a pipeline configuration, and the reason if not."""

    kind: str
    """Name of the layer type; empty if the reason holds for all of them."""
    strategy: str
    verdict: Verdict
    reason: str = ""
    """The rule that forbids it, or the strategy that dominates it; empty if undominated."""


class NotSearched(FilePart):
    """Configuration values that were never searched, and the reason."""

    what: str
    """Name of the quantity: stages, microbatches or schedule."""
    values: str
    """Values in words, as in ``3, 5–7``."""
    reason: str


class ComparedBaseline(FilePart):
    """Best plan under a restriction, to compare with the explained plan."""

    name: str
    """The restriction: ``without tp``."""
    step_time_s: float | None = None
    """Step time in seconds; None if nothing fits."""
    slowdown: float | None = None
    """Step time relative to that of the explained plan, minus one; negative if faster."""
    is_bound: bool = False
    """Whether the search ended before it proved its plan or found one, so that the best plan may be faster."""
    missing_bytes: int | None = None
    """Bytes per device that the nearest plan lacks; None if a plan fits or if more memory would not help."""
    setting: str = ""
    strategies: str = ""
    reason: str = ""
    """Reason why nothing was searched; empty if it was."""


class WhyNot(FilePart):
    """Counterfactual: the best plan that meets the request, or why there is none; or the user's own plan, priced."""

    asked: str
    plan: Plan | None = None
    reasons: tuple[str, ...] = ()
    """Obstacles to the request; empty if there are none."""
    beyond: str = ""
    """Extension of the search for this request, beyond what the search of the plan covers."""


class Recut(FilePart):
    """Plan that gives the node of a slow rank its own stages, priced with these stages as slow as the rank."""

    step_time_s: float
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    is_slow: tuple[bool, ...]
    """Whether each stage lies on the node of the slow rank."""
    setting: str
    strategies: str


class SlowNode(FilePart):
    """A slow rank of a run, with the step as predicted, slowed by the rank, without its node, and repartitioned."""

    rank: str
    """Name, place and slowdown of the rank, in words."""
    step_time_s: float
    slowed_step_s: float
    without_step_s: float | None = None
    """Step time without the node, in seconds; None if no plan fits without it."""
    lost: Literal["node", "device"] = "node"
    """Unit that ``without_step_s`` leaves out: a device if the pool has one node."""
    cluster: str = ""
    setting: str = ""
    strategies: str = ""
    recut: Recut | None = None
    """The repartitioned plan; None if none was searched, or if the best one has only the slow node or leaves it out."""


class Explanation(FilePart):
    """Reasons for choosing a plan; each baseline was searched again under its restriction."""

    binds: str
    """Bottleneck that a faster plan must relieve, in a sentence."""
    rivals: tuple[ComparedBaseline, ...] = ()
    budgets: tuple[ComparedBaseline, ...] = ()
    """Best plans with slightly more and slightly less memory per device."""
    notes: tuple[str, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    """Slow ranks of the recorded run that was given."""
    why_not: WhyNot | None = None
    not_searched: tuple[NotSearched, ...] = ()
    """Pipeline configurations that were never searched."""
    verdicts: tuple[StrategyVerdict, ...] = ()
    """Verdict on every strategy of the decision tree, for the pipeline configuration of the plan."""


class PlanStudy(FilePart):
    """Context of a plan in a report: baselines, and time against memory, as far as the time limit allowed."""

    scope: str
    """Set of plans that was searched, in words; empty if nothing was."""
    explanation: Explanation
    points: tuple[FrontierPoint, ...] = ()
    """Points in order of falling memory and rising step time."""
    is_complete: bool = False
    """Whether no Pareto-optimal plan is missing between the first and the last point."""
    left_out: tuple[str, ...] = ()
    """Baselines that the time limit left out."""


class Axis(FilePart):
    """One control of an exploration: its values in words and as command-line options."""

    name: str
    words: tuple[str, ...]
    values: tuple[int, ...]
    """Values as numbers of tokens, samples, devices or bytes; for engines and levers, indices."""
    options: tuple[str, ...]
    """Options of `steelyard plan` for each value."""
    own: int
    """Index of the requested value."""


class ExploredPoint(FilePart):
    """Fastest plan found at one point of the axes, or the reason why there is none."""

    place: tuple[int, int, int, int, int]
    """Index on each axis."""
    plan: int | None = None
    """Index into ``Exploration.plans``; None if nothing fits."""
    reason: str = ""
    """Reason why there is no plan; empty if there is one."""


class Exploration(FilePart):
    """Plans solved over software and levers, sequence length or batch, devices, and memory."""

    model: str
    cluster: str
    precision: str
    command: str
    """`steelyard plan` command with the options that all points share."""
    axes: tuple[Axis, Axis, Axis, Axis, Axis]
    """Engine, lever, sequence length or batch, devices, memory per device. Values of the last three rise."""
    margin_bytes: int
    """Bytes of a device reserved in addition to the requested budget; used only if nothing fits otherwise."""
    plans: tuple[Plan, ...]
    points: tuple[ExploredPoint, ...]
    """Solved points; a missing one was not reached within the time limit."""
    left_out: tuple[str, ...] = ()
    """Engines and levers that were not tried, each with the reason."""
    price_per_device_hour: float | None = None

    @property
    def num_places(self) -> int:
        """Number of points if the time suffices for all."""
        return math.prod(len(axis.words) for axis in self.axes)


RESULTS: tuple[Result, ...] = ("exact", "rounding", "other updates", "fewer trained parameters")
"""Effects of a change on training, smallest first."""
LEAST_GAIN = 1e-3
"""Smallest fraction of memory or time that counts as a gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Effect of a change on memory and step time."""

    options: str
    """Command-line options of the change; empty for the request itself."""
    result: Result
    """Effect on the training result."""
    least_bytes: int | None
    """Minimum bytes per device for which a plan exists; None if no plan is legal."""
    saved_bytes: int
    """Reduction of ``least_bytes`` by the change."""
    step_s: float
    """Step time of the fastest plan that fits, in seconds; infinite if none fits."""
    slowdown: float
    """Step time relative to that of the request, without a memory limit if it does not fit, minus one."""
    missing_bytes: int
    """Bytes that a device lacks; 0 if a plan fits."""

    @property
    def fits(self) -> bool:
        """Whether some plan fits."""
        return self.step_s < math.inf

    def gains_on(self, own: "Advice") -> bool:
        """Return whether this change saves memory or time compared with the request itself."""
        return self.saved_bytes > LEAST_GAIN * (own.least_bytes or 0) or self.step_s < (1 - LEAST_GAIN) * own.step_s

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key, best first: changes that save time by their step time, others that fit by their cost per GiB saved,
        the rest by the missing bytes."""
        if not self.fits:
            return (2, self.missing_bytes)
        if self.slowdown <= 0:
            return (0, self.slowdown, RESULTS.index(self.result))
        return (1, self.slowdown * GIB / max(self.saved_bytes, 1), RESULTS.index(self.result))

    _repr_html_ = notebook_html


class Found(NamedTuple):
    """Advice on a request."""

    own: Advice
    """The request itself, unchanged."""
    changes: tuple[Advice, ...]
    """Changes in order, best first."""
    left_out: tuple[str, ...]
    """Changes that are not possible, each with the reason."""
    untried: tuple[str, ...]
    """Changes that the time limit left out."""

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        return notebook_html(self)


class OverEngines(TypedDict):
    """A plan and the best one of every other engine: ``--engines``."""

    plan: Plan
    engines: tuple[ComparedBaseline, ...]


class Reason(TypedDict):
    """A pipeline configuration without a plan, and the reason."""

    stages: int
    microbatches: int
    reason: str


class NothingFits(TypedDict):
    """The nearest miss, where no plan fits."""

    status: Literal["infeasible"]
    budget_bytes: int
    missing_bytes: int | None
    nearest_miss: str
    settings: list[Reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan, and the processes that follow it."""

    plan: Plan
    taken: tuple[int, ...]
    """Number of participating processes of each host, the first ones."""
    order: tuple[int, ...] = ()
    """Indices of the hosts in rank order, pool by pool as in the plan; empty if the hosts are already in rank order."""
    notice: str = ""
    """Cost of the change, for people; empty if the plan is the given one."""


Replan = Callable[[Plan, Sequence[int], Path, Sequence[str]], Replanned]
"""Function from a plan, the processes of each host, the folder of the plan's file and, if given, the pool of each host,
to the plan for them. Raises `UserError` if there is none."""
