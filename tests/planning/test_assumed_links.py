"""Tests of a profile of one device for plans of many: measured and assumed values, both reported."""

from pathlib import Path

import pytest

from steelyard.cost.accuracy import DENSE, spread_of
from steelyard.cost.compute import compute_time
from steelyard.cost.efficiency import Efficiency, efficiency_of
from steelyard.cost.job import Job
from steelyard.errors import InvalidProfileError, UserError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import find_plan
from steelyard.planning.job import measured_over_catalogue, slowed, with_assumed_links
from steelyard.planning.variants import Study, on_devices
from steelyard.profiles.profile import Profile
from steelyard.report.plan_table import link_lines
from tests.cost import examples
from tests.jobs import make_job, request_of

LINKED = """
version: 1
device: cpu
num_nodes: 1
devices_per_node: 4
intra_link: {name: cable, bandwidth_GBps: 2, latency_us: 20}
"""


def of_one_device(*, device: str = "cpu", device_type: str = "cpu", precision: str = "fp32") -> Profile:
    """Layers that one device measured, a millisecond for each sample."""
    whole = examples.measured_profile(examples.chain(), num_devices=1)
    identity = whole.identity.model_copy(update={"device": device, "device_kind": device_type, "precision": precision})
    layers = tuple(layer for layer in whole.layers if not layer.degrees)
    return whole.model_copy(update={"identity": identity, "layers": layers, "collectives": ()})


def made(cluster: str | Cluster, profile: Profile, **changes: object) -> Job:
    arguments = {"global_batch": 8, "seq_len": examples.SEQ_LEN, "precision": profile.identity.precision}
    return make_job(examples.chain(), cluster, memory="1GiB", profile=profile, **arguments | changes)


def on_gpus(num_devices: int = 8) -> Job:
    """Before anything is assumed."""
    profile = of_one_device(device="NVIDIA A100-SXM4-80GB", device_type="gpu", precision="bf16")
    return examples.job(parse_cluster(f"1x{num_devices}xa100-80gb")).on(profile=profile)


def assumed() -> Job:
    return with_assumed_links(on_gpus(), lambda: examples.profile(examples.chain(), "bf16"))


@pytest.fixture
def cpu_cluster(tmp_path: Path) -> str:
    (tmp_path / "cluster.yaml").write_text(LINKED)
    return str(tmp_path / "cluster.yaml")


def test_one_process_is_enough_to_plan_for_four_whose_links_a_file_states(cpu_cluster: str) -> None:
    plan = plan_job(made(cpu_cluster, of_one_device()), Decisions()).plan
    assert plan is not None
    assert plan.prediction is not None
    assert plan.num_devices == 4
    assert plan.prediction.profile.links_assumed
    assert "layers measured on cpu" in str(plan.prediction.profile)
    assert "links assumed" in str(plan.prediction.profile)
    assert link_lines(plan, plan.prediction) == ["Links assumed, per device and direction: cable inside a node, 2 GB/s"]


def test_a_slower_link_makes_the_plan_slower(tmp_path: Path, cpu_cluster: str) -> None:
    (tmp_path / "slow.yaml").write_text(LINKED.replace("bandwidth_GBps: 2", "bandwidth_GBps: 0.01"))
    options = Decisions(num_stages=1)
    fast, slow = (plan_job(made(name, of_one_device()), options) for name in (cpu_cluster, str(tmp_path / "slow.yaml")))
    assert fast.cost is not None
    assert slow.cost is not None
    assert slow.cost.step_time_s > fast.cost.step_time_s


def test_no_shape_is_planned_that_was_neither_measured_nor_has_rates(cpu_cluster: str) -> None:
    plan = plan_job(made(cpu_cluster, of_one_device()), Decisions()).plan
    assert plan is not None
    assert not any(strategy.shape for strategy in plan.strategies)


def test_links_whose_rates_nobody_knows_are_an_error() -> None:
    with pytest.raises(InvalidProfileError, match="not in the catalogue"):
        plan_job(made("1x4xcpu", of_one_device()), Decisions())


def test_on_gpus_layers_stay_as_measured_and_those_in_other_shapes_come_from_the_trace() -> None:
    job = assumed()
    assert job.profile.layer("block", {}).times
    divided = job.profile.layer("block", examples.tp_shape(2, False))
    assert divided is not None
    assert not divided.times


def test_the_catalogues_rates_are_scaled_to_what_the_measured_layers_take() -> None:
    job = assumed()
    assert measured_over_catalogue(job) == pytest.approx(1.0, rel=1e-6)
    assert measured_over_catalogue(on_gpus()) != pytest.approx(1.0, rel=0.01)


def test_slowed_rates_make_every_kernel_take_so_much_longer() -> None:
    rates: Efficiency = efficiency_of("a100-80gb", "")
    job = on_gpus().on(rates=rates)
    layer = job.profile.layer("block", {}).model_copy(update={"times": ()})
    before, after = (compute_time(layer, 2, job.on(rates=each)) for each in (rates, slowed(rates, 3.0)))
    assert after.forward_s == pytest.approx(3 * before.forward_s)
    assert after.forward_launch_s == pytest.approx(3 * before.forward_launch_s)


def test_the_interval_is_the_catalogues_whose_links_they_are() -> None:
    job = assumed()
    assert spread_of(job, ()) is DENSE


def test_without_rates_in_the_catalogue_nothing_is_known_of_the_errors(cpu_cluster: str) -> None:
    assert spread_of(made(cpu_cluster, of_one_device()), ()) is None


def test_a_profile_of_one_device_prices_other_numbers_of_them(cpu_cluster: str) -> None:
    assert on_devices(made(cpu_cluster, of_one_device()), 2).name == "cluster (1x2)"


def test_a_profile_of_several_devices_prices_their_number_and_divisors_of_it_alone() -> None:
    profile = examples.measured_profile(examples.chain())
    with pytest.raises(InvalidProfileError, match=r"identity.num_devices: found 4\n  expected: 8, as"):
        made("1x8xcpu", profile)
    job = made("1x4xcpu", profile)
    for count in (0, 3, 8):
        with pytest.raises(UserError, match="on which the profile was measured, or a divisor of it"):
            on_devices(job, count)
    study = Study(request_of(job), job)
    for count in (1, 2, 4):
        found = study.plan(on_devices(job, count))
        assert not isinstance(found, str)
        assert found.plan is not None
        by_itself = plan_job(made(f"1x{count}xcpu", profile.for_devices(count))).plan
        assert by_itself is not None
        assert found.plan.prediction == by_itself.prediction


def test_a_profile_of_another_device_is_refused() -> None:
    profile = of_one_device(device="NVIDIA H100 80GB HBM3", device_type="gpu", precision="bf16")
    with pytest.raises(InvalidProfileError, match=r"identity.device: found NVIDIA H100 80GB HBM3\n  expected: a100"):
        made("1x8xa100-80gb", profile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "text"), [("rtx4090", "pcie-4-host inside a node, 31.5 GB/s, 1.69 among 8"), ("a100-80gb", "300 GB/s")]
)
def test_a_link_that_its_devices_crowd_is_shown_with_what_is_left_of_it(device: str, text: str) -> None:
    plan = find_plan("llama3.2-1b", f"1x8x{device}", global_batch=8, seq_len=1024)
    assert plan.prediction is not None
    assert link_lines(plan, plan.prediction)[0].endswith(text)
