"""Plans over memory × devices × sequence length or batch × engine × lever, as one value.

A column is all memory budgets at one point of the other axes. It is searched from the largest budget down: a plan that
also fits the next smaller budget is optimal there as well, and if nothing fits a budget, nothing fits a smaller one.
Columns are solved in the order of their distance from the request until the time is up. The others stay unsolved.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from steelyard.engines import ENGINES
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.hardware import FULL_NODE, Cluster, is_as_named
from steelyard.levers import Levers
from steelyard.plan.choices import Axis, Exploration, ExploredPoint
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Certificate
from steelyard.planning.advise import as_options, single_changes
from steelyard.planning.choose import device_bytes
from steelyard.planning.price import peak_bytes, refuse_host
from steelyard.planning.request import PlanRequest, with_levers
from steelyard.planning.simple import with_usual_stages
from steelyard.planning.variants import Progress, Study, Variant, on_devices, run_by, with_shape, within
from steelyard.units import GIB, MIB, format_bytes, format_plural

LIMIT_S = 52.0
"""Seconds of computing after which no further search begins."""
SEARCH_S = 10.0
"""Seconds after which one search ends with the best plan so far, as its certificate says."""
SHARES = (0.5, 0.75, 1.0, 1.75)
"""Budgets per device as fractions of the request's budget. An H200 has 1.76 times the memory of an H100."""
FACTORS = (1, 2, 4)
"""Sequence lengths or batches as multiples of the request's own."""
MANY_CONFIGS = 128
"""Number of pipeline configurations from which the last factor is left out, because searches take too long."""
NUM_ENGINES = 2
MOST_LEVERS = 2
"""Alternatives shown alongside the request: the ``NUM_ENGINES`` fastest engines and the first useful levers."""
LEAST_GAIN = 0.005
"""Fraction of the step time that a lever must gain to be shown, unless something fits only with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Values of all axes except engines and levers, and the indices of the request among them."""

    is_batch: bool
    sizes: tuple[int, ...]
    clusters: tuple[Cluster, ...]
    budgets: tuple[int, ...]
    """Budgets in bytes per device, ascending."""
    margin_bytes: int
    """Bytes left free in addition to the budget of the request, if something fits that way."""
    own: tuple[int, int, int]
    """Indices of the request's size, cluster and budget."""

    def at(self, place: tuple[int, int], request: PlanRequest) -> PlanRequest:
        """Return the request at a size and on a cluster."""
        size, moved = self.sizes[place[0]], replace(request, cluster=self.clusters[place[1]])
        return replace(moved, global_batch=size) if self.is_batch else replace(moved, seq_len=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One engine with one lever or none, with its plans at each size and cluster by budget."""

    study: Study
    levers: Mapping[str, str] = field(default_factory=dict)
    """Texts of the levers added to those of the request."""
    refusal: str = ""
    """Reason why the engine does not run the levers; empty if it does."""
    columns: dict[tuple[int, int], dict[int, Plan | str]] = field(default_factory=dict)
    """Fastest plan found, or the reason why there is none, by the indices on the axes."""

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.study.request.engine.name

    @property
    def options(self) -> str:
        """Command-line options of the added levers."""
        return as_options(self.levers)

    def solve(self, grid: _Grid, place: tuple[int, int], deadline: float, budgets: Sequence[int] | None = None) -> None:
        """Solve one column, or only some of its ``budgets``, from the largest budget down."""
        column = self.columns.setdefault(place, {})
        if self.refusal:
            column.update(dict.fromkeys(range(len(grid.budgets)), self.refusal))
        study, above = None, None
        for index in reversed(range(len(grid.budgets)) if budgets is None else budgets):
            if index in column:
                pass
            elif isinstance(above, str) or (above is not None and peak_bytes(above) <= grid.budgets[index]):
                column[index] = above
            elif time.process_time() < deadline:
                try:
                    study = study or self._study(grid, place)
                    solved = _solved(study, grid, index)
                except UserError as error:
                    solved = error.found
                if solved is not None:
                    column[index] = solved
            above = column.get(index, above)

    def _study(self, grid: _Grid, place: tuple[int, int]) -> Study:
        """Return the study of all budgets at a size and on a cluster. That of the request itself is kept."""
        if place == grid.own[:2]:
            return self.study
        return self.study.at(Variant(name="", change=partial(grid.at, place)))

    def reconcile(self, grid: _Grid) -> None:
        """Give every budget the fastest of all plans that fit it, so that more memory is never slower.

        Without this it could be, because searches end with gaps and plans of usual depth give up a little.
        """
        for column in self.columns.values():
            best: Plan | None = None
            for index in sorted(column):
                plan = column[index]
                if isinstance(plan, str):
                    continue
                if best is not None and best.step_s < plan.step_s and plan.prediction and best.prediction:
                    bound_s = min(plan.prediction.lower_bound_s, best.step_s)
                    certificate = Certificate(status="gap", gap=1 - bound_s / best.step_s)
                    proven = {"certificate": certificate, "lower_bound_s": bound_s}
                    plan = best.model_copy(update={"prediction": best.prediction.model_copy(update=proven)})
                    column[index] = plan
                best = plan if peak_bytes(plan) <= grid.budgets[index] else best


def explore(
    request: PlanRequest,
    command: str,
    *,
    device_counts: Sequence[int] | None = None,
    batches: bool = False,
    limit_s: float = LIMIT_S,
    price_per_device_hour: float | None = None,
    progress: Progress = lambda _: None,
) -> Exploration:
    """Return the fastest plans around a request on one device type.

    ``command`` is the part of the command line that all plans share. ``device_counts`` default to half and twice the
    devices of the request. ``batches`` varies the batch instead of the sequence length. ``limit_s`` is computing time
    in seconds. Raises `UserError` for groups of different devices, and as `on_devices`.
    """
    deadline = time.process_time() + limit_s
    if request.is_mixed:
        raise UserError(
            field="--cluster",
            found=f"{request.cluster.name}, groups of different devices",
            expected="devices of one type",
            hint="compare groups with steelyard frontier --price",
        )
    search_s = SEARCH_S if request.time_limit_s is None else min(SEARCH_S, request.time_limit_s)
    study = Study(replace(request, time_limit_s=search_s))
    own = _Way(study=study)
    grid = _grid(study, request, device_counts, batches)
    progress(f"{len(grid.budgets)} memory budgets on {request.cluster.name}")
    own.solve(grid, grid.own[:2], deadline)
    engines, without_engines = _engines(own, request, grid, deadline, progress)
    levers, without_levers = _levers(own, grid, deadline, progress)
    ways = {(0, 0): own} | {(index, 0): way for index, way in enumerate(engines, start=1)}
    ways |= {(0, index): way for index, way in enumerate(levers, start=1)}
    axes = _axes(engines, levers, grid, request)
    places = product(*(range(len(axis.words)) for axis in axes[:-1]))
    columns = sorted(places, key=partial(_distance, [axis.own for axis in axes]))
    for number, (engine, lever, *place) in enumerate(columns, start=1):
        if time.process_time() > deadline:
            break
        words = [axis.words[at] for axis, at in zip(axes, (engine, lever, *place), strict=False)]
        progress(f"{number} of {len(columns)}: {', '.join(words)}")
        if (engine, lever) not in ways:
            ways[engine, lever] = _combined(ways[engine, 0], ways[0, lever])
        ways[engine, lever].solve(grid, (place[0], place[1]), deadline)
    plans: list[Plan] = []
    points = []
    for software, way in ways.items():
        way.reconcile(grid)
        for at, column in way.columns.items():
            for budget, solved in column.items():
                reason, plan = (solved, None) if isinstance(solved, str) else ("", _place_in(plans, solved))
                points.append(ExploredPoint(place=(*software, *at, budget), plan=plan, reason=reason))
    return Exploration(
        model=study.job.chain.name,
        cluster=request.cluster.name,
        precision=study.job.precision,
        command=command,
        axes=axes,
        margin_bytes=grid.margin_bytes,
        plans=tuple(plans),
        points=tuple(points),
        left_out=(*without_engines, *without_levers),
        price_per_device_hour=price_per_device_hour,
    )


def _distance(own: Sequence[int], column: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Return the sort key of a column: its distance from the request, other engines and levers after near columns."""
    switched = sum(at != 0 for at in column[:2])
    moves = sum(abs(at - own_at) for at, own_at in zip(column[2:], own[2:], strict=False))
    return 1.5 * switched + (1 + switched) * moves, column


def _combined(engine: _Way, lever: _Way) -> _Way:
    """Return an engine with a lever of the request's own engine."""
    try:
        study = Study(with_levers(engine.study.request, lever.levers))
    except UserError as error:
        return _Way(study=engine.study, levers=lever.levers, refusal=f"{error.found} is not possible")
    return _Way(study=study, levers=lever.levers)


def _grid(study: Study, request: PlanRequest, device_counts: Sequence[int] | None, batches: bool) -> _Grid:
    """Return the grid around a request. A measured profile allows only the devices that it was measured on."""
    job = study.job
    cluster, factors = job.cluster, FACTORS[: 2 if len(study.tables) >= MANY_CONFIGS else None]
    if device_counts is not None:
        clusters = [on_devices(job, count).change(request).cluster for count in device_counts]
    else:
        clusters = [] if job.has_measured_links else [*_halved(cluster), *_doubled(cluster)]
    clusters = sorted([cluster, *(each for each in clusters if each != cluster)], key=lambda each: each.num_devices)
    is_batch = batches or not job.chain.family.task.reads_text
    size = job.global_batch if is_batch else job.seq_len
    unit = GIB // 2 if job.budget_bytes >= 8 * GIB else MIB
    others = {round(share * job.budget_bytes / unit) * unit for share in SHARES if share != 1}
    budgets = sorted({job.budget_bytes, *others})
    return _Grid(
        is_batch=is_batch,
        sizes=tuple(factor * size for factor in factors),
        clusters=tuple(clusters),
        budgets=tuple(budgets),
        margin_bytes=job.margin_bytes,
        own=(0, clusters.index(cluster), budgets.index(job.budget_bytes)),
    )


def _halved(cluster: Cluster) -> list[Cluster]:
    nodes, size = cluster.num_nodes, cluster.devices_per_node
    if nodes % 2 == 0:
        return [with_shape(cluster, nodes // 2, size)]
    return [with_shape(cluster, 1, size // 2)] if nodes == 1 and size % 2 == 0 else []


def _doubled(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with twice the devices, in one node if it has fewer than eight or no network is known."""
    nodes, size = cluster.num_nodes, cluster.devices_per_node
    has_network = cluster.inter_link is not None or is_as_named(cluster)
    if nodes == 1 and (size < FULL_NODE or not has_network):
        return [with_shape(cluster, 1, 2 * size)]
    return [with_shape(cluster, 2 * nodes, size)]


def _solved(study: Study, grid: _Grid, index: int) -> Plan | str | None:
    """Return the fastest plan within a budget, or why there is none; None if the time was up before either is known."""
    margin = grid.margin_bytes if index == grid.own[2] else 0
    result = study.plan(within("", grid.budgets[index], margin_bytes=margin), top=1, to_the_end=False)
    if isinstance(result, str):
        return result
    if result.plan is None:
        if any(each.result.status == "beaten" for each in result.search.configs):
            return None
        if result.miss is None:
            return result.miss_text
        return f"the nearest plan needs {format_bytes(device_bytes(result.job, result.miss.needed_bytes))} per device"
    plan = with_usual_stages(result, study.request)[0].plan
    assert plan is not None
    assert plan.prediction is not None, "as before, and searched"
    shown = plan.prediction.model_copy(update={"alternatives": ()})
    return refuse_host(plan.model_copy(update={"prediction": shown}))


def _engines(
    own: _Way, request: PlanRequest, grid: _Grid, deadline: float, progress: Progress
) -> tuple[list[_Way], list[str]]:
    """Return the fastest other engines, and why others are left out."""
    found, left_out = list[tuple[float, _Way]](), list[str]()
    place, index = grid.own[:2], grid.own[2]
    for engine in ENGINES.values():
        if engine == request.engine or time.process_time() > deadline:
            continue
        progress(f"engine {engine.name}")
        try:
            way = _Way(study=own.study.at(run_by(engine)))
        except UserError as error:
            left_out.append(f"engine {engine.name}: {error.found}")
            continue
        way.solve(grid, place, deadline, [index])
        solved = way.columns[place].get(index)
        found.append((solved.step_s if isinstance(solved, Plan) else float("inf"), way))
    return [way for _, way in sorted(found, key=lambda each: each[0])[:NUM_ENGINES]], left_out


def _levers(own: _Way, grid: _Grid, deadline: float, progress: Progress) -> tuple[list[_Way], list[str]]:
    """Return the first useful value of each lever, and why others are left out.

    A lever that trains fewer parameters is tried only if the request does not fit.
    """
    place, index = grid.own[:2], grid.own[2]
    plain = own.columns[place]
    found, left_out, taken = list[_Way](), list[str](), set[str]()
    too_small = max((budget for budget, solved in plain.items() if isinstance(solved, str)), default=None)
    for texts in single_changes(own.study.request, asked=False):
        name = next(iter(texts))
        trains_fewer = any(each.result == "fewer trained parameters" for each in Levers.of(texts))
        if name in taken or (trains_fewer and isinstance(plain.get(index), Plan)):
            continue
        if len(found) == MOST_LEVERS or time.process_time() > deadline:
            break
        try:
            way = _Way(study=Study(with_levers(own.study.request, texts)), levers=texts)
            progress(way.options)
            way.solve(grid, place, deadline, [index] if too_small is None else [index, too_small])
        except UserError as error:
            left_out.append(f"{as_options(texts)}: {error.found}")
            continue
        if _is_useful(way.columns[place], plain, index):
            found.append(way)
            taken.add(name)
    return found, left_out


def _is_useful(column: Mapping[int, Plan | str], plain: Mapping[int, Plan | str], index: int) -> bool:
    """Return whether a column has a plan where there was none, or a faster one within the budget of the request."""
    solved, before = column.get(index), plain.get(index)
    if isinstance(solved, Plan) and isinstance(before, Plan) and solved.step_s < (1 - LEAST_GAIN) * before.step_s:
        return True
    return any(isinstance(each, Plan) and isinstance(plain.get(budget), str) for budget, each in column.items())


def _place_in(plans: list[Plan], plan: Plan) -> int:
    """Return the index of a plan among others, appending it if it is new."""
    for place, each in enumerate(plans):
        if each is plan:
            return place
    plans.append(plan)
    return len(plans) - 1


def _axes(
    engines: Sequence[_Way], levers: Sequence[_Way], grid: _Grid, request: PlanRequest
) -> tuple[Axis, Axis, Axis, Axis, Axis]:
    names = [request.engine.name, *(way.engine for way in engines)]
    unit, option = ("samples", "--global-batch") if grid.is_batch else ("tokens", "--seq-len")
    memory = [
        f"--memory {each / GIB:.1f}GiB" if each % (GIB // 2) == 0 else f"--memory {each}B" for each in grid.budgets
    ]
    if request.memory_bytes is None:
        memory[grid.own[2]] = ""
    return (
        Axis(
            name="engine",
            words=tuple(names),
            values=tuple(range(len(names))),
            options=tuple("" if name == NATIVE.name else f"--engine {name}" for name in names),
            own=0,
        ),
        Axis(
            name="lever",
            words=("none added", *(way.options.replace("--", "") for way in levers)),
            values=tuple(range(1 + len(levers))),
            options=("", *(way.options for way in levers)),
            own=0,
        ),
        Axis(
            name="samples of a step" if unit == "samples" else "sequence length",
            words=tuple(f"{each:,} {unit}" for each in grid.sizes),
            values=grid.sizes,
            options=tuple(f"{option} {each}" for each in grid.sizes),
            own=grid.own[0],
        ),
        Axis(
            name="devices",
            words=tuple(format_plural(each.num_devices, "device") for each in grid.clusters),
            values=tuple(each.num_devices for each in grid.clusters),
            options=tuple(f"--cluster {shlex.quote(each.name)}" for each in grid.clusters),
            own=grid.own[1],
        ),
        Axis(
            name="memory per device",
            words=tuple(format_bytes(each) for each in grid.budgets),
            values=grid.budgets,
            options=tuple(memory),
            own=grid.own[2],
        ),
    )
