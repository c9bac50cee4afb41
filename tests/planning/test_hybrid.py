"""Tests that hybrid sharding is found if many nodes share a job, and that offering it never costs time."""

from dataclasses import replace

import pytest

from steelyard.cost.job import Job
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.model.read import load_model
from steelyard.plan.decisions import Decisions, Space
from steelyard.plan.dimensions import DP
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy, parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.pins import parse_pin
from steelyard.planning.problem import stage_strategies
from steelyard.planning.why_not import not_offered
from steelyard.tracer.cache import cached_trace
from tests.cost.examples import cluster, job
from tests.jobs import make_job

SEQ_LEN = 4096


@pytest.fixture(scope="module")
def llama() -> Job:
    """Llama-3-8B on one node of 8."""
    profile = cached_trace(load_model("llama3-8b"), seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2, 4, 8))
    return make_job(
        "llama3-8b",
        "1x8xa100-80gb",
        global_batch=1024,
        seq_len=SEQ_LEN,
        precision="bf16",
        memory=None,
        profile=profile,
    )


def with_links(machines: Cluster, share: float) -> Cluster:
    """The machines with links between nodes at a share of their rate."""
    link = machines.inter_link
    return machines.on(inter_link=link and replace(link, bytes_per_s=share * link.bytes_per_s))


def planned(of: Job, space: Space = "full") -> Plan:
    found = plan_job(of, Decisions(space=space, num_stages=1)).plan
    assert found is not None
    return found


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def is_hybrid(strategy: Strategy) -> bool:
    return strategy.degree(DP) > 1 and strategy.state_shards > 1


@pytest.mark.slow
def test_over_a_thousand_gpus_states_are_sharded_in_groups(llama: Job) -> None:
    """Gathering over 128 nodes in every microbatch costs more than summing shards once."""
    of = llama.on(cluster=parse_cluster("128x8xa100-80gb"))
    found, without = planned(of), planned(of, "paper")
    assert all(is_hybrid(strategy) for strategy in found.strategies)
    assert step_s(found) < 0.98 * step_s(without)


@pytest.mark.slow
@pytest.mark.nightly  # 57 pipelines of 1,024 GPUs, twice; of one stage both are searched above
def test_over_slow_links_between_nodes_it_is_found_among_all_pipelines(llama: Job) -> None:
    """Plans with layers sharded between microbatches; with whole layers, two stages are faster, half of them hybrid."""
    machines = with_links(parse_cluster("128x8xa100-80gb"), 0.2)
    of = replace(llama.on(cluster=machines), global_batch=4096)
    found, without = (plan_job(of, Decisions(space=space, modes={"zero": (2, 3)})).plan for space in ("full", "paper"))
    assert found is not None
    assert without is not None
    assert all(is_hybrid(strategy) for strategy in found.strategies[:-1]), "all but the head"
    assert step_s(found) < 0.995 * step_s(without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "share", "batch"),
    [
        *((1, 1.0, 64), (2, 1.0, 256), (16, 8.0, 1024), (16, 0.2, 1024)),
        pytest.param(128, 0.2, 4096, marks=pytest.mark.nightly),  # over as many nodes both are searched above, too
    ],
)
def test_the_full_space_is_never_slower_than_the_papers(llama: Job, nodes: int, share: float, batch: int) -> None:
    machines = with_links(parse_cluster(f"{nodes}x8xa100-80gb"), share)
    of = replace(llama.on(cluster=machines), global_batch=batch)
    assert step_s(planned(of)) <= step_s(planned(of, "paper")) * (1 + 1e-9)


def offered(*pins: str) -> set[str]:
    """The levels of strategies without cp for a stage of 16 nodes of 8."""
    of, decisions = job(cluster(16, 8), global_batch=1024), Decisions(pins=pins, max_degrees={"cp": 1})
    return {each.parallel for each in stage_strategies(of, 128, decisions) if is_hybrid(each)}


def test_groups_of_one_node_and_of_four_are_searched_with_tp_inside() -> None:
    assert offered() == {
        *("dp16-fsdp8", "dp16-fsdp4-tp2", "dp16-fsdp2-tp4"),
        *("dp4-fsdp32", "dp4-fsdp16-tp2", "dp4-fsdp8-tp4", "dp4-fsdp4-tp8"),
    }


@pytest.mark.parametrize(("pin", "more"), [("dp=2", "dp2-fsdp64"), ("blocks 0-1: dp8-fsdp16", "dp8-fsdp16")])
def test_a_pin_offers_other_groups(pin: str, more: str) -> None:
    assert more not in offered()
    assert more in offered(pin)


@pytest.mark.slow
def test_what_is_not_searched_says_which_groups_are() -> None:
    of = job(cluster(16, 8), global_batch=1024)
    reasons = dict(not_offered(of, 128, Decisions()))
    assert reasons[parse_strategy("dp8-fsdp16")].startswith("hybrid sharding is searched with groups of one node")


def test_states_are_not_sharded_outside_replicas() -> None:
    with pytest.raises(InvalidPlanError, match="dp outside fsdp"):
        parse_strategy("fsdp2-dp2")
    with pytest.raises(UserError, match="dp outside fsdp"):
        parse_pin("fsdp2-dp2", option="--pin", num_layers=6)
