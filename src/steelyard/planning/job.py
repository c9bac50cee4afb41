"""The job that a user's arguments describe, with the profile it is priced by: traced, or given as measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.setting import ASSUMED_IMBALANCE, Job
from steelyard.errors import InvalidModelError, InvalidProfileError, UserError
from steelyard.hardware import Cluster, MixedCluster, is_same_device, known_device, parse_cluster
from steelyard.installed import require_training
from steelyard.limits import MOST_SAMPLES, MOST_STEP_TOKENS, MOST_TOKENS
from steelyard.model.chain import ModelChain
from steelyard.model.freeze import Freeze
from steelyard.model.freezing import frozen_chain
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import divisors
from steelyard.planning.assumed_links import with_assumed_links
from steelyard.planning.margin import with_margin
from steelyard.planning.profile_file import GivenProfiles, pool_profiles, read_profile
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace
from steelyard.units import parse_bytes

MOST_IMBALANCE = 8.0
"""Beyond it no plan is worth making: the routing is to be mended."""


def make_job(
    config: str | Path | Mapping[str, Any] | ModelChain,
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq_len: int | None,
    precision: Precision,
    memory: str | int | None,
    profile: str | Path | Profile | None,
    memory_margin: float | None = None,
    imbalance: float = ASSUMED_IMBALANCE,
    own: Any = None,
) -> Job:
    """The job that these arguments describe; see `find_plan`. Traces the model unless a profile is given.

    ``memory_margin`` is the part of the memory to leave free, see `steelyard.planning.margin`. ``own`` is a user's own
    module (`steelyard.modules.own_pieces.OwnModel`), where ``config`` is its chain.
    """
    chain = planned_chain(config, own=own)
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    given = parse_bytes(memory) if isinstance(memory, str) else memory
    budgeted = machines if given is None else machines.with_memory(given)
    seq_len = chain.known_seq_len(seq_len)
    _check_sizes(global_batch, seq_len)
    _check_imbalance(chain, imbalance)
    chain.check_seq_len(seq_len)
    _check_precision(chain, precision)
    options = {"seq_len": seq_len, "precision": precision, "degrees": divisors(machines.devices_per_node)}
    traced = partial(cached_trace, chain, **options, batch=global_batch, own=own)
    file = None
    if isinstance(profile, str | Path):
        profile, file = read_profile(profile)
    if profile is not None:
        _check_profile(profile, chain, machines, seq_len, precision)
    job = Job(
        chain=chain,
        profile=traced() if profile is None else profile,
        cluster=machines,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        budget_bytes=budgeted.device.known_memory_bytes(),
        imbalance=imbalance,
        profile_file=file,
    )
    job = with_margin(job, memory_margin, is_asked=memory is not None)
    return with_assumed_links(job, traced) if job.assumes_links else job


def _check_sizes(global_batch: int, seq_len: int) -> None:
    for field, value, most in (("global_batch", global_batch, MOST_SAMPLES), ("seq_len", seq_len, MOST_TOKENS)):
        if not 1 <= value <= most:
            raise UserError(
                field=field, found=str(value), expected=f"1 to {most}", hint=f"give --{field.replace('_', '-')}"
            )
    if global_batch * seq_len > MOST_STEP_TOKENS:
        raise UserError(
            field="global_batch",
            found=f"{global_batch} samples of {seq_len} tokens, {global_batch * seq_len} tokens a step",
            expected=f"at most {MOST_STEP_TOKENS} tokens a step",
            hint="give a smaller --global-batch",
        )


def _check_imbalance(chain: ModelChain, imbalance: float) -> None:
    if imbalance != ASSUMED_IMBALANCE and not any(kind.num_experts for kind in chain.kinds):
        raise UserError(
            field="imbalance",
            found=f"{imbalance:g} for {chain.name}",
            expected="a model with experts",
            hint="leave it out: no routing is uneven here",
        )
    if not 1 <= imbalance <= MOST_IMBALANCE:
        raise UserError(
            field="imbalance",
            found=f"{imbalance:g}",
            expected=f"1 (every rank's experts get as many tokens) to {MOST_IMBALANCE:g}",
            hint="give --imbalance what training reported, or leave it out",
        )


def _check_precision(chain: ModelChain, precision: Precision) -> None:
    if chain.split.no_bf16 and precision == "bf16":
        raise InvalidModelError(
            field="precision",
            found=f"bf16 for {chain.split.module}, which fails on parameters in bf16: {chain.split.no_bf16}",
            expected="a module that computes in the type of its parameters",
            hint="convert what the forward pass makes in fp32 (x.to(self.proj.weight.dtype)), or plan with fp32",
        )


def make_pooled_job(
    config: Any,
    cluster: MixedCluster,
    *,
    global_batch: int,
    seq_len: int | None,
    precision: Precision,
    memory: str | int | None = None,
    profile: GivenProfiles | None = None,
    **more: Any,
) -> PooledJob:
    """The job that these arguments describe on several pools; as `make_job` for each.

    ``profile`` has the measured profiles of pools by name, see `pool_profiles`; the others are traced.
    """
    pools, profiles = [], pool_profiles(profile, [pool.name for pool in cluster.pools])
    for pool, link in zip(cluster.pools, cluster.links, strict=True):
        job = make_job(
            config,
            pool,
            global_batch=global_batch,
            seq_len=seq_len,
            precision=precision,
            memory=memory,
            profile=profiles.get(pool.name),
            **more,
        )
        pools.append(replace(job, outer_link=link))
    return PooledJob(pools=tuple(pools), cluster=cluster)


def make_any_job(
    config: Any, cluster: Cluster | MixedCluster, *, profile: GivenProfiles | None = None, **asked: Any
) -> AnyJob:
    """The job that these arguments describe on one pool or several; as `make_job` and `make_pooled_job`."""
    if isinstance(cluster, MixedCluster):
        return make_pooled_job(config, cluster, profile=profile, **asked)
    if isinstance(profile, Mapping):
        profile = pool_profiles(profile, [cluster.name])[cluster.name]
    return make_job(config, cluster, profile=profile, **asked)


def with_batch(job: Job, global_batch: int) -> Job:
    """The job with another global batch, traced for it where its loss compares all samples."""
    if not job.chain.why_one_microbatch:
        return replace(job, global_batch=global_batch)
    degrees = divisors(job.cluster.devices_per_node)
    options = {"seq_len": job.seq_len, "precision": job.precision, "degrees": degrees, "batch": global_batch}
    return replace(job, global_batch=global_batch, profile=cached_trace(job.chain, **options))


def planned_chain(
    config: str | Path | Mapping[str, Any] | ModelChain, *, freeze: Sequence[str] = (), own: Any = None
) -> ModelChain:
    """The chain that these arguments describe, with what ``freeze`` names frozen; see `find_plan`.

    So is what a user's own module (``own``) has without gradients.
    """
    if isinstance(config, ModelChain):
        chain = config
    else:
        chain = chain_from_config(config, name="model") if isinstance(config, Mapping) else load_model(config)
    if chain.freeze is not None or (own is None and not freeze):
        return chain
    require_training("to find what is frozen the model is built")
    found: Freeze | None = import_module(_FREEZING).find_freeze(chain, freeze, own)
    return frozen_chain(chain, found)


_FREEZING = "steelyard.modules.freezing"
"""Which takes torch."""


def _check_profile(profile: Profile, chain: ModelChain, cluster: Cluster, seq_len: int, precision: Precision) -> None:
    identity = profile.identity
    wanted: list[tuple[str, object, object]] = [
        ("config_hash", identity.config_hash, chain.config_hash),
        ("seq_len", identity.seq_len, seq_len),
        ("precision", identity.precision, precision),
    ]
    if identity.device_kind is not None:
        wanted.append(("device_kind", identity.device_kind, cluster.device.kind))
    if identity.is_measured and identity.num_devices > 1:
        wanted.append(("num_devices", identity.num_devices, cluster.num_devices))
    is_named = known_device(cluster.device.name) is not None
    if identity.is_measured and is_named and not is_same_device(identity.device, cluster.device):
        wanted.append(("device", identity.device, cluster.device.name))
    missing = [kind.name for kind in chain.kinds if kind.likeness and profile.layer(kind.name, {}) is None]
    if missing:
        raise InvalidProfileError(
            field="layers",
            found=f"none of the {missing[0]}: the profile was measured with everything trained",
            expected=f"a job that trains all of {chain.name}",
            hint="freeze nothing, or leave the profile out",
        )
    for field, found, expected in wanted:
        if found != expected:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=str(found),
                expected=f"{expected}, as in this job",
                hint="profile again for this model, length, precision and kind of device, on as many devices or on one",
            )
