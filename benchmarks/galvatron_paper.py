"""BERT-Huge on 8 GPUs as Galvatron's authors published it: our search on their tables against their planner's results.

The published inputs and rules are turned into cost tables, one for each global batch and pipeline degree. Their
stages are cut evenly and are all alike, and the step takes p times as long as one stage, with the bubble in the time
of each layer and no switch between stages; so the tables describe one stage, with times and switches p-fold. Layer
times and memory reproduce the published table per strategy, which `tests/search/test_galvatron_paper.py` checks.

Rules, in ms and MB, for a layer under (pp p, tp, dp) with global batch B and m microbatches:

    compute = 3 × fwd × B/dp / tp + tensor-parallel all-reduces       scaled by (p + m − 1) / (p m)
    c, d    = backward that may overlap, data-parallel all-reduce     + 0.3 min(c, d) + max(d − c, 0)
              the second term is divided by p for plain dp without tp; sharded dp adds d / 2
    everything × 1.1

Source: PKU-DAIR/Hetu at df32daa and the files in `data/galvatron_2022`. Not covered: 16 GPUs, T5, ViT, Swin.

Run: python benchmarks/galvatron_paper.py
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from steelyard.cost.tables import CostTables
from steelyard.plan.strategy import Level, Parallelism, Remat, Strategy
from steelyard.search import SearchResult, SettingOutcome, SpaceOptions, enumerate_strategies, search

DATA = Path(__file__).parent / "data" / "galvatron_2022"
NUM_DEVICES = 8
MB = 1024**2
SLOWDOWN = 0.3
INFLATION = 1.1e-3
Space = Literal["full", "dp+pp", "dp+tp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The published measurements of one model."""

    seq: int
    hidden: int
    param_mb: float
    fwd_ms: float
    act_mb: dict[int, float]
    other_states_mb: float
    other_act_mb: float
    allreduce_ms_per_mb: dict[str, float]


def bert_huge() -> Inputs:
    """BERT-Huge as in the authors' main repository."""
    content = yaml.safe_load((DATA / "profiled_inputs.yaml").read_text())
    model = content["models"]["bert_huge_1280"]
    return Inputs(
        seq=model["seq"],
        hidden=model["hidden"],
        param_mb=model["param_MB_per_layer"],
        fwd_ms=model["fwd_ms"],
        act_mb=model["act_MB_per_sample_by_tp"],
        other_states_mb=model["other_model_states_MB"]["hetu"],
        other_act_mb=model["other_act_MB_per_sample"]["hetu"],
        allreduce_ms_per_mb={str(key): value for key, value in content["allreduce_coe_8gpu_ms_per_MB"].items()},
    )


def layer_mb(inputs: Inputs, strategy: Strategy, batch: int) -> float:
    """Model states and activations of one layer."""
    states = 4 * inputs.param_mb / strategy.tp
    if strategy.fsdp > 1:
        states *= 1 / strategy.fsdp + 0.025
    return states + inputs.act_mb[strategy.tp] * batch / strategy.data_degree


def layer_s(inputs: Inputs, strategy: Strategy, batch: int, num_stages: int) -> float:
    """Contribution of one layer to the step time."""
    tp, data = strategy.tp, strategy.data_degree
    samples = batch / data
    m = microbatches(num_stages, tp, samples)
    forward = inputs.fwd_ms * samples / tp
    message = 2 * (tp - 1) / tp * samples * inputs.seq * inputs.hidden * 4 * 4 / MB
    compute = 3 * forward + message * _coefficient(inputs, strategy, num_stages, is_tp=True)
    overlappable = 2 * forward / (2 if tp > 1 and data == 2 else 1)
    sync = 2 * (data - 1) / data * inputs.param_mb / tp * _coefficient(inputs, strategy, num_stages, is_tp=False)
    rest = max(sync - overlappable, 0.0)
    if tp == 1 and strategy.fsdp == 1:
        rest /= num_stages
    extra = SLOWDOWN * min(sync, overlappable) + rest + (sync / 2 if strategy.fsdp > 1 else 0.0)
    return (compute * (num_stages + m - 1) / (num_stages * m) + extra) * INFLATION


def microbatches(num_stages: int, tp: int, samples: float) -> float:
    """The published choice of microbatches; it need not be whole."""
    if num_stages == 1:
        return 1.0
    if samples == int(samples) and (num_stages, tp) in {(2, 4), (4, 2)}:
        return samples / 4
    return samples / 2 if samples < 6 else samples / 8 + 2


def _coefficient(inputs: Inputs, strategy: Strategy, num_stages: int, *, is_tp: bool) -> float:
    """Milliseconds per MB of an all-reduce over the tensor-parallel or the data-parallel group."""
    size = strategy.tp if is_tp else strategy.data_degree
    if size == 1:
        return 0.0
    is_inner = (strategy.levels[-1].kind is Parallelism.TP) == is_tp
    return inputs.allreduce_ms_per_mb[f"{num_stages}{size}{int(is_inner)}"]  # YAML reads the key 1_8_1 as 181


