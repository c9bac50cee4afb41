r"""How far measured step times lie from predicted ones: the table of `steelyard/cost/accuracy.py`, and its test.

    python benchmarks/intervals.py [--write]

For a class of runs that are like each other the interval is $[q_{(1-p)/2},\, q_{(1+p)/2}]$ of measured over predicted
time, quantiles in which sources of 20 runs or more weigh the same and smaller ones in proportion. Each source is
predicted by the others' interval, and $p$ is the least of `LEVELS` of which, sources weighing so, nine in ten runs of a
source that was left out lie inside: sources differ more than the runs of one, so $p$ is above 0.9.

| class                      | runs                                                                                    |
|----------------------------|-----------------------------------------------------------------------------------------|
| dense 16-bit               | those that the rates are fitted to, each source by rates that were fitted without it    |
| adapters                   | as those, and open measurements of adapters of `levers.py`                              |
| others of the catalogue    | open runs that `steelyard.cost.accuracy.spread_of` takes for them, by its rates, but    |
|                            | those that whoever compiled the table flags as slower than anything explains, or as of  |
|                            | devices below their power                                                               |
| one measured run           | pairs of the first class of one model, framework and device: one scales the other       |
| three measured runs        | the same, `DRAWS` times for every run the median of three others                        |
| measured profile           | ratios of `prediction_accuracy.py` as its page has them, each plan left out in turn    |

An engine's runs of a class have an interval of their own where they are `MIN_JUDGED` or more of several sources, and
`HELD` of a source that was left out lie inside the others'. Where not, the table says what the class's interval holds
of them, found without their source; where that is less than `HELD`, it is widened to the next of `LEVELS`.

Two plans of one job err alike. ``as good`` is the least slowdown $x$ of which nine in ten pairs of a job's plans that
are predicted further apart than $x$ are measured in that order; tested in the same way.

With ``--write`` the figures go into the table of `accuracy.py` and that of intervals.md, which a test compares.
"""

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from calibrate import fit_with_left_out
from lever_runs.forecast import Forecast as LeverForecast
from lever_runs.forecast import forecast
from lever_runs.jobs import PROMPTS
from lever_runs.rows import read_rows
from lever_runs.score import figures
from numpy.typing import NDArray
from published_runs.forecast import forecast_case
from published_runs.frameworks import framework_of
from published_runs.jobs import Case, case_of
from published_runs.rows import PublishedRun, read_runs
from published_runs.targets import MIN_JUDGED

from steelyard.cost.accuracy import (
    ADAPTERS,
    DENSE,
    EIGHT_BIT,
    EXPERTS,
    LONG_CONTEXT,
    MEASURED,
    SCALED,
    SCALED_BY_SEVERAL,
    SEVERAL,
    Spread,
    spread_of,
)
from steelyard.engines import ENGINES

