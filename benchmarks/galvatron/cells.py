"""The cells of the published table of predictions: theirs, their plan scored again under the rules, and ours."""

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from galvatron.cuts import CutSearch, Plan
from galvatron.inputs import DATA, DEPTHS, GPU_COUNTS, NAMES, Inputs, Layer, ModelName, inputs_of
from galvatron.rules import MB, Point, layer_mb, other_mb
from galvatron.tables import (
    SPACES,
    Space,
    degrees_of,
    even_tables,
    parse_plan,
    stage_tables,
    strategies_of,
    uneven_tables,
)
from steelyard.plan.strategy import Strategy
from steelyard.search import evaluate, search
from steelyard.search.problem import Problem

PREDICTIONS = DATA / "predicted_by_published_planner.csv"
BUDGETS_GB = (8, 12, 16, 20)
BATCH_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question of the table: the fastest plan of a model on a cluster, within a budget and a space."""

    model: ModelName
    num_layers: int
    num_gpus: int
    memory_gb: int
    space: Space

    def __str__(self) -> str:
        return f"{self.model}-{self.num_layers} on {self.num_gpus}, {self.memory_gb} GB, {self.space}"

    @property
    def file_name(self) -> str:
        """A name for its problem file, without the ending."""
        return f"{self.model}-{self.num_layers}-{self.num_gpus}gpus-{self.memory_gb}GB-{self.space}"

    @property
    def inputs(self) -> Inputs:
        """What was measured of the model and the cluster."""
        return inputs_of(self.model, self.num_layers, self.num_gpus)

    @property
    def budget_mb(self) -> int:
        """Memory of one device."""
        return self.memory_gb * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published answer to a cell."""

    throughput: float
    step_s: float
    batch: int
    num_stages: int
    plan: str


def all_cells() -> Iterator[Cell]:
    """Every cell for which there are inputs, whether or not its prediction is at hand."""
    for model, depth, gpus, memory, space in itertools.product(NAMES, DEPTHS, GPU_COUNTS, BUDGETS_GB, SPACES):
        yield Cell(model=model, num_layers=depth, num_gpus=gpus, memory_gb=memory, space=space)


def published_cells(path: Path = PREDICTIONS) -> dict[Cell, Published | None]:
    """The published predictions; None where the published planner ran out of memory."""
    with path.open() as file:
        return {
            Cell(
                model=row["model"],  # type: ignore[arg-type]
                num_layers=int(row["layers"]),
                num_gpus=int(row["gpus"]),
                memory_gb=int(row["mem_gb"]),
                space=row["space"],  # type: ignore[arg-type]
            ): _published(row)
            for row in csv.DictReader(file)
        }


def _published(row: dict[str, str]) -> Published | None:
    if row["status"] != "ok":
        return None
    return Published(
        throughput=float(row["pred_throughput"]),
        step_s=float(row["iter_s"]),
        batch=int(float(row["bsz"])),
        num_stages=int(float(row["pp"])),
        plan=row["plan"],
    )


def score(cell: Cell, batch: int, num_stages: int, stages: tuple[tuple[Strategy, ...], ...]) -> Plan:
    """A given plan under the rules: time and memory stage by stage; one stage stands for all where they are alike."""
    point = Point(inputs=cell.inputs, batch=batch, num_stages=num_stages)
    if len(stages) == 1:
        stages *= num_stages
    layers = iter(cell.inputs.layers)
    seconds, peaks = [], []
    for strategies, held in zip(stages, other_mb(point), strict=True):
        own: tuple[Layer, ...] = tuple(itertools.islice(layers, len(strategies)))
        tables = stage_tables(point, own, held, "full")
        found = evaluate(tables, (0, len(own)), [tables.strategies.index(each) for each in strategies])
        seconds.append(found.step_s)
        peaks.append(found.peak_bytes // MB)
    if next(layers, None) is not None:
        raise ValueError(f"the plan of {cell} has fewer layers than the model")
    return Plan(batch=batch, num_stages=num_stages, stages=stages, step_s=sum(seconds), peak_mb=max(peaks))


def score_published(cell: Cell, published: Published) -> Plan:
    """The published plan of a cell under the rules as they are read here."""
    return score(cell, published.batch, published.num_stages, parse_plan(published.plan))


def best(cell: Cell) -> Plan | None:
    """Our fastest plan over all batches, pipeline degrees, cuts and strategies; None if nothing fits."""
    return _best_even(cell) if cell.inputs.is_alike else _best_uneven(cell)


def _best_even(cell: Cell) -> Plan | None:
    points = list(points_of(cell))
    if not points:
        return None
    tables = [even_tables(point, cell.space) for point in points]
    samples = [point.batch for point in points]
    found = search(tables, cell.budget_mb * MB, samples=samples, num_alternatives=0).best
    if found is None:
        return None
    stage = tuple(found.tables.strategies[index] for index in found.solution.strategies)
    return score(cell, found.samples, points[found.index].num_stages, (stage,))


def _best_uneven(cell: Cell) -> Plan | None:
    """Points in the order of their bounds, until no bound is better than the best plan."""
    searches = [CutSearch(point, cell.space, cell.budget_mb) for point in points_of(cell)]
    bounds = [each.best_cuts()[0] / each.point.batch for each in searches]
    fastest: Plan | None = None
    for _, index in sorted(zip(bounds, range(len(searches)), strict=True)):
        batch = searches[index].point.batch
        limit = float("inf") if fastest is None else batch / fastest.throughput
        fastest = searches[index].plan(limit) or fastest
    return fastest


def points_of(cell: Cell) -> Iterator[Point]:
    """Batches and pipeline degrees that may fit: batches rise until the smallest memory of all layers does not."""
    for degree in degrees_of(cell.num_gpus, cell.space):
        for batch in itertools.count(BATCH_STEP, BATCH_STEP):
            point = Point(inputs=cell.inputs, batch=batch, num_stages=degree)
            if batch % point.num_devices == 0:
                if sum(other_mb(point)) + sum(least_layer_mb(point, cell.space)) > degree * cell.budget_mb:
                    break
                yield point


def least_layer_mb(point: Point, space: Space) -> list[float]:
    """For each layer, what it takes under its smallest strategy."""
    strategies = strategies_of(point, space)
    layer_types = {layer.name: layer for layer in point.inputs.layers}
    least = {
        name: min(layer_mb(point, layer, each) for each in strategies if each.tensor_degree in layer.act_mb)
        for name, layer in layer_types.items()
    }
    return [least[layer.name] for layer in point.inputs.layers]


def fastest_s(point: Point, space: Space) -> float:
    """No plan takes less than this, whatever the memory."""
    tables = stage_tables(point, point.inputs.layers, 0.0, space)
    fastest = tables.time_s.min(axis=1, where=tables.legal, initial=np.inf)
    return float(fastest[list(tables.layers)].sum())


def problem(cell: Cell) -> Problem:
    """The cell as a problem file's content: one configuration for each batch and pipeline degree."""
    points = list(points_of(cell))
    make = even_tables if cell.inputs.is_alike else uneven_tables
    return Problem(
        name=f"Galvatron {cell}",
        budget_bytes=cell.budget_mb * MB,
        configs=tuple(make(point, cell.space) for point in points),
        samples=tuple(point.batch for point in points),
    )
