"""Tests of host requirements of a plan, checked before any process takes memory."""

import os
from pathlib import Path

import pytest
import torch

from steelyard.errors import InvalidPlanError, UserError
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.runtime import checks
from steelyard.runtime.checks import check_host, device_type_of, free_bytes
from steelyard.runtime.launch import launch
from steelyard.runtime.options import TrainOptions
from tests.plan import examples

ALL = range(4)
"""The ranks of the example, two of each stage."""


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment that the checks changed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def plan(**changes: object) -> Plan:
    return Plan.model_validate(examples.CONTENT | {"cluster": "1x4xa100-80gb"} | changes)


def have_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)


def have_memory(patch: pytest.MonkeyPatch, folder: Path, available: int, *, limit: int | None = None) -> None:
    """A host with so many KiB, and a control group that may take so many bytes."""
    (folder / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {available} kB\nSwapFree: 1 kB\nHugePages: 0\n")
    (folder / "memory.max").write_text("max" if limit is None else str(limit))
    (folder / "memory.current").write_text("700")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    patch.setattr(checks, "MEMINFO", folder / "meminfo")
    patch.setattr(checks, "CGROUP", folder)


@pytest.mark.parametrize("num_gpus", [0, 3])
def test_a_plan_for_gpus_is_refused_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    have_gpus(monkeypatch, num_gpus)
    with pytest.raises(InvalidPlanError, match=r"4 GPUs \(1x4xa100-80gb\)(.|\n)*--device cpu") as raised:
        check_host(plan(), ALL, device=None)
    assert f"which has {num_gpus or 'none'}" in raised.value.found


def test_only_the_ranks_of_this_host_need_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    check_host(plan(), range(2, 4), device=None)


@pytest.mark.parametrize(("cluster", "device"), [("1x4xa100-80gb", "cpu"), ("1x4xcpu", None)])
def test_a_run_on_the_cpu_hides_the_gpus(monkeypatch: pytest.MonkeyPatch, cluster: str, device: str | None) -> None:
    have_gpus(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_host(plan(cluster=cluster), ALL, device=device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_may_be_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 4)
    check_host(plan(cluster="1x4xcpu"), ALL, device="gpu")


@pytest.mark.parametrize(("backend", "device_type"), [("nccl", "gpu"), ("gloo", None)])
def test_the_device_type_of_an_unknown_cluster_is_told_by_what_it_communicates_with(
    backend: str, device_type: str | None
) -> None:
    prediction = examples.CONTENT["prediction"] | {"backend": backend}
    assert device_type_of(plan(cluster="lab", prediction=prediction)) == device_type


def test_a_plan_of_a_cluster_that_nobody_knows_runs_on_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    assert device_type_of(plan(cluster="lab")) is None
    check_host(plan(cluster="lab"), ALL, device=None)


def huge(**changes: object) -> Plan:
    """The example with 30 GiB and 20 GiB of a rank."""
    found = plan(cluster="1x4xcpu", **changes)
    assert found.prediction is not None
    stages = tuple(
        stage.model_copy(update={"memory_bytes": {"activations": gib * 2**30}})
        for stage, gib in zip(found.prediction.stages, (30, 20), strict=True)
    )
    return found.model_copy(update={"prediction": found.prediction.model_copy(update={"stages": stages})})


@pytest.mark.parametrize(
    ("ranks", "needed_gib"), [(ALL, 100), (range(2), 60), (range(2, 4), 40)], ids=["all", "first stage", "second stage"]
)
def test_processes_that_the_host_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: range, needed_gib: int
) -> None:
    have_memory(monkeypatch, tmp_path, (needed_gib << 20) - 2)
    with pytest.raises(InvalidPlanError, match=rf"up to {needed_gib}(\.0)? GiB(.|\n)*--memory"):
        check_host(huge(), ranks, device=None)
    have_memory(monkeypatch, tmp_path, needed_gib << 20)
    check_host(huge(), ranks, device=None)


def test_insisting_on_the_cpu_still_asks_for_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_memory(monkeypatch, tmp_path, 2**20)
    with pytest.raises(InvalidPlanError, match="free memory of this host"):
        check_host(huge(), ALL, device="cpu")


def test_a_plan_without_prediction_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_memory(monkeypatch, tmp_path, 0)
    check_host(plan(cluster="1x4xcpu", prediction=None), ALL, device=None)


def test_free_memory_is_what_can_be_freed_with_swap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_memory(monkeypatch, tmp_path, 7)
    assert free_bytes() == 8 * 1024


def test_a_control_group_may_leave_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_memory(monkeypatch, tmp_path, 7, limit=1500)
    assert free_bytes() == 1000


def test_a_host_that_does_not_say_what_is_free_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "MEMINFO", tmp_path / "absent")
    assert free_bytes() is None
    check_host(huge(), ALL, device=None)


def test_launch_refuses_before_any_process_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_gpus(monkeypatch, 0)
    monkeypatch.setattr("steelyard.runtime.launch.run_processes", None)
    write_plan(plan(), tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("to be or not to be " * 1000)
    with pytest.raises(InvalidPlanError, match="a plan for 4 GPUs"):
        launch(tmp_path / "plan.json", tmp_path / "text.txt", TrainOptions(steps=1))


def test_a_device_of_no_type_is_named() -> None:
    with pytest.raises(UserError, match=r"--device: found 'gpus'(.|\n)*gpu or cpu"):
        TrainOptions(device="gpus")
