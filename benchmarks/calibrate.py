r"""Fits the efficiencies of `steelyard/cost/efficiency.yaml` to the open rows of the table of published runs.

    python benchmarks/calibrate.py [PATH] [--sources NAME ...] [--write] [--leave-out]

PATH is as in `published_runs.py`.

Fitted are a few numbers that mean something (see `steelyard.cost.efficiency`), the same for every source: the least

$$\sum_s \frac{1}{n_s} \sum_{i \in s} \log\big(1 + (r_i / 0.07)^2\big)
+ 0.02 \sum_k \big(\ln(\theta_k / \theta_k^0) / \sigma_k\big)^2$$

with $r_i$ the logarithm of predicted over measured time, sources $s$ weighing the same, and a weak pull of each
parameter towards its usual value $\theta^0$. The loss forgives outliers: some sources hold runs that were slow for
reasons of their own. Only recommended rows of dense bf16 and fp16 models are used; sealed rows have no measurement.

The step is put together from unit costs: the cost model's own functions, each called with one rate set to 1 and all
others without cost, give coefficients that are combined in arrays. The pipeline is the closed form, which differs from
the simulator by little; `published_runs.py` then scores the result with the simulator. Needs scipy.
"""

import argparse
import random
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from published_runs.jobs import Case, case_of
from published_runs.rows import OPEN_RUNS, PublishedRun, of_sources, read_runs
from published_runs.targets import is_recommended_dense
from scipy.optimize import least_squares

from steelyard.cost.build import transfer_s
from steelyard.cost.communication import collective_s
from steelyard.cost.compute import ACCUMULATION_BYTES, OPTIMIZER_BYTES, launch_s, work_s
from steelyard.cost.efficiency import Efficiency, LinkEfficiency
from steelyard.cost.layer import held_up_s, levels_group, num_calls, tied_s
from steelyard.cost.setting import Job, Setting
from steelyard.plan.kinds import DP, TP
from steelyard.plan.kinds.data import data_levels
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import CollectiveCount, LayerProfile, Work

