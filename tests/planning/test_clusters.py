"""Tests of the cluster in a plan: a name if that is complete, else the full description."""

from pathlib import Path

import pytest

from steelyard.hardware import Cluster, parse_cluster, with_network
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.variants import with_devices
from tests.cost.examples import cluster, job


def planned(machines: Cluster) -> Plan:
    found = plan_job(job(machines), Decisions(num_stages=1)).plan
    assert found is not None
    return found


def test_a_plan_carries_a_cluster_that_was_described(tmp_path: Path) -> None:
    machines = cluster(2, 4).on(name="lab")
    write_plan(planned(machines), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").machines() == machines


def test_a_plan_carries_the_network_that_was_chosen(tmp_path: Path) -> None:
    machines = with_network(parse_cluster("2x4xa100-80gb"), "ethernet-25")
    write_plan(planned(machines), tmp_path / "plan.json")
    link = read_plan(tmp_path / "plan.json").machines().inter_link
    assert link is not None
    assert link.bytes_per_s == pytest.approx(3.125e9 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 2**34])
def test_a_cluster_that_its_name_describes_is_not_carried(memory: int | None) -> None:
    machines = parse_cluster("2x4xa100-80gb")
    plan = planned(machines if memory is None else machines.with_memory(memory))
    assert plan.hardware is None
    assert plan.machines() == machines


def test_a_file_that_took_the_name_of_another_cluster_is_carried() -> None:
    machines = cluster(2, 4).on(name="2x4xa100-80gb")
    assert planned(machines).machines() == machines


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_other_numbers_of_devices_keep_the_network_that_was_chosen(count: int) -> None:
    machines = with_network(parse_cluster("2x4xa100-80gb"), "ethernet-25")
    found = with_devices(machines, count)
    assert found.inter_link == machines.inter_link
    assert found.name == parse_cluster(found.name).name
