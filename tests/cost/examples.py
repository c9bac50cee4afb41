"""Small model, made-up profile and jobs on known clusters, shared by the tests of costs; no torch."""

from collections.abc import Sequence
from typing import Any, get_args

from steelyard.cost.accuracy import (
    ADAPTERS,
    DENSE,
    EIGHT_BIT,
    EXPERTS,
    LONG_CONTEXT,
    MEASURED,
    SCALED,
    SCALED_BY_SEVERAL,
)
from steelyard.cost.communication import Group, collective_time
from steelyard.cost.efficiency import IDEAL_LINKS, LinkEfficiency
from steelyard.cost.job import DeviceGroup, Job, JobConfig
from steelyard.cost.simulator import StageTimes, Timeline, simulate
from steelyard.hardware import Backend, Cluster, parse_cluster
from steelyard.hardware.values import Device, Link, NodeGroup
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from steelyard.precision import Precision
from steelyard.profiles.profile import (
    Affine,
    Collective,
    CollectiveCount,
    CollectiveProfile,
    LayerProfile,
    MeasuredTime,
    Profile,
    ProfileIdentity,
    Recomputation,
    Work,
)
from tests.schedules.examples import pipeline
from tests.shapes import tp_shape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PARAMS = {"embedding": 16384, "block": 41088, "head": 16448}
SEQ_LEN = 32
SPREADS = (DENSE, EIGHT_BIT, LONG_CONTEXT, EXPERTS, ADAPTERS, SCALED, SCALED_BY_SEVERAL, MEASURED)
"""All errors that predictions may state."""


def chain(**changes: Any) -> ModelChain:
    return chain_from_config(CONFIG | changes, name="small")


def cluster(
    num_nodes: int = 1,
    devices_per_node: int = 8,
    *,
    intra_bytes_per_s: float = 100e9,
    inter_bytes_per_s: float = 10e9,
    latency_s: float = 1e-6,
) -> Cluster:
    """Round numbers: 100 TFLOP/s, 1 TB/s of memory."""
    device = Device(
        name="round",
        type="gpu",
        backend=Backend.NCCL,
        memory_bytes=80 * 2**30,
        peak_flop_per_s={"bf16": 100e12, "fp32": 10e12},
        memory_bytes_per_s=1e12,
        source="test",
    )
    intra = Link(name="intra", bytes_per_s=intra_bytes_per_s, latency_s=latency_s, source="test")
    inter = Link(name="inter", bytes_per_s=inter_bytes_per_s, latency_s=10 * latency_s, source="test")
    return Cluster(
        groups=(
            NodeGroup(
                name="round",
                num_nodes=num_nodes,
                devices_per_node=devices_per_node,
                device=device,
                intra_link=intra,
                inter_link=inter if num_nodes > 1 else None,
            ),
        )
    )


def profile(model: ModelChain, precision: Precision = "bf16") -> Profile:
    """A profile with plausible numbers for tp 1, 2, 4 and 8, exactly divided."""
    layers = []
    for layer_type in model.layer_types:
        for tp in (1, 2, 4, 8):
            for sp in (False, True) if tp > 1 else (False,):
                layers.append(_layer(layer_type.name, tp, sp))
    identity = ProfileIdentity(
        method="traced",
        model_name=model.name,
        config_hash=model.config_hash,
        seq_len=SEQ_LEN,
        precision=precision,
        device="any",
        num_devices=1,
        torch="0",
        transformers="0",
        created="2026-01-01",
    )
    return Profile(identity=identity, layers=tuple(layers))


def _layer(layer_type: str, tp: int, sp: bool) -> LayerProfile:
    hidden_bytes = 2 * SEQ_LEN * CONFIG["hidden_size"]
    params = PARAMS[layer_type] // tp
    work = Work(
        matmul_flop=Affine(per_sample=2e9 / tp),
        attention_flop=Affine(per_sample=1e8 / tp),
        matmul_bytes=Affine(per_sample=1e6),
        memory_bytes=Affine(per_sample=1e6 / tp),
        num_kernels=20,
    )
    reduce = CollectiveCount(kind="all_reduce", count=2, tensor_bytes=Affine(per_sample=2.0 * hidden_bytes))
    gather = CollectiveCount(kind="all_gather", count=2, tensor_bytes=Affine(per_sample=2.0 * hidden_bytes))
    scatter = CollectiveCount(kind="reduce_scatter", count=2, tensor_bytes=Affine(per_sample=2.0 * hidden_bytes))
    collectives = () if tp == 1 else (gather, scatter) if sp else (reduce,)
    return LayerProfile(
        kind=layer_type,
        degrees=tp_shape(tp, sp),
        num_params=params,
        forward=work,
        backward=work,
        forward_collectives=collectives,
        backward_collectives=collectives,
        saved_bytes=Affine(constant=64, per_sample=10.0 * hidden_bytes / tp),
        input_bytes=Affine(per_sample=hidden_bytes / (tp if sp else 1)),
        forward_transient_bytes=Affine(per_sample=2.0 * hidden_bytes / tp),
        backward_transient_bytes=Affine(per_sample=4.0 * hidden_bytes / tp),
        recomputations=_recomputations(layer_type, tp, sp, work),
    )


