"""Laws of the predictions for published runs, and the file that they are written to."""

import csv
from pathlib import Path

import pytest

from steelyard.validation.forecast import COLUMNS, Forecast, counted_bytes, forecast, write_predictions
from tests.validation.examples import forecasts, outcomes, run_of

TERMS = {"parameters": 100, "activations": 1000, "context": 10, "allocator slack": 80}


def predicted(source: str, **cells: str) -> Forecast:
    found = forecast(run_of(source, **cells))
    assert isinstance(found, Forecast), found
    return found


def test_what_torch_allocated_has_no_slack_and_no_context() -> None:
    assert counted_bytes(TERMS, "torch max_memory_allocated") == 1100


def test_what_torch_reserves_is_more_of_what_comes_and_goes() -> None:
    assert 1100 < counted_bytes(TERMS, "peak reserved") < 1100 + 1000


def test_the_drivers_tool_sees_the_context() -> None:
    assert counted_bytes(TERMS, "nvidia-smi, max over nodes") == counted_bytes(TERMS, "peak reserved") + 10


@pytest.mark.parametrize("source", ["ultrascale_playbook", "vtrain", "torchtitan", "aleph_alpha"])
def test_a_faster_memory_or_a_wider_device_is_never_slower(source: str) -> None:
    slow = predicted(source, gpu="A100", gpu_mem_gb="80", precision="bf16")
    fast = predicted(source, gpu="H100", gpu_mem_gb="80", precision="bf16")
    assert fast.step_time_s < slow.step_time_s


@pytest.mark.parametrize("source", ["vtrain", "torchtitan", "llm_foundry", "bigscience_bloom_prequel"])
def test_full_remat_takes_longer_and_less_memory(source: str) -> None:
    kept, again = predicted(source, act_ckpt="none"), predicted(source, act_ckpt="full")
    assert again.step_time_s > kept.step_time_s
    assert again.peak_bytes < kept.peak_bytes


def test_sharding_the_optimizer_saves_memory_and_costs_time() -> None:
    degrees = {"dp": "8", "tp": "1", "pp": "1", "gpus": "8", "mbs": "1", "gbs": "64"}
    whole = predicted("ultrascale_playbook", zero_stage="0", **degrees)
    sharded = predicted("ultrascale_playbook", zero_stage="1", **degrees)
    assert sharded.peak_bytes < whole.peak_bytes


def test_tensor_parallelism_over_node_borders_costs() -> None:
    degrees = {"pp": "1", "gpus": "16", "mbs": "4", "gbs": "64", "zero_stage": "0"}
    inside = predicted("ultrascale_playbook", tp="8", dp="2", **degrees)
    across = predicted("ultrascale_playbook", tp="16", dp="1", **degrees)
    assert across.step_time_s > inside.step_time_s


def test_a_longer_network_costs_the_gradients_more() -> None:
    degrees = {"dp": "16", "tp": "1", "pp": "1", "gpus": "16", "mbs": "1", "gbs": "16", "zero_stage": "1"}
    fast = predicted("ultrascale_playbook", inter_link="3200 Gb/s", **degrees)
    slow = predicted("ultrascale_playbook", inter_link="400 Gb/s", **degrees)
    assert slow.step_time_s > fast.step_time_s


def test_most_of_the_sample_is_within_a_third() -> None:
    timed = [each for each in forecasts() if each.run.step_time_s and each.run.is_recommended]
    near = [each for each in timed if 0.67 < each.step_time_s / (each.run.step_time_s or 1) < 1.5]
    assert len(near) >= 0.9 * len(timed)


def test_a_line_per_run_is_written_in_their_order(tmp_path: Path) -> None:
    write_predictions(outcomes(), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == COLUMNS
        lines = list(reader)
    assert [line["id"] for line in lines] == [outcome.run.id for outcome in outcomes()]
    for line in lines:
        assert bool(line["skipped"]) != bool(line["step_time_s"])
        assert line["fits"] in ("", "0", "1")
