"""Tests of plans for the remaining devices of a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json
from steelyard.plan.plan import Plan
from steelyard.planning.choose import NothingFitsError, PlanningResult, plan_job
from steelyard.planning.complete import find_plan
from steelyard.planning.elastic import check_replannable, fastest_on, replan
from steelyard.planning.problem import is_beaten, make_tables
from steelyard.planning.variants import Study, with_shape
from tests.cost.examples import CONFIG, SEQ_LEN, chain, measured_profile
from tests.jobs import make_job, request_of
from tests.runtime.models import make_plan

HERE = Path()
BATCH = 64


def job_on(cluster: str, *, model: str = "llama3-8b") -> Job:
    return make_job(model, cluster, global_batch=BATCH, seq_len=2048, precision="bf16", memory=None, profile=None)


def plan_of(job: Job, options: Decisions | None = None) -> Plan:
    plan = plan_job(job, options or Decisions()).plan
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def job() -> Job:
    return job_on("4x4xh100-80gb")


@pytest.fixture(scope="module")
def plan(job: Job) -> Plan:
    return plan_of(job)


@pytest.mark.slow
def test_all_devices_keep_the_plan(plan: Plan) -> None:
    found = replan(plan, (4, 4, 4, 4), HERE)
    assert found.plan is plan
    assert found.taken == (4, 4, 4, 4)
    assert found.notice == ""


@pytest.mark.slow
def test_a_lost_node_gives_nearly_the_plan_that_the_whole_search_gives_on_what_is_left(plan: Plan) -> None:
    found = replan(plan, (4, 4, 4), HERE).plan
    alone = {count: plan_of(job_on(f"{count}x4xh100-80gb")) for count in (2, 3)}
    best = min(map(step_s, alone.values()))
    assert best <= step_s(found) <= best / 0.99


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def test_numbers_of_devices_that_a_measured_profile_lacks_are_left_out(tmp_path: Path) -> None:
    """It has collectives of 2 and 4 ranks, and no link says how fast those of 3 are."""
    profile = measured_profile(chain())
    asked: dict[str, Any] = {"global_batch": 12, "seq_len": SEQ_LEN, "memory": "1GiB", "precision": "fp32"}
    (tmp_path / "profile.json").write_text(dump_json(profile))
    plan = find_plan(CONFIG, "1x4xcpu", profile=tmp_path / "profile.json", **asked)
    found = replan(plan, (3,), tmp_path)
    assert (found.plan.num_devices, found.taken) == (2, (2,))


@pytest.mark.slow
def test_what_is_left_trains_the_same_batch_and_length_in_the_same_memory(plan: Plan) -> None:
    found = replan(plan, (4, 4), HERE).plan
    assert (found.global_batch, found.seq_len, found.precision) == (plan.global_batch, plan.seq_len, plan.precision)
    assert found.prediction is not None
    assert plan.prediction is not None
    assert found.prediction.budget_bytes == plan.prediction.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts",
    [
        (4, 3, 4, 4),
        *(pytest.param(hosts, marks=pytest.mark.nightly) for hosts in ((3, 4, 4, 4), (4, 4, 1), (3,), (3, 4))),
    ],
)
def test_as_many_devices_take_part_as_the_plan_has(plan: Plan, hosts: Sequence[int]) -> None:
    found = replan(plan, hosts, HERE)
    assert sum(found.taken) == found.plan.num_devices
    assert all(taken <= there for taken, there in zip(found.taken, hosts, strict=True))
    assert len({taken for taken in found.taken if taken}) == 1
    assert found.taken[0] > 0, "it holds the store"


@pytest.mark.slow
def test_more_devices_left_never_cost_time(job: Job) -> None:
    times = [fastest_on(request_of(job), job, {"all": (4,) * count}) for count in (1, 2, 3, 4)]
    steps = [step_s(each[0]) for each in times if each is not None]
    assert len(steps) == len(times)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_fewer_devices_that_cannot_be_faster_are_not_searched(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(job: Job, *arguments: Any, **options: Any) -> PlanningResult:
        searched.append(job.cluster.num_devices)
        return plan_job(job, *arguments, **options)

    monkeypatch.setattr("steelyard.planning.variants.plan_job", counted)
    monkeypatch.setattr("steelyard.planning.elastic.MOST_S", 1000.0)
    best = fastest_on(request_of(job), job, {"all": (4, 4)})
    assert best is not None
    assert (best[1], searched) == ({"all": (2, 4)}, [8])


def test_where_processes_share_cores_nothing_shows_without_a_search(job: Job) -> None:
    shared = job.on(profile=job.profile.model_copy(update={"busy_speeds": (1.0,) * 16}))
    assert is_beaten(job, make_tables(job, Decisions()), 1e-6)
    assert not is_beaten(shared, make_tables(shared, Decisions()), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "pinned"),
    [*(pytest.param(*each, marks=pytest.mark.nightly) for each in ((5, None), (7, 4))), (6, None)],
)
def test_no_part_of_the_devices_that_was_not_searched_has_a_faster_plan(num_devices: int, pinned: int | None) -> None:
    job = replace(job_on("1x8xh100-80gb"), global_batch=16)
    request = request_of(job, Decisions(num_microbatches=pinned))
    plans = [
        Study(request, job.on(cluster=with_shape(job.cluster, 1, count))).plan() for count in range(num_devices, 0, -1)
    ]
    steps = [step_s(each.plan) for each in plans if not isinstance(each, str) and each.plan is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.planning.elastic.MOST_S", 1000.0)
        patch.setattr("steelyard.planning.elastic.LEAST_SHARE", 0.0)
        best = fastest_on(request, job, {"all": (num_devices,)})
    assert best is not None
    assert step_s(best[0]) == min(steps)


@pytest.mark.slow
def test_the_notice_says_what_the_loss_costs(plan: Plan) -> None:
    notice = replan(plan, (4, 4, 4), HERE).notice
    assert notice.startswith("16 → ")
    assert " devices, predicted " in notice
    assert " a step (" in notice


@pytest.mark.slow
def test_what_was_asked_is_kept_where_what_is_left_can_have_it(job: Job) -> None:
    asked = plan_of(job, Decisions(pins=("blocks 0-31: remat=full",)))
    found = replan(asked, (4, 4), HERE)
    assert {str(strategy.remat) for strategy in found.plan.strategies[1:33]} == {"full"}
    assert "given up" not in found.notice


@pytest.mark.slow
def test_what_was_asked_is_given_up_where_nothing_that_is_left_can_have_it(job: Job) -> None:
    asked = plan_of(job, Decisions(num_stages=16))
    assert asked.asked == Decisions(num_stages=16)
    assert "given up: --stages 16" in replan(asked, (4, 4), HERE).notice


@pytest.mark.slow
def test_devices_that_hold_no_plan_are_an_error_that_says_what_to_do(job: Job) -> None:
    tight = job.on(cluster=with_shape(job.cluster, 2, 8), budget_bytes=13_000_000_000)
    with pytest.raises(NothingFitsError, match="1 device left, no part of which has a plan") as raised:
        replan(plan_of(tight, Decisions(num_stages=1)), (1,), HERE)
    assert "start again when devices are back" in str(raised.value)


@pytest.mark.slow
def test_a_plan_whose_costs_are_not_known_is_refused_before_it_runs(plan: Plan) -> None:
    foreign = plan.model_copy(update={"cluster": "our-machines", "hardware": None, "prediction": None})
    with pytest.raises(UserError, match=r"--elastic: .*: found 'our-machines'"):
        check_replannable(foreign, HERE)


@pytest.mark.slow
def test_what_a_run_waits_for_is_not_searched_to_the_end(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[bool] = []

    def noted(*arguments: Any, to_the_end: bool, **options: Any) -> PlanningResult:
        ends.append(to_the_end)
        return plan_job(*arguments, to_the_end=to_the_end, **options)

    monkeypatch.setattr("steelyard.planning.variants.plan_job", noted)
    replan(plan, (4, 4), HERE)
    assert set(ends) == {False}


POOLS = ("2x2xh100-80gb", "2x2xa100-80gb")


@pytest.fixture(scope="module")
def pooled() -> Plan:
    plan = find_plan("llama3-8b", "+".join(POOLS), global_batch=BATCH, seq_len=4096)
    assert set(plan.cluster.split("+")) == set(POOLS)
    return plan


@pytest.mark.slow
def test_hosts_of_all_pools_keep_the_plan_and_come_in_its_order(pooled: Plan) -> None:
    first, second = pooled.cluster.split("+")
    found = replan(pooled, (2, 2, 2, 2), HERE, (second, first, second, first))
    assert found.plan is pooled
    assert found.taken == (2, 2, 2, 2)
    assert found.order == (1, 3, 0, 2)


@pytest.mark.slow
def test_a_lost_node_of_a_pool_gives_nearly_the_plan_of_the_whole_search_over_what_is_left(pooled: Plan) -> None:
    found = replan(pooled, (2, 2, 2), HERE, (POOLS[1], POOLS[0], POOLS[0]))
    searched = find_plan("llama3-8b", f"{POOLS[0]}+1x2xa100-80gb", global_batch=BATCH, seq_len=4096)
    assert set(found.plan.cluster.split("+")) == {POOLS[0], "1x2xa100-80gb"}
    assert step_s(searched) <= step_s(found.plan) <= step_s(searched) / 0.99
    assert sum(found.taken) == found.plan.num_devices
    places = [("1x2xa100-80gb", POOLS[0])[place > 0] for place in found.order if found.taken[place]]
    assert list(dict.fromkeys(places)) == found.plan.cluster.split("+")


@pytest.mark.slow
def test_a_pool_without_hosts_leaves_a_plan_on_the_other(pooled: Plan) -> None:
    found = replan(pooled, (2, 2), HERE, (POOLS[0], POOLS[0]))
    assert found.plan.cluster == POOLS[0]
    assert found.taken == (2, 2)
    assert found.notice.startswith("8 → 4 devices, predicted ")


@pytest.mark.slow
def test_hosts_of_a_pool_that_the_new_plan_leaves_out_are_spare() -> None:
    """A model so small that more than one device only costs time."""
    first, second = "2x2xh100-80gb", "1x2xl40s"
    written = make_plan("llama-tied", "dp4, dp4", "dp2, dp2", sizes=(4, 2))
    hosts = (first, second, first)
    found = replan(written.model_copy(update={"cluster": f"{first}+{second}"}), (2, 1, 2), HERE, hosts)
    (used,) = (pool for pool in (first, second) if pool.endswith(found.plan.machines().device.name))
    assert sum(found.taken) == found.plan.num_devices
    assert all(count == 0 for count, pool in zip(found.taken, hosts, strict=True) if pool != used)
    assert hosts[found.order[0]] == used


@pytest.mark.slow
@pytest.mark.parametrize("pools", [(), ("", POOLS[0]), (POOLS[0], "2x2xh200")])
def test_a_host_of_no_pool_of_the_plan_is_refused(pooled: Plan, pools: Sequence[str]) -> None:
    with pytest.raises(UserError, match=r"--pool: found .*\n +expected: the device group of this host"):
        replan(pooled, (2, 2), HERE, pools)


@pytest.mark.slow
def test_a_pool_is_refused_where_the_plan_has_none(plan: Plan) -> None:
    with pytest.raises(UserError, match="expected: a plan over pools"):
        replan(plan, (4, 4, 4, 4), HERE, (POOLS[0],) * 4)
