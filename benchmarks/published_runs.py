"""Predicts training runs that others measured and published, and says how far off it is. No GPU needed.

PATH is a folder with a table of runs (``runs.csv`` or ``runs.csv.gz``), or the table; without it those in
``published_runs/data`` are predicted: the rows whose measurements are shown, with their sources in its READMEs.

Run: python benchmarks/published_runs.py [PATH ...] [--sources NAME ...] [--left-out] [--predictions out.csv] [--json]
"""

import argparse
import json
import sys
from pathlib import Path

from calibrate import fit_with_left_out
from published_runs.evidence import regret_evidence, regret_targets
from published_runs.forecast import Outcome, forecast_all, write_predictions
from published_runs.rows import PublishedRun, of_sources, read_runs
from published_runs.score import score_sources
from published_runs.table import comparison_json, comparison_view, counted
from published_runs.targets import counts_for_memory, is_recommended_dense, summarise
from rich.console import Console
from rich.progress import Progress

from steelyard.errors import UserError

FILE_WIDTH = 120
"""Columns of the tables in a file or a pipe, where nothing says how wide it is: none of them is cut off."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="*", metavar="PATH")
    parser.add_argument("--sources", nargs="+", metavar="NAME", help="only these, as column source_file has them")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="where to write one line per run, as CSV")
    parser.add_argument(
        "--left-out", action="store_true", help="fit without each source in turn and predict it: minutes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    try:
        runs = read_runs(*options.path)
        outcomes = forecast(runs if options.sources is None else of_sources(runs, options.sources))
    except UserError as error:
        parser.error(str(error))
    if options.predictions is not None:
        write_predictions(outcomes, options.predictions)
    timed = score_sources(outcomes, is_recommended_dense)
    held = score_sources(outcomes, counts_for_memory)
    left_out = fit_with_left_out([each.run for each in outcomes])[1] if options.left_out else ()
    targets = summarise(timed, held, outcomes, left_out) + regret_targets(regret_evidence(outcomes, left_out))
    if options.json:
        print(json.dumps(comparison_json(timed, held, targets, outcomes, left_out), indent=2, ensure_ascii=False))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(comparison_view(timed, held, targets, outcomes, left_out))
    console.print(counted(outcomes) + ("" if options.predictions is None else f"; written to {options.predictions}"))


def forecast(runs: tuple[PublishedRun, ...]) -> tuple[Outcome, ...]:
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("predicting", total=len(runs))
        return forecast_all(runs, lambda: progress.advance(task))


if __name__ == "__main__":
    main()