EFFICIENCY_FILE = Path(__file__).parents[1] / "src/steelyard/cost/efficiency.yaml"
FREE = 1e15
"""A rate so high that what it serves costs nothing."""
SCALE = 0.07
PULL = 0.02
USUAL = {
    "matmul ampere": (0.75, 0.1),
    "matmul hopper": (0.62, 0.1),
    "attention ampere": (0.5, 0.3),
    "attention hopper": (0.4, 0.3),
    "operands": (0.5, 0.5),
    "memory": (0.8, 0.1),
    "ramp_us": (3.0, 0.3),
    "launch_us": (10.0, 0.7),
    "collective_launch_us": (50.0, 0.7),
    "jitter_us": (3.0, 0.7),
    "intra": (0.75, 0.15),
    "inter": (0.65, 0.2),
    "efa": (0.4, 0.5),
    "intra_latency": (1.0, 0.5),
    "inter_latency": (1.0, 0.7),
    "straggling": (0.005, 0.7),
    "step_ms": (10.0, 1.0),
    "step_per_node_ms": (1.0, 1.0),
}
"""Usual value of every parameter, and the spread of its logarithm that is nothing remarkable."""
FRACTIONS = ("matmul ampere", "matmul hopper", "memory", "intra", "inter", "efa")
MOST = 0.95
KAPPA = 1.3
Array = NDArray[np.float64]
UNIT_LINKS = {
    "intra": LinkEfficiency(intra=1.0, inter=FREE, intra_latency=0.0, inter_latency=0.0),
    "inter": LinkEfficiency(intra=FREE, inter=1.0, intra_latency=0.0, inter_latency=0.0),
    "intra_latency": LinkEfficiency(intra=FREE, inter=FREE, intra_latency=1.0, inter_latency=0.0),
    "inter_latency": LinkEfficiency(intra=FREE, inter=FREE, intra_latency=0.0, inter_latency=1.0),
}
NOTHING = Efficiency(
    matmul=FREE,
    operands=0.0,
    attention=FREE,
    memory=FREE,
    ramp_s=0.0,
    launch_s=0.0,
    collective_launch_s=0.0,
    jitter_s=0.0,
    links=UNIT_LINKS["intra_latency"],
    straggling=0.0,
    step_s=0.0,
    step_per_node_s=0.0,
)
UNIT_WORK = (
    replace(NOTHING, matmul=1.0),
    replace(NOTHING, operands=1.0),
    replace(NOTHING, attention=1.0),
    replace(NOTHING, memory=1.0),
    replace(NOTHING, ramp_s=1e-6),
)
UNIT_LAUNCH = (replace(NOTHING, launch_s=1e-6), replace(NOTHING, collective_launch_s=1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Coefficients of all rows: leading dims rows [N] and layer kinds [K]; seconds at unit rates."""

    source: NDArray[np.str_]
    measured_s: Array
    hopper: NDArray[np.bool_]
    efa: NDArray[np.bool_]
    nodes: Array
    work: Array
    """[N, K, 3 (forward, backward, remat), 5 (matmul, operands, attention, memory, ramp)]"""
    launch: Array
    """[N, K, 3, 3 (kernels, collectives, collectives held up by the pipeline)]"""
    tp: Array
    """[N, K, 3, 4 (intra, inter, intra latency, inter latency)]"""
    jitter: Array
    """[N, K, 3] collectives times the square of the ranks that may be late, in millionths."""
    gather: Array
    """[N, K, 4] parameters: of fsdp per microbatch, of ZeRO-1 once."""
    reduce: Array
    """[N, K, 4] gradients."""
    tied: Array
    """[N, K, 4] exchange of a tied matrix's gradient, once a step."""
    moved: Array
    """[N, K, 2 (accumulation per microbatch, optimizer once)] seconds at the memory's full rate."""
    is_fsdp: NDArray[np.bool_]
    gathers_again: NDArray[np.bool_]
    overlaps: NDArray[np.bool_]
    gathers_once: NDArray[np.bool_]
    stages: Array
    """[N, 4, K] layers of each kind in the stages that differ; unused ones hold none."""
    totals: Array
    """[N, K] layers of each kind in all."""
    counts: Array
    """[N, 3] stages, microbatches, chunks."""
    transfer: Array
    """[N, 4] both ways, one microbatch."""
    waits: NDArray[np.bool_]
    """Whether a stage computes nothing while it sends."""


def collect(cases: list[Case]) -> Rows:
    """The coefficients of all rows."""
    columns: dict[str, list[object]] = defaultdict(list)
    for case in cases:
        for name, value in _row(case).items():
            columns[name].append(value)
    return Rows(**{name: np.array(values) for name, values in columns.items()})


def _row(case: Case) -> dict[str, object]:
    job, plan = case.job, case.plan
    setting = Setting(job=job, pipeline=plan.pipeline)
    strategies = [plan.strategies[0], plan.strategies[1], plan.strategies[-1]]
    share = sum(strategy.remat is not Remat.NONE for strategy in plan.strategies) / job.chain.layers.count(1)
    kinds = [
        _kind(kind.name, strategy, setting, share) for kind, strategy in zip(job.chain.kinds, strategies, strict=True)
    ]
    block = strategies[1]
    stages = sorted({_composition(plan, stage, job) for stage in range(plan.num_stages)}, reverse=True)[:4]
    stages += [(0, 0, 0)] * (4 - len(stages))
    whole = block.head_degree if job.execution.transfer == "whole" and not block.variant("sp") else 1
    network = job.cluster.inter_link.name if job.cluster.inter_link else ""
    assert case.run.step_time_s is not None, "only measured runs are fitted"
    return {
        "source": case.run.source,
        "measured_s": case.run.step_time_s,
        "hopper": job.cluster.device.name.startswith("h"),
        "efa": "efa" in network,
        "nodes": float(job.cluster.num_nodes),
        **{
            name: np.stack([kind[name] for kind in kinds])
            for name in ("work", "launch", "tp", "jitter", "gather", "reduce", "tied", "moved")
        },
        "is_fsdp": block.state_shards > 1,
        "gathers_again": not block.keeps_gathered,
        "overlaps": job.overlaps,
        "gathers_once": job.execution.optimizer_shards(block.degree(DP)) > 1,
        "stages": np.array(stages, dtype=float),
        "totals": np.bincount(job.chain.layers, minlength=3).astype(float),
        "counts": np.array([plan.num_stages, plan.num_microbatches, plan.num_chunks], dtype=float),
        "waits": plan.num_stages > 1 and not job.execution.overlaps_transfers,
        "transfer": np.array(
            [
                whole * transfer_s(replace(setting, job=replace(job, rates=replace(NOTHING, links=links))), 1)
                for links in UNIT_LINKS.values()
            ]
        ),
    }


def _composition(plan: object, stage: int, job: Job) -> tuple[int, ...]:
    counts = [0, 0, 0]
    for part in plan.chunks(stage):  # type: ignore[attr-defined]
        for layer in part.layers:
            counts[job.chain.layers[layer]] += 1
    return tuple(counts)


def _kind(name: str, strategy: Strategy, setting: Setting, share: float) -> dict[str, Array]:
    """Coefficients of a layer kind, ``share`` of whose layers recompute what their strategy says."""
    job = setting.job
    layer = job.profile.layer(name, strategy.shape)
    assert layer is not None, "the profile was made for this degree"
    samples = setting.microbatch_samples // strategy.sample_degree
    passes = _passes(layer, strategy, job, share)
    group = levels_group(strategy, data_levels(strategy.levels), setting.devices_per_stage)
    shards = job.execution.optimizer_shards(strategy.replicas)
    sharded = strategy.state_shards > 1 or shards > 1
    bandwidth = job.cluster.device.known_memory_bytes_per_s()
    accumulated = layer.num_params * ACCUMULATION_BYTES if job.execution.accumulates_apart else 0
    owned = layer.num_params / (strategy.state_shards * shards)

    pieces = job.execution.shard_pieces if shards > 1 else 1

    def links(kind: str, num_bytes: float) -> Array:
        size = num_bytes / pieces
        return pieces * np.array(
            [collective_s(kind, size, group, job.cluster, job.profile, each) for each in UNIT_LINKS.values()]
        )

    return {
        "work": np.array([[part * _unit(work, samples, job, each) for each in UNIT_WORK] for work, _, part in passes]),
        "launch": np.array(
            [
                [part * launch_s(work, calls, replace(job, rates=each)) for each in UNIT_LAUNCH]
                + [0.0 if index == 2 else held_up_s(strategy, setting) * num_calls(calls)]
                for index, (work, calls, part) in enumerate(passes)
            ]
        ),
        "tp": np.array([part * _tensor(calls, strategy, setting, samples) for _, calls, part in passes]),
        "jitter": np.array(
            [part * 1e-6 * num_calls(calls) * (strategy.tensor_degree - 1) ** 2 for _, calls, part in passes]
        ),
        "gather": links("all_gather", layer.num_params * job.compute_bytes if sharded else 0),
        "reduce": links("reduce_scatter" if sharded else "all_reduce", layer.num_params * job.execution.reduce_bytes),
        "tied": _tied(name, strategy, setting),
        "moved": np.array([accumulated, owned * OPTIMIZER_BYTES]) / bandwidth,
    }


def _tied(name: str, strategy: Strategy, setting: Setting) -> Array:
    kind = next(kind for kind in setting.job.chain.kinds if kind.name == name)
    return np.array(
        [
            tied_s(kind, strategy, replace(setting, job=replace(setting.job, rates=replace(NOTHING, links=links))))
            for links in UNIT_LINKS.values()
        ]
    )


def _passes(
    layer: LayerProfile, strategy: Strategy, job: Job, share: float
) -> list[tuple[Work, tuple[CollectiveCount, ...], float]]:
    """Work, collectives and weight of the forward pass, the backward pass and what remat repeats."""
    again = (layer.forward, (), 0.0)
    if strategy.remat is not Remat.NONE:
        entry = layer.recomputation(strategy.remat)
        again = (entry.work, entry.collectives, share * job.execution.remat_fraction)
    return [
        (layer.forward, layer.forward_collectives, 1.0),
        (layer.backward, layer.backward_collectives, 1.0),
        again,
    ]


def _unit(work: Work, samples: int, job: Job, rates: Efficiency) -> float:
    return work_s(work, samples, replace(job, rates=rates))


def _tensor(calls: tuple[CollectiveCount, ...], strategy: Strategy, setting: Setting, samples: int) -> Array:
    job = setting.job
    group = levels_group(strategy, [level for level in strategy.levels if level.kind is TP], setting.devices_per_stage)
    total = np.zeros(len(UNIT_LINKS))
    for each in calls if strategy.tensor_degree > 1 else ():
        size = each.tensor_bytes.at(samples) / each.count
        total += each.count * np.array(
            [collective_s(each.kind, size, group, job.cluster, job.profile, links) for links in UNIT_LINKS.values()]
        )
    return (1 - job.execution.hidden_tp) * total


def step_s(rows: Rows, parameters: dict[str, float]) -> Array:
    """[N] predicted seconds of a step at these parameters."""
    p = parameters
    matmul = np.where(rows.hopper, p["matmul hopper"], p["matmul ampere"])
    attention = np.where(rows.hopper, p["attention hopper"], p["attention ampere"])
    ones = np.ones_like(matmul)
    rates = np.stack(
        [1 / matmul, p["operands"] * ones, 1 / attention, ones / p["memory"], p["ramp_us"] * ones], axis=-1
    )
    straggling = 1 + p["straggling"] * np.log2(rows.nodes)
    compute = np.einsum("nkpf,nf->nkp", rows.work, rates) * straggling[:, None, None]
    compute[:, :, 1] += rows.moved[:, :, 0] / p["memory"]
    launched = rows.launch @ np.array([p["launch_us"], p["collective_launch_us"], 1.0])
    busy = compute + _links_s(rows.tp, rows, p) + p["jitter_us"] * rows.jitter
    passes = np.maximum(busy, launched)
    forward, backward = passes[:, :, 0], passes[:, :, 1] + passes[:, :, 2]
    gather, reduce = _links_s(rows.gather, rows, p), _links_s(rows.reduce, rows, p)
    once = rows.moved[:, :, 1] / p["memory"] + _links_s(rows.tied, rows, p)
    fsdp = rows.is_fsdp[:, None]
    again = np.where(rows.gathers_again[:, None], gather, 0.0)
    gathered_once = np.where(rows.gathers_once[:, None], _beside(forward, gather, rows), 0.0)
    once = once + np.where(fsdp, 0.0, _beside(backward, reduce, rows) + gathered_once)
    microbatch = forward + backward
    microbatch = microbatch + np.where(
        fsdp, _beside(forward, gather, rows) + _beside(backward, again + reduce, rows), 0.0
    )
    return _pipeline(rows, microbatch, once, p)


def _links_s(unit: Array, rows: Rows, p: dict[str, float]) -> Array:
    inter = np.where(rows.efa, p["efa"], p["inter"]).reshape(-1, *([1] * (unit.ndim - 2)))
    carried = np.maximum(unit[..., 0] / p["intra"], unit[..., 1] / inter)
    return carried + unit[..., 2] * p["intra_latency"] + unit[..., 3] * p["inter_latency"]


def _beside(compute: Array, communication: Array, rows: Rows) -> Array:
    shorter, longer = np.minimum(compute, communication), np.maximum(compute, communication)
    exposed = KAPPA * shorter + longer - shorter - compute
    return np.where(rows.overlaps[:, None], exposed, communication)


def _pipeline(rows: Rows, microbatch: Array, once: Array, p: dict[str, float]) -> Array:
    stages = np.einsum("nsk,nk->ns", rows.stages, microbatch).max(axis=1)
    last = np.einsum("nsk,nk->ns", rows.stages, once).max(axis=1)
    num_stages, num_microbatches, num_chunks = rows.counts.T
    transfers = _links_s(rows.transfer, rows, p)
    transfers = transfers * (np.maximum(num_stages - 1, 0) + np.where(rows.waits, num_microbatches * num_chunks, 0))
    others = (rows.totals * microbatch).sum(axis=1) - stages
    step = num_microbatches * stages + others / num_chunks + transfers + last
    return step + 1e-3 * (p["step_ms"] + p["step_per_node_ms"] * rows.nodes)


def fit(rows: Rows, keep: NDArray[np.bool_]) -> dict[str, float]:
    """The parameters that fit the rows that ``keep`` admits."""
    names = list(USUAL)
    usual, spread = (np.array([USUAL[name][index] for name in names]) for index in (0, 1))
    weights = np.zeros(len(rows.source))
    for source in np.unique(rows.source[keep]):
        chosen = keep & (rows.source == source)
        weights[chosen] = 1 / chosen.sum()

    def residuals(x: Array) -> Array:
        error = np.log(step_s(rows, dict(zip(names, usual * np.exp(x), strict=True))) / rows.measured_s)
        robust = np.sqrt(weights * np.log1p((error / SCALE) ** 2))
        return np.concatenate([robust[keep], np.sqrt(PULL) * x / spread])

    most = np.array([np.log(MOST / USUAL[name][0]) if name in FRACTIONS else 3.0 for name in names])
    best = least_squares(residuals, np.zeros(len(names)), bounds=(-3.0, most), max_nfev=200)
    return dict(zip(names, usual * np.exp(best.x), strict=True))


def scores(rows: Rows, parameters: dict[str, float], keep: NDArray[np.bool_]) -> list[str]:
    """A line per source: runs, median |error|, bias, 90th percentile, and the first and last after scaling."""
    lines = []
    ratio = step_s(rows, parameters) / rows.measured_s
    for source in np.unique(rows.source[keep]):
        found = ratio[keep & (rows.source == source)]
        scaled = np.abs(found / np.median(found) - 1)
        error = np.abs(found - 1)
        lines.append(
            f"  {source:28s} {len(found):5d} {np.median(error):7.1%} {np.median(found) - 1:+7.1%} "
            f"{np.quantile(error, 0.9):7.1%}   {np.median(scaled):7.1%} {np.quantile(scaled, 0.9):7.1%}"
        )
    return lines


def rewritten(text: str, parameters: dict[str, float], reached: str) -> str:
    """The text of ``efficiency.yaml`` with these parameters in the place of its own, and how well they fit."""
    places = {
        "matmul ampere": r"(ampere: .*matmul: )[0-9.]+",
        "matmul hopper": r"(hopper: .*matmul: )[0-9.]+",
        "attention ampere": r"(ampere: .*attention: )[0-9.]+",
        "attention hopper": r"(hopper: .*attention: )[0-9.]+",
        "efa": r"(efa: .*rate: )[0-9.]+",
        "inter": r"(other: \{links.*rate: )[0-9.]+",
    }
    for name, value in parameters.items():
        pattern = places.get(name, rf"(?m)^({name}: )[0-9.]+")
        text, count = re.subn(pattern, rf"\g<1>{value:.3g}", text)
        assert count == 1, f"{name} stands {count} times in the file"
    return re.sub(r'(reached: ").*(")', rf"\g<1>{reached}\g<2>", text)


def reached(rows: Rows, parameters: dict[str, float]) -> str:
    """One sentence on how well the parameters fit: medians over the runs of a source, sources weighing the same."""
    ratio = step_s(rows, parameters) / rows.measured_s - 1
    sources = [ratio[rows.source == source] for source in np.unique(rows.source)]
    errors, biases = ([float(np.median(f(each))) for each in sources] for f in (np.abs, lambda each: each))
    return (
        f"median |error| of a source {min(errors):.0%} to {max(errors):.0%}, mean over {len(sources)} sources "
        f"{np.mean(errors):.1%}; mean bias {np.mean(biases):+.1%}; {len(ratio)} runs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=OPEN_RUNS, metavar="PATH")
    parser.add_argument("--sources", nargs="+", metavar="NAME", help="only these, as column source_file has them")
    parser.add_argument("--write", action="store_true", help="put the parameters into the cost model's file")
    parser.add_argument("--leave-out", action="store_true", help="fit without each source in turn and score it")
    parser.add_argument("--most", type=int, default=400, help="rows of a source to use, chosen at random (seed 0)")
    options = parser.parse_args()
    runs = read_runs(options.path)
    runs = runs if options.sources is None else of_sources(runs, options.sources)
    rows = collect(_cases(runs, options.most))
    everything = np.ones(len(rows.source), dtype=bool)
    parameters = fit(rows, everything)
    print(yaml.safe_dump({name: float(f"{value:.4g}") for name, value in parameters.items()}, sort_keys=False))
    print(
        "source, runs, median |error|, bias, 90 %, scaled median, scaled 90 %",
        *scores(rows, parameters, everything),
        sep="\n",
    )
    print(reached(rows, parameters))
    if options.write:
        EFFICIENCY_FILE.write_text(
            rewritten(EFFICIENCY_FILE.read_text(encoding="utf-8"), parameters, reached(rows, parameters)),
            encoding="utf-8",
        )
    if options.leave_out:
        print("each source predicted by a fit without it")
        for source in np.unique(rows.source):
            kept = rows.source != source
            print(*scores(rows, fit(rows, kept), ~kept), sep="\n")


def _cases(runs: tuple[PublishedRun, ...], most: int) -> list[Case]:
    by_source: dict[str, list[Case]] = defaultdict(list)
    chooser = random.Random(0)
    for run in runs:
        if run.is_open and run.step_time_s and is_recommended_dense(run):
            case = case_of(run)
            if isinstance(case, Case):
                by_source[run.source].append(case)
    return [case for cases in by_source.values() for case in chooser.sample(cases, min(most, len(cases)))]


if __name__ == "__main__":
    main()
