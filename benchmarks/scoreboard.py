"""Writes docs/explanation/accuracy.md: errors by class and source, beside what others' open estimators say.

    python benchmarks/scoreboard.py [PATH ...] [--no-others] [--no-left-out] [--output FILE]

PATH is as in `published_runs.py`. Others' estimators are installed from the package index on their first run, into
environments of their own under ``$XDG_CACHE_HOME/steelyard/estimators``; one that does not install is named with the
reason. Takes 3 to 8 minutes on 2 cores, of which the first run spends about 3 on installing.
"""

import argparse
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

from calibrate import fit_with_left_out, predicted_s
from others.estimators import ESTIMATORS, ask
from others.questions import question_of
from published_runs.accuracy import counts_for_memory, judged_once
from published_runs.classes import DENSE, EXPERTS, class_of, counts_for_time
from published_runs.forecast import STATES, Forecast, Outcome, forecast_all
from published_runs.jobs import Case, case_of
from published_runs.page import Findings, accuracy_page
from published_runs.rows import read_runs
from published_runs.score import LeftOut, measured_memory

from steelyard.cost.predict import predict_memory

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "accuracy.md"


def cases_asked(outcomes: Iterable[Outcome]) -> list[Case]:
    """The judged runs that others are asked about: experts are in the scope of none of them."""
    judged = [each for each in outcomes if isinstance(each, Forecast) and class_of(each.run) != EXPERTS]
    runs = [each.run for each in judged if counts_for_time(each.run) or counts_for_memory(each.run)]
    return [case for run in runs if isinstance(case := case_of(run), Case)]


def states_bytes(case: Case) -> float:
    """Predicted bytes of parameters, gradients and optimizer states on the fullest rank."""
    return max(sum(stage.get(name, 0) for name in STATES) for stage in predict_memory(case.plan, case.job))


def forecasts_left_out(outcomes: Iterable[Outcome], left_out: Sequence[LeftOut]) -> tuple[Forecast, ...]:
    """The judged runs by rates fitted without their source; no dense runs of sources that have too few to leave out."""
    without = {each.source: each for each in left_out}
    found = []
    for each in judged_once(outcomes):
        run, source = each.run, without.get(each.run.source)
        if source is not None and run.id in source.log_ratios:
            found.append(replace(each, step_time_s=exp(source.log_ratios[run.id]) * (run.step_time_s or 0.0)))
        elif source is not None:
            found.append(replace(each, step_time_s=predicted_s(source.parameters, [run])[0]))
        elif class_of(run) != DENSE:
            found.append(each)
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="*", metavar="PATH")
    parser.add_argument("--no-others", action="store_true", help="ask no other estimator, install nothing")
    parser.add_argument("--no-left-out", action="store_true", help="leave no source out of the fit")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="where the page is written")
    options = parser.parse_args()
    runs = read_runs(*options.path)
    outcomes = forecast_all(runs)
    left_out = () if options.no_left_out else fit_with_left_out(runs, rounds=1)[1]
    cases = [] if options.no_others else cases_asked(outcomes)
    found = Findings(
        outcomes=outcomes,
        left_out=forecasts_left_out(outcomes, left_out) if left_out else (),
        others=() if options.no_others else tuple(ask(each, list(map(question_of, cases))) for each in ESTIMATORS),
        states={case.run.id: states_bytes(case) for case in cases if measured_memory(case.run) is not None},
    )
    options.output.write_text(accuracy_page(found, f"{datetime.date.today():%d %B %Y}"), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