PAGE, RUNS = (Path(__file__).parent / name for name in ("intervals.md", "prediction-accuracy.md"))
TABLE_FILE = Path(__file__).parents[1] / "src/steelyard/cost/accuracy.py"
OTHERS = {
    "EIGHT_BIT": EIGHT_BIT,
    "LONG_CONTEXT": LONG_CONTEXT,
    "EXPERTS": EXPERTS,
    "ADAPTERS": ADAPTERS,
}
"""Classes of the catalogue beside the first."""
NAMES = ("DENSE", *OTHERS, "SCALED", "SCALED_BY_SEVERAL", "MEASURED")
UNEXPLAINED = ("note_very_low_mfu", "note_power_limited")
INSIDE = 0.9
HELD = (0.87, 0.95)
LEVELS = (0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
SLOWDOWNS = tuple(percent / 100 for percent in range(51))
DRAWS = 20
ROWS_AT_ONCE = 16
Array = NDArray[np.float64]
Errors = Mapping[str, Array]
"""Logarithms of measured over predicted time by source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A run with its measured time and the error of its prediction."""

    run: PublishedRun
    log_error: float
    """Of measured over predicted time."""

    @property
    def engine(self) -> str:
        """The product's engine that ran it, or none."""
        framework = framework_of(self.run)
        name = "" if framework is None else framework.engine.name.partition("+")[0]
        return name if name in ENGINES else ""

    @property
    def log_measured_s(self) -> float:
        """Logarithm of the seconds of a step."""
        assert self.run.step_time_s is not None, "only timed runs have an error"
        return float(np.log(self.run.step_time_s))

    @property
    def log_predicted_s(self) -> float:
        """The same as predicted."""
        return self.log_measured_s - self.log_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An interval of measured over predicted time, and what part of each source lies inside those of the others."""

    typical: float
    low: float
    high: float
    level: float
    inside: Mapping[str, float]
    num_runs: int
    held_out: float
    """The mean of ``inside``, sources weighing as in the interval."""


def interval(errors: Errors) -> Found:
    """The interval of a class: the narrowest of `LEVELS` that holds of sources left out, or the last of them."""
    for level in LEVELS:
        inside = {
            source: _part_within(found, quantiles(_without(errors, source), level)) for source, found in errors.items()
        }
        held_out = _mean(inside, errors)
        if held_out >= INSIDE:
            break
    low, high = np.exp(quantiles(errors, level))
    medians = {source: float(np.median(np.abs(np.expm1(-found)))) for source, found in errors.items()}
    return Found(
        typical=_mean(medians, errors),
        low=float(low),
        high=float(high),
        level=level,
        inside=inside,
        num_runs=sum(map(len, errors.values())),
        held_out=held_out,
    )


def quantiles(errors: Errors, level: float) -> tuple[float, float]:
    """The two quantiles between which the middle part ``level`` of all errors lies, weighed by `weight`."""
    values = np.concatenate(list(errors.values()))
    weights = np.concatenate([np.full(len(found), weight(found) / len(found)) for found in errors.values()])
    order = np.argsort(values)
    done = np.cumsum(weights[order]) / weights.sum()
    places = np.searchsorted(done, [(1 - level) / 2, (1 + level) / 2 - 1e-12])
    low, high = values[order][np.minimum(places, len(values) - 1)]
    return float(low), float(high)


def weight(runs: Sequence[float] | Array) -> float:
    """Of a source: 1 from `MIN_JUDGED` runs on, less in proportion below."""
    return min(1.0, len(runs) / MIN_JUDGED)


def _part_within(errors: Array, bounds: tuple[float, float]) -> float:
    return float(np.mean((errors >= bounds[0]) & (errors <= bounds[1])))


def _without(errors: Errors, source: str) -> dict[str, Array]:
    return {name: found for name, found in errors.items() if name != source}


def _mean(parts: Mapping[str, float], errors: Mapping[str, Array]) -> float:
    weights = {source: weight(errors[source]) for source in parts}
    return sum(weights[source] * part for source, part in parts.items()) / sum(weights.values())


def by_source(timed: Iterable[Timed]) -> dict[str, Array]:
    """Their errors."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in timed:
        found[each.run.source].append(each.log_error)
    return {source: np.array(errors) for source, errors in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEngine:
    """An engine's runs of a class."""

    spread: Spread
    engine: str
    num_runs: int
    num_sources: int
    own: Found | None
    """Their interval where it holds what was left out."""
    inside: float
    """What part of them lies inside their interval, or the class's, without the run's source."""

    @property
    def figures(self) -> str:
        """The figures of it in `OF_ENGINES`."""
        own = self.own
        return f"({own.typical:.3f}, {own.low:.3f}, {own.high:.3f})" if own else "None"


def of_engines(spread: Spread, found: Found, errors: Errors, timed: Sequence[Timed]) -> list[OfEngine]:
    """The engines of a class, whose runs and sources' errors are given, with its interval ``found``."""
    lines = []
    for engine in sorted({each.engine for each in timed} - {""}):
        own = by_source(each for each in timed if each.engine == engine)
        count, alone = sum(map(len, own.values())), None
        if count >= MIN_JUDGED and len(own) > 1:
            alone = interval(own)
            alone = alone if HELD[0] <= alone.held_out <= HELD[1] else None
        for level in (each for each in LEVELS if each >= found.level):
            by_class = {
                source: _part_within(each, quantiles(_without(errors, source), level)) for source, each in own.items()
            }
            inside = _mean(by_class, own)
            if count < MIN_JUDGED or inside >= HELD[0]:
                break
        if count >= MIN_JUDGED and alone is None and level > found.level:
            low, high = np.exp(quantiles(errors, level))
            typical = _mean({name: float(np.median(np.abs(np.expm1(-each)))) for name, each in own.items()}, own)
            widened = {"typical": typical, "low": float(low), "high": float(high), "level": level}
            alone = replace(found, **widened, inside=by_class, num_runs=count, held_out=inside)
        lines.append(
            OfEngine(
                spread=spread,
                engine=engine,
                num_runs=count,
                num_sources=len(own),
                own=alone,
                inside=alone.held_out if alone else inside,
            )
        )
    return lines


def with_adapters() -> dict[str, Array]:
    """Errors of open measurements of adapters that ran, as their engine runs them.

    Rows of a source with equal measured and predicted times are one measurement that several of its tables show.
    """
    others = ("", "full", *PROMPTS)
    rows = [row for row in read_rows() if row.text("method") not in others and row.text("status") == "ok"]
    found: dict[str, set[tuple[float, float]]] = defaultdict(set)
    with ProcessPoolExecutor() as pool:
        for each in pool.map(forecast, rows, chunksize=ROWS_AT_ONCE):
            times = figures(each).get("time") if isinstance(each, LeverForecast) else None
            if times is not None:
                found[each.row.source].add(times)
    return {
        source: np.array([np.log(there / ours) for ours, there in sorted(times)]) for source, times in found.items()
    }


def scaled_by_one(timed: Iterable[Timed]) -> dict[str, Array]:
    """What is left of each error where each other run that is like it scales the prediction."""
    found: dict[str, list[Array]] = defaultdict(list)
    for (source, *_), errors in _alike(timed).items():
        pairs = errors[:, None] - errors[None, :]
        found[source].append(pairs[~np.eye(len(errors), dtype=bool)])
    return {source: np.concatenate(parts) for source, parts in found.items()}


def scaled_by_several(timed: Iterable[Timed], chooser: random.Random) -> dict[str, Array]:
    """The same where the median of several runs, drawn `DRAWS` times, scales it."""
    found: dict[str, list[float]] = defaultdict(list)
    for (source, *_), errors in _alike(timed).items():
        for place, error in enumerate(errors) if len(errors) > SEVERAL else ():
            others = np.delete(errors, place).tolist()
            found[source] += [error - median(chooser.sample(others, SEVERAL)) for _ in range(DRAWS)]
    return {source: np.array(errors) for source, errors in found.items()}


def _alike(timed: Iterable[Timed]) -> dict[tuple[str, ...], Array]:
    """Errors of runs of one source, model, framework and device; those of which there are two or more."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in timed:
        names = (each.run.text(column) for column in ("model", "framework", "gpu", "gpu_mem_gb"))
        found[each.run.source, *names].append(each.log_error)
    return {key: np.array(errors) for key, errors in found.items() if len(errors) > 1}


Pairs = Mapping[str, Array]
"""[N, 2] by source: of two plans of a job the logarithms of the slower over the faster time, predicted and measured."""


def pairs_of_jobs(timed: Iterable[Timed]) -> dict[str, Array]:
    """All pairs of plans of each job, the one that is predicted faster first."""
    jobs: dict[tuple[str, str], list[Timed]] = defaultdict(list)
    for each in timed:
        jobs[each.run.source, each.run.job].append(each)
    found: dict[str, list[Array]] = defaultdict(list)
    for (source, _), plans in jobs.items():
        times = np.array([(each.log_predicted_s, each.log_measured_s) for each in plans])
        differences = times[:, None] - times[None, :]
        found[source].append(differences[differences[:, :, 0] > 0])
    joined = {source: np.concatenate(parts) for source, parts in found.items()}
    return {source: pairs for source, pairs in joined.items() if len(pairs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AsGood:
    """The slowdown within which plans are as good, and what part of each source's further pairs is in order."""

    slowdown: float
    level: float
    inside: Mapping[str, float]
    num_pairs: int
    held_out: float
    """The mean over sources of ``inside`` by the slowdown that the other sources give."""


def as_good(pairs: Pairs) -> AsGood:
    """The least slowdown beyond which nine in ten pairs are measured in the order in which they are predicted."""
    for level in LEVELS:
        inside = {
            source: _in_order(found, least_slowdown(_without(pairs, source), level)) for source, found in pairs.items()
        }
        held_out = _mean(inside, pairs)
        if held_out >= INSIDE:
            break
    return AsGood(
        slowdown=least_slowdown(pairs, level),
        level=level,
        inside=inside,
        num_pairs=sum(map(len, pairs.values())),
        held_out=held_out,
    )


def least_slowdown(pairs: Pairs, level: float) -> float:
    """The least of `SLOWDOWNS` beyond which such a part of the pairs is in order, or the last of them."""
    for slowdown in SLOWDOWNS:
        if _mean({source: _in_order(found, slowdown) for source, found in pairs.items()}, pairs) >= level:
            return slowdown
    return SLOWDOWNS[-1]


def _in_order(pairs: Array, slowdown: float) -> float:
    """The part of the pairs that are predicted further apart and are in that order; 1 where none are."""
    further = pairs[pairs[:, 0] > np.log1p(slowdown)]
    return float(np.mean(further[:, 1] >= 0)) if len(further) else 1.0


def in_classes(runs: Iterable[PublishedRun]) -> dict[Spread, list[Timed]]:
    """Open runs that were timed, as the shipped rates predict them, by class."""
    found: dict[Spread, list[Timed]] = defaultdict(list)
    for run in runs:
        if not (run.is_open and run.step_time_s) or any(flag in run.text("flags") for flag in UNEXPLAINED):
            continue
        case = case_of(run)
        spread = spread_of(case.job, case.plan.strategies) if isinstance(case, Case) else None
        if isinstance(case, Case) and spread is not None:
            error = np.log(run.step_time_s / forecast_case(case).step_time_s)
            found[spread].append(Timed(run=run, log_error=float(error)))
    return found


def measured_profiles(text: str) -> dict[str, Array]:
    """Errors by plan in the tables of `prediction_accuracy.py`, as they stand in prediction-accuracy.md."""
    rows = re.findall(r"^(.{35}) ([24]) +([\d.]+) (m?s) +([\d.]+) (m?s) ", text, flags=re.MULTILINE)
    units = {"s": 1.0, "ms": 1e-3}
    return {
        f"{plan.strip()} on {count}": np.log([float(measured) * units[b] / (float(predicted) * units[a])])
        for plan, count, predicted, a, measured, b in rows
    }


def lines(found: Sequence[tuple[str, Found]], good: AsGood, engines: Sequence[OfEngine] = ()) -> list[str]:
    """The tables of intervals.md."""
    head = "| runs like | runs | typical | low | high | level | left out, inside |"
    rows = [
        f"| {name} | {each.num_runs:,} | {each.typical:.3f} | {each.low:.3f} | {each.high:.3f} | {each.level:.2f} | "
        f"{each.held_out:.1%} |"
        for name, each in found
    ]
    rows.append(
        f"| as good | {good.num_pairs:,} pairs | – | – | {good.slowdown:.2f} | {good.level:.2f} | {good.held_out:.1%} |"
    )
    sources = sorted({source for name, each in found if name != MEASURED.words for source in each.inside})
    columns = [(name, each.inside) for name, each in found if name != MEASURED.words] + [("as good", good.inside)]
    table = ["| left out | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for source in sources:
        cells = (f"{inside[source]:.0%}" if source in inside else "–" for _, inside in columns)
        table.append(f"| {source} | " + " | ".join(cells) + " |")
    of_engines = ["| engine's runs | runs | sources | typical | low | high | inside |", "|---" * 7 + "|"]
    for line in engines:
        figures = line.figures.strip("()").replace(",", " |") if line.own else "of the class | |"
        name = f"{line.spread.words}, {line.engine}"
        of_engines.append(f"| {name} | {line.num_runs} | {line.num_sources} | {figures} | {line.inside:.1%} |")
    return [head, "|---" * 7 + "|", *rows, "", *of_engines, "", *table]


def rewritten(text: str, found: Sequence[tuple[str, Found]], good: AsGood, engines: Sequence[OfEngine] = ()) -> str:
    """The text of `accuracy.py` with these figures."""
    for name, (_, each) in zip(NAMES, found, strict=True):
        figures = f"typical={each.typical:.3f}, low={each.low:.3f}, high={each.high:.3f}"
        text, count = re.subn(rf"(?m)^({name} = Spread\(.*)typical=.*\)$", rf"\g<1>{figures})", text)
        assert count == 1, f"{name} stands {count} times in the file"
    own = [f'    ("{line.spread.words}", "{line.engine}"): {line.figures},\n' for line in engines]
    table = f"OF_ENGINES: dict[tuple[str, str], tuple[float, float, float] | None] = {{\n{''.join(own)}}}"
    text = re.sub(r"(?ms)^OF_ENGINES: .*?\}$", lambda _: table, text)
    return re.sub(r"(?m)^(AS_GOOD = )[\d.]+", rf"\g<1>{good.slowdown:.2f}", text)


BEGIN, END = "<!-- benchmarks/intervals.py -->", "<!-- end -->"


def in_page(text: str, tables: Sequence[str]) -> str:
    """The text of intervals.md with these tables between the marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([before + BEGIN, "", *tables, "", END + rest.split(END, 1)[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the figures into accuracy.py and intervals.md")
    options = parser.parse_args()
    runs = read_runs()
    named = {run.id: run for run in runs}
    left_out = fit_with_left_out(runs, rounds=1)[1]
    fitted = [
        Timed(run=named[row], log_error=-ratio) for source in left_out for row, ratio in source.log_ratios.items()
    ]
    others = in_classes(runs)
    errors = [
        (DENSE.words, by_source(fitted)),
        *((spread.words, by_source(others[spread])) for spread in OTHERS.values() if spread is not ADAPTERS),
        (ADAPTERS.words, by_source(others[ADAPTERS]) | with_adapters()),
        (SCALED.words, scaled_by_one(fitted)),
        (SCALED_BY_SEVERAL.words, scaled_by_several(fitted, random.Random(0))),
        (MEASURED.words, measured_profiles(RUNS.read_text(encoding="utf-8"))),
    ]
    found = [(name, interval(each)) for name, each in errors]
    good = as_good(pairs_of_jobs(fitted))
    left = {each.run.source for each in fitted}
    others[DENSE] = [*fitted, *(each for each in others[DENSE] if each.run.source not in left)]
    engines = [
        line
        for spread, (_, of_class), (_, each) in zip((DENSE, *OTHERS.values()), found, errors, strict=False)
        for line in of_engines(spread, of_class, each, others[spread])
    ]
    tables = lines(found, good, engines)
    print("\n".join(tables))
    if options.write:
        text = TABLE_FILE.read_text(encoding="utf-8")
        TABLE_FILE.write_text(rewritten(text, found, good, engines), encoding="utf-8")
        PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
