"""Tests that numbers too large to compute with are refused by name where they are read."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.limits import MOST_BYTES, MOST_DEVICES, MOST_LAYERS, MOST_SAMPLES
from tests.cli.conftest import Run, user_error
from tests.damage.documents import whole
from tests.jobs import make_job

JOB = ("--cluster", "1x8xa100-80gb", "--seq-len", 2048, "--global-batch", 32)


@cache
def files() -> dict[str, Any]:
    """Contents of every sort of file."""
    return whole()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("plan", "llama3-8b", *JOB[:4], "--global-batch", 2**63), "--global-batch"),
        (("plan", "llama3-8b", *JOB[:2], "--seq-len", "9" * 5000, "--global-batch", 8), "--seq-len"),
        (("plan", "llama3-8b", "--cluster", f"{MOST_DEVICES}x8xh100-80gb", *JOB[2:]), "cluster"),
        (("plan", "llama3-8b", "--cluster", "9999999999x8xh100-80gb", *JOB[2:]), "cluster"),
        (("plan", "llama3-8b", *JOB, "--memory", "300TiB"), "memory"),
        (("frontier", "llama3-8b", *JOB, "--devices", 10**6), "--devices"),
        (("frontier", "llama3-8b", *JOB, "--devices", ",".join("8" * 40)), "--devices"),
    ],
)
def test_a_number_of_an_argument_beyond_the_bounds_is_named(
    run: Run, arguments: tuple[object, ...], named: str
) -> None:
    assert named in user_error(run(*arguments)).field


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("plan", "--stages", 10**20),
        ("plan", "--microbatches", 10**20),
        ("plan", "--top", 10**20),
        ("plan", "--fallbacks", 10**20),
        ("plan", "--time-limit", "nan"),
        ("plan", "--time-limit", "inf"),
        ("plan", "--price", "inf"),
        ("plan", "--price", 1e308),
        ("plan", "--price", "nan"),
        ("frontier", "--points", 10**9),
        ("frontier", "--max-tp", 10**20),
    ],
)
def test_an_option_beyond_its_range_is_named(run: Run, command: str, option: str, value: object) -> None:
    result = run(command, "llama3-8b", *JOB, option, value)
    assert user_error(result).field == option


@pytest.mark.parametrize("price", ["nan", "inf", "-1", "h100-80gb=nan"])
def test_a_price_that_is_none_is_named(run: Run, price: str) -> None:
    error = user_error(run("frontier", "llama3-8b", *JOB, "--price", price))
    assert error.field == "--price"
    assert price.rsplit("=", maxsplit=1)[-1] in error.found


def changed(content: Any, path: str, value: object) -> Any:
    content = json.loads(json.dumps(content))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    inner = content
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return content


@pytest.mark.parametrize(
    ("sort", "path", "value"),
    [
        ("problem", "budget_bytes", 2**63),
        ("problem", "settings.0.layers.0.count", 10**9),
        ("problem", "settings.0.num_microbatches", 2**40),
        ("problem", "settings.0.kinds.0.time_s.0", 1e300),
        ("problem", "settings.0.transfer_s", 1e300),
        ("problem", "settings.0.samples", 2**63),
        ("plan", "seq_len", 2**63),
        ("plan", "global_batch", 2 * MOST_SAMPLES),
        ("plan", "stages.0.ranks.1", 10**18),
        ("plan", "stages.0.runs.0.layers.1", 10**18),
        ("plan", "prediction.step_time_s", 0),
        ("plan", "prediction.budget_bytes", 2**63),
    ],
)
def test_a_number_of_a_file_beyond_the_bounds_is_named(
    run: Run, tmp_path: Path, sort: str, path: str, value: object
) -> None:
    (tmp_path / "file.json").write_text(json.dumps(changed(files()[sort], path, value)))
    command = ["solve"] if sort == "problem" else ["diff", tmp_path / "file.json"]
    error = user_error(run(*command, tmp_path / "file.json"))
    names = [part for part in path.split(".") if not part.isdigit()]
    assert names[-1] in error.field


@pytest.mark.parametrize("key", ["memory_GiB", "memory_bandwidth_GBps"])
@pytest.mark.parametrize("value", [1e308, 0, -1, float("nan")])
def test_a_number_of_a_cluster_beyond_the_bounds_is_named(run: Run, tmp_path: Path, key: str, value: float) -> None:
    (tmp_path / "lab.yaml").write_text(
        json.dumps(changed(files()["cluster"], f"device.{key}", value)).replace("NaN", ".nan")
    )
    error = user_error(run("plan", "llama3-8b", "--cluster", tmp_path / "lab.yaml", *JOB[2:]))
    assert key in error.field


def test_layers_of_a_problem_count_together(run: Run, tmp_path: Path) -> None:
    layers = [{"kind": files()["problem"]["settings"][0]["kinds"][0]["name"], "count": MOST_LAYERS}] * 2
    (tmp_path / "p.json").write_text(json.dumps(changed(files()["problem"], "settings.0.layers", layers)))
    assert user_error(run("solve", tmp_path / "p.json")).found == f"{2 * MOST_LAYERS} layers"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bytes_too_many_for_any_device_fit_nowhere_and_wrap_around_nowhere(
    run: Run, tmp_path: Path, schedule: str
) -> None:
    content = changed(files()["problem"], "budget_bytes", MOST_BYTES // 2)
    content["settings"] = [config | {"schedule": schedule, "num_microbatches": 2**16} for config in content["settings"]]
    for layer_type in content["settings"][0]["kinds"]:
        layer_type["activation_bytes"] = [MOST_BYTES] * len(layer_type["activation_bytes"])
    (tmp_path / "p.json").write_text(json.dumps(content | {"settings": content["settings"][:1]}))
    result = run("solve", tmp_path / "p.json", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["missing_bytes"] >= MOST_BYTES // 2


def test_tokens_of_a_step_are_bounded_together() -> None:
    with pytest.raises(UserError, match="tokens a step"):
        make_job(
            "llama3-8b",
            "1x8xa100-80gb",
            global_batch=MOST_SAMPLES,
            seq_len=2**20,
            precision="bf16",
            memory=None,
            profile=None,
        )


def test_a_search_says_how_long_it_may_take(run: Run) -> None:
    assert "300" in run("plan", "--help").output


@pytest.mark.parametrize(
    ("path", "value"), [("predicted_busy_s", [0.1]), ("predicted_peak_bytes", [1, 2, 3]), ("ranks.0.stage", 2)]
)
def test_a_record_of_other_stages_than_the_plans_is_named(run: Run, tmp_path: Path, path: str, value: object) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(files()["plan"]))
    (tmp_path / "record.json").write_text(json.dumps(changed(files()["record"], path, value)))
    words = (tmp_path / "plan.json", "-o", tmp_path / "page.html", "--run", tmp_path / "record.json")
    error = user_error(run("report", *words))
    assert path.split(".", maxsplit=1)[0] in error.field


@pytest.mark.parametrize("command", ["timeline", "report"])
def test_a_folder_is_no_place_for_a_page(run: Run, tmp_path: Path, command: str) -> None:
    for sort, name in (("plan", "plan.json"), ("cluster", "lab.yaml"), ("profile", "profile.json")):
        (tmp_path / name).write_text(json.dumps(files()[sort]))
    job = ("--cluster", tmp_path / "lab.yaml", "--profile", tmp_path / "profile.json")
    error = user_error(run(command, tmp_path / "plan.json", "-o", tmp_path, *job))
    assert error.field == "--output"
    assert "Is a directory" in error.found
