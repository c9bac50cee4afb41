"""Tests of the search with experts divided over ranks: its options, results and messages."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.cost.job import DeviceGroup, Job
from steelyard.engines.capabilities import unsupported
from steelyard.engines.megatron import MEGATRON
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import find_plan
from steelyard.planning.engine_fit import fit_plan
from steelyard.planning.problem import stage_strategies
from steelyard.planning.why_not import not_offered
from steelyard.tracer.cache import cached_trace
from tests.jobs import make_job
from tests.runtime.models import FAMILY_CONFIGS

CONFIG = FAMILY_CONFIGS["mixtral"] | {"num_local_experts": 8, "hidden_size": 256, "intermediate_size": 4096}


@cache
def chain() -> ModelChain:
    """The model, which is split when a test first asks for it."""
    return chain_from_config(CONFIG, name="test")


@pytest.fixture(scope="module")
def job() -> Job:
    """Two nodes of four devices."""
    return Job(
        chain=chain(),
        groups=(
            DeviceGroup(
                profile=cached_trace(chain(), seq_len=32, precision="bf16", degrees=(1,)),
                cluster=parse_cluster("2x4xh100-80gb"),
                budget_bytes=8 * 2**30,
            ),
        ),
        seq_len=32,
        global_batch=32,
        precision="bf16",
    )


@pytest.mark.slow
def test_groups_of_a_node_are_offered_and_others_are_not_worth_a_search(job: Job) -> None:
    degrees = {each.expert_degree for each in stage_strategies(job, 8, Decisions()) if each.tensor_degree == 1}
    assert degrees == {1, 4, 8}
    reasons = {str(strategy): why for strategy, why in not_offered(job, 8, Decisions())}
    assert reasons["fsdp8 ep2"].startswith("ep is searched with groups of 4 ranks, as many as a node allows")


def test_experts_over_all_ranks_are_searched_if_no_group_fits_inside_a_node(job: Job) -> None:
    group = replace(job.groups[0], cluster=parse_cluster("2x1xh100-80gb"))
    found = stage_strategies(replace(job, groups=(group,)), 2, Decisions())
    assert {each.expert_degree for each in found} == {1, 2}


@pytest.mark.slow
def test_a_pin_offers_what_is_not_worth_a_search(job: Job) -> None:
    pinned = Decisions(pins=("ep=2",))
    assert {each.expert_degree for each in stage_strategies(job, 8, pinned)} == {1, 2, 4, 8}


@pytest.mark.slow
def test_a_pin_of_all_layers_is_for_those_with_experts(job: Job) -> None:
    found = plan_job(job, Decisions(pins=("ep=4",))).plan
    assert found is not None
    layer_types = [chain().type_of(layer) for layer in range(chain().num_layers)]
    degrees = [strategy.expert_degree for strategy in found.strategies]
    assert degrees == [4 if layer_type.num_experts else 1 for layer_type in layer_types]


@pytest.mark.slow
def test_the_space_of_the_papers_divides_no_experts(job: Job) -> None:
    assert {each.expert_degree for each in stage_strategies(job, 8, Decisions(space="paper"))} == {1}


@pytest.mark.slow
def test_an_engine_divides_experts_of_the_types_that_it_knows(job: Job) -> None:
    knows = replace(MEGATRON.capabilities, experts_of=frozenset({"mixtral"}))
    for means, degrees in ((knows, {1, 4, 8}), (replace(knows, experts_of=frozenset({"olmoe"})), {1})):
        of_engine = replace(job, engine=replace(MEGATRON, capabilities=means))
        offered = stage_strategies(of_engine, 8, Decisions())
        assert {each.expert_degree for each in offered if each.tensor_degree == 1} == degrees


@pytest.mark.slow
def test_a_plan_says_the_imbalance_it_assumes(job: Job) -> None:
    found = plan_job(replace(job, imbalance=1.5), Decisions()).plan
    assert found is not None
    assert found.prediction is not None
    assert "expert load imbalance assumed: 1.5" in str(found.prediction.profile)


def test_an_imbalance_below_one_is_an_error() -> None:
    with pytest.raises(UserError, match=r"imbalance: found 0\.5"):
        make_job(
            chain(),
            "1x4xh100-80gb",
            global_batch=4,
            seq_len=32,
            precision="bf16",
            memory=None,
            profile=None,
            imbalance=0.5,
        )


def test_an_imbalance_of_a_model_without_experts_is_an_error() -> None:
    with pytest.raises(UserError, match=r"imbalance: found 1\.5 for .*\n.*a model with experts"):
        find_plan(FAMILY_CONFIGS["llama"], "1x4xh100-80gb", global_batch=4, seq_len=32, imbalance=1.5)


@pytest.mark.slow
def test_the_imbalance_that_a_caller_gives_is_the_one_that_a_plan_assumes(job: Job) -> None:
    decisions = Decisions(pins=("ep=4",))
    asked = {"global_batch": 32, "seq_len": 32, "profile": job.profile, "decisions": decisions}
    found = find_plan(chain(), "2x4xh100-80gb", imbalance=1.5, **asked)
    assert found.prediction is not None
    assert found.prediction.profile.imbalance == 1.5


@pytest.mark.slow
@pytest.mark.parametrize("pin", ["ep=4", "blocks 0-0: ep=4"])
def test_a_framework_of_one_strategy_divides_experts_where_that_is_asked_for(job: Job, pin: str) -> None:
    wanted = plan_job(job, Decisions(pins=(pin,))).plan
    assert wanted is not None
    fitted = fit_plan(wanted, job, MEGATRON)
    layer_types = [chain().type_of(layer) for layer in range(chain().num_layers)]
    assert [each.expert_degree for each in fitted.plan.strategies] == [
        4 if layer_type.num_experts else 1 for layer_type in layer_types
    ]
    assert (fitted.given_up, unsupported(fitted.plan, MEGATRON.capabilities)) == ((), ())
