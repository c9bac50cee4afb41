"""Tests of ``steelyard frontier``, ``plan --objective devices`` and ``plan --global-batch max``."""

import itertools
import json
import re
from pathlib import Path

import pytest

from steelyard.plan.choices import TradeOffs
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan
from steelyard.planning.choose import plan_job
from steelyard.planning.sizes import LEAST_GAIN
from steelyard.planning.variants import device_counts, with_devices
from tests.cli.conftest import Run, user_error
from tests.jobs import make_job

SMALL = ("llama3.2-1b", "--cluster", "1x4xa100-80gb", "--seq-len", 2048)
JOB = (*SMALL, "--global-batch", 16)
TIGHT = "16GiB"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[TradeOffs, Path]:
    from typer.testing import CliRunner

    from steelyard.cli.app import app

    page = tmp_path_factory.mktemp("figures") / "frontier.html"
    arguments = ["frontier", *JOB, "--memory", TIGHT, "--points", 5, "--price", 2, "--json", "-o", page]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return TradeOffs.model_validate(json.loads(result.stdout)), page


@pytest.mark.slow
def test_less_memory_takes_more_time(found: tuple[TradeOffs, Path]) -> None:
    points = found[0].points
    assert len(points) > 2
    sizes, times = ([getattr(point, name) for point in points] for name in ("memory_bytes", "step_time_s"))
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


@pytest.mark.slow
def test_the_point_within_the_budget_is_the_plan_of_the_planner(found: tuple[TradeOffs, Path], run: Run) -> None:
    chosen = [point for point in found[0].points if point.is_chosen]
    plan = json.loads(run("plan", *JOB, "--memory", TIGHT, "--simplify", 0, "--json").stdout)
    assert [point.step_time_s for point in chosen] == [plan["prediction"]["step_time_s"]]
    assert chosen[0].memory_bytes <= found[0].budget_bytes


@pytest.mark.slow
def test_every_device_count_has_the_plan_of_the_planner_on_so_many(found: tuple[TradeOffs, Path], run: Run) -> None:
    for point in found[0].devices:
        cluster = f"{max(1, point.num_devices // 4)}x{min(4, point.num_devices)}xa100-80gb"
        arguments = ("llama3.2-1b", "--cluster", cluster, *JOB[3:], "--memory", TIGHT, "--json")
        result = run("plan", *arguments, "--simplify", 0)
        step_s = json.loads(result.stdout)["prediction"]["step_time_s"] if result.exit_code == 0 else None
        assert point.step_time_s == step_s, point.num_devices
        assert bool(point.reason) == (step_s is None)


@pytest.mark.slow
def test_cost_is_price_times_devices_times_time_over_tokens(found: tuple[TradeOffs, Path]) -> None:
    for point in found[0].devices:
        if point.step_time_s is not None:
            tokens = 16 * 2048
            money = 2 * point.num_devices * point.step_time_s / 3600
            assert point.cost_per_billion_tokens == pytest.approx(money / tokens * 1e9)


@pytest.mark.slow
def test_the_page_has_axes_with_units_the_budget_and_the_plan(found: tuple[TradeOffs, Path]) -> None:
    text = found[1].read_text()
    for expected in ("memory per device (GiB)", "step time (s)", "devices", "this plan", "cost of a billion tokens"):
        assert f">{expected}<" in text
    assert ">budget 16.0 GiB<" in text


@pytest.mark.slow
def test_the_html_figure_loads_nothing_from_elsewhere_and_is_small(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "frontier.html"
    result = run("frontier", *JOB, "--points", 3, "--devices", 4, "-o", path)
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert len(text) < 100_000
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text) == []
    assert "budget 75.2 GiB" in text
    assert "this plan" in text


@pytest.mark.slow
def test_the_table_marks_the_plan_and_says_what_is_missing(run: Run) -> None:
    output = run("frontier", *JOB, "--points", 3, "--devices", "2,4").stdout
    assert "▶" in output
    assert "sampled" in output


