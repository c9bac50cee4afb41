"""Tests of ``steelyard check`` from the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from steelyard.hardware import Backend
from steelyard.model.read import chain_from_config
from steelyard.modules.any_model import changed_split_refused
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Certificate, CostSource, Prediction, StagePrediction
from steelyard.report.run_table import CheckedRank, StageBudget, misfit_lines, term_table
from steelyard.runtime import dry_run
from steelyard.runtime.dry_run import RankMemory
from steelyard.runtime.peak_memory import Peak
from steelyard.units import format_ranges
from tests.cli.conftest import Run, user_error
from tests.plan.examples import COST_SOURCE
from tests.runtime.models import CONFIGS, make_plan

TERMS = {"parameters": 100, "activations": 300, "context": 200, "allocator slack": 60}


OWN_GPUS = """
version: 1
num_nodes: 1
devices_per_node: 4
device: {name: mine, kind: gpu}
intra_link: pcie-4
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan of two stages with a prediction of its own."""
    plan = make_plan("llama-tied", "fsdp2, tp2", "dp2, fsdp2", num_devices=4, num_microbatches=2, global_batch=8)
    predicted = StagePrediction(time_s={"compute": 1.0}, memory_bytes={"parameters": 2**20, "working set": 2**22})
    prediction = Prediction(
        step_time_s=1.0,
        tokens_per_s_per_device=1.0,
        budget_bytes=2**30,
        stages=(predicted, predicted),
        certificate=Certificate(status="priced"),
        lower_bound_s=0.0,
        profile=CostSource.model_validate(COST_SOURCE),
        backend=Backend.GLOO,
    )
    path = tmp_path / "plan.json"
    write_plan(plan.model_copy(update={"prediction": prediction}), path)
    return path


def by_hand(path: Path, plan: Plan, **changes: Any) -> Path:
    path.write_text(json.dumps(plan.model_dump(mode="json", exclude_none=True) | changes))
    return path


@pytest.mark.slow
def test_each_stage_is_run_once_and_shown_beside_its_prediction(run: Run, plan_file: Path) -> None:
    result = run("check", plan_file, "--processes", 1)
    assert result.exit_code == 0, result.output
    for expected in ("fits; 2 ranks of 4", "predicted", "activations", "stands for", "0–1", "2–3"):
        assert expected in result.output


@pytest.mark.slow
def test_json_has_the_peak_the_terms_and_the_ranks_that_it_stands_for(run: Run, plan_file: Path) -> None:
    found = json.loads(run("check", plan_file, "--processes", 1, "--json").output)
    assert found["fits"]
    assert [rank["stands_for"] for rank in found["ranks"]] == [[0, 1], [2, 3]]
    for rank in found["ranks"]:
        assert sum(rank["peak_terms"].values()) == rank["peak_bytes"]
        assert rank["predicted_terms"] == {"parameters": 2**20, "working set": 2**22}


@pytest.mark.slow
def test_a_plan_that_does_not_fit_exits_1_and_names_the_rank_and_the_missing_bytes(run: Run, plan_file: Path) -> None:
    plan = json.loads(plan_file.read_text())
    plan["prediction"]["budget_bytes"] = 1000
    plan_file.write_text(json.dumps(plan))
    result = run("check", plan_file, "--processes", 1)
    assert result.exit_code == 1
    assert "does not fit: rank 0 of stage 0" in result.output
    assert "bytes) more than" in " ".join(result.output.split())


def backend_of(run: Run, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Backend:
    """Return the backend that a check gives its ranks, which are not run."""
    seen: list[Backend] = []

    def noted(_plan: Plan, ranks: list[int], *, backend: Backend, **_options: object) -> list[RankMemory]:
        seen.append(backend)
        peak = Peak(terms={"parameters": 1}, where="nowhere")
        return [RankMemory(rank=rank, first_step=peak, later_steps=peak, wall_s=0.0) for rank in ranks]

    monkeypatch.setattr(dry_run, "dry_run_all", noted)
    result = run("check", *arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize("backend", list(Backend))
def test_ranks_communicate_with_what_the_plan_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan_file: Path, backend: Backend
) -> None:
    plan = json.loads(plan_file.read_text())
    plan["prediction"]["backend"] = backend
    plan_file.write_text(json.dumps(plan))
    assert backend_of(run, monkeypatch, plan_file) is backend


@pytest.mark.parametrize(("cluster", "backend"), [("1x4xcpu", Backend.GLOO), ("1x4xh100-80gb", Backend.NCCL)])
def test_ranks_of_a_plan_that_does_not_say_it_communicate_with_what_its_cluster_has(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan_file: Path, cluster: str, backend: Backend
) -> None:
    plan = json.loads(plan_file.read_text()) | {"cluster": cluster}
    del plan["prediction"]["backend"]
    plan_file.write_text(json.dumps(plan))
    assert backend_of(run, monkeypatch, plan_file) is backend


@pytest.mark.slow
def test_ranks_of_gpus_of_which_only_a_profile_knows_the_rates_communicate_over_nccl(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(OWN_GPUS)
    options = ("--cluster", tmp_path / "own.yaml", "--memory", "16GiB")
    assert backend_of(run, monkeypatch, plan_file, *options) is Backend.NCCL


@pytest.mark.slow
def test_a_plan_by_hand_for_processes_of_this_host_needs_no_profile(run: Run, tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "fsdp2, fsdp2, fsdp2, fsdp2", num_devices=2, num_microbatches=2, global_batch=8)
    path = by_hand(tmp_path / "hand.json", plan, cluster="1x2xcpu")
    found = json.loads(run("check", path, "--memory", "1GiB", "--processes", 1, "--json").output)
    rank = found["ranks"][0]
    assert rank["allowance_bytes"] == 0
    assert 1.0 <= rank["predicted_bytes"] / rank["peak_bytes"] <= 1.15


@pytest.mark.slow
def test_a_memory_that_is_not_known_is_asked_for(run: Run, tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "fsdp2, fsdp2, fsdp2, fsdp2", num_devices=2, num_microbatches=2, global_batch=8)
    error = user_error(run("check", by_hand(tmp_path / "hand.json", plan, cluster="1x2xcpu")))
    assert error.exit_code == 2
    assert "memory" in str(error)


def test_a_missing_plan_is_a_mistake(run: Run, tmp_path: Path) -> None:
    error = user_error(run("check", tmp_path / "none.json"))
    assert error.exit_code == 2
    assert "no file" in error.found


@pytest.mark.slow
def test_a_strategy_that_the_model_does_not_allow_is_a_mistake(run: Run, tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "tp2, tp2, tp2, tp2", num_devices=2, num_microbatches=2, global_batch=8)
    odd = {"name": "odd", "config": CONFIGS["llama-tied"] | {"num_attention_heads": 1, "num_key_value_heads": 1}}
    error = user_error(run("check", by_hand(tmp_path / "odd.json", plan, model=odd)))
    assert "does not divide" in error.expected


# the verdict


def checked(budget_bytes: int, first_step_bytes: int = 0) -> CheckedRank:
    return CheckedRank(
        rank=4,
        stage=1,
        ranks=(4, 5, 7),
        terms={"parameters": 100, "activations": 260},
        where="backward of head",
        first_step_bytes=first_step_bytes,
        wall_s=1.0,
        budget=StageBudget(predicted=TERMS, budget_bytes=budget_bytes),
    )


def test_the_context_and_the_share_of_slack_are_kept_free() -> None:
    assert checked(1000).allowance_bytes == 200 + (200 + 360) * 60 // 600


def test_a_narrow_terminal_shows_the_names_of_all_rows() -> None:
    shown = Console(width=60)
    with shown.capture() as captured:
        shown.print(term_table([checked(1000), checked(1000)]))
    assert all(
        words in captured.get() for words in ("peak in the first step", "context and slack", "predicted", "head")
    )


def test_a_rank_fits_to_the_last_byte() -> None:
    needed = 360 + checked(1000).allowance_bytes
    assert checked(needed).fits
    assert not checked(needed - 1).fits
    assert misfit_lines([checked(needed)]) == []
    assert "(1 bytes) more than" in misfit_lines([checked(needed - 1)])[0]


def test_a_rank_that_takes_of_the_margin_fits_under_pressure() -> None:
    needed = 360 + checked(1000).allowance_bytes
    at_ease, pressed = (
        replace(checked(budget), budget=StageBudget(predicted=TERMS, budget_bytes=budget, margin_bytes=10))
        for budget in (needed + 10, needed + 9)
    )
    assert (at_ease.fits, at_ease.is_pressed, misfit_lines([at_ease])) == (True, False, [])
    assert (pressed.fits, pressed.is_pressed) == (True, True)
    assert "leaves 9 B of the 10 B reserved" in misfit_lines([pressed])[0]
    assert misfit_lines([pressed])[0].startswith("fits under pressure: rank 4")


def test_a_first_step_that_holds_more_counts() -> None:
    assert checked(1000, first_step_bytes=500).peak_bytes == 500


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1, 2), "0–2"), ((0, 1, 3), "0–1, 3"), ((2, 4, 5), "2, 4–5")]
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranges(ranks) == text


@pytest.mark.slow
@pytest.mark.parametrize("is_predicted", [True, False], ids=["run", "traced"])
def test_a_split_on_which_layers_fail_is_named_with_the_place_that_was_changed(
    run: Run, plan_file: Path, is_predicted: bool
) -> None:
    plan = json.loads(plan_file.read_text())
    split = chain_from_config(plan["model"]["config"], name="small").split.model_dump(mode="json", exclude_none=True)
    width = split["hidden_size"]
    plan["model"]["split"] = split | {"hidden_size": width + 1}
    plan |= {"cluster": "1x4xa100-80gb", "prediction": plan["prediction"] if is_predicted else None}
    plan_file.write_text(json.dumps(plan))
    error = str(user_error(run("check", plan_file, "--processes", 1)))
    assert f"model.split.hidden_size: found {width + 1}, for which layers fail (RuntimeError: " in error
    assert f"expected: {width}, the value of the model" in error
    assert "to fix: plan again" in error


def test_a_failure_on_the_split_of_the_model_itself_is_not_the_users() -> None:
    split = chain_from_config(CONFIGS["llama-tied"], name="small").split
    with pytest.raises(IndexError), changed_split_refused(split, lambda: split):
        raise IndexError
