r"""Fits the efficiencies of `steelyard/cost/efficiency.yaml` to published runs, and leaves every source out in turn.

    python benchmarks/calibrate.py [PATH ...] [--sources NAME ...] [--most N] [--write]

PATH is as in `published_runs.py`. Fitted are a few numbers that mean something (see `steelyard.cost.efficiency`), the
same for every source: the least

$$\sum_s \frac{w_s}{n_s} \sum_{i \in s} \log\big(1 + (r_i / 0.07)^2\big)
+ 0.02 \sum_k \big(\ln(\theta_k / \theta_k^0) / \sigma_k\big)^2$$

with $r_i$ the logarithm of predicted over measured time, sources $s$ of 20 rows or more weighing the same and smaller
ones in proportion, and a weak pull of each parameter towards its usual value $\theta^0$. The loss forgives outliers:
some sources hold runs that were slow for reasons of their own. Only recommended rows of dense bf16 and fp16 models are
used; sealed rows have no measurement.

Predictions are the cost model's own (`predict`, simulator included), whatever its forms. Their logarithms are taken as
linear in the logarithms of the parameters around the last fit, whose derivatives are by forward differences; the fit is
repeated there once. What is printed of a source that was left out are real predictions by the parameters that the other
sources give, of all its rows.
"""

import argparse
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from least_squares import least
from numpy.typing import NDArray
from published_runs.forecast import Forecast, has_margin
from published_runs.jobs import Case, case_of
from published_runs.rows import PublishedRun, of_sources, read_runs
from published_runs.score import ErrorSummary, LeftOut, regret, scaled_errors, time_errors
from published_runs.table import left_out_table
from published_runs.targets import MIN_JUDGED, is_recommended_dense
from rich.console import Console

from steelyard.cost.efficiency import Efficiency, LinkEfficiency, catalogue_rates
from steelyard.cost.job import Job
from steelyard.cost.predict import predict, predict_memory

