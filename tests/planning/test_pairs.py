"""Models of images with their texts, whose loss compares the whole global batch: what is searched and priced."""

import json

import pytest

from steelyard.cost.layer import layer_cost
from steelyard.cost.setting import Job, Setting
from steelyard.errors import InvalidPlanError, UserError
from steelyard.export import TARGETS
from steelyard.export.target import Request, export_plan
from steelyard.hardware import parse_cluster
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json, parse_value
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import with_batch
from steelyard.planning.not_searched import settings_not_searched
from steelyard.planning.problem import pipeline_settings
from steelyard.tracer.trace import trace
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import CASES, SPLITS


def _chain(name: str) -> ModelChain:
    return chain_from_config(split_config(name), name=name, split=SPLITS[name])


@pytest.fixture(scope="module")
def job() -> Job:
    chain = _chain("clip")
    return Job(
        chain=chain,
        profile=trace(chain, seq_len=16, precision="bf16", degrees=(1, 2, 4), batch=64),
        cluster=parse_cluster("1x4xh100-80gb"),
        seq_len=16,
        global_batch=64,
        precision="bf16",
        budget_bytes=8 * 2**30,
    )


def _setting(job: Job) -> Setting:
    (found,) = [each for each in pipeline_settings(job, Decisions()) if each.pipeline.num_stages == 1]
    return found


def test_the_features_of_images_flow_past_the_blocks_of_the_text_to_the_head() -> None:
    chain = _chain("clip")
    assert chain.family.task is Task.CONTRASTIVE
    names = ["embedding", "image block", "text embedding", "text block", "head"]
    assert [kind.name for kind in chain.kinds] == names
    assert [chain.flow_shapes(layer, 16) for layer in (2, 3, 5)] == [((5, 64),), ((16, 32), (48,)), ((16, 32), (48,))]
    assert chain.read_shapes(4, 16) == ((16, 32),)
    assert chain.read_shapes(6, 16) == ((16, 32), (48,))


@pytest.mark.parametrize(("name", "is_causal"), [("clip", True), ("siglip", False)])
def test_texts_attend_as_the_model_has_it_and_images_to_all_places(name: str, is_causal: bool) -> None:
    chain = _chain(name)
    assert [chain.is_causal(kind) for kind in chain.kinds if "block" in kind.name] == [False, is_causal]


@pytest.mark.slow
def test_a_step_comes_in_one_microbatch_and_the_reason_is_said(job: Job) -> None:
    assert {each.pipeline.num_microbatches for each in pipeline_settings(job, Decisions())} == {1}
    with pytest.raises(UserError, match="the loss compares all samples of the global batch"):
        pipeline_settings(job, Decisions(num_microbatches=2))
    reasons = {each.reason for each in settings_not_searched(job, Decisions()) if each.what == "microbatches"}
    assert any("compares all samples" in reason for reason in reasons)


def test_a_plan_with_two_microbatches_is_refused() -> None:
    plan = CASES["clip, samples over four ranks"].plan
    content = plan.model_dump(mode="json", exclude_none=True) | {"num_microbatches": 2}
    with pytest.raises(InvalidPlanError, match="1: the loss compares all samples"):
        Plan.model_validate(content)


@pytest.mark.slow
def test_gathering_the_features_is_priced_where_ranks_have_samples_of_their_own(job: Job) -> None:
    head, setting = job.chain.kind_of(6), _setting(job)
    plain, again = (layer_cost(head, parse_strategy(text), setting) for text in ("fsdp4", "fsdp4 remat=full"))
    assert 0 < plain.forward_s["pairs"] <= plain.backward_s["pairs"] < again.backward_s["pairs"]
    assert set(layer_cost(job.chain.kind_of(5), parse_strategy("fsdp4"), setting).forward_s).isdisjoint({"pairs"})


@pytest.mark.slow
def test_both_features_are_gathered_for_one_loss_and_those_of_images_for_the_other(job: Job) -> None:
    siglip = trace(_chain("siglip"), seq_len=16, precision="bf16", degrees=(1,), batch=64)
    entries = [profile.layer("head", {}).gathered_entries for profile in (job.profile, siglip)]
    assert entries == [2 * 64 * 48, 64 * 64]


@pytest.mark.slow
def test_logits_of_a_rank_grow_with_the_global_batch(job: Job) -> None:
    large = with_batch(job, 1024)
    one, other = (each.layer("head", {}) for each in (job, large))
    per_sample = other.saved_bytes.per_sample - one.saved_bytes.per_sample
    assert per_sample >= 2 * 4 * (1024 - 64)  # the logits of a row, in fp32, to images and to texts
    assert other.forward.matmul_flop.per_sample - one.forward.matmul_flop.per_sample == 2 * 2 * 48 * (1024 - 64)


def test_a_plan_is_found_and_read_again(job: Job) -> None:
    plan = plan_job(job, Decisions()).plan
    assert plan is not None
    assert plan.num_microbatches == 1
    assert parse_value(json.loads(dump_json(plan)), Plan, InvalidPlanError, what="plan") == plan


def test_an_export_says_that_the_loss_over_all_ranks_is_not_carried_over(job: Job) -> None:
    plan = plan_job(job, Decisions()).plan
    found = {
        name: export_plan(TARGETS[name], Request(plan=plan, headline="", unsupported=(), cluster=job.cluster)).left_out
        for name in ("accelerate", "torchrun")
    }
    assert any("the loss over the pairs of all data ranks" in each for each in found["accelerate"])
    assert not any("pairs" in each for each in found["torchrun"])
