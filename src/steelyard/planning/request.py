"""Planning requests: all inputs of planning as one value, which the command line, Python and every replanning build.

| built by               | from                                                                    |
|------------------------|-------------------------------------------------------------------------|
| `make_request`         | user input: names, paths, texts with units, the user's own module       |
| `request_of_plan`      | a plan, with optional replacements of its cluster, memory, engine, …    |
| `dataclasses.replace`  | another request: see `steelyard.planning.variants`                      |

`steelyard.planning.job.job_of` prices a request, and `steelyard.planning.complete.complete` answers it. A plan made
from a measured profile names the profile's file with its hash. A request of the plan uses that profile if the file is
unchanged.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

from steelyard.arguments import check_types, checked
from steelyard.cost.job import ASSUMED_IMBALANCE
from steelyard.engines import check_levers, check_model, engine_of
from steelyard.engines.capabilities import unsupported
from steelyard.engines.engine import Engine
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidModelError, InvalidProfileError, UserError, all_of, nearest
from steelyard.hardware import Cluster, parse_pools, with_network
from steelyard.installed import TRAINING, installed_version, require_training
from steelyard.levers import LEVERS, NO_LEVERS, Levers
from steelyard.levers.lever import AUTO
from steelyard.limits import MOST_BYTES, MOST_SAMPLES, MOST_STEP_TOKENS, MOST_TOKENS
from steelyard.model.chain import Freeze, ModelChain, frozen_chain
from steelyard.model.read import ImageSize, chain_with_images, load_model, planned_model
from steelyard.modules.kept_splits import read_kept
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.file import default_folder, digest, keep, parse_file
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import CostSource, ProfileFile
from steelyard.planning.pins import pins_of
from steelyard.precision import Precision
from steelyard.profiles.profile import Profile
from steelyard.search import TIME_LIMIT_S
from steelyard.tracer.cache import TRACER_VERSION
from steelyard.units import parse_bytes

GivenProfiles = str | Path | Profile | Mapping[str, str | Path | Profile]
"""One profile, or one per pool by name, written ``old=a.json,new=b.json`` on the command line."""


def read_profile(path: str | Path) -> tuple[Profile, ProfileFile]:
    """Read a profile and the reference by which a plan finds its file again. Raises `InvalidProfileError`."""
    profile = parse_file(Path(path), Profile, InvalidProfileError, what="profile")
    return profile, ProfileFile(path=str(path), sha256=_sha256(Path(path)))


def recorded_profile(source: CostSource, *, folder: Path | None) -> Path:
    """Return the unchanged file of the measured profile that a plan's costs came from.

    It is looked for at its recorded path, and in the plan's ``folder`` under that path and its name. Raises
    `InvalidProfileError` if it is missing or has changed.
    """
    if source.file is None:
        raise _not_at_hand("a plan made from a measured profile, of which it names no file")
    path = Path(source.file.path)
    places = [path] if folder is None else [path, folder / path, folder / path.name]
    found = [place for place in places if place.is_file()]
    for place in found:
        if _sha256(place) == source.file.sha256:
            return place
    if found:
        raise _not_at_hand(f"{found[0]}, which has changed since the plan was made from it")
    raise _not_at_hand(f"no file {path}, from which the plan was made, here or next to the plan")


def _not_at_hand(found: str) -> InvalidProfileError:
    return InvalidProfileError(
        field="--profile",
        found=found,
        expected="the profile that the plan was made from",
        hint="add --profile with the path of one of this model and machine",
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Objective = Literal["time", "devices"]
"""Fastest plan, or fewest devices that hold a plan and then the fastest."""
MOST_IMBALANCE = 8.0
"""Largest expert load imbalance that is planned for. Above it, fix the router instead of planning."""
MARGIN = 0.05
"""Fraction of a GPU's memory that is left free by default.

