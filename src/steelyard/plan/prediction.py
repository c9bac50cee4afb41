"""The prediction of a plan, and the words for it that every view shows.

A `Prediction` holds time and memory of each stage, the `CostSource` that its times rest on, the `Certificate` of what
the search proved, and the baselines that the plan was compared with. Status, margin, shortfall and comparison are put
into words here alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from steelyard import limits
from steelyard.errors import InvalidPlanError
from steelyard.hardware import Backend
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.plan.part import PlanPart
from steelyard.profiles.profile import ProfileIdentity
from steelyard.units import format_bytes, format_plural, format_seconds, format_tera


class CatalogueRates(PlanPart):
    """Which entry says what part of a data sheet's rates a device reaches in matrix products and attention."""

    generation: str
    """The name of the entry."""
    is_assumed: bool
    """Whether no run of such a device was among those that were fitted."""
    is_stand_in: bool = False
    """Whether the device is of no generation that is known, and this entry is taken for all such."""

    @property
    def brief(self) -> str:
        """The words for a cell of a table: ``fitted (hopper)``."""
        return f"{'assumed' if self.is_assumed else 'fitted'} ({self.generation})"

    def __str__(self) -> str:
        if self.is_stand_in:
            return f"assumed: the device is of no known generation, so the entry {self.generation!r} is taken"
        if self.is_assumed:
            return f"assumed for {self.generation}, of which no published run was fitted"
        return f"fitted to published runs of {self.generation}"


class ProfileFile(PlanPart):
    """The file that a profile was read from."""

    path: str
    """As it was given, so relative to where the plan was made, or absolute."""
    sha256: str
    """Of its content."""


class CostSource(ProfileIdentity):
    """The identity of a profile with what else the times rest on."""

    time_factor: float = Field(default=1.0, gt=0)
    """What all times were multiplied by after a measured run; 1 where there was none."""
    num_calibrating: limits.Count = 0
    """Measured runs that gave it; 0 also in plans that were written before they were counted."""
    rates: CatalogueRates | None = None
    """Absent where times were measured or the rates given, and in plans that were written before it was said."""
    links_assumed: bool = False
    """Whether layers were measured on one device, and the rates of links are the cluster's."""

    file: ProfileFile | None = None
    """Absent where the profile was traced or given as a value, and in plans that were written before it was kept."""
    imbalance: float | None = Field(default=None, ge=1)
    """How many times the mean the rank computes whose experts most tokens take, which is assumed; absent for models
    without experts, and in plans that were written before they were divided."""

    def __str__(self) -> str:
        runs = "a measured run" if self.num_calibrating < 2 else f"{self.num_calibrating} measured runs"
        scaled = "" if self.time_factor == 1.0 else f"; all times × {self.time_factor:.3f}, calibrated by {runs}"
        if self.is_measured:
            what, links = ("layers measured", ", links assumed") if self.links_assumed else ("measured", "")
            return f"{what} on {self.device} ({self.created}){links}{scaled}{self._routing}"
        rates = "" if self.rates is None else f", {self.rates}"
        how = f"traced with torch {self.torch}, transformers {self.transformers}"
        return f"{how}; catalogue rates{rates}{scaled}{self._routing}"

    @property
    def _routing(self) -> str:
        return "" if self.imbalance is None else f"; imbalance of divided experts assumed: {self.imbalance:g}"


TOLERANCE = 1e-4
"""A gap that solvers of integer programs by custom leave (HiGHS and Gurobi: ``mip_rel_gap``, ``MIPGap``)."""
Status = Literal["optimal", "gap", "simulated", "simplified", "priced"]


