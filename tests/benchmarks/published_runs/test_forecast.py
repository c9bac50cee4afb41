"""Laws of the predictions for published runs, and tests of the file that they are written to."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from calibrate import with_parameters
from published_runs.forecast import (
    COLUMNS,
    Forecast,
    Unpredicted,
    counted_bytes,
    forecast,
    forecast_case,
    write_predictions,
)
from published_runs.frameworks import FIXED_SEGMENTS_RESERVE
from published_runs.jobs import Case, case_of

from steelyard.cost.predict import predict_memory
from steelyard.engines.execution import OURS, StateBytes
from tests.benchmarks.published_runs.examples import case, forecasts, outcomes, run_of, sample

TABLES = ("ground_truth_multi.csv (measured)", "ground_truth_single.csv (sums)")
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


def test_what_the_optimizers_step_takes_is_reserved_on_top() -> None:
    terms = TERMS | {"optimizer step": 50}
    assert counted_bytes(terms, "peak reserved", 700) == counted_bytes(TERMS, "peak reserved") + 700
    assert counted_bytes(terms, "torch max_memory_allocated", 700) == 1150


@pytest.mark.parametrize(
    ("source", "cells", "per_parameter"),
    [
        ("bigscience_bloom_prequel", {"zero_stage": "1"}, 6 / 8),
        ("bigscience_bloom_prequel", {"zero_stage": "0"}, 8),
        ("bigscience_bloom_prequel", {"zero_stage": "1", "precision": "bf16 (BF16Optimizer)"}, 0),
        ("aleph_alpha", {"zero_stage": "1", "sp": "False"}, 4 / 8),
        ("ultrascale_playbook", {"zero_stage": "1"}, 2 + 2 / 8),
        ("ultrascale_playbook", {"zero_stage": "0"}, 0),
        ("megatron_lm", {"zero_stage": "0", "vpp": ""}, 0),
    ],
)
def test_a_framework_steps_on_the_copies_that_its_code_makes(
    source: str, cells: dict[str, str], per_parameter: float
) -> None:
    degrees = {"gpus": "8", "dp": "8", "tp": "1", "pp": "1", "mbs": "1", "gbs": "8", "dp_shard": ""}
    execution = case(source, **degrees, **cells).job.execution
    assert isinstance(execution.states, StateBytes)
    assert execution.step_bytes(execution.states.parameters * 800, 8) == 800 * per_parameter


def test_what_steps_alone_gathers_nothing() -> None:
    execution = case("ultrascale_playbook", zero_stage="1").job.execution
    assert execution.step_bytes(1600, 1) == 0


def test_a_step_takes_more_only_as_far_as_the_passes_freed_less() -> None:
    """A microbatch of one sample leaves less than a step on an optimizer that is not sharded takes."""
    degrees = {"gpus": "8", "dp": "1", "tp": "8", "pp": "1", "gbs": "64", "zero_stage": "1", "act_ckpt": "full"}
    short, long = (case("bigscience_bloom_prequel", **degrees, mbs=samples) for samples in ("1", "64"))
    (terms,), (more,) = (predict_memory(each.plan, each.job) for each in (short, long))
    step = short.job.execution.step_bytes(terms["parameters"], 1)
    assert step - terms["activations"] <= terms["optimizer step"] <= step
    assert more["optimizer step"] < 0.03 * step


def test_the_allocator_holds_one_reserve_where_segments_expand_and_one_where_they_do_not() -> None:
    found = [each for run in sample() if isinstance(each := case_of(run), Case)]
    held = {(each.run.text("framework").startswith("torchtitan"), each.job.execution.reserve) for each in found}
    assert held == {(True, OURS.reserve), (False, FIXED_SEGMENTS_RESERVE)}
    assert OURS.reserve < FIXED_SEGMENTS_RESERVE


def test_a_sum_of_kernels_holds_nothing_that_a_step_does_beside_its_layers() -> None:
    """The vocabulary of its layers is divided as it is, and no fitted rate brings back what is not in its times."""
    steps, kernels = (case("vtrain", source_ref=f"VIA-Research/vTrain:data/{name}") for name in TABLES)
    assert kernels.job.chain.vocab_size < steps.job.chain.vocab_size
    assert forecast_case(kernels).step_time_s < forecast_case(steps).step_time_s
    rates = {"intra": 0.7, "inter": 0.7, "efa": 0.7, "intra_latency": 1.0, "inter_latency": 1.0, "step_ms": 5.0}
    assert [with_parameters(each, rates).efficiency.step_s for each in (steps, kernels)] == [0.005, 0.0]


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


def test_the_memory_of_the_first_rank_alone_is_that_of_its_stage() -> None:
    """The last of two stages holds the logits of a large vocabulary."""
    degrees = {"dp": "4", "tp": "1", "pp": "2", "gpus": "8", "mbs": "8", "gbs": "32", "grad_accum": "1"}
    of_the_first = case("ultrascale_playbook", vocab="512000", **degrees)
    assert of_the_first.reports == "first"
    of_the_fullest = replace(of_the_first, reports="fullest")
    assert forecast_case(of_the_first).peak_bytes < forecast_case(of_the_fullest).peak_bytes
    assert forecast_case(of_the_first).fits == forecast_case(of_the_fullest).fits


def test_with_one_microbatch_no_other_ones_logits_are_alive() -> None:
    degrees = {"dp": "8", "tp": "1", "pp": "1", "gpus": "8", "mbs": "8"}
    several = predicted("ultrascale_playbook", gbs="128", grad_accum="2", **degrees)
    one = predicted("ultrascale_playbook", gbs="64", grad_accum="1", **degrees)
    assert one.peak_bytes < several.peak_bytes


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


@pytest.mark.slow
def test_most_of_the_sample_is_within_a_third() -> None:
    timed = [each for each in forecasts() if each.run.step_time_s and each.run.is_recommended]
    near = [each for each in timed if 0.67 < each.step_time_s / (each.run.step_time_s or 1) < 1.5]
    assert len(near) >= 0.9 * len(timed)


def test_a_precision_that_the_device_lacks_is_no_error_but_a_reason() -> None:
    found = forecast(run_of("megatron_lm", gpu="MI355X", gpu_mem_gb="288", precision="mxfp4 + bf16"))
    assert isinstance(found, Unpredicted)
    assert "'nvfp4' on device 'mi355x'" in found.reason


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