PyTorch's allocator caches freed memory for the next tensor of that size. If the device is nearly full, it returns the
cached memory and allocates it again in every step. The published runs (`benchmarks/published-runs.md`) measured above
90 % of their device memory took 3 to 8 times as long as predicted. Of the runs of that source with a predicted memory
(an upper bound) above 95 %, six of 33 took 3 times as long; below it, one in forty. Other sources show no such effect.
So plans are searched with `MARGIN` of a GPU's memory free, and within all of it if none fits that way. The CPU's
allocator caches nothing.
"""
MOST_MARGIN = 0.9
SIMPLIFY = 0.01
"""Allowed slowdown of a simpler plan, as a fraction of the step time. Prediction errors are larger, and a plan of few
groups of layers is easier to read, to check and to write for other engines."""
MOST_SIMPLIFY = 0.5
NUM_ALTERNATIVES = 5
NUM_FALLBACKS = 2


class MeasuredProfile(NamedTuple):
    """A measured profile and the file that it was read from, if any."""

    profile: Profile
    file: ProfileFile | None = None


class Budget(NamedTuple):
    """Memory budget of one device in bytes, and the bytes that are left free in addition."""

    num_bytes: int
    margin_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """All inputs of planning, validated on construction.

    ``global_batch`` counts samples of ``seq_len`` tokens. Either may be None and is then as large as fits. Raises
    `UserError` for contradictory values and values out of range.
    """

    chain: ModelChain
    """Model with its frozen parameters."""
    own: Any = None
    """The user's own module (`steelyard.modules.own_pieces.OwnModel`) if ``chain`` is its chain."""
    cluster: Cluster
    global_batch: int | None
    seq_len: int | None
    precision: Precision = "bf16"
    memory_bytes: int | None = None
    """Budget per device in bytes; None for all of its memory."""
    memory_margin: float | None = None
    """Fraction of the budget to leave free if a plan fits that way; None for `MARGIN` of a GPU's own memory."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Known budgets by the name of the pool."""
    engine: Engine = NATIVE
    """Engine that runs the plan."""
    levers: Levers = NO_LEVERS
    """Levers: changes alongside strategies."""
    searched: tuple[str, ...] = ()
    """Names of levers whose values are left to the search."""
    profiles: Mapping[str, MeasuredProfile] = field(default_factory=dict)
    """Measured profiles by the name of the pool. Pools without one are traced and priced by the catalogue."""
    calibration: tuple[Path, ...] = ()
    """Measured runs whose median scales all predicted times."""
    time_factor: float = 1.0
    """Known scale of all predicted times, from ``num_calibrating`` runs."""
    num_calibrating: int = 0
    imbalance: float = ASSUMED_IMBALANCE
    """Load of the busiest expert rank relative to the mean."""
    decisions: Decisions = FREE
    objective: Objective = "time"
    simplify: float = SIMPLIFY
    """Allowed slowdown of a simpler plan relative to the fastest, as a fraction of its step time."""
    time_limit_s: float | None = TIME_LIMIT_S
    """Time limit in seconds of every search, including its tables; None for no limit."""
    num_alternatives: int = NUM_ALTERNATIVES
    """Number of slower plans to keep with their reasons."""
    num_next_best: int = NUM_ALTERNATIVES - 1
    """Number of whole plans of other pipeline configurations to keep, for `steelyard measure`."""
    num_fallbacks: int = NUM_FALLBACKS
    """Number of whole plans of less memory to keep, with which `steelyard train` continues if memory runs out."""
    tokens: int | None = None
    """Tokens of the whole training, for which the plan gives days and cost."""
    price: float | None = None
    """Price per device-hour."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_sizes(self)
        _check_model(self)
        if not 0 <= (self.memory_margin or 0.0) <= MOST_MARGIN:
            raise UserError(
                field="--memory-margin",
                found=f"{self.memory_margin:g}",
                expected=f"a share of the memory from 0 to {MOST_MARGIN:g}",
                hint=f"give for example --memory-margin {MARGIN:g}, or leave it out",
            )
        if not 0 <= self.simplify <= MOST_SIMPLIFY:
            raise UserError(
                field="--simplify",
                found=f"{self.simplify:g}",
                expected=f"a fraction of a step from 0 to {MOST_SIMPLIFY:g}",
                hint="give for example --simplify 0.01",
            )
        _check_what_is_free(self)
        _check_pools(self)
        devices = tuple(pool.device for pool in self.cluster.pools)
        check_levers(self.levers, self.chain, self.engine, devices, self.precision)
        _check_engine(self)
        pins_of(self.decisions, self.chain)
        if self.price is not None and self.tokens is None:
            raise UserError(
                field="--price",
                found="a price without tokens",
                expected="--tokens with it, from which the paid device-hours follow",
                hint="write for example --tokens 15T --price 2.5",
            )

    @property
    def simplify_share(self) -> float:
        """Allowed slowdown of a simpler plan; 0 if the fastest is requested.

        It is also 0 over several pools and for cuts that are not searched, because no simpler plans are known there.
        """
        if self.is_mixed or self.decisions.stage_partition != "exact":
            return 0.0
        return self.simplify

    @property
    def is_mixed(self) -> bool:
        """Whether there are several pools of different devices."""
        return len(self.cluster.pools) > 1


class Elsewhere(TypedDict, total=False):
    """Replacements for the cluster and other inputs of a plan. Fields that are None or missing keep the plan's own."""

    cluster: str | Cluster | None
    network: str | None
    memory: str | int | None
    profile: GivenProfiles | None
    engine: str | None


