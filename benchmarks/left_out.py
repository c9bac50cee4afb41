"""What a plan would gain from what the search leaves out: ring attention, and more group sizes of hybrid sharding.

*Ring attention* hands keys and values on from rank to rank while a rank attends with those it has. At best all of that
runs beside attention and costs what the slowdown of both takes, and nobody holds more than a part of them. So no ring
is faster than a gather of ``overlap_slowdown − 1`` times the bytes, with which each job is planned once more. Left out,
all in favour of the ring: merging partial results (a pass over queries in fp32 for each rank), that a hop between nodes
goes over one link where a gather uses those of all its ranks there, and attention that is shorter than a transfer.

*Hybrid sharding* is searched with groups of 1, 4, 16, … nodes: here also with 2, 8, 32, … on the tables that the search
adds up, without acceptance.

Run: OMP_NUM_THREADS=1 python benchmarks/left_out.py [ring] [groups]
"""

import sys
from dataclasses import replace
from math import inf

from steelyard.cost.build import KnownCosts, build_tables, usable_bytes
from steelyard.cost.job import Job
from steelyard.hardware import parse_cluster
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DP
from steelyard.plan.dimensions.dimension import Divides, degree_of
from steelyard.plan.strategy import Strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.problem import pipeline_configs, space_options
from steelyard.planning.request import make_request
from steelyard.profiles.profile import Affine, LayerProfile
from steelyard.search import enumerate_strategies, search

TIME_LIMIT_S = 120.0
LONG = [
    ("llama3-8b", "1x8xh100-80gb", 1.0, 131072, 1),
    ("llama3-8b", "4x8xh100-80gb", 1.0, 131072, 32),
    ("llama3-8b", "4x8xh100-80gb", 1.0, 131072, 2),
    ("llama3-8b", "4x8xh100-80gb", 1.0, 524288, 1),
    ("llama3-8b", "4x8xh100-80gb", 0.25, 131072, 2),
    ("llama2-7b", "4x8xh100-80gb", 1.0, 131072, 1),
    ("llama3-8b", "2x8xa100-40gb", 0.25, 131072, 2),
    ("llama3-8b", "1x8xl40s-48gb", 1.0, 32768, 4),
    ("llama3-8b", "2x8xl40s-48gb", 1.0, 65536, 4),
]
"""Model, cluster, share of the rate of its links between nodes, tokens of a sequence, samples of a step."""
MANY_NODES = [
    ("llama3-8b", "8x8xh100-80gb", 1.0, 4096, 256),
    ("llama3-8b", "16x8xa100-80gb", 1.0, 4096, 1024),
    ("llama3-8b", "16x8xa100-80gb", 0.2, 4096, 1024),
    ("llama3-8b", "32x8xh100-80gb", 0.25, 4096, 1024),
    ("llama3-8b", "64x8xh100-80gb", 1.0, 4096, 1024),
]


def job_within(model: str, cluster: str, share: float, seq_len: int, batch: int) -> Job:
    machines = parse_cluster(cluster)
    if machines.inter_link is not None:
        link = replace(machines.inter_link, bytes_per_s=share * machines.inter_link.bytes_per_s)
        machines = machines.on(inter_link=link)
    return job_of(
        make_request(
            model,
            machines,
            global_batch=batch,
            seq_len=seq_len,
            precision="bf16",
        )
    )


def planned_s(job: Job) -> float:
    """Predicted seconds of a step of the best plan; infinite where nothing fits."""
    plan = plan_job(job, time_limit_s=TIME_LIMIT_S).plan
    return inf if plan is None or plan.prediction is None else plan.prediction.step_time_s


def searched_s(job: Job, *, every_group: bool) -> float:
    """The same by the tables; ``every_group`` offers hybrid sharding in groups of any 2ⁿ nodes."""
    options = Decisions()
    space = space_options(job, options)
    if every_group:
        nodes = job.cluster.devices_per_node
        space = replace(space, insists=lambda strategy: shards_over_nodes(strategy, nodes))
    configs = pipeline_configs(job, options)
    sizes = {config.devices_per_stage for config in configs}
    shapes = job.profile.shapes
    offered = {
        size: tuple(each for each in enumerate_strategies(size, space) if frozenset(each.shape.items()) in shapes)
        for size in sizes
    }
    known = KnownCosts([config.pipeline.num_microbatches for config in configs])
    tables = [build_tables(config, offered[config.devices_per_stage], known) for config in configs]
    best = search(tables, usable_bytes(job), time_limit_s=TIME_LIMIT_S).best
    return inf if best is None else best.score_s


def shards_over_nodes(strategy: Strategy, devices_per_node: int) -> bool:
    """Whether a strategy shards in groups of 1, 2, 4, 8, … nodes, with what divides the layer innermost."""
    dimensions = [level.dimension for level in strategy.levels]
    if DP not in dimensions or strategy.state_shards == 1:
        return False
    inside = strategy.levels[dimensions.index(DP) + 1 :]
    nodes, rest = divmod(degree_of(inside), devices_per_node)
    return not (rest or nodes & (nodes - 1) or any(each.dimension.divides is Divides.TENSORS for each in inside[:-1]))


def with_hidden_keys(job: Job) -> Job:
    """The job with no more of its keys and values to gather than what a transfer beside attention costs."""
    exposed = job.profile.overlap_slowdown - 1

    def hidden(layer: LayerProfile) -> LayerProfile:
        keys = layer.key_value_bytes
        scaled = Affine(constant=exposed * keys.constant, per_sample=exposed * keys.per_sample)
        return layer.model_copy(update={"key_value_bytes": scaled})

    layers = tuple(hidden(layer) for layer in job.profile.layers)
    return job.on(profile=job.profile.model_copy(update={"layers": layers}))


def main(parts: list[str]) -> None:
    jobs = {"ring": LONG, "groups": MANY_NODES}
    for part in parts or jobs:
        print(f"{part:<48} {'searched':>11} {'with more':>11} {'gain':>8}")
        for model, cluster, share, seq_len, batch in jobs[part]:
            job = job_within(model, cluster, share, seq_len, batch)
            links = "" if share == 1 else f" links × {share:g}"
            name = f"{model} {cluster}{links} {batch} × {seq_len}"
            if part == "ring":
                found_s, more_s = planned_s(job), planned_s(with_hidden_keys(job))
                more_s = min(found_s, more_s)
            else:
                found_s, more_s = (searched_s(job, every_group=every) for every in (False, True))
            print(f"{name:<48} {found_s:9.3f} s {more_s:9.3f} s {100 * (1 - more_s / found_s):6.2f} %", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
