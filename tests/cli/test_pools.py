"""Tests of ``--cluster`` with several device groups: output of `plan`, `explain` and others, and refusals."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from steelyard.plan.file import read_plan
from steelyard.report.plan_table import answer_view, stage_table
from tests.cli.conftest import Run, user_error

POOLS = "1x2xh100-80gb+1x2xa100-80gb"
ASKED = ("--seq-len", 256, "--global-batch", 32, "--precision", "bf16")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan over two pools, as `plan` writes it."""
    from typer.testing import CliRunner

    from steelyard.cli.app import app

    found = tmp_path_factory.mktemp("plans") / "pools.json"
    arguments = ["plan", "tinyllama-1.1b", "--cluster", POOLS, *ASKED, "--stages", 2, "-o", found]
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return found


@pytest.mark.slow
def test_a_plan_over_pools_says_which_stage_lies_where(run: Run, path: Path) -> None:
    shown = " ".join(run("plan", "tinyllama-1.1b", "-v", "--cluster", POOLS, *ASKED, "--stages", 2).output.split())
    assert "Group 1x2xh100-80gb: 1 stage on 2 devices of 75.1 GiB (5% of 79.1 GiB left free)" in shown
    assert "Links assumed between groups" in shown
    assert {pool.name for pool in read_plan(path).stage_pools()} == set(POOLS.split("+"))


def test_the_answer_shows_the_strategies_of_every_group(path: Path) -> None:
    plan = read_plan(path)
    shown = Console(width=200)
    with shown.capture() as captured:
        shown.print(answer_view(plan))
    layers = captured.get().partition("Layers")[2]
    assert all(str(strategy) in layers for strategy in set(plan.strategies))
    assert len(set(plan.strategies)) > 1


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_every_cell_of_the_strategies_whole(path: Path, width: int) -> None:
    cells = {}
    for each in (width, 200):
        console = Console(width=each)
        with console.capture() as captured:
            console.print(stage_table(read_plan(path)))
        rows = [line.strip("│┃").split("│") for line in captured.get().splitlines() if "│" in line]
        cells[each] = ["".join("".join(column).split()) for column in zip(*rows, strict=True)]
    assert cells[width] == cells[200]


@pytest.mark.slow
def test_every_pool_says_by_which_rates_and_links_it_is_priced(run: Run, path: Path) -> None:
    for command in ("explain", path), ("plan", "tinyllama-1.1b", "-v", "--cluster", POOLS, *ASKED, "--stages", 2):
        shown = " ".join(run(*command).output.split())
        for name, generation in zip(POOLS.split("+"), ("hopper", "ampere"), strict=True):
            assert re.search(
                rf"[Cc]osts:? (on .*; )?on {name} traced with [^;]*; .*fitted to .* of {generation}", shown
            )
        assert "In 1x2xh100-80gb: nvlink-4 inside a node, 450 GB/s" in shown
        assert "In 1x2xa100-80gb: nvlink-3 inside a node, 300 GB/s" in shown


@pytest.mark.slow
def test_explain_compares_with_each_pool_alone_and_even_cuts(run: Run, path: Path) -> None:
    shown = run("explain", path).output
    assert all(words in shown for words in ("1x2xh100-80gb alone", "1x2xa100-80gb alone", "even cuts over all pools"))
    baselines = json.loads(run("explain", path, "--json").output)["explanation"]["rivals"]
    assert len(baselines) == 3


@pytest.mark.slow
def test_explain_prices_it_for_the_memory_that_is_given(run: Run, path: Path) -> None:
    pools = json.loads(run("explain", path, "--memory", "70GiB", "--json").output)["plan"]["prediction"]["pools"]
    assert {pool["budget_bytes"] for pool in pools} == {70 * 2**30}


def test_timeline_shows_such_a_plan(run: Run, path: Path) -> None:
    events = path.with_suffix(".trace.json")
    assert run("timeline", path, "-o", events).exit_code == 0
    assert events.stat().st_size > 0


@pytest.fixture(scope="module")
def page(path: Path) -> str:
    """The report of the plan."""
    from typer.testing import CliRunner

    from steelyard.cli.app import app

    written = path.with_suffix(".html")
    assert CliRunner().invoke(app, ["report", str(path), "-o", str(written)]).exit_code == 0
    return written.read_text()


def test_a_report_shows_the_schedule_and_the_baselines_of_such_a_plan(page: str) -> None:
    assert 'id="timeline"' in page
    assert all(words in page for words in ("1x2xh100-80gb alone", "1x2xa100-80gb alone", "even cuts over all pools"))
    assert "left out" not in page
    assert page.count("rates from the catalogue below, fitted to published runs of") == 2