@checked
def make_request(
    model: Any,
    cluster: str | Path | Cluster,
    *,
    global_batch: int | Literal["max", "devices"],
    seq_len: int | Literal["max"] | None = None,
    network: str | None = None,
    image_size: ImageSize = None,
    memory: str | int | None = None,
    profile: GivenProfiles | None = None,
    own: Any = None,
    freeze: Sequence[str] = (),
    engine: str | Engine | None = None,
    levers: Mapping[str, str | None] | None = None,
    **asked: Any,
) -> PlanRequest:
    """Return the request for a user's input; see `steelyard.planning.complete.find_plan`.

    ``max`` requests the most that fits, ``devices`` one sample per device. ``freeze`` names the parameters that are not
    trained; parameters of the user's own module without gradients are not trained either. ``levers`` are texts by the
    name of the lever. ``asked`` are fields of `PlanRequest`. Raises one `UserError` for all misspelt values among
    model, cluster, memory and profile.
    """

    cluster = str(cluster) if isinstance(cluster, Path) else cluster

    def read_chain() -> ModelChain:
        if own is not None and image_size is not None:
            raise UserError(
                field="--image-size",
                found=f"one for {own.split.module}, your own module",
                expected="the images of its sample",
                hint="leave the option out",
            )
        if own is not None:
            chain: ModelChain = own.chain
            return chain
        if isinstance(model, ModelChain):
            return model
        if isinstance(model, Mapping):
            return chain_with_images(model, name="model", image_size=image_size)
        return load_model(model, image_size=image_size)

    searched = tuple(name for name, each in LEVERS.items() if each.searched and (levers or {}).get(name) == AUTO)
    reads: list[Callable[[], Any]] = [
        partial(_machines, cluster, network),
        read_chain,
        partial(_num_bytes, memory),
        partial(_read_if_one, profile, cluster),
        lambda: engine_of(engine or NATIVE.name) if not isinstance(engine, Engine) else engine,
        lambda: Levers.of({name: text for name, text in (levers or {}).items() if name not in searched}),
    ]
    if isinstance(model, Mapping) or (isinstance(model, str | Path) and os.path.exists(model)):  # splits take seconds
        all_of(*(each for each in reads if each is not read_chain))
    machines, chain, memory_bytes, given, runs_it, chosen = all_of(*reads)
    profiles = _profiles(given, machines)
    check_levers(chosen, chain, runs_it)  # before the model is built for what they change
    chain = changed_chain(chain, chosen, freeze, own)
    batch = machines.num_devices if global_batch == "devices" else global_batch
    return PlanRequest(
        chain=chain,
        own=own,
        cluster=machines,
        global_batch=None if batch == "max" else batch,
        seq_len=None if seq_len == "max" else chain.known_seq_len(seq_len),
        memory_bytes=memory_bytes,
        engine=runs_it,
        levers=chosen,
        searched=searched,
        profiles=profiles,
        **asked,
    )