def _recomputations(layer_type: str, tp: int, sp: bool, forward: Work) -> tuple[Recomputation, ...]:
    """Recomputations: full remat repeats all but one collective; selective the memory-bound part, without FLOP."""
    hidden_bytes = 2 * SEQ_LEN * CONFIG["hidden_size"]
    saved, entering = 10.0 * hidden_bytes / tp, hidden_bytes / (tp if sp else 1)
    again = CollectiveCount(
        kind="all_gather" if sp else "all_reduce", count=1, tensor_bytes=Affine(per_sample=hidden_bytes)
    )
    full = Recomputation(
        remat="full",
        work=forward,
        collectives=() if tp == 1 else (again,),
        saved_bytes=Affine(per_sample=entering),
        forward_transient_bytes=Affine(constant=64, per_sample=saved),
        backward_transient_bytes=Affine(constant=64, per_sample=1.4 * saved - entering),
    )
    if layer_type != "block":
        return (full,)
    nothing = Affine()
    selective = Recomputation(
        remat="selective",
        work=forward.model_copy(
            update={"matmul_flop": nothing, "attention_flop": nothing, "matmul_bytes": nothing, "num_kernels": 15}
        ),
        saved_bytes=Affine(per_sample=(saved + entering) / 2),
        forward_transient_bytes=Affine(constant=64, per_sample=0.6 * saved),
        backward_transient_bytes=Affine(constant=64, per_sample=(1.4 * saved) - (saved + entering) / 2),
    )
    return full, selective


def measured_profile(model: ModelChain, samples: Sequence[int] = (1, 2, 4), *, num_devices: int = 4) -> Profile:
    """Profile as if measured on so many CPU processes: 1 ms per sample, both forward and backward."""
    return as_measured(profile(model, "fp32"), samples, num_devices=num_devices)


def as_measured(counted: Profile, samples: Sequence[int] = (1, 2, 4), *, num_devices: int = 4) -> Profile:
    """Counts with these times, and with collectives of 0.1 ms and 1 GB/s."""
    times = tuple(
        MeasuredTime(samples=count, forward_s=count / 1e3, backward_s=count / 1e3, selective_s=0.0, full_s=count / 1e3)
        for count in samples
    )
    collectives = [
        CollectiveProfile(
            kind=collective, group_size=size, strided=False, latency_s=1e-4, bytes_per_s=1e9, max_relative_error=0.0
        )
        for collective in get_args(Collective)
        for size in range(2, num_devices + 1)
        if num_devices % size == 0
    ]
    identity = {"method": "measured", "device": "cpu", "device_kind": "cpu", "num_devices": num_devices}
    return counted.model_copy(
        update={
            "identity": counted.identity.model_copy(update=identity),
            "layers": tuple(layer.model_copy(update={"times": times}) for layer in counted.layers),
            "collectives": tuple(collectives),
            "optimizer_s_per_param": 1e-9,
        }
    )


def job(
    machines: Cluster | None = None, *, global_batch: int = 64, precision: Precision = "bf16", **changes: Any
) -> Job:
    model = chain(**changes)
    return Job(
        chain=model,
        groups=(
            DeviceGroup(profile=profile(model, precision), cluster=machines or cluster(), budget_bytes=80 * 2**30),
        ),
        seq_len=SEQ_LEN,
        global_batch=global_batch,
        precision=precision,
    )


def job_on_shared_cores() -> Job:
    """Job of two processes, each twice as fast while the other waits: the search's sums rank wrongly there."""
    of = job(cluster(1, 2, intra_bytes_per_s=1e9), global_batch=8, hidden_size=256, intermediate_size=512)
    identity = of.profile.identity.model_copy(update={"num_devices": 2})
    return of.on(profile=of.profile.model_copy(update={"busy_speeds": (2.0, 1.0), "identity": identity}))


def unprofiled_job() -> Job:
    """A job on processes of one host, whose rates only a profile knows."""
    return job(parse_cluster("1x4xcpu").with_memory(2**30))


def config(
    of: Job | None = None,
    *,
    num_stages: int = 1,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    num_chunks: int = 1,
) -> JobConfig:
    return JobConfig(job=of or job(), pipeline=pipeline(num_stages, num_microbatches, schedule, num_chunks))


def simulated(
    parts: Sequence[StageTimes], num_microbatches: int, schedule: str, *, num_chunks: int = 1, **how: Any
) -> Timeline:
    """The timeline of a pipeline of as many stages as the parts make."""
    return simulate(parts, pipeline(len(parts) // num_chunks, num_microbatches, schedule, num_chunks), **how)


def plan(of: Job, *stages: str, num_microbatches: int, schedule: str = "1f1b", num_chunks: int = 1) -> Plan:
    """A plan of the job whose stages (interleaved: chunks) are strategies separated by commas, one per layer."""
    num_stages = len(stages) // num_chunks
    size = of.cluster.num_devices // num_stages
    parts, first_layer = [], 0
    for index, stage in enumerate(stages):
        strategies = tuple(parse_strategy(text.strip()) for text in stage.split(","))
        first_rank = pipeline(num_stages, num_microbatches, schedule, num_chunks).stage_of(index) * size
        ranks = (first_rank, first_rank + size - 1)
        parts.append(StagePart(ranks=ranks, runs=fold_runs(first_layer, strategies)))
        first_layer += len(strategies)
    return Plan.model_validate(
        {
            "model": {
                **{"name": "small", "config": dict(of.chain.config)},
                "split": of.chain.split and of.chain.split.model_dump(mode="json"),
            },
            "cluster": of.cluster.name,
            "seq_len": of.seq_len,
            "global_batch": of.global_batch,
            "num_microbatches": num_microbatches,
            "precision": of.precision,
            "schedule": schedule,
            "stages": [stage.model_dump(mode="json") for stage in stages_of(parts)],
        }
    )


def collective_s(
    collective: Collective,
    num_bytes: float,
    group: Group,
    machines: Cluster,
    profile: Profile,
    reached: LinkEfficiency = IDEAL_LINKS,
) -> float:
    """Seconds of one collective over two ranks or more."""
    return collective_time(collective, group, machines, profile, reached)(num_bytes)