@pytest.mark.slow
def test_nothing_fits_anywhere_exits_1_with_reasons(run: Run) -> None:
    result = run("frontier", *JOB, "--memory", "2GiB", "--points", 3, "--devices", "1,2", "--json")
    assert result.exit_code == 1
    devices = json.loads(result.stdout)["devices"]
    assert all("does not fit" in point["reason"] for point in devices)


@pytest.mark.parametrize(
    ("arguments", "field", "suggestion"),
    [
        (("-o", "figure.svg"), "--output", "figure.html"),
        (("--devices", "8,many"), "--devices", "8,16,32"),
        (("--devices", "3"), "devices", "multiple of the 4 devices"),
        (("--imbalance", 1.5), "--imbalance", "no routing is uneven here"),
    ],
)
def test_a_mistake_is_one_clear_error(run: Run, arguments: tuple[str, ...], field: str, suggestion: str) -> None:
    error = user_error(run("frontier", *JOB, *arguments))
    assert error.exit_code == 2
    assert error.field == field
    assert suggestion in str(error)


@pytest.mark.slow
def test_fewest_devices_is_the_smallest_count_of_all_that_holds_a_plan(run: Run, tmp_path: Path) -> None:
    fewest = []
    for memory in ("4GiB", "8GiB", "40GiB"):
        job = make_job(
            "tinyllama-1.1b",
            "2x2xa100-80gb",
            global_batch=4,
            seq_len=512,
            precision="bf16",
            memory=memory,
            profile=None,
        )
        counts = device_counts(job.cluster)
        parts = {count: job.on(cluster=with_devices(job.cluster, count)) for count in counts}
        holding = [count for count in counts if plan_job(parts[count], Decisions()).plan is not None]
        fewest.append(min(holding, default=None))
        arguments = ("--cluster", "2x2xa100-80gb", "--seq-len", 512, "--global-batch", 4, "--memory", memory)
        result = run(
            "plan", "tinyllama-1.1b", *arguments, "--objective", "devices", "-o", tmp_path / "p.json", "--json"
        )
        if not holding:
            assert result.exit_code == 1
        else:
            assert result.exit_code == 0, result.output
            assert read_plan(tmp_path / "p.json").num_devices == min(holding)
    assert fewest == [None, 4, 1], "none, all and one of the devices"


def test_device_counts_are_divisors_of_a_node_then_whole_nodes() -> None:
    cluster = make_job(
        "llama3.2-1b", "3x4xa100-80gb", global_batch=1, seq_len=2048, precision="bf16", memory=None, profile=None
    ).cluster
    assert device_counts(cluster) == (1, 2, 4, 8, 12)
    resized = [with_devices(cluster, count) for count in device_counts(cluster)]
    assert [each.num_devices for each in resized] == [1, 2, 4, 8, 12]
    assert resized[1].name == "1x2xa100-80gb"


def test_an_unknown_objective_names_the_nearest(run: Run) -> None:
    error = user_error(run("plan", *JOB, "--objective", "device"))
    assert "devices" in error.hint


@pytest.mark.parametrize(
    ("option", "value", "suggestion"),
    [("--remat", "none,ful", "full"), ("--zero", "0", "1, 2, 3"), ("--global-batch", "maximum", "max")],
)
def test_a_wrong_choice_names_the_choices(run: Run, option: str, value: str, suggestion: str) -> None:
    arguments = SMALL if option == "--global-batch" else JOB
    error = user_error(run("plan", *arguments, option, value))
    assert error.field == option
    assert suggestion in str(error)


def test_the_choices_of_remat_and_zero_are_obeyed(run: Run) -> None:
    plan = json.loads(run("plan", *JOB, "--remat", "full", "--zero", "3", "--json").stdout)
    runs = [run for stage in plan["stages"] for run in stage["runs"]]
    blocks = range(1, max(last for run in runs for last in run["layers"]))
    assert {run["remat"] for run in runs if {*range(run["layers"][0], run["layers"][1] + 1)} & {*blocks}} == {"full"}
    assert {run.get("zero", 3) for run in runs} == {3}