def request_of_plan(
    plan: Plan, *, folder: Path | None = None, decisions: Decisions = FREE, **given: Unpack[Elsewhere]
) -> PlanRequest:
    """Return the request that a plan answers, within its budget on its cluster, or with the memory of another cluster.

    The scale of times and the expert load imbalance are those of the plan's prediction. With its original cluster, a
    plan made from a measured profile uses that profile, whose file is also looked for in the plan's ``folder``. Raises
    `InvalidProfileError` if the file is missing or has changed, and `UserError` if a plan over pools gets one cluster.
    """
    cluster, network, memory = given.get("cluster"), given.get("network"), given.get("memory")
    machines = _machines(plan.hardware_value() if cluster is None else cluster, network)
    engine = engine_of(given.get("engine") or plan.engine or NATIVE.name)
    if reasons := unsupported(plan, engine.running(plan.chosen_levers, plan.precision).capabilities):
        raise UserError(
            field="--engine",
            found=f"{engine.name} for a plan with {'; '.join(reasons)}",
            expected="a plan that it can run",
            hint=f"plan for it with --engine {engine.name}, or see `steelyard export`",
        )
    if plan.is_mixed != (len(machines.pools) > 1):
        raise UserError(
            field="--cluster",
            found=f"{machines.name} for a plan over {plan.cluster}",
            expected="the device groups of the plan, or others with the same names"
            if plan.is_mixed
            else "one device type",
            hint="leave --cluster out, or plan for this cluster",
        )
    profile, source = given.get("profile"), plan.prediction.profile if plan.prediction else None
    is_own = cluster is None
    if profile is None and is_own:
        profile = {
            name: recorded_profile(each, folder=folder) for name, each, _ in _taken(plan, machines) if each.is_measured
        }
    factor = (1.0, 0) if source is None or plan.is_mixed else (source.time_factor, source.num_calibrating)
    imbalance = ASSUMED_IMBALANCE if source is None or source.imbalance is None else source.imbalance
    return PlanRequest(
        chain=plan.chain(),
        cluster=machines,
        global_batch=plan.global_batch,
        seq_len=plan.seq_len,
        precision=plan.precision,
        memory_bytes=_num_bytes(memory),
        memory_margin=0.0,
        engine=engine,
        levers=plan.chosen_levers,
        budgets={name: each for name, _, each in _taken(plan, machines)} if is_own and memory is None else {},
        profiles=_profiles(_read_if_one(profile, machines), machines),
        time_factor=factor[0],
        num_calibrating=factor[1],
        imbalance=imbalance,
        decisions=decisions,
    )


def with_levers(request: PlanRequest, texts: Mapping[str, str]) -> PlanRequest:
    """Return the request with these levers added to its own. Raises `UserError` if they are impossible.

    Levers that change the model require one without parameters that the user froze.
    """
    levers = Levers.of({**request.levers.texts, **texts})
    chain = request.chain
    if Levers.of(texts).change(chain) == chain:
        return replace(request, levers=levers)
    if chain.freeze is not None and not chain.has_adapters:
        raise UserError(
            field="levers",
            found=f"{levers} for a model with frozen parameters",
            expected="a model that is trained whole, or by adapters",
            hint="plan anew",
        )
    check_levers(levers, chain, request.engine)
    plain = planned_model(chain.name, chain.config, chain.split) if chain.changes else chain
    return replace(request, levers=levers, chain=changed_chain(plain, levers, (), request.own))


def changed_chain(chain: ModelChain, levers: Levers, freeze: Sequence[str], own: Any = None) -> ModelChain:
    """Return the model as changed by levers, with its frozen parameters, which are cached on disk."""
    chain = levers.change(chain)
    if chain.freeze is not None or not (own is not None or freeze or chain.has_adapters):
        return chain
    entries = {"config": chain.config_hash, "split": chain.split.model_dump_json(), "tracer": TRACER_VERSION}
    entries |= {name: installed_version(name) for name in (*TRAINING, "peft")}
    path = default_folder("frozen") / f"{digest(entries | {'frozen': [*freeze, *map(str, chain.changes)]})}.json"
    found: Freeze | None = None
    if own is None:
        found = read_kept(path, Freeze, "found again, because the cached list of frozen parameters cannot be read")
    if found is None:
        require_training("to find what is frozen the model is built")
        found = import_module("steelyard.modules.freezing").find_freeze(chain, freeze, own)
        if found is not None and own is None:
            keep(path, found.model_dump_json())
    return frozen_chain(chain, found)