EFFICIENCY_FILE = Path(__file__).parents[1] / "src/steelyard/cost/efficiency.yaml"
SCALE = 0.07
PULL = 0.02
USUAL = {
    "matmul ampere": (0.76, 0.05),
    "matmul hopper": (0.7, 0.07),
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
"""Usual value of every parameter, and the spread of its logarithm that is nothing remarkable. Those of matmuls are from
`kernel_rates.py`: Ampere's in SimuMax's training loops, Hopper's 0.83 in short runs over the 1.2 by which these
flatter."""
FRACTIONS = ("matmul ampere", "matmul hopper", "memory", "intra", "inter", "efa")
MOST = 0.95
FAR = 3.0
"""How far a parameter's logarithm may go from that of its usual value."""
WIDTH = 120
MOST_ROWS = 60
STEP = 0.02
ROUNDS = 2
Array = NDArray[np.float64]


def with_parameters(case: Case, parameters: Mapping[str, float]) -> Job:
    """The case's job at these rates; what none of them names stays as the catalogue has it."""
    job = case.job
    rates = job.on(rates=None).efficiency
    found: dict[str, object] = {}
    generation = catalogue_rates(job.cluster.device.name).generation
    for name, value in parameters.items():
        kind, _, of = name.partition(" ")
        if of in ("", generation) and kind not in _LINKS:
            found[_FIELDS.get(kind, kind)] = value * _UNITS.get(kind, 1.0)
    network = job.cluster.inter_link.name if job.cluster.inter_link else ""
    links = LinkEfficiency(
        intra=parameters["intra"],
        inter=parameters["efa" if "efa" in network else "inter"],
        intra_latency=parameters["intra_latency"],
        inter_latency=parameters["inter_latency"],
    )
    return case.timed_at(_replaced(rates, found | {"links": links}))


_LINKS = ("intra", "inter", "efa", "intra_latency", "inter_latency")
_MICRO, _MILLI = ("ramp_us", "launch_us", "collective_launch_us", "jitter_us"), ("step_ms", "step_per_node_ms")
_UNITS = dict.fromkeys(_MICRO, 1e-6) | dict.fromkeys(_MILLI, 1e-3)
_FIELDS = {name: name.rpartition("_")[0] + "_s" for name in _UNITS}


def _replaced(rates: Efficiency, found: Mapping[str, object]) -> Efficiency:
    return replace(rates, **found)  # type: ignore[arg-type]


def predicted_s(parameters: Mapping[str, float], runs: Sequence[PublishedRun]) -> list[float]:
    """[N] seconds of a step of every run at these parameters."""
    return [predict(case.plan, with_parameters(case, parameters)).step_time_s for case in map(_case, runs)]


@cache
def _cases() -> dict[str, Case]:
    return {}


def _case(run: PublishedRun) -> Case:
    if run.id not in _cases():
        found = case_of(run)
        assert isinstance(found, Case), "only rows that can be priced are fitted"
        _cases()[run.id] = found
    return _cases()[run.id]


class Rows:
    """Rows with their measured times, and the processes that predict them."""

    def __init__(self, runs: Sequence[PublishedRun], pool: ProcessPoolExecutor) -> None:
        self.runs, self._pool = list(runs), pool
        self.source = np.array([run.source for run in runs])
        self.measured_s = np.array([run.step_time_s for run in runs], dtype=float)
        self._pieces = [self.runs[first::PIECES] for first in range(PIECES)]

    def log_ratios(self, points: Sequence[Mapping[str, float]]) -> Array:
        """[points, N] logarithms of predicted over measured."""
        asked = [(point, piece) for point in points for piece in self._pieces]
        found = list(self._pool.map(_predict_piece, asked))
        seconds = np.empty((len(points), len(self.runs)))
        for index, values in enumerate(found):
            point, piece = divmod(index, PIECES)
            seconds[point, piece::PIECES] = values
        return np.log(seconds / self.measured_s)

    def weights(self, without: str | None = None) -> Array:
        """[N] of each row; none for the source that is left out."""
        found = np.zeros(len(self.runs))
        for source in np.unique(self.source):
            chosen = self.source == source
            if source != without:
                found[chosen] = min(1.0, chosen.sum() / MIN_JUDGED) / chosen.sum()
        return found


PIECES = 8
"""Parts in which rows are handed to processes, always the same ones to keep what they have traced."""


def _predict_piece(asked: tuple[Mapping[str, float], Sequence[PublishedRun]]) -> list[float]:
    return predicted_s(*asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Logarithms of predicted over measured around a point: ``x`` are logarithms of parameters over the usual ones."""

    x: Array
    at: Array
    slope: Array

    @staticmethod
    def around(x: Array, rows: Rows) -> "Linear":
        """The same by forward differences."""
        points = [x] + [x + STEP * (np.arange(len(x)) == index) for index in range(len(x))]
        found = rows.log_ratios([parameters_at(point) for point in points])
        return Linear(x=x, at=found[0], slope=(found[1:] - found[0]).T / STEP)

    def fit(self, weights: Array) -> Array:
        """The point of least loss."""
        names = list(USUAL)
        spread = np.array([USUAL[name][1] for name in names])
        most = np.array([np.log(MOST / USUAL[name][0]) if name in FRACTIONS else FAR for name in names])
        pull = np.sqrt(PULL) * SCALE / spread

        def residuals(x: Array) -> Array:
            return np.concatenate([self.at + self.slope @ (x - self.x), pull * x])

        slope = np.concatenate([self.slope, np.diag(pull)])
        return least(
            residuals,
            self.x,
            np.full(len(names), -FAR),
            most,
            scale=SCALE,
            weights=np.concatenate([weights, np.ones(len(names))]),
            derivatives=lambda _x: slope,
        )


def parameters_at(x: Array) -> dict[str, float]:
    """The parameters by name."""
    return {name: float(USUAL[name][0] * np.exp(value)) for name, value in zip(USUAL, x, strict=True)}


def parameters_of_file() -> Array:
    """Where the cost model's own file stands."""
    import yaml

    file = yaml.safe_load(EFFICIENCY_FILE.read_text(encoding="utf-8"))
    values = []
    for name, (usual, _) in USUAL.items():
        kind, _, generation = name.partition(" ")
        if generation:
            value = file["generations"][generation][kind]
        elif name in ("inter", "efa"):
            value = file["networks"]["efa" if name == "efa" else "other"]["rate"]
        else:
            value = file[name]
        values.append(np.log(max(float(value), 1e-9) / usual))
    return np.clip(np.array(values), -FAR, FAR)


def fit_with_left_out(
    runs: Iterable[PublishedRun], *, most: int = MOST_ROWS, processes: int = 0, rounds: int = ROUNDS
) -> tuple[dict[str, float], tuple[LeftOut, ...], str]:
    """The parameters that fit the runs, every source as a fit without it predicts it, and how well they fit."""
    by_source: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.is_open and run.step_time_s and is_recommended_dense(run) and isinstance(case_of(run), Case):
            by_source[run.source].append(run)
    chooser = random.Random(0)
    chosen = [run for source in by_source.values() for run in chooser.sample(source, min(most, len(source)))]
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        rows = Rows(chosen, pool)
        x = parameters_of_file()
        for _ in range(rounds):
            linear = Linear.around(x, rows)
            x = linear.fit(rows.weights())
        judged = [source for source, found in by_source.items() if len(found) >= MIN_JUDGED]
        left_out = []
        for source in sorted(judged):
            without = parameters_at(linear.fit(rows.weights(without=source)))
            left_out.append(_left_out(source, by_source[source], without, pool))
        fitted = rows.log_ratios([parameters_at(x)])[0]
    return parameters_at(x), tuple(left_out), _reached(rows, fitted)


def _left_out(
    source: str, runs: list[PublishedRun], parameters: Mapping[str, float], pool: ProcessPoolExecutor
) -> LeftOut:
    ratios = Rows(runs, pool).log_ratios([parameters])[0]
    forecasts = [
        Forecast(
            run=run,
            step_time_s=float(np.exp(ratio)) * (run.step_time_s or 0.0),
            peak_bytes=0,
            fits=True,
            has_margin=_has_margin(run),
        )
        for run, ratio in zip(runs, ratios, strict=True)
    ]
    seconds = {each.run.id: each.step_time_s for each in forecasts}
    zero_shot, scaled = ErrorSummary.of(time_errors(forecasts)), ErrorSummary.of(scaled_errors(forecasts))
    assert zero_shot is not None, "a source that is left out has rows"
    assert scaled is not None, "and a factor"
    return LeftOut(
        source=source,
        zero_shot=zero_shot,
        scaled=scaled,
        regret=regret(forecasts, seconds),
        log_ratios={run.id: float(ratio) for run, ratio in zip(runs, ratios, strict=True)},
        parameters=parameters,
    )


def _has_margin(run: PublishedRun) -> bool:
    case = _case(run)
    return has_margin(case, predict_memory(case.plan, case.job))


def _reached(rows: Rows, log_ratios: Array) -> str:
    """One sentence on how well the parameters fit: medians over the runs of a source, sources weighing the same."""
    ratio = np.exp(log_ratios) - 1
    sources = [ratio[rows.source == source] for source in np.unique(rows.source)]
    errors, biases = ([float(np.median(f(each))) for each in sources] for f in (np.abs, lambda each: each))
    return (
        f"median |error| of a source {min(errors):.0%} to {max(errors):.0%}, mean over {len(sources)} sources "
        f"{np.mean(errors):.1%}; mean bias {np.mean(biases):+.1%}; {len(ratio)} runs"
    )


def rewritten(text: str, parameters: Mapping[str, float], reached: str) -> str:
    """The text of ``efficiency.yaml`` with these parameters in the place of its own, and how well they fit."""
    for name, value in parameters.items():
        kind, _, generation = name.partition(" ")
        pattern = rf"({generation}: .*{kind}: )[0-9.]+" if generation else _PLACES.get(name, rf"(?m)^({name}: )[0-9.]+")
        text, count = re.subn(pattern, rf"\g<1>{value:.3g}", text)
        assert count == 1, f"{name} stands {count} times in the file"
    return re.sub(r'(reached: ").*(")', partial(_quoted, reached), text)


def _quoted(reached: str, match: re.Match[str]) -> str:
    return match.group(1) + reached + match.group(2)


_PLACES = {"efa": r"(efa: .*rate: )[0-9.]+", "inter": r"(other: \{links.*rate: )[0-9.]+"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="*", metavar="PATH")
    parser.add_argument("--sources", nargs="+", metavar="NAME", help="only these, as column source_file has them")
    parser.add_argument("--write", action="store_true", help="put the parameters into the cost model's file")
    parser.add_argument(
        "--most", type=int, default=MOST_ROWS, help="rows of a source to fit, chosen at random (seed 0)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fits in turn, each around the one before")
    parser.add_argument("--processes", type=int, default=0, help="0: one a core")
    options = parser.parse_args()
    runs = read_runs(*options.path)
    runs = runs if options.sources is None else of_sources(runs, options.sources)
    parameters, left_out, reached = fit_with_left_out(
        runs, most=options.most, processes=options.processes, rounds=options.rounds
    )
    print("\n".join(f"{name}: {value:.4g}" for name, value in parameters.items()))
    print(reached)
    Console(width=WIDTH).print(left_out_table(left_out))
    if options.write:
        text = rewritten(EFFICIENCY_FILE.read_text(encoding="utf-8"), parameters, reached)
        EFFICIENCY_FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
