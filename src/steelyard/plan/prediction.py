"""The prediction of a plan, and its wording in every view.

A `Prediction` holds time and memory of each stage, the `CostSource` of its times, the `Certificate` with the result of
the search, and the baselines of the plan. Only this module words status, reserved memory, shortfall and comparison.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from steelyard import limits
from steelyard.errors import InvalidPlanError
from steelyard.files import FilePart
from steelyard.hardware import Backend
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.profiles.profile import ProfileIdentity
from steelyard.units import (
    MOST_COUNT,
    format_bytes,
    format_count,
    format_days,
    format_money,
    format_plural,
    format_seconds,
)


class CatalogueRates(FilePart):
    """Catalogue entry with the fractions of data-sheet rates that a device reaches in matrix products and attention."""

    generation: str
    """Name of the entry."""
    is_assumed: bool
    """Whether no fitted run used such a device."""
    is_stand_in: bool = False
    """Whether the device is of no known generation, so that this entry stands in."""

    @property
    def brief(self) -> str:
        """Words for a table cell: ``fitted (hopper)``."""
        return f"{'assumed' if self.is_assumed else 'fitted'} ({self.generation})"

    def __str__(self) -> str:
        if self.is_stand_in:
            return f"assumed: unknown device generation, values of {self.generation!r}"
        if self.is_assumed:
            return f"assumed for {self.generation}, without fitted published runs"
        return f"fitted to published runs of {self.generation}"


class ProfileFile(FilePart):
    """File that a profile was read from."""

    path: str
    """Path as given: absolute, or relative to the folder in which the plan was made."""
    sha256: str
    """Hash of the content."""


class CostSource(ProfileIdentity):
    """Identity of a profile, with the other sources of the times."""

    time_factor: float = Field(default=1.0, gt=0)
    """Factor on all times, calibrated by measured runs; 1 if there were none."""
    num_calibrating: limits.Count = 0
    """Number of runs that calibrated ``time_factor``; 0 also in plans older than this field."""
    rates: CatalogueRates | None = None
    """Catalogue entry; absent if times were measured or the rates given, and in plans older than this field."""
    links_assumed: bool = False
    """Whether layers were measured on one device, so that the link rates are the cluster's."""

    file: ProfileFile | None = None
    """Profile file; absent if the profile was traced or given as a value, and in plans older than this field."""
    imbalance: float | None = Field(default=None, ge=1)
    """Load of the busiest expert rank relative to the mean (assumed); absent for models without experts, and in plans
    older than this field."""

    def __str__(self) -> str:
        runs = "a measured run" if self.num_calibrating < 2 else f"{self.num_calibrating} measured runs"
        more = "" if self.time_factor == 1.0 else f"; all times × {self.time_factor:.3f}, calibrated by {runs}"
        more += "" if self.imbalance is None else f"; expert load imbalance assumed: {self.imbalance:g}"
        if self.is_measured:
            what, links = ("layers measured", ", links assumed") if self.links_assumed else ("measured", "")
            return f"{what} on {self.device} ({self.created}){links}{more}"
        rates = "" if self.rates is None else f", {self.rates}"
        return f"traced with torch {self.torch}, transformers {self.transformers}; catalogue rates{rates}{more}"


TOLERANCE = 1e-4
"""Default optimality gap of integer programming solvers (HiGHS and Gurobi: ``mip_rel_gap``, ``MIPGap``)."""
Status = Literal["optimal", "gap", "simulated", "simplified", "priced"]


