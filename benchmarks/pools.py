"""Plans over pools of unlike devices: against each pool alone and even cuts, and against measured plans of others.

`clusters` searches each of the clusters below and compares the plan with the best one on each pool alone and the best
one of stages of equal devices and layers; all times are predictions. Four of the clusters are those that Sailor's
authors measured on (rows ``mixed_devices`` of the second set of published runs, the nodes of each card a pool), two
more papers' are in ``data/pools`` with where each number is stated, the others are sizes that users ask for. Words in
place of `clusters` choose the clusters whose names hold one of them.

`sailor` predicts the measured plans. The rows do not say which links the machines have, the authors' own measurements
beside them do: what a send between nodes reaches, and what a block takes under tensor parallelism, from which the rate
inside a node follows (`intra_link`). Whether fp32 matmuls are in TF32 no file says; true fp32 is assumed. OPT-350M is
priced as a GPT-2 of its sizes. A stage whose replicas lie on several kinds of card is priced as if all lay on the
slowest of them, for which the others wait. Beside each prediction is that calibrated as `--calibrate` does: times the
median of measured over predicted of the other rows of machines with as many cards, never of the row itself. A row with
the numbers of another one is left out.

Run: OMP_NUM_THREADS=1 python benchmarks/pools.py [clusters] [sailor] [WORD ...]
"""

import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from published_runs.rows import OPEN_RUNS, PublishedRun, read_runs

from steelyard.cost.predict import predict
from steelyard.hardware import Cluster, hardware_file, joined_pools, parse_pools
from steelyard.hardware.parse import pools_from_yaml
from steelyard.plan.dimensions import DP, TP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import Strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.request import make_request
from steelyard.planning.variants import Study, group_answers
from steelyard.units import format_seconds

NETWORK = "{name: 1 Gb/s between nodes, bandwidth_GBps: 0.117, latency_us: 30}"
"""Sends between nodes of Sailor's machines reach 0.110 to 0.118 GB/s, large ones 0.115 to 0.118: bandwidth_sockets.json
under sailor/providers/mit of github.com/eth-easl/sailor (MIT), whose two nodes of Titan RTX reach 2.9."""
BLOCK_S = {
    "RTX 2080": {1: 0.033330, 2: 0.033859, 8: 0.027682},
    "RTX 3090": {1: 0.016952, 2: 0.010626, 8: 0.080919},
    "Titan RTX": {1: 0.031114, 2: 0.033164, 8: 0.027462},
}
"""Seconds of the forward pass of a block of OPT-350M, four samples of 2,048 tokens in fp32, by tensor-parallel degree
on each card: OPT-350/*/profile.json under sailor/Planner/sailor_planner/profiles of the same code."""
BLOCK_BYTES = 4 * 2048 * 1024 * 4
"""Of what an all-reduce of such a block sums up."""
OPT_350M = {
    "model_type": "gpt2",
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50432,
    "activation_function": "gelu_new",
}
GPT2_MEDIUM = OPT_350M | {"n_positions": 1024, "vocab_size": 52256}
POOLS = Path(__file__).parent / "data" / "pools"
CARDS = {
    "RTX 2080": "{name: rtx-2080, kind: gpu, memory_GiB: 7.79, memory_bandwidth_GBps: 448, peak_TFLOPs: {fp16: 40.3, "
    "fp32: 10.1}, source: 'https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/"
    "turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf'}",
    "RTX 3090": "rtx-3090",
    "Titan RTX": "titan-rtx",
}


def intra_link(card: str, count: int) -> str:
    """The link of a node of so many cards: a block waits for two all-reduces beyond its share of the computation."""
    each_s = (BLOCK_S[card][count] - BLOCK_S[card][1] / count) / 2
    rate = 2 * (count - 1) / count * BLOCK_BYTES / each_s / 1e9
    return f"{{name: '{count} × {card}', bandwidth_GBps: {rate:.3g}, latency_us: 5.7}}"


def node(card: str, count: int, name: str, nodes: int = 1) -> Cluster:
    """Nodes of one of the cards of Sailor's runs."""
    text = (
        f"version: 1\nname: '{name}'\nnum_nodes: {nodes}\ndevices_per_node: {count}\ndevice: {CARDS[card]}\n"
        f"intra_link: {intra_link(card, count)}\ninter_link: {NETWORK}\n"
    )
    return pools_from_yaml(text)


