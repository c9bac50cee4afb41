"""Tests of the default output of ``steelyard plan``: at most 25 lines, unbroken quantities, and readable sizes."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from steelyard.cli import app as application
from steelyard.cli.options import whole
from steelyard.errors import UserError
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan, pipeline_text
from steelyard.report.plan_table import answer_view, engine_line, fastest_engines, stage_texts
from tests.cli.conftest import Run, user_error
from tests.cost.examples import cluster, job, plan
from tests.report.html.examples import pipelined

JOB = ("llama3.2-1b", "--cluster", "1x4xa100-80gb", "--seq-len", "2k", "--global-batch", 16)
DEEP = 20


def shown(found: Plan, width: int = 100) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(answer_view(found))
    return capture.get().splitlines()


@pytest.fixture(scope="module")
def deep() -> Plan:
    """Plan of 20 stages, whose neighbours are equal except the first and the last."""
    of = job(cluster(1, DEEP), num_hidden_layers=2 * DEEP - 2, global_batch=DEEP)
    return plan(of, *["single, single"] * DEEP, num_microbatches=DEEP)


@pytest.mark.parametrize(("width", "most"), [(100, 20), (80, 25)])
def test_the_answer_is_short_and_keeps_quantities_whole(deep: Plan, width: int, most: int) -> None:
    for found in (deep, pipelined().plan):
        lines = shown(found, width)
        assert len(lines) <= most  # the next commands take five more
        assert max(map(len, lines)) <= width
        assert not any(re.search(r"(^|\s)[\d.,]+$|[×±≤]$", line.rstrip()) for line in lines)


def test_equal_stages_are_drawn_together(deep: Plan) -> None:
    assert pipeline_text(deep).startswith(f"{DEEP} stages of 1 device (1f1b), ")
    assert list(stage_texts(deep)) == [
        "0: embedding, 1 block",
        f"1–{DEEP - 2}: 2 blocks each",
        f"{DEEP - 1}: 1 block, head",
    ]


@pytest.mark.slow
def test_degrees_fix_the_plan_and_the_micro_batch_follows(run: Run, tmp_path: Path) -> None:
    fixed = ("--tp", 2, "--pp", 2, "--micro-batch", 4, "-o", tmp_path / "plan.json")
    result = run("plan", *JOB, *fixed)
    assert result.exit_code == 0, result.output
    found = read_plan(tmp_path / "plan.json")
    assert found.num_stages == 2
    assert found.seq_len == 2048
    assert {each.tensor_degree for each in found.strategies} == {2}
    blocks = found.strategies[1:-1]
    assert {found.microbatch_samples // each.sample_degree for each in blocks} == {4}


def test_a_page_is_written_to_a_file_that_browsers_open(run: Run, tmp_path: Path) -> None:
    assert user_error(run("report", tmp_path / "no-plan.json", "-o", tmp_path / "page.htm")).field == "--output"


def test_a_micro_batch_divides_the_global_batch(run: Run) -> None:
    assert user_error(run("plan", *JOB, "--micro-batch", 3)).field == "--micro-batch"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4,096", "--seq-len 4096"),
        ("4096 tokens", "--seq-len 4096"),
        ("4e3", "--seq-len 4000"),
        ("4kk", "--seq-len 1k"),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(text: str, hint: str) -> None:
    parse = whole("--seq-len", 2**20, kilo=1024, example="1k")
    assert (parse("4k"), parse("1.5K"), parse(7)) == (4096, 1536, 7)
    with pytest.raises(UserError) as caught:
        parse(text)
    assert caught.value.hint == f"write {hint}"


@pytest.mark.parametrize(
    ("words", "field", "told"),
    [
        (("plan", "llama3-8b", "--clster", "x"), "--clster", "did you mean --cluster"),
        (("plan", "llama3-8b"), "--cluster", "NODESxDEVICESxDEVICE"),
        (("plan",), "model", "steelyard plan --help"),
        (("nonsense",), "steelyard", "no such command 'nonsense'"),
        (("plan", "llama3-8b", "--imbalance", "x"), "--imbalance", "found 'x'\n  expected: a valid number"),
        (("solve", __file__), "problem", "steelyard plan --save-problem"),
    ],
)
def test_words_that_are_wrong_are_told_as_all_mistakes(
    words: tuple[str, ...], field: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["steelyard", *words])
    monkeypatch.setattr(application, "_ENDING", [])
    with pytest.raises(SystemExit) as ended:
        application.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert lines[0].startswith(f"error: {field}: found ")
    assert lines[1].startswith("  expected: ")
    assert lines[2].startswith("  to fix: ")
    assert told in "\n".join(lines)


def test_help_has_ten_common_options_and_groups(run: Run) -> None:
    text = run("plan", "--help").output
    groups = re.findall(r"╭─ (.*?) ─+╮", text)
    assert groups[1:] == ["Options", *(group for group in application_groups() if group)]
    common = text.split("╭─ Options")[1].split("╰")[0]
    assert len(re.findall(r"^│ [* ]  ?--|^│\s+--", common, flags=re.MULTILINE)) <= 10


def application_groups() -> tuple[str | None, ...]:
    from steelyard.cli.options import GROUPS

    return GROUPS


def test_engines_whose_search_was_cut_short_are_named() -> None:
    found = [
        ComparedBaseline(name=name, step_time_s=seconds, slowdown=seconds / 10 - 1, is_bound=is_bound)
        for name, seconds, is_bound in (("a", 8.0, False), ("b", 9.0, True), ("c", 11.0, False), ("d", 12.0, True))
    ]
    found.append(ComparedBaseline(name="e", is_bound=True))
    text = fastest_engines(found)
    assert text.startswith("a 8.00 s (−20.0%), b ≤ 9.00 s (−10.0%), c 11.0 s (+10.0%)")
    assert text.endswith("; not searched to the end: d, e; all: --engines")
    assert engine_line(found[-1]) == "  e: no plan found before the time was up"
    assert fastest_engines([ComparedBaseline(name="f", reason="it has no experts")]) == ""
