"""Tests of calibration by one factor from one measured run: its effect, and refused runs."""

import json
from pathlib import Path

import pytest

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.hardware import is_same_device, parse_cluster
from steelyard.hardware.files import find_device
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.job import InvalidRunError, calibrate, time_factors
from steelyard.planning.price import with_price
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from tests.cost.examples import job, plan
from tests.jobs import job_of

FSDP = ", ".join(["fsdp8"] * 6)
TP = ", ".join(["tp2-fsdp4"] * 6)


def measured(folder: Path, of: Job, text: str, step_time_s: float) -> Path:
    write_plan(plan(of, text, num_microbatches=4), folder / "plan.json")
    path = folder / "run.yaml"
    path.write_text(f"version: 1\nplan: plan.json\nstep_time_s: {step_time_s}\n")
    return path


def record(folder: Path, of: Job, **changes: object) -> Path:
    content = RunRecord(
        model_name="small",
        config_hash=of.chain.config_hash,
        device="Round 80GB",
        num_devices=8,
        strategies=(),
        num_warmup_steps=1,
        median_step_s=3.0,
        tokens_per_s=1.0,
        steps=(StepRecord(step=1, loss=1.0, time_s=3.0, grad_norm=1.0),),
        ranks=(RankRecord(rank=0, stage=0, peak_bytes=1, memory_method="test", num_params=1),),
        predicted_step_s=2.0,
    ).model_dump(mode="json")
    path = folder / "record.json"
    path.write_text(json.dumps(content | changes))
    return path


def calibrated(of: Job, *paths: Path) -> Job:
    return calibrate(of, paths)


def priced(of: Job, text: str = FSDP) -> float:
    return predict(plan(of, text, num_microbatches=4), of).step_time_s


def test_the_measured_plan_is_predicted_as_it_was_measured(tmp_path: Path) -> None:
    assert priced(calibrated(job(), measured(tmp_path, job(), FSDP, 0.5))) == pytest.approx(0.5)


@pytest.mark.parametrize("text", [FSDP, TP])
def test_every_other_plan_is_scaled_alike(tmp_path: Path, text: str) -> None:
    of = job()
    factor = 0.5 / priced(of)
    assert priced(calibrated(of, measured(tmp_path, of, FSDP, 0.5)), text) == pytest.approx(factor * priced(of, text))


def test_a_run_on_fewer_devices_calibrates_a_plan_for_more(tmp_path: Path) -> None:
    small, large = (job(parse_cluster(name)) for name in ("1x8xa100-80gb", "2x8xa100-80gb"))
    path = measured(tmp_path, small, FSDP, 2 * priced(small))
    assert calibrated(large, path).time_factor == pytest.approx(2.0)


def test_a_record_scales_by_measured_over_predicted(tmp_path: Path) -> None:
    assert calibrated(job(), record(tmp_path, job())).time_factor == pytest.approx(1.5)


def test_a_record_of_a_calibrated_plan_replaces_its_factor(tmp_path: Path) -> None:
    assert calibrated(job(), record(tmp_path, job(), predicted_time_factor=2.0)).time_factor == pytest.approx(3.0)


def three(folder: Path, of: Job, *seconds: float) -> list[Path]:
    paths = []
    for number, step_s in enumerate(seconds):
        (folder / str(number)).mkdir()
        paths.append(record(folder / str(number), of, median_step_s=step_s))
    return paths


def test_several_runs_scale_by_their_median_which_an_odd_one_does_not_move(tmp_path: Path) -> None:
    of = calibrated(job(), *three(tmp_path, job(), 2.2, 2.6, 90.0))
    assert of.time_factor == pytest.approx(1.3)
    assert of.group.num_calibrating == 3


def test_two_runs_scale_by_their_geometric_mean(tmp_path: Path) -> None:
    assert calibrated(job(), *three(tmp_path, job(), 2.0, 8.0)).time_factor == pytest.approx(2.0)


def test_runs_of_plans_and_records_go_together(tmp_path: Path) -> None:
    of = job()
    paths = [measured(tmp_path, of, FSDP, 3 * priced(of)), *three(tmp_path, of, 4.0, 40.0)]
    assert [factor for _, factor in time_factors(of, paths)] == pytest.approx([3.0, 2.0, 20.0])
    assert calibrated(of, *paths).time_factor == pytest.approx(3.0)


def test_one_of_several_that_is_of_another_model_or_device_is_refused_by_its_name(tmp_path: Path) -> None:
    good, bad = three(tmp_path, job(), 2.0, 3.0)
    content = json.loads(bad.read_text())
    for changes, message in (
        ({"device": "NVIDIA A100-SXM4-80GB"}, "a run on round"),
        ({"config_hash": "0"}, "another"),
    ):
        bad.write_text(json.dumps(content | changes))
        with pytest.raises(InvalidRunError, match=message) as raised:
            calibrated(job(), good, bad)
        assert str(bad) in raised.value.field


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path, job())
    with pytest.raises(InvalidRunError, match="twice"):
        calibrated(job(), path, path.parent / "." / path.name)


def test_a_plan_says_how_many_runs_its_times_rest_on_and_keeps_it_when_priced_again(tmp_path: Path) -> None:
    of = calibrated(job(), *three(tmp_path, job(), 2.2, 2.6, 3.0))
    found = with_price(plan(of, FSDP, num_microbatches=4), of)
    assert found.prediction is not None
    assert "calibrated by 3 measured runs" in str(found.prediction.profile)
    assert job_of(found, cluster=of.cluster, profile=of.profile).group.num_calibrating == 3


def test_a_plan_says_by_what_its_times_were_scaled_and_keeps_it_when_priced_again(tmp_path: Path) -> None:
    of = calibrated(job(), record(tmp_path, job()))
    found = plan_job(of, Decisions(num_stages=1, num_microbatches=4, max_degrees={"tp": 1})).plan
    assert found is not None
    assert found.prediction is not None
    assert found.prediction.profile.time_factor == pytest.approx(1.5)
    assert Plan.model_validate(found.model_dump(mode="json")) == found
    again = with_price(found, job_of(found, cluster=of.cluster, profile=of.profile))
    assert again.prediction is not None
    assert again.prediction.step_time_s == pytest.approx(found.prediction.step_time_s)


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    other = job(num_hidden_layers=8)
    with pytest.raises(InvalidRunError, match="another model"):
        calibrated(other, measured(tmp_path, job(), FSDP, 0.5))
    with pytest.raises(InvalidRunError, match="another model"):
        calibrated(other, record(tmp_path, job()))


def test_a_run_on_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunError, match="a run on round"):
        calibrated(job(), record(tmp_path, job(), device="NVIDIA A100-SXM4-80GB"))


def test_a_record_without_a_prediction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunError, match="had no prediction"):
        calibrated(job(), record(tmp_path, job(), predicted_step_s=None))


@pytest.mark.parametrize("text", ["version: 1\nplan: p\nstep_time_s: 0\n", "version: 1\nplan: p\n", "1", "a: [", ""])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRunError):
        calibrated(job(), path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunError, match="--calibrate"):
        calibrated(job(), tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("found", "name", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb", True),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", True),
        ("NVIDIA A100-SXM4-80GB", "h100-80gb", False),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb", True),
        ("NVIDIA A100-SXM4-80GB", "a100-pcie-80gb", False),
        ("NVIDIA GeForce RTX 3090", "rtx-3090", True),
        ("cpu", "cpu", True),
        ("cpu", "h100-80gb", False),
    ],
)
def test_a_drivers_name_means_a_device_of_the_catalogue(found: str, name: str, same: bool) -> None:
    assert is_same_device(found, find_device(name)) is same