def joined(*pools: Cluster) -> Cluster:
    assert all(pool.inter_link for pool in pools), "given for a single node too"
    return joined_pools(pools, [pool.inter_link for pool in pools if pool.inter_link is not None])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job on a cluster of several pools."""

    name: str
    cluster: Cluster
    model: Any
    seq_len: int
    batch: int
    precision: Any = "bf16"


def cases() -> list[Case]:
    sailor = {"model": OPT_350M, "seq_len": 2048, "batch": 256, "precision": "fp32"}
    two = joined(node("RTX 3090", 2, "3090"), node("Titan RTX", 2, "titan"))
    three = joined(node("RTX 3090", 8, "3090"), node("RTX 2080", 8, "2080"), node("Titan RTX", 8, "titan"))
    four = joined(node("RTX 3090", 8, "3090"), node("RTX 2080", 8, "2080", 2), node("Titan RTX", 8, "titan"))
    six = joined(node("RTX 3090", 8, "3090"), node("RTX 2080", 8, "2080", 3), node("Titan RTX", 8, "titan", 2))
    smallest, amp = parse_pools(str(POOLS / "sailor-8b.yaml")), parse_pools(str(POOLS / "amp.yaml"))
    more_nodes = [pool.on(num_nodes=pool.num_nodes * 5 // 2) for pool in smallest.pools]
    larger = joined_pools(more_nodes, smallest.links)
    planned = sailor | {"model": OPT_350M | {"vocab_size": 50272}, "batch": 1024}
    return [
        Case(name="Sailor N2: 2 × RTX 3090, 2 × Titan RTX", cluster=two, **sailor),
        Case(name="Sailor N3: 8 × RTX 3090, 8 × RTX 2080, 8 × Titan RTX", cluster=three, **sailor),
        Case(name="Sailor N4: 8 × RTX 3090, 16 × RTX 2080, 8 × Titan RTX", cluster=four, **sailor),
        Case(name="Sailor N6: 8 × RTX 3090, 24 × RTX 2080, 16 × Titan RTX", cluster=six, **(sailor | {"batch": 288})),
        Case(name="Sailor 8b: 32 × A100 40 GB, 96 × V100", cluster=smallest, **planned),
        Case(name="Sailor 8b: 80 × A100 40 GB, 240 × V100", cluster=larger, **planned),
        Case(name="AMP: 12 × V100, 4 × T4", cluster=amp, model=GPT2_MEDIUM, seq_len=1024, batch=32, precision="fp32"),
        shown("1x8xh100-80gb+1x8xa100-80gb", "llama3-8b", 8192, 128),
        shown("2x8xh100-80gb+4x8xa100-40gb", "llama2-13b", 4096, 256),
        shown("4x8xh100-80gb+8x8xa100-80gb", "llama3-70b", 4096, 512),
        shown("1x8xa100-80gb+2x8xl40s", "llama3-8b", 4096, 128),
    ]


def shown(cluster: str, model: str, seq_len: int, batch: int) -> Case:
    return Case(name=f"{cluster}, {model}", cluster=parse_pools(cluster), model=model, seq_len=seq_len, batch=batch)


def compare(case: Case) -> None:
    request = make_request(
        case.model, case.cluster, global_batch=case.batch, seq_len=case.seq_len, precision=case.precision
    )
    job = job_of(request)
    started = time.process_time()
    found = plan_job(job)
    spent_s = time.process_time() - started
    if found.plan is None:
        print(f"{case.name}\n  nothing fits: {found.miss_text}")
        return
    prediction = found.plan.prediction
    order = ", ".join(f"{each.name} × {each.num_stages} stages" for each in prediction.pools)
    print(f"{case.name}\n  {format_seconds(prediction.step_time_s)} a step: {order}")
    print(f"  {prediction.certificate}; searched in {spent_s:.1f} s of CPU")
    for baseline in (each.beside(prediction.step_time_s) for each in group_answers(Study(request, job))):
        words = "does not fit" if baseline.step_time_s is None else format_seconds(baseline.step_time_s)
        slower = "" if baseline.slowdown is None else f", {baseline.slowdown:+.1%}"
        print(f"  {baseline.name}: {words}{slower}")


def measured_plan(run: PublishedRun) -> tuple[Plan, Cluster]:
    """The plan of a row, every stage on the slowest kind of card that its replicas lie on, and its machines."""
    devices = re.search(r"devices of the stages: ([^;]+)", run.text("notes"))
    units = re.search(r"counted as one each\): ([0-9/]+)", run.text("notes"))
    assert devices, f"{run.id} does not say its cards"
    assert units, f"{run.id} does not say its stages"
    tp, dp, per_node = (run.count(column) or 1 for column in ("tp", "dp", "gpus_per_node"))
    size, pools = tp * dp, []
    for number, dimensions in enumerate(devices.group(1).split(" / ")):
        alike = [
            node(card, per_node, f"{dimensions}-{number}", size // per_node) for card in dimensions.strip().split("|")
        ]
        pools.append(min(alike, key=lambda each: each.device.peak("fp32")))
    levels = tuple(
        Level(dimension=dimension, degree=degree) for dimension, degree in ((DP, dp), (TP, tp)) if degree > 1
    )
    parts, first = [], 0
    for index, count in enumerate(map(int, units.group(1).split("/"))):
        parts.append(
            StagePart(
                ranks=(index * size, (index + 1) * size - 1), runs=fold_runs(first, (Strategy(levels=levels),) * count)
            )
        )
        first += count
    cluster = joined(*pools) if len(pools) > 1 else pools[0]
    plan = Plan(
        model=PlanModel(name="opt-350m", config=OPT_350M),
        cluster=cluster.name,
        hardware=hardware_file(cluster),
        seq_len=2048,
        global_batch=run.count("gbs") or 0,
        num_microbatches=(run.count("gbs") or 0) // ((run.count("mbs") or 1) * dp),
        precision="fp32",
        stages=stages_of(parts),
    )
    return plan, cluster


def predicted_s(run: PublishedRun) -> float:
    """Seconds of a step of the plan of a row."""
    plan, cluster = measured_plan(run)
    asked: dict[str, Any] = {"global_batch": plan.global_batch, "seq_len": plan.seq_len, "precision": "fp32"}
    if cluster.is_mixed:
        return predict(plan, job_of(make_request(plan.chain(), cluster, **asked))).step_time_s
    return predict(plan, job_of(make_request(plan.chain(), cluster, **asked))).step_time_s


def calibrated_s(run: PublishedRun, rows: Sequence[PublishedRun], predictions_s: Mapping[str, float]) -> float:
    """The prediction for a row, times what the other rows of machines with as many cards took over theirs."""
    others = [each for each in rows if each is not run and each.count("gpus_per_node") == run.count("gpus_per_node")]
    factors = [(each.number("step_time_s") or 0.0) / predictions_s[each.id] for each in others]
    return predictions_s[run.id] * statistics.median(factors)


def measured_rows() -> list[PublishedRun]:
    """The rows over several kinds of cards, without that which has the numbers of another."""
    rows = [run for folder in OPEN_RUNS for run in read_runs(folder) if "mixed_devices" in run.text("flags")]
    return [run for run in rows if "source_inconsistent" not in run.text("flags")]


def sailor() -> None:
    rows = measured_rows()
    predictions_s = {run.id: predicted_s(run) for run in rows}
    for run in rows:
        measured_s, plain_s = run.number("step_time_s") or 0.0, predictions_s[run.id]
        cards = run.text("notes").partition("devices of the stages: ")[2]
        words = f"{format_seconds(plain_s)} for {format_seconds(measured_s)} measured, {plain_s / measured_s - 1:+.0%}"
        print(f"{run.id} ({cards}; dp {run.count('dp')}, tp {run.count('tp')}): {words}", end="; ")
        print(f"calibrated by the others {calibrated_s(run, rows, predictions_s) / measured_s - 1:+.0%}")


if __name__ == "__main__":
    asked = sys.argv[1:] or ["clusters", "sailor"]
    for each in cases():
        if "clusters" in asked or any(word in each.name for word in asked):
            compare(each)
    if "sailor" in asked:
        sailor()
