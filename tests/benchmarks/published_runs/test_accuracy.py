"""Tests of the accuracy page: figures by class on small cases, other estimators without a network, and format."""

import csv
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from others.estimators import ESTIMATORS, Answers, Estimate, ask
from others.questions import question_of
from published_runs.accuracy import (
    Errors,
    accuracy_targets,
    errors_by_kind,
    judged_once,
    memory_by_source,
    time_by_source,
)
from published_runs.classes import ADAPTERS, CONTEXT, DENSE, class_of
from published_runs.forecast import Forecast
from published_runs.jobs import Case, case_of
from published_runs.page import Findings, accuracy_page
from published_runs.rows import FILE_NAMES

from steelyard.cost.accuracy import spread_of
from steelyard.units import GIB
from tests.benchmarks.published_runs.examples import case, sample
from tests.benchmarks.published_runs.test_score import made

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "accuracy.md"
MEMORY = {"peak_mem_gib": "10", "mem_kind": "torch max allocated"}


def test_sources_of_twenty_runs_weigh_the_same_and_smaller_ones_do_not_count() -> None:
    lines = [
        Errors(kind=DENSE, source="a", values=(0.1,) * 20),
        Errors(kind=DENSE, source="b", values=(-0.3,) * 60),
        Errors(kind=DENSE, source="c", values=(0.9,) * 10),
    ]
    (found,) = errors_by_kind(lines)
    assert (found.rows, found.sources, found.judged, found.worst) == (90, 3, 2, 0.9)
    assert (found.bias, found.median_abs, found.p90_abs) == pytest.approx((-0.1, 0.2, 0.2))
    assert found.median_of_all == pytest.approx((0.1 + 0.3 + 0.5 * 0.9) / 2.5)


def test_a_class_without_such_a_source_is_judged_over_all_its_runs() -> None:
    lines = [Errors(kind=CONTEXT, source="a", values=(0.1,)), Errors(kind=CONTEXT, source="b", values=(0.3, 0.5))]
    (found,) = errors_by_kind(lines)
    assert (found.judged, found.median_abs) == (0, pytest.approx(0.3))


def test_repeats_of_an_adapter_plan_count_once_and_those_of_other_plans_each() -> None:
    dense = [made(1.0, 1.0, number=n) for n in range(3)]
    adapters = [made(1.0 + n, 3.0, number=10 + n, lora="16") for n in range(3)]
    assert len(judged_once(dense + adapters)) == 4
    (line,) = [line for line in time_by_source(dense + adapters) if line.kind == ADAPTERS]
    assert line.values == pytest.approx((0.5,))


def test_memory_is_too_low_by_more_than_five_percent_and_verdicts_are_counted() -> None:
    runs = [
        replace(made(1.0, 1.0, number=n, **MEMORY), peak_bytes=size * GIB // 100) for n, size in enumerate((940, 960))
    ]
    runs += [made(1.0, 1.0, number=2, status="oom", step_time_s=""), replace(made(1.0, 1.0, number=3), fits=False)]
    (line,) = memory_by_source(runs)
    assert line.errors is not None
    assert line.errors.worst == pytest.approx(-0.06)
    assert (line.too_low, line.false_fits, line.oom, line.false_misfits, line.ran) == (1, 1, 1, 1, 3)


def test_a_target_is_not_met_by_what_was_not_measured() -> None:
    lines = accuracy_targets([Errors(kind=DENSE, source="a", values=(0.5,))], [], [], [], [])
    assert {line.is_met for line in lines} == {False, None}


def page(outcomes: Sequence[Forecast], others: Sequence[Answers] = ()) -> str:
    found = Findings(
        outcomes=tuple(outcomes),
        left_out=tuple(outcomes),
        others=tuple(others),
        states={each.run.id: 2.0 * GIB for each in outcomes},
    )
    return accuracy_page(found, "1 January 2027")


def headings(text: str) -> list[str]:
    """Headings and heads of tables, in order."""
    return re.findall(r"^(?:#+ .*|\|.*(?=\n\| ---))", text, flags=re.MULTILINE)


def answers(failure: str = "") -> list[Answers]:
    estimate = Estimate(peak_bytes=5.0 * GIB, states_bytes=12.0 * GIB, step_time_s=3.0)
    return [Answers(estimator=ESTIMATORS[0], estimates={} if failure else {"made-0": estimate}, failure=failure)]


def test_the_page_in_docs_has_the_form_that_the_benchmark_writes() -> None:
    written = page([made(2.0, 1.0, **MEMORY)], answers())
    assert headings(written) == headings(PAGE.read_text(encoding="utf-8"))


def test_an_estimator_and_we_are_held_against_the_same_runs() -> None:
    text = page([made(2.0, 1.0, **MEMORY), made(2.0, 2.0, number=1, **MEMORY)], answers())
    for line in (
        "| llm-analysis | 1 | +50.0% | 50.0% | 50.0% | +50% | 0.0% |",
        "| steelyard, the same runs | 1 | -50.0% | 50.0% | 50.0% | -50% | 0.0% |",
        "| llm-analysis | 1 | -50.0% | 50.0% | 50.0% | -50% |",
        "| llm-analysis | 1 | 120% | 1 of 1 |",
        "| steelyard, the same runs | 1 | 20% | 0 of 1 |",
    ):
        assert line in text


def test_an_estimator_that_could_not_be_asked_is_named_with_the_reason() -> None:
    assert "Not asked: no wheel for this machine" in page([made(2.0, 1.0)], answers("no wheel for this machine"))


def test_what_does_not_install_gives_the_last_line_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(command: Sequence[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="a\nERROR: no matching distribution\n\n[notice] new pip")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fails)
    found = ask(ESTIMATORS[0], [])
    assert (found.failure, found.estimates) == ("ERROR: no matching distribution", {})


def test_what_is_installed_is_asked_once_and_not_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = []

    def answered(command: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        return subprocess.CompletedProcess(command, 0, stdout='a notice\n{"r": {"step_time_s": 2.0}}\n')

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", answered)
    estimator = ESTIMATORS[0]
    marker = tmp_path / "steelyard" / "estimators" / estimator.environment / estimator.package
    marker.parent.mkdir(parents=True)
    marker.touch()
    assert ask(estimator, [{"id": "r"}]).estimates == {"r": Estimate(step_time_s=2.0)}
    assert [Path(command[1]).name for command in commands] == [estimator.script]


def test_a_question_has_the_parameters_and_the_plan_of_the_run() -> None:
    asked = question_of(case("torchtitan"))
    assert asked["params"] == pytest.approx(8.03e9, rel=1e-3)
    assert (asked["zero"], asked["tp"], asked["gated"]) == (3, 8, True)
    json.dumps(asked)


def test_the_script_writes_a_page_without_asking_anyone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [dict(run.cells) for run in sample() if run.source == "torchtitan"][:2]
    with (tmp_path / FILE_NAMES[0]).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    script, out = ROOT / "benchmarks" / "scoreboard.py", tmp_path / "out.md"
    options = ["--no-others", "--no-left-out", "--output", str(out)]
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), *options])
    runpy.run_path(str(script), run_name="__main__")
    text = out.read_text(encoding="utf-8")
    assert "compares these predictions with 2 training runs" in text
    assert "None was asked" in text
    assert "No source was left out" in text


@pytest.mark.slow
def test_a_run_is_of_the_class_that_a_plan_says_of_itself() -> None:
    for run in sample():
        found = case_of(run)
        spread = spread_of(found.job, found.plan.strategies) if isinstance(found, Case) else None
        assert spread is None or spread.words == class_of(run), run.id
