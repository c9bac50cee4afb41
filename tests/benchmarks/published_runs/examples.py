"""Published runs for the tests: a sample of the table, and rows derived from one of its rows."""

from functools import cache
from pathlib import Path

from published_runs.forecast import Forecast, Outcome, forecast_all
from published_runs.jobs import Case, case_of
from published_runs.rows import PublishedRun, read_runs

FOLDER = Path(__file__).parent / "data"


@cache
def sample() -> tuple[PublishedRun, ...]:
    return read_runs(FOLDER)


@cache
def outcomes() -> tuple[Outcome, ...]:
    return forecast_all(sample())


def run_of(source: str, **cells: str) -> PublishedRun:
    """The first run of a source with some cells changed."""
    first = next(run for run in sample() if run.source == source)
    return PublishedRun(cells={**first.cells, **cells})


def case(source: str, **cells: str) -> Case:
    found = case_of(run_of(source, **cells))
    assert isinstance(found, Case), found
    return found


def forecasts() -> list[Forecast]:
    return [outcome for outcome in outcomes() if isinstance(outcome, Forecast)]