def _machines(cluster: str | Cluster, network: str | None) -> Cluster:
    found = parse_pools(cluster) if isinstance(cluster, str) else cluster
    return found if network is None else with_network(found, network)


def _num_bytes(memory: str | int | None) -> int | None:
    return parse_bytes(memory) if isinstance(memory, str) else memory


def _read_if_one(profile: GivenProfiles | None, cluster: str | Cluster) -> GivenProfiles | MeasuredProfile | None:
    """Return the profile in a file if one is named. Profiles of several pools are read once the pools are known."""
    is_mixed = "+" in cluster if isinstance(cluster, str) else len(cluster.pools) > 1
    if not is_mixed and (isinstance(profile, Path) or (isinstance(profile, str) and "=" not in profile)):
        return MeasuredProfile(*read_profile(profile))
    return profile


def _profiles(given: GivenProfiles | MeasuredProfile | None, machines: Cluster) -> dict[str, MeasuredProfile]:
    """Return the profile of each pool that has one. Raises `InvalidProfileError` for a profile of no pool."""
    names = [pool.name for pool in machines.pools]
    given = MeasuredProfile(given) if isinstance(given, Profile) else given
    if isinstance(given, MeasuredProfile) and len(names) == 1:
        return {names[0]: given}
    if given is None:
        return {}
    pairs = [each.partition("=")[::2] for each in given.split(",")] if isinstance(given, str) else []
    found = given if isinstance(given, Mapping) else dict(pairs)
    is_one = isinstance(given, Path | MeasuredProfile)
    if is_one or len(pairs) > len(found) or not all(name in names and file for name, file in found.items()):
        raise InvalidProfileError(
            field="--profile",
            found="one profile" if is_one else repr(given) if isinstance(given, str) else ", ".join(found),
            expected=f"NAME=FILE, separated by commas, at most one for each device group of {', '.join(names)}",
            hint="measure each device type separately with `steelyard profile`; groups without a file are traced",
        )
    return {
        name: MeasuredProfile(each) if isinstance(each, Profile) else MeasuredProfile(*read_profile(each))
        for name, each in found.items()
    }


def _taken(plan: Plan, machines: Cluster) -> list[tuple[str, CostSource, Budget]]:
    """Return each pool's name, the source of the plan's predicted costs on it, and its budget."""
    found = plan.prediction
    if found is None:
        return []
    if plan.is_mixed:
        return [(each.name, each.profile, Budget(each.budget_bytes, each.margin_bytes)) for each in found.pools or ()]
    return [(machines.name, found.profile, Budget(found.budget_bytes, found.margin_bytes))]


def _check_sizes(request: PlanRequest) -> None:
    batch, seq_len = request.global_batch, request.seq_len
    memory = ("--memory", request.memory_bytes, MOST_BYTES)
    for option, value, most in (("--global-batch", batch, MOST_SAMPLES), ("--seq-len", seq_len, MOST_TOKENS), memory):
        if value is not None and not 1 <= value <= most:
            raise UserError(field=option, found=str(value), expected=f"1 to {most}", hint=f"give another {option}")
    if batch is not None and seq_len is not None and batch * seq_len > MOST_STEP_TOKENS:
        raise UserError(
            field="--global-batch",
            found=f"{batch} samples of {seq_len} tokens, {batch * seq_len} tokens a step",
            expected=f"at most {MOST_STEP_TOKENS} tokens a step",
            hint="give a smaller --global-batch",
        )
    if seq_len is not None:
        request.chain.check_seq_len(seq_len)