@pytest.mark.slow
def test_top_sets_how_many_losers_are_shown(run: Run) -> None:
    assert "Plans that lost (best 2 of" in run("plan", *JOB, "-v", "--top", 2).stdout
    assert "Plans that lost" not in run("plan", *JOB, "-v", "--top", 0).stdout


@pytest.mark.slow
def test_the_largest_batch_is_doubled_while_that_gains_and_says_why_it_stops(run: Run) -> None:
    output = run("plan", *SMALL, "--global-batch", "max").stdout
    tried = [int(count) for count in re.findall(r"^global batch (\d+):", output, flags=re.MULTILINE)]
    assert tried == [4 * 2**index for index in range(len(tried))]
    assert "stopped:" in output
    speeds = []
    for count in tried:
        job = make_job(
            "llama3.2-1b",
            "1x4xa100-80gb",
            global_batch=count,
            seq_len=2048,
            precision="bf16",
            memory=None,
            profile=None,
        )
        prediction = plan_job(job, Decisions()).plan.prediction  # type: ignore[union-attr]
        assert prediction is not None
        speeds.append(prediction.tokens_per_s_per_device)
    gains = [later / earlier - 1 for earlier, later in itertools.pairwise(speeds)]
    assert all(gain >= LEAST_GAIN for gain in gains[:-1])
    assert gains[-1] < LEAST_GAIN
    assert f"global batch {tried[-2]}" in next(line for line in output.splitlines() if "(taken)" in line)


def test_a_batch_that_never_fits_exits_1(run: Run) -> None:
    result = run("plan", *SMALL, "--global-batch", "max", "--memory", "2GiB")
    assert result.exit_code == 1
    assert "nothing fits" in result.stderr


def test_a_free_batch_on_the_fewest_devices_is_refused(run: Run) -> None:
    error = user_error(run("plan", *SMALL, "--global-batch", "max", "--objective", "devices"))
    assert error.field == "--global-batch"


@pytest.mark.slow
def test_prices_by_device_type_compare_parts_of_the_cluster(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "offers.html"
    asked = ("frontier", "tinyllama-1.1b", "--seq-len", 512, "--global-batch", 64)
    priced = ("--cluster", "1x1xh100-80gb+2x1xa100-80gb", "--price", "h100-80gb=2.5,a100-80gb=1.1")
    result = run(*asked, *priced, "-o", path)
    assert result.exit_code == 0, result.output
    assert "1x1xh100-80gb+2x1xa100-80gb" in result.output
    assert "▶ worth its price" in result.output
    text = path.read_text()
    assert "Least time for the money" in text
    assert "Worth having: " in text
    offers = json.loads(run(*asked, *priced, "--json").output)["offers"]
    assert len(offers) == 5
    assert any(each["is_worth_having"] for each in offers)


@pytest.mark.parametrize("price", ["cheap", "-1", "nan", "h100-80gb=", "h100-80gb=1,h100-80gb=2", "h100-80gb=inf"])
def test_a_price_that_is_none_is_an_error(run: Run, price: str) -> None:
    result = run(
        "frontier",
        "tinyllama-1.1b",
        "--seq-len",
        512,
        "--global-batch",
        8,
        "--cluster",
        "1x2xh100-80gb",
        "--price",
        price,
    )
    assert user_error(result).field == "--price"


def test_one_price_for_several_pools_is_named(run: Run) -> None:
    asked = ("frontier", "tinyllama-1.1b", "--seq-len", 1024, "--global-batch", 8)
    error = user_error(run(*asked, "--cluster", "1x1xh100-80gb+1x1xa100-80gb", "--price", 2.5))
    assert error.found == "2.5 for all devices of 1x1xh100-80gb+1x1xa100-80gb"


def test_offers_take_no_device_counts(run: Run) -> None:
    result = run(
        "frontier",
        "tinyllama-1.1b",
        "--seq-len",
        512,
        "--global-batch",
        8,
        "--cluster",
        "1x2xh100-80gb",
        "--price",
        "h100-80gb=2.5",
        "--devices",
        "2",
    )
    assert user_error(result).field == "--devices"