def switch_s(inputs: Inputs, before: Strategy, after: Strategy, batch: int, num_stages: int) -> float:
    """Redistribution between two layers, and the published 0.1 ms that orders sharded before replicated."""
    moved = after.tp > before.tp or (after.tp == before.tp and _order(after) != _order(before))
    size = (after.tp - 1) / after.tp * 2 * batch / after.data_degree
    cost = size * _coefficient(inputs, after, num_stages, is_tp=True) * INFLATION if moved else 0.0
    ordered = _order(after) == _order(before) and before.fsdp > 1 and after.dp > 1
    return cost + (1e-4 if ordered else 0.0)


def _order(strategy: Strategy) -> tuple[tuple[bool, int], ...]:
    return strategy.layout.axes


def tables(inputs: Inputs, num_layers: int, batch: int, num_stages: int, space: Space) -> CostTables:
    """The published costs of one of the equal stages, for one global batch and pipeline degree."""
    strategies = tuple(_space(NUM_DEVICES // num_stages, space))
    seconds = [layer_s(inputs, each, batch, num_stages) for each in strategies]
    switches = [[switch_s(inputs, a, b, batch, num_stages) for b in strategies] for a in strategies]
    other = inputs.other_states_mb + inputs.other_act_mb * batch * num_stages / NUM_DEVICES + 1024
    row = np.zeros((1, len(strategies)))
    return CostTables(
        num_stages=1,
        num_microbatches=1,
        schedule="gpipe",
        kinds=("layer",),
        layers=(0,) * (num_layers // num_stages),
        strategies=strategies,
        legal=np.ones_like(row, dtype=bool),
        time_s=num_stages * np.array([seconds]),
        static_bytes=np.array([[math.ceil(layer_mb(inputs, each, batch)) * MB for each in strategies]]),
        activation_bytes=row.astype(np.int64),
        transient_bytes=row.astype(np.int64),
        switch_s=num_stages * np.array([switches]),
        transfer_s=0.0,
        overhead_bytes=math.ceil(other) * MB,
    )


def _space(num_devices: int, space: Space) -> Iterator[Strategy]:
    options = SpaceOptions(sp=(False,), remats=(Remat.NONE,))
    for strategy in enumerate_strategies(num_devices, options):
        if space == "full" or (strategy.fsdp == 1 and (space == "dp+tp" or strategy.tp == 1)):
            yield strategy


def best(inputs: Inputs, num_layers: int, memory_gb: int, space: Space, largest_batch: int = 64) -> SearchResult:
    """Our best plan for one published cell, over batches and pipeline degrees."""
    degrees = (1,) if space == "dp+tp" else (1, 2, 4, 8)
    settings = [
        (tables(inputs, num_layers, batch, degree, space), batch)
        for batch in range(8, largest_batch + 1, 8)
        for degree in degrees
    ]
    return search(
        [each for each, _ in settings],
        memory_gb * 1024 * MB,
        samples=[batch for _, batch in settings],
        num_exact=1,
    )


def published_cells() -> list[dict[str, str]]:
    """The rows of the published predictions for BERT-Huge on 8 GPUs."""
    with (DATA / "predicted_by_published_planner.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["model"] == "bert" and row["gpus"] == "8"]


def parse_published(name: str) -> tuple[int, Strategy]:
    """Pipeline degree and strategy of a name such as ``2-2*-2f``: the star marks the level on neighbouring ranks."""
    stages, tp, data = name.split("-")
    is_tp_inner = "*" in tp
    kind = Parallelism.FSDP if "f" in data else Parallelism.DP
    pairs = [(Parallelism.TP, int(tp.strip("*"))), (kind, int(data.strip("f*")))]
    ordered = reversed(pairs) if is_tp_inner else pairs
    return int(stages), Strategy(levels=tuple(Level(kind=k, degree=n) for k, n in ordered if n > 1))


def plan_text(result: SearchResult) -> str:
    """The best plan's batch, pipeline degree and stage, runs folded."""
    if result.best is None:
        return "does not fit"
    names = [str(result.best.tables.strategies[index]) for index in result.best.solution.strategies]
    runs = " ".join(f"{name}x{names.count(name)}" for name in dict.fromkeys(names))
    return f"batch {result.best.samples}, pp {pipeline_degree(result.best)}: {runs}"


def pipeline_degree(found: SettingOutcome) -> int:
    """Equal stages of the published pipeline, of which the tables describe one."""
    return NUM_DEVICES // found.tables.strategies[0].num_devices


def main() -> None:
    inputs = bert_huge()
    print(f"{'layers':>6} {'GB':>3} {'space':6} {'published':>9} {'ours':>7}  our plan | published plan")
    for row in published_cells():
        space: Space = row["space"]  # type: ignore[assignment]
        result = best(inputs, int(row["layers"]), int(row["mem_gb"]), space)
        ours = f"{1 / result.best.score_s:.2f}" if result.best else "OOM"
        published = row["pred_throughput"] or "OOM"
        plans = f"{plan_text(result)} | {row['plan']}"
        print(f"{row['layers']:>6} {row['mem_gb']:>3} {row['space']:6} {published:>9} {ours:>7}  {plans}")


if __name__ == "__main__":
    main()