def _check_model(request: PlanRequest) -> None:
    """Raise `UserError` for an imbalance or a precision that the model cannot have."""
    chain, imbalance = request.chain, request.imbalance
    if imbalance != ASSUMED_IMBALANCE and not any(layer_type.num_experts for layer_type in chain.layer_types):
        raise UserError(
            field="--imbalance",
            found=f"{imbalance:g} for {chain.name}",
            expected="a model with experts",
            hint="leave it out: no routing is uneven here",
        )
    if not 1 <= imbalance <= MOST_IMBALANCE:
        raise UserError(
            field="--imbalance",
            found=f"{imbalance:g}",
            expected=f"1 (every rank's experts get as many tokens) to {MOST_IMBALANCE:g}",
            hint="give --imbalance what training reported, or leave it out",
        )
    split = request.chain.split
    if split.no_bf16 and request.precision != "fp32":
        raise InvalidModelError(
            field="--precision",
            found=f"{request.precision} for {split.module}, which fails on parameters in bf16: {split.no_bf16}",
            expected="a module that computes in the type of its parameters",
            hint="convert what the forward pass makes in fp32 (x.to(self.proj.weight.dtype)), or plan with fp32",
        )


def _check_what_is_free(request: PlanRequest) -> None:
    """Raise `UserError` if more than one of length, batch and devices is free, or a length that is measured."""
    is_fewest = request.objective == "devices"
    if request.searched and (is_fewest or None in (request.seq_len, request.global_batch)):
        raise UserError(
            field=f"--{request.searched[0]}",
            found=f"{AUTO} with a free length, batch or number of devices",
            expected="one choice of the search other than strategies at a time",
            hint=f"write for example --global-batch 64, or a value of --{request.searched[0]}",
        )
    if request.seq_len is not None:
        if request.global_batch is None and is_fewest:
            raise UserError(
                field="--global-batch",
                found="max with --objective devices",
                expected="a number: with a free batch the fewest devices are those that hold a single sample",
                hint="write for example --global-batch 64",
            )
        return
    beside = {
        "--global-batch max": request.global_batch is None,
        "--objective devices": is_fewest,
        "--profile": bool(request.profiles),
    }
    option = next((option for option, is_given in beside.items() if is_given), None)
    if option is not None:
        raise UserError(
            field="--seq-len",
            found=f"max with {option}",
            expected="a number: one thing at a time can be as large as fits, and a profile is of one length",
            hint="write for example --seq-len 8192",
        )


def _check_engine(request: PlanRequest) -> None:
    """Raise `UserError` if the engine cannot train the model, or for several pools, which only our own engine runs."""
    check_precision(request.engine, request.precision)
    if request.engine == NATIVE:
        return
    if request.is_mixed:
        not_with_pools({f"--engine {request.engine.name}": True})
    if request.seq_len is not None:
        check_model(request.engine, request.chain, request.seq_len)


def check_precision(engine: Engine, precision: str) -> None:
    """Raise `UserError` for a precision that an engine does not compute in."""
    if precision not in engine.precisions:
        instead = [name for name in engine.levers if precision in LEVERS[name].precisions]
        names = get_args(Precision)
        raise UserError(
            field="--precision",
            found=f"{precision} with the engine {engine.name}",
            expected="one of " + ", ".join(engine.precisions),
            hint="".join(f"write --{name}, or " for name in instead)
            + "plan for an engine that computes in it, as in --engine "
            + (NATIVE.name if precision in NATIVE.precisions else "megatron")
            if precision in names
            else nearest(str(precision), names),
        )


def _check_pools(request: PlanRequest) -> None:
    if request.is_mixed:
        not_with_pools(
            {
                "--seq-len max": request.seq_len is None,
                "--global-batch max": request.global_batch is None,
                "--pin": request.decisions.pins,
                "--objective devices": request.objective == "devices",
                "--calibrate": request.calibration,
                "--partition": request.decisions.stage_partition != "exact",
                "--uniform": request.decisions.uniform,
                "--simplify": request.simplify not in (0.0, SIMPLIFY),
                **dict.fromkeys((f"--{name} {AUTO}" for name in request.searched), True),
            }
        )


def not_with_pools(asked: Mapping[str, object]) -> None:
    """Raise `UserError` for the first option that was given, because none works with several pools of devices."""
    option = next((option for option, value in asked.items() if value), None)
    if option is not None:
        raise UserError(
            field=option.partition(" ")[0],
            found=f"{option} with several device groups",
            expected="a cluster or a plan of one device type",
            hint="leave it out, or plan for one of the pools",
        )
