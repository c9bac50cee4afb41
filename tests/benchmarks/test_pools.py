"""Tests of ``benchmarks/pools.py`` on rows with several types of cards."""

import pytest
from pools import calibrated_s, measured_plan, measured_rows


@pytest.fixture(scope="module")
def rows():
    return {run.id: run for run in measured_rows()}


def test_a_row_with_the_numbers_of_another_is_left_out(rows):
    assert "n-0409" not in rows
    assert "n-0405" in rows


@pytest.mark.slow
def test_a_stage_over_several_kinds_of_cards_is_priced_on_the_slowest_of_them(rows):
    plan, cluster = measured_plan(rows["n-0407"])
    assert [pool.device.name for pool in cluster.pools] == ["rtx-2080", "rtx-2080"]
    assert [pool.num_nodes for pool in cluster.pools] == [2, 2]
    assert [len(part.layers) for part in plan.parts] == [12, 14]


def test_a_row_is_calibrated_by_the_others_of_such_machines_and_not_by_itself(rows):
    measured_s = {name: run.number("step_time_s") for name, run in rows.items()}
    predictions_s = {name: seconds / 2 for name, seconds in measured_s.items()} | {"n-0403": 50.0}
    found = {name: calibrated_s(run, list(rows.values()), predictions_s) for name, run in rows.items()}
    assert found["n-0403"] == pytest.approx(100.0)
    assert found["n-0404"] == pytest.approx(measured_s["n-0404"] / 2 * measured_s["n-0403"] / 50)
    assert found["n-0405"] == pytest.approx(measured_s["n-0405"])


@pytest.mark.slow
def test_links_inside_a_node_are_what_the_measured_blocks_wait_for(rows):
    _, cluster = measured_plan(rows["n-0403"])
    rates = {pool.device.name: pool.intra_link.bytes_per_s / 1e9 for pool in cluster.pools}
    assert rates["rtx-3090"] == pytest.approx(31.2)
    assert rates["titan-rtx"] == pytest.approx(3.81)
    assert {link.bytes_per_s for link in cluster.links} == {0.117e9 / 2}, "of one port for both devices"