class Certificate(PlanPart):
    """How sure the planner is that no plan is faster.

    ``optimal``: none is, by the cost tables. ``gap``: it is the best that was found, in the time that
    there was or of those that fit; optimal to so much where that is within `TOLERANCE`. ``simulated``: the
    fastest in simulation of several that the search found. ``simplified``: the simplest of those that take little
    longer than the best found (`FastestPlan`). ``priced``: given, not searched.
    """

    status: Status
    gap: float | None = Field(default=None, ge=0, le=1)
    """The part of the plan's step by the cost tables, or as shown where processes share cores, that
    `Prediction.lower_bound_s` does not prove necessary; absent where nothing is proven."""
    time_limit_s: limits.Seconds | None = None
    """What the search might take, where that ended it before it proved its plan; absent where it ended by itself."""
    num_simulated: int | None = Field(default=None, ge=2, le=limits.MOST_STEPS)
    """Plans among which the simulator chose; absent where it confirmed the search's best."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, needed_by in (("gap", "gap"), ("gap", "simplified"), ("num_simulated", "simulated")):
            if self.status == needed_by and getattr(self, field) is None:
                raise InvalidPlanError(
                    field=f"certificate.{field}",
                    found="nothing",
                    expected=f"a number, since the status is {self.status}",
                    hint="plan again",
                )
        return self

    @property
    def is_optimal(self) -> bool:
        """Whether no plan that was searched is faster, by the cost tables."""
        return self.status == "optimal"

    @property
    def _is_within_tolerance(self) -> bool:
        return self.gap is not None and self.gap <= TOLERANCE

    @property
    def brief(self) -> tuple[str, str]:
        """A word or two, and what they mean."""
        match self.status:
            case "optimal":
                return "optimal", "none that was searched is faster"
            case "gap" if self._is_within_tolerance:
                return f"optimal to {TOLERANCE:.2%}", "no plan that fits is faster by more"
            case "gap":
                is_over = self.time_limit_s is not None
                ended = "left when the time was up" if is_over else "no plan that fits is faster by more"
                return f"gap {self.gap:.2%}", ended
            case "simulated":
                return "simulated", "the fastest of the search's best"
            case "simplified":
                return f"gap {self.gap:.2%}", "the simplest; no plan that fits is faster by more"
            case "priced":
                return "none", "priced as given, not searched"

    def __str__(self) -> str:
        by_more = "no plan that fits is faster by more"
        found = f"best found, gap {self.gap or 0.0:.2%}: {by_more}"
        if self._is_within_tolerance:
            found = f"optimal for the cost tables to {TOLERANCE:.2%}: {by_more}"
        elif self.time_limit_s is not None:
            limit = format_seconds(self.time_limit_s)
            found = f"best so far, gap {self.gap:.2%}: the search ended at its limit of {limit}"
        return {
            "optimal": "optimal for the cost tables",
            "gap": found,
            "simulated": f"fastest in simulation among the search's best {self.num_simulated}; in its closed form "
            "another is",
            "simplified": f"simplest found, gap {self.gap or 0.0:.2%}: {by_more}",
            "priced": "priced as given, not searched",
        }[self.status]


def margin_text(budget_bytes: int, margin_bytes: int) -> str:
    """What is left free beside the budget of a device, where something is."""
    if not margin_bytes:
        return ""
    device_bytes = budget_bytes + margin_bytes
    return f"{margin_bytes / device_bytes:.0%} of {format_bytes(device_bytes)} left free"


def shortfall(peak_bytes: int, budget_bytes: int, margin_bytes: int) -> str:
    """How a plan of so many bytes on its fullest device misses the budget, or takes of the margin; empty if neither."""
    over = peak_bytes - budget_bytes
    if over <= 0:
        return ""
    if over > margin_bytes:
        return f"does not fit: misses {format_bytes(over - margin_bytes)} per device"
    return f"fits under pressure: takes {format_bytes(over)} of the {format_bytes(margin_bytes)} to be left free"


OWN_TERMS = ("compute", "remat", "host", "optimizer", "offload")
"""Terms of time in which a rank computes by itself; those of parallelism dimensions wait for others."""


class StagePrediction(PlanPart):
    """What one stage is predicted to take: seconds of a microbatch and bytes per rank, each term by its name.

    Of all its chunks together.
    """

    time_s: dict[str, limits.Seconds]
    memory_bytes: dict[str, limits.Bytes]
    host_bytes: limits.Bytes = Field(default=0, exclude_if=lambda size: not size)
    """What a rank holds in the memory of its host, which ``memory_bytes`` does not count."""

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
    step_time_s: limits.Seconds | None = None
    """Absent where it was not computed exactly."""
    is_bound: bool = False
    """Whether the configuration was not searched to the end, so that its best plan may be faster."""
    memory_bytes: limits.Bytes | None = None
    """Of its fullest device; absent where it was not computed exactly."""


class FastestPlan(PlanPart):
    """The fastest plan that was found, in whose place stands a simpler one that is little slower."""

    step_time_s: limits.PositiveSeconds
    memory_bytes: limits.Bytes
    """Of its fullest device."""
    num_groups: int = Field(ge=1, le=limits.MOST_LAYERS)
    """Runs of neighbouring layers of one strategy, summed over the stages."""
    num_stages: int | None = Field(default=None, ge=1, le=limits.MOST_LAYERS)
    """Absent in files of before, whose plans gave up groups alone."""
    setting: str
    strategies: str


class Baseline(PlanPart):
    """The best plan of a simple way to train that needs no planner, on the same costs."""

    name: str
    step_time_s: limits.Seconds | None = None
    """Absent where none of them fits."""
    missing_bytes: limits.Bytes | None = None
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
    """What such runs are, as `steelyard.cost.accuracy` has it."""
    as_good: float = Field(ge=0)
    """By what fraction a plan of the same job may be predicted slower and still be as good as this one."""

    def __str__(self) -> str:
        return (
            f"typically ± {self.typical:.0%} ({self.like}); 9 in 10 such runs: "
            f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        )


class PoolUse(PlanPart):
    """A pool of devices that was at hand: what it was taken to be, and how many stages lie in it."""

    name: str
    num_devices: int = Field(ge=1, le=limits.MOST_DEVICES)
    num_stages: int = Field(ge=0, le=limits.MOST_DEVICES)
    """0 where it is left out."""
    budget_bytes: limits.Bytes
    margin_bytes: limits.Bytes = 0
    profile: CostSource
    reason: str | None = None
    """Why it is left out."""


class HostUse(PlanPart):
    """Tensors of the ranks of a node in the memory of their host, of the node that has least left.

    On GPUs they are pinned, in which torch rounds each of them up to a power of two.
    """

    node_bytes: limits.Bytes
    memory_bytes: limits.Bytes | None = None
    """What they may hold; absent where the cluster does not say it, so that nothing was checked."""

    @property
    def fits(self) -> bool:
        """Whether they may hold it, as far as is known."""
        return self.memory_bytes is None or self.node_bytes <= self.memory_bytes

    def __str__(self) -> str:
        taken = f"{format_bytes(self.node_bytes)} of tensors in the host memory of a node"
        if self.memory_bytes is None:
            return f"{taken}, of which the cluster does not say how much there is: not checked"
        if not self.fits:
            return f"{taken}, more than its {format_bytes(self.memory_bytes)}"
        rounded = "; pinned, each may take up to twice its size" if 2 * self.node_bytes > self.memory_bytes else ""
        return f"{taken}, of {format_bytes(self.memory_bytes)}{rounded}"


class Prediction(PlanPart):
    """What the planner expects of a plan, and how sure it is that no plan is better."""

    step_time_s: limits.PositiveSeconds
    tokens_per_s_per_device: float = Field(ge=0, le=limits.MOST_PER_S)
    mfu: float | None = Field(default=None, ge=0, le=limits.MOST_PER_S)
    """Model FLOP utilisation; absent where the device's peak is not known."""
    mfu_attention: str = ""
    """How attention is counted in it, as the model has it: ``causal``; empty in plans that were written before."""
    model_flop_per_s: float | None = Field(default=None, ge=0, le=limits.MOST_PER_S)
    """Model FLOP/s of a device, counted as in `mfu`; absent where no layer says its work, and in older plans."""
    rank_samples: tuple[limits.Samples, ...] = ()
    """Micro-batch size: samples of a microbatch on a rank, each size that a layer has; absent in older plans."""
    warnings: tuple[str, ...] = ()
    """What is allowed and should be known all the same: sequences longer than the model was made for."""
    budget_bytes: limits.Bytes
    """What a device may hold."""
    margin_bytes: limits.Bytes = 0
    """What each device has beside it and is left free, for the allocator's sake."""
    stages: tuple[StagePrediction, ...]
    certificate: Certificate
    lower_bound_s: limits.Seconds
    """No plan takes less: by the cost tables, or where processes share cores by the work that these can do."""
    not_searched: tuple[str, ...] = ()
    """What could be run and was left out of the search, so that the certificate says nothing of it."""
    profile: CostSource
    """Where the costs came from."""
    backend: Backend | None = None
    """What the devices communicate with; absent in plans that were written before it was said."""
    interval: Interval | None = None
    """Absent where no measured runs are like this one, and in plans that were written before it was said."""
    alternatives: tuple[Alternative, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    """The best plans of simple ways to train, `ONE_STRATEGY` the last; none where they were not searched."""
    fastest: FastestPlan | None = None
    """Absent where the plan is the fastest that was found itself."""
    reasons: tuple[str, ...] = ()
    """Why some layers are not as most blocks are, one line for each strategy; none in older plans."""
    host: HostUse | None = Field(default=None, exclude_if=lambda use: use is None)
    """Absent where nothing lies in host memory."""
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
    def utilisation(self) -> str:
        """TFLOP/s of a device and MFU, with how attention is counted in both; empty where neither is known."""
        tera = None if self.model_flop_per_s is None else f"{format_tera(self.model_flop_per_s)} TFLOP/s per device"
        found = [tera, None if self.mfu is None else f"MFU {self.mfu:.1%}"]
        counted = f" ({self.mfu_attention} attention)" if self.mfu_attention else ""
        return ", ".join(filter(None, found)) + counted if any(found) else ""

    @property
    def accuracy(self) -> str:
        """How far a step typically turns out from its prediction."""
        return "error unknown: no published runs like this one" if self.interval is None else str(self.interval)

    def is_as_good(self, step_time_s: float | None) -> bool:
        """Whether another plan of this job, of this step time, is predicted too close to be told which is faster."""
        if step_time_s is None or self.interval is None:
            return False
        return max(step_time_s, self.step_time_s) <= min(step_time_s, self.step_time_s) * (1 + self.interval.as_good)


ONE_STRATEGY = "one strategy for all layers"
"""The baseline that has all others in it: one recomputation choice for all blocks too, stages cut freely."""
SAME_SHARE = 5e-4
"""Step times that differ by less than this share are called the same."""


def baseline_line(prediction: Prediction) -> str:
    """Return the gain over the baseline, and the simple ways to train that have no plan; empty if none was searched."""
    missing = " and ".join(misfits(prediction.baselines))
    return "; ".join(filter(None, (gain_text(prediction), missing)))


def gain_text(prediction: Prediction) -> str:
    """Return the gain over the baseline, and the baseline's plan; empty if none was searched."""
    if not prediction.baselines:
        return ""
    fitting = [(each.step_time_s, each) for each in prediction.baselines if each.step_time_s is not None]
    if not fitting:
        return f"the only kind that fits: no plan with {ONE_STRATEGY} does"
    step_s, best = min(fitting, key=lambda pair: pair[0])
    words = against(1 - prediction.step_time_s / step_s, "as fast as")
    name = "" if best.name == ONE_STRATEGY else f", {best.name}"
    what = f"{format_seconds(step_s)}: {best.strategies}; {best.setting}"
    return f"{words} the baseline, the best plan with {ONE_STRATEGY}{name} ({what})"


def simplicity_line(num_groups: int, num_stages: int, prediction: Prediction) -> str:
    """Return the cost of having fewer groups of layers, or fewer stages, than the fastest plan; empty for the fastest
    plan itself."""
    fastest = prediction.fastest
    if fastest is None:
        return ""
    slower = prediction.step_time_s / fastest.step_time_s - 1
    words = "as fast as" if slower <= SAME_SHARE else f"{slower:.1%} slower than"
    is_deep = (fastest.num_stages or 0) > num_stages
    is_mixed = fastest.num_groups > num_groups or not is_deep
    alike = ", fewer shardings" * (fastest.num_groups == num_groups)
    mine = [f"{format_plural(num_groups, 'group')} of layers{alike}"] * is_mixed
    mine += [format_plural(num_stages, "stage")] * is_deep
    best = f"fastest plan, of {format_plural(fastest.num_groups, 'group')}"
    if is_deep:
        groups = f" and {format_plural(fastest.num_groups, 'group')}" if is_mixed else ""
        best = f"fastest plan, of {format_plural(fastest.num_stages or 1, 'stage')}{groups}"
    return f"{', '.join(mine)}: {words} the {best} (take it with --simplify 0)"


def against(gain: float, same: str) -> str:
    """Return ``2.2% faster than`` for the fraction of time gained, or ``same`` if the times are equal."""
    if abs(gain) <= SAME_SHARE:
        return same
    return f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than"


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
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def layers_text(chain: ModelChain, first: int, last: int) -> str:
    """Consecutive layers by name, both ends included: ``embedding, blocks 0–6``."""
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