class Certificate(FilePart):
    """Degree of certainty that no plan is faster.

    ``optimal``: no plan in the search space is faster under the cost model. ``gap``: the best plan found, within the
    time limit or among those that fit; optimal to `TOLERANCE` if the gap is within it. ``simulated``: the fastest in
    simulation of several plans that the search found. ``simplified``: the simplest of the plans that are slightly
    slower than the best found (`FastestPlan`). ``priced``: given, not searched.
    """

    status: Status
    gap: float | None = Field(default=None, ge=0, le=1)
    """Fraction of the plan's step time (by the cost tables, or as shown if processes share cores) that
    `Prediction.lower_bound_s` does not prove necessary; absent if nothing is proven."""
    time_limit_s: limits.Seconds | None = None
    """Time limit of the search, if it ended the search before a proof; absent if the search ended by itself."""
    num_simulated: int | None = Field(default=None, ge=2, le=limits.MOST_STEPS)
    """Number of plans that the simulator chose from; absent if it confirmed the search's best."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, needed_by in (("gap", "gap"), ("gap", "simplified"), ("num_simulated", "simulated")):
            if self.status == needed_by and getattr(self, field) is None:
                raise InvalidPlanError(
                    field=f"certificate.{field}",
                    found="nothing",
                    expected=f"a number, because the status is {self.status}",
                    hint="plan again",
                )
        return self

    @property
    def is_optimal(self) -> bool:
        """Whether no searched plan is faster, by the cost tables."""
        return self.status == "optimal"

    @property
    def _is_within_tolerance(self) -> bool:
        return self.gap is not None and self.gap <= TOLERANCE

    @property
    def brief(self) -> tuple[str, str]:
        """Status in a word or two, and its meaning."""
        match self.status:
            case "optimal":
                return "optimal", "no plan in the search space is faster"
            case "gap" if self._is_within_tolerance:
                return f"optimal to {TOLERANCE:.2%}", "no plan in the search space is faster by more"
            case "gap":
                is_over = self.time_limit_s is not None
                ended = "left at the time limit" if is_over else "no plan in the search space is faster by more"
                return f"gap {self.gap:.2%}", ended
            case "simulated":
                return "simulated", "fastest of the search's best"
            case "simplified":
                return f"gap {self.gap:.2%}", "simplest plan; no plan in the search space is faster by more"
            case "priced":
                return "none", "priced as given, not searched"

    def __str__(self) -> str:
        by_more = "no plan in the search space is faster by more"
        found = f"best found, gap {self.gap or 0.0:.2%}: {by_more}"
        if self._is_within_tolerance:
            found = f"optimal under the cost model to {TOLERANCE:.2%}: {by_more}"
        elif self.time_limit_s is not None:
            limit = format_seconds(self.time_limit_s)
            found = f"best found in {limit} (time limit), gap {self.gap:.2%}: {by_more}"
        return {
            "optimal": "optimal under the cost model: no plan in the search space is faster",
            "gap": found,
            "simulated": f"fastest in simulation of the search's best {self.num_simulated}, but not by the search's "
            "closed form",
            "simplified": f"simplest found, gap {self.gap or 0.0:.2%}: {by_more}",
            "priced": "priced as given, not searched",
        }[self.status]


def margin_text(budget_bytes: int, margin_bytes: int) -> str:
    """Return the reserved memory of a device, in words; empty if there is none."""
    if not margin_bytes:
        return ""
    device_bytes = budget_bytes + margin_bytes
    return f"{margin_bytes / device_bytes:.0%} of {format_bytes(device_bytes)} left free"


def shortfall(peak_bytes: int, budget_bytes: int, margin_bytes: int) -> str:
    """Return by how much a plan misses the budget or uses reserved memory; empty if it does neither."""
    over = peak_bytes - budget_bytes
    if over <= 0:
        return ""
    if over > margin_bytes:
        return f"does not fit: exceeds the memory by {format_bytes(over - margin_bytes)} per device"
    return f"fits under pressure: uses {format_bytes(over)} of the reserved {format_bytes(margin_bytes)}"


OWN_TERMS = ("compute", "remat", "host", "optimizer", "offload")
"""Time terms in which a rank computes by itself; in the terms of parallelism dimensions it waits for others."""


class StagePrediction(FilePart):
    """Predicted seconds per microbatch and bytes per rank of one stage, each term by name.

    Terms are sums over all chunks of the stage.
    """

    time_s: dict[str, limits.Seconds]
    memory_bytes: dict[str, limits.Bytes]
    host_bytes: limits.Bytes = Field(default=0, exclude_if=lambda size: not size)
    """Bytes of a rank in host memory, which ``memory_bytes`` does not count."""

    @property
    def total_time_s(self) -> float:
        """Seconds that one microbatch occupies the stage; once-per-step work is spread over the microbatches."""
        return sum(self.time_s.values())

    @property
    def total_bytes(self) -> int:
        """Upper bound of the bytes on one rank."""
        return sum(self.memory_bytes.values())


class Alternative(FilePart):
    """A candidate that lost, and the reason."""

    description: str
    reason: str
    step_time_s: limits.Seconds | None = None
    """Step time in seconds; absent if it was not computed exactly."""
    is_bound: bool = False
    """Whether the configuration was not searched to the end, so that its best plan may be faster."""
    memory_bytes: limits.Bytes | None = None
    """Bytes of the fullest device; absent if not computed exactly."""


class FastestPlan(FilePart):
    """The fastest plan found, which was given up for a simpler one that is slightly slower."""

    step_time_s: limits.PositiveSeconds
    memory_bytes: limits.Bytes
    """Bytes of the fullest device."""
    num_groups: int = Field(ge=1, le=limits.MOST_LAYERS)
    """Number of runs of neighbouring layers with one strategy, summed over the stages."""
    num_stages: int | None = Field(default=None, ge=1, le=limits.MOST_LAYERS)
    """Number of pipeline stages; absent in older files, whose plans were simplified in groups only."""
    setting: str
    strategies: str


class Baseline(FilePart):
    """Best plan of a simple way to train that needs no planner, on the same costs."""

    name: str
    step_time_s: limits.Seconds | None = None
    """Step time in seconds; absent if no such plan fits."""
    missing_bytes: limits.Bytes | None = None
    """Bytes per device that the nearest plan lacks, if none fits."""
    setting: str = ""
    strategies: str = ""


class Interval(FilePart):
    """Range of nine in ten runs similar to a predicted one, and the difference within which plans cannot be ranked."""

    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)
    typical: float = Field(ge=0)
    """The median of |predicted / measured − 1| of such runs."""
    like: str
    """Description of these runs, from `steelyard.cost.accuracy`."""
    as_good: float = Field(ge=0)
    """Relative step-time difference up to which plans of one job are within prediction error."""

    def __str__(self) -> str:
        return (
            f"typically ± {self.typical:.0%} ({self.like}); 9 in 10 such runs: "
            f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        )


class PoolUse(FilePart):
    """An available pool of devices: its costs and memory, and the number of stages in it."""

    name: str
    num_devices: int = Field(ge=1, le=limits.MOST_DEVICES)
    num_stages: int = Field(ge=0, le=limits.MOST_DEVICES)
    """Number of stages; 0 if the pool is left out."""
    budget_bytes: limits.Bytes
    margin_bytes: limits.Bytes = 0
    profile: CostSource
    reason: str | None = None
    """Reason why the pool is left out."""


class HostUse(FilePart):
    """Host memory of a node's ranks, for the node with the least memory left.

    On GPUs the tensors are pinned, and torch rounds each of them up to a power of two.
    """

    node_bytes: limits.Bytes
    memory_bytes: limits.Bytes | None = None
    """Host memory for the tensors, in bytes; absent if the cluster does not give it, so that nothing was checked."""

    @property
    def fits(self) -> bool:
        """Whether the tensors fit, or the limit is not known."""
        return self.memory_bytes is None or self.node_bytes <= self.memory_bytes

    def __str__(self) -> str:
        taken = f"{format_bytes(self.node_bytes)} of tensors in the host memory of a node"
        if self.memory_bytes is None:
            return f"{taken}; not checked, because the cluster does not define its size"
        if not self.fits:
            return f"{taken}, more than its {format_bytes(self.memory_bytes)}"
        rounded = "; pinned tensors may take up to twice their size" if 2 * self.node_bytes > self.memory_bytes else ""
        return f"{taken}, of {format_bytes(self.memory_bytes)}{rounded}"


class Prediction(FilePart):
    """Predicted time and memory of a plan, and the certainty that no plan is better."""

    step_time_s: limits.PositiveSeconds
    tokens_per_s_per_device: float = Field(ge=0, le=limits.MOST_PER_S)
    mfu: float | None = Field(default=None, ge=0, le=limits.MOST_PER_S)
    """Model FLOP utilisation; absent if the device's peak is not known."""
    mfu_attention: str = ""
    """Method of counting attention in ``mfu``, from the model: ``causal``; empty in older plans."""
    model_flop_per_s: float | None = Field(default=None, ge=0, le=limits.MOST_PER_S)
    """Model FLOP/s of a device, counted as in `mfu`; absent if no layer gives its FLOP count, and in older plans."""
    rank_samples: tuple[limits.Samples, ...] = ()
    """Micro-batch size, in samples per rank: each size that a layer has; absent in older plans."""
    warnings: tuple[str, ...] = ()
    """Caveats of an allowed plan: sequences longer than the model was made for."""
    budget_bytes: limits.Bytes
    """Memory budget of a device, in bytes."""
    margin_bytes: limits.Bytes = 0
    """Bytes of each device reserved for the allocator, in addition to the budget."""
    stages: tuple[StagePrediction, ...]
    certificate: Certificate
    lower_bound_s: limits.Seconds
    """Lower bound of the step time: by the cost tables or, if processes share cores, by what the cores can compute. At
    most the step time, which the simulator may find shorter than the cost tables."""
    order_bound_s: limits.Seconds | None = Field(default=None, exclude_if=lambda bound_s: bound_s is None)
    """Lower bound of the step time over all orders of the plan's passes, if the schedule takes its order from times."""
    not_searched: tuple[str, ...] = ()
    """Runnable plans that the search left out; the certificate does not cover them."""
    profile: CostSource
    """Source of the costs."""
    backend: Backend | None = None
    """Communication backend of the devices; absent in older plans."""
    interval: Interval | None = None
    """Error interval of the step time; absent if no measured runs are similar, and in older plans."""
    alternatives: tuple[Alternative, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    """Best plans of simple ways to train, `ONE_STRATEGY` last; empty if they were not searched."""
    fastest: FastestPlan | None = None
    """The fastest plan found; absent if it is this plan."""
    reasons: tuple[str, ...] = ()
    """Reasons why some layers differ from most blocks, one line per strategy; empty in older plans."""
    host: HostUse | None = Field(default=None, exclude_if=lambda use: use is None)
    """Use of host memory; absent if there is none."""
    pools: tuple[PoolUse, ...] | None = None
    """Available pools, the used ones first in rank order; absent if all devices are identical."""

    @property
    def costs(self) -> str:
        """Source of the costs; for heterogeneous pools, the source of each pool that is used, if they differ."""
        names: dict[str, list[str]] = {}
        for pool in self.pools or ():
            if pool.num_stages:
                names.setdefault(str(pool.profile), []).append(pool.name)
        if len(names) < 2:
            return str(self.profile)
        return "; ".join(f"on {' and '.join(on)} {text}" for text, on in names.items())

    def stage_budgets(self) -> tuple[int, ...]:
        """Return the memory budget of a device of each stage, in bytes."""
        if self.pools is None:
            return (self.budget_bytes,) * len(self.stages)
        return tuple(pool.budget_bytes for pool in self.pools for _ in range(pool.num_stages))

    def stage_margins(self) -> tuple[int, ...]:
        """Return the reserved bytes of a device of each stage."""
        if self.pools is None:
            return (self.margin_bytes,) * len(self.stages)
        return tuple(pool.margin_bytes for pool in self.pools for _ in range(pool.num_stages))

    def left_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the budget that a device of each stage leaves free; negative if it does not fit."""
        pairs = zip(self.stages, self.stage_budgets(), strict=True)
        return tuple(budget - stage.total_bytes for stage, budget in pairs)

    @property
    def fullest(self) -> int:
        """Index of the stage whose devices have the least budget left."""
        left = self.left_bytes()
        return left.index(min(left))

    @property
    def device_bytes(self) -> int:
        """Bytes of a device, reserved bytes included."""
        return self.budget_bytes + self.margin_bytes

    @property
    def margin_text(self) -> str:
        """Reserved memory in words; empty if there is none."""
        return margin_text(self.budget_bytes, self.margin_bytes)

    @property
    def accuracy(self) -> str:
        """Typical error of the predicted step time, in words."""
        return "error unknown: no published runs like this one" if self.interval is None else str(self.interval)

    @property
    def order_line(self) -> str:
        """Proven distance from the best order of the plan's passes, rounded up; empty if nothing is proven."""
        if self.order_bound_s is None:
            return ""
        above = math.ceil(1000 * (self.step_time_s / self.order_bound_s - 1)) / 1000
        return f"at most {above:.1%} above the best order of its passes"

    def is_as_good(self, step_time_s: float | None) -> bool:
        """Return whether the step times of this plan and another of the same job are within prediction error."""
        if step_time_s is None or self.interval is None:
            return False
        return max(step_time_s, self.step_time_s) <= min(step_time_s, self.step_time_s) * (1 + self.interval.as_good)


SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


class Training(FilePart):
    """Duration and cost of training on a number of tokens at the predicted step time.

    Time outside steps is not counted: start-up, evaluation, checkpoints, and devices that wait or fail.
    """

    tokens: int = Field(ge=1, le=MOST_COUNT)
    steps: int = Field(ge=1, le=MOST_COUNT)
    days: float = Field(ge=0)
    device_hours: float = Field(ge=0)
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """Price in dollars; absent if none was given."""
    cost: float | None = Field(default=None, ge=0)
    """Cost of all device-hours in dollars; absent if no price was given."""

    @property
    def brief(self) -> tuple[str, str]:
        """Duration, and device-hours with their cost, in words: ``61.2 days``, ``1.17 M device-hours, $2.94 M``."""
        money = "" if self.cost is None else f", {format_money(self.cost)}"
        return format_days(self.days), f"{format_count(self.device_hours)} device-hours{money}"

    def __str__(self) -> str:
        return f"{format_count(self.tokens)} tokens: {', '.join(self.brief)}"


ONE_STRATEGY = "one strategy for all layers"
"""The baseline that contains all others: also one recomputation choice for all blocks, and free stage cuts."""
SAME_SHARE = 5e-4
"""Relative difference below which step times are called the same."""


def gain_text(prediction: Prediction, *, has_decisions: bool) -> str:
    """Return the gain over the baseline, and the baseline's plan; empty if none was searched.

    With ``has_decisions`` the baseline was searched within the user's decisions too.
    """
    if not prediction.baselines:
        return ""
    fitting = [(each.step_time_s, each) for each in prediction.baselines if each.step_time_s is not None]
    within = " within your options" if has_decisions else ""
    if not fitting:
        return f"no baseline: no plan with {ONE_STRATEGY} fits{within}"
    step_s, best = min(fitting, key=lambda pair: pair[0])
    words = against(1 - prediction.step_time_s / step_s)
    name = "" if best.name == ONE_STRATEGY else f", {best.name}"
    what = f"{format_seconds(step_s)}: {best.strategies}; {best.setting}"
    return f"{words} the baseline, the best plan with {ONE_STRATEGY}{within}{name} ({what})"


def simplicity_line(num_groups: int, num_stages: int, prediction: Prediction) -> str:
    """Return the cost of fewer groups of layers or stages than the fastest plan; empty if nothing is to choose."""
    fastest = prediction.fastest
    if fastest is None:
        return ""
    slower = prediction.step_time_s / fastest.step_time_s - 1
    if slower <= SAME_SHARE and (fastest.num_groups, fastest.num_stages or num_stages) == (num_groups, num_stages):
        return ""
    words = "as fast as" if slower <= SAME_SHARE else f"{slower:.1%} slower than"
    is_deep = (fastest.num_stages or 0) > num_stages
    is_mixed = fastest.num_groups > num_groups or not is_deep
    alike = ", fewer shardings or chunks" * (fastest.num_groups == num_groups)
    mine = [f"{format_plural(num_groups, 'group')} of layers{alike}"] * is_mixed
    mine += [format_plural(num_stages, "stage")] * is_deep
    best = f"fastest plan, of {format_plural(fastest.num_groups, 'group')}"
    if is_deep:
        groups = f" and {format_plural(fastest.num_groups, 'group')}" if is_mixed else ""
        best = f"fastest plan, of {format_plural(fastest.num_stages or 1, 'stage')}{groups}"
    return f"{', '.join(mine)}: {words} the {best} (choose it with --simplify 0)"


def against(gain: float) -> str:
    """Return ``2.2% faster than`` for the fraction of time gained, or ``as fast as`` if the times are equal."""
    return "as fast as" if abs(gain) <= SAME_SHARE else f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than"


def misfits(baselines: Iterable[Baseline]) -> Iterator[str]:
    """Yield the baselines without a plan, and why: ``plain DDP and plain FSDP do not fit (2 GiB and 1 GiB short)``."""
    none = [each for each in baselines if each.step_time_s is None]
    for is_legal, one, several in (
        (True, "does not fit", "do not fit"),
        (False, "has no legal strategy", "have no legal strategy"),
    ):
        alike = [each for each in none if (each.missing_bytes is not None) == is_legal]
        if alike:
            short = _listed([format_bytes(each.missing_bytes) for each in alike if each.missing_bytes is not None])
            verdict = (one if len(alike) == 1 else several) + (f" ({short} short)" if short else "")
            yield f"{_listed([each.name for each in alike])} {verdict}"


def _listed(words: Sequence[str]) -> str:
    """Return the words as ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def layers_text(chain: ModelChain, first: int, last: int) -> str:
    """Return the names of consecutive layers, both ends included: ``embedding, blocks 0–6``."""
    has_embedding = chain.type_of(first).role is LayerRole.EMBEDDING
    has_head = chain.type_of(last).role is LayerRole.HEAD
    names = ["embedding"] if has_embedding else []
    start, end = first + has_embedding, last - has_head
    if start == end:
        names.append(chain.layer_name(start))
    elif start < end:
        words = chain.layer_name(start), chain.layer_name(end)
        numbers = [each.removeprefix("block ") for each in words]
        plain = all(each.isdigit() for each in numbers)
        names.append(f"blocks {'–'.join(numbers)}" if plain else " to ".join(words))
    return ", ".join([*names, *(["head"] if has_head else [])])