def test_a_report_has_no_frontier_where_none_was_searched_over_pools(page: str) -> None:
    assert "Time against memory" not in page


@pytest.mark.slow
def test_a_report_names_the_pool_and_the_budget_of_each_stage(run: Run, tmp_path: Path) -> None:
    pools, plan = "1x2xh100-80gb+1x2xa100-40gb", tmp_path / "plan.json"
    longer = ("--seq-len", 1024, "--global-batch", 8, "--stages", 2)
    assert run("plan", "tinyllama-1.1b", "--cluster", pools, *longer, "-o", plan).exit_code == 0
    assert run("report", plan, "--time-limit", 0, "-o", tmp_path / "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert all(f"<small>{name}</small>" in text for name in pools.split("+"))
    memory = text[text.index('id="memory"') : text.index('id="timeline"')]
    assert memory.count('class="limit"') == 2
    assert "37.4 GiB" in memory
    assert "75.1 GiB" in memory


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "torchrun"])
def test_exports_refuse_such_a_plan_with_the_reason(run: Run, path: Path, target: str) -> None:
    error = user_error(run("export", path, "--to", target, "-o", path.parent / "out"))
    assert "2 device groups" in error.found


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubeflow"])
def test_launch_files_say_how_such_a_plan_is_started(run: Run, path: Path, target: str) -> None:
    error = user_error(run("export", path, "--to", target, "--image", "an-image"))
    assert (error.field, f"{target} for a plan over 2 device groups" in error.found) == ("--to", True)
    assert "--elastic --hosts 2:2 --rendezvous FIRST_HOST:29500 --pool NAME" in error.hint
    assert all(name in error.hint for name in POOLS.split("+"))


@pytest.mark.parametrize(
    "option",
    [
        ("--pin", "tp=2"),
        ("--objective", "devices"),
        ("--partition", "even"),
        ("--save-problem", "problem.json"),
    ],
    ids=lambda option: option[0],
)
def test_what_does_not_go_with_pools_is_refused(run: Run, option: tuple[str, str]) -> None:
    error = user_error(run("plan", "tinyllama-1.1b", "--cluster", POOLS, *ASKED, *option))
    assert error.field == option[0]
    assert "with several device groups" in error.found


def test_a_free_batch_or_length_is_refused_with_pools(run: Run) -> None:
    asked = ("plan", "tinyllama-1.1b", "--cluster", POOLS)
    for option, more in (("--seq-len", ("--global-batch", 8)), ("--global-batch", ("--seq-len", 256))):
        assert user_error(run(*asked, option, "max", *more)).field == option


def test_other_commands_ask_for_one_device_type(run: Run, path: Path) -> None:
    error = user_error(run("export", path, "--to", "pytorch", "--cluster", POOLS))
    assert "2 device groups" in error.found


def test_a_frontier_of_pools_asks_for_the_price_of_each(run: Run) -> None:
    error = user_error(run("frontier", "tinyllama-1.1b", "--cluster", POOLS, *ASKED))
    assert error.field == "--price"
    assert all(device in error.hint for device in ("h100-80gb", "a100-80gb"))


def test_explain_refuses_what_does_not_go_with_pools(run: Run, path: Path) -> None:
    assert user_error(run("explain", path, "--why-not", "tp=2")).field == "--why-not"


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_a_profile_that_names_no_pool_is_refused(run: Run, path: Path, command: str) -> None:
    asked = {"plan": ("tinyllama-1.1b", "--cluster", POOLS, *ASKED), "explain": (path,)}[command]
    error = user_error(run(command, *asked, "--profile", "measured.json"))
    assert error.field == "--profile"
    assert "NAME=FILE" in error.expected


@pytest.mark.slow
def test_check_runs_the_ranks_of_unlike_stages_within_what_was_predicted_of_their_pools(run: Run, path: Path) -> None:
    result = run("check", path, "--processes", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["ranks"]
    assert sorted(rank for each in found for rank in each["stands_for"]) == list(range(4))
    assert {each["stage"] for each in found} == {0, 1}
    assert all(each["peak_bytes"] <= each["predicted_bytes"] for each in found)


def test_a_plan_whose_pools_are_not_there_is_named(run: Run, path: Path) -> None:
    error = user_error(run("explain", path, "--cluster", "1x2xh100-80gb+1x4xl4"))
    assert error.field == "cluster"
    assert "plan for the available device groups" in error.hint
