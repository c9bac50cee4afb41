"""Tests of explanations of strategies in the plan's own pipeline configuration."""

from dataclasses import replace

import pytest

from steelyard.cost.predict import predict
from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.planning.explain import explain_plan, plan_verdicts, search_for_report
from steelyard.planning.variants import Study
from tests.cost.examples import job, job_on_shared_cores, plan
from tests.jobs import request_of

TWO_CHUNKS = ("fsdp4, fsdp4, fsdp4", "fsdp4, fsdp4", "fsdp4, fsdp4", "fsdp4, fsdp4, fsdp4")


def test_a_plan_in_chunks_has_a_verdict_on_every_strategy() -> None:
    of = job(global_batch=32, num_hidden_layers=8)
    in_chunks = plan(of, *TWO_CHUNKS, num_microbatches=4, num_chunks=2, schedule="interleaved-1f1b")
    verdicts = plan_verdicts(in_chunks, of, Decisions())
    assert {each.verdict for each in verdicts} >= {"undominated", "not offered"}
    assert {each.strategy for each in verdicts if each.kind == "block"} >= {"fsdp4", "dp4", "tp4"}


def test_a_plan_in_chunks_is_explained_with_everything() -> None:
    of = job(global_batch=32, num_hidden_layers=8)
    in_chunks = plan(of, *TWO_CHUNKS, num_microbatches=4, num_chunks=2, schedule="interleaved-1f1b")
    options = Decisions(num_stages=2, num_microbatches=4, max_degrees={"tp": 1})
    found = explain_plan(in_chunks, Study(request_of(of, options), of), everything=True)
    assert found.verdicts
    assert {"1f1b", "gpipe"} <= {baseline.name for baseline in found.rivals}


def test_an_explanation_says_where_a_plan_of_the_models_makers_is_not_read() -> None:
    of = job(global_batch=8, num_hidden_layers=2)
    assert of.chain.split is not None
    why = "styles of its own tp plan are not supported: embedding_rowwise (of mlp.up_embed)"
    layer_types = [
        each.model_copy(update={"unread_plan": why} if each.name == "block" else {}) for each in of.chain.split.kinds
    ]
    told = replace(of, chain=replace(of.chain, split=of.chain.split.model_copy(update={"kinds": tuple(layer_types)})))
    options = Decisions(num_stages=1, num_microbatches=1, max_degrees={"tp": 1})
    whole = plan(of, "fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=1)
    assert not explain_plan(whole, Study(request_of(of, options), of)).notes
    expected = (f"How tp divides the block follows from its structure: {why}.",)
    assert explain_plan(whole, Study(request_of(told, options), told)).notes == expected
    request = request_of(told, options)
    found = search_for_report(whole, request, told, predict(whole, told), time_limit_s=0)
    assert found.explanation.notes == expected


def test_searches_are_counted() -> None:
    of, said = job(global_batch=8, num_hidden_layers=2), list[str]()
    whole = plan(of, "fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=1)
    options = Decisions(num_stages=1, num_microbatches=1, max_degrees={"tp": 1})
    explain_plan(whole, Study(request_of(of, options), of), progress=said.append)
    assert [each.partition(" of ")[0] for each in said] == [str(number) for number in range(1, len(said) + 1)]
    assert {each.partition(" of ")[2].partition(",")[0] for each in said} == {str(len(said))}
    assert any(each.endswith(", without fsdp") for each in said)


@pytest.mark.slow
def test_where_processes_share_cores_the_simulator_ranks_baselines_as_it_ranks_plans() -> None:
    of = job_on_shared_cores()
    by_hand, best = plan(of, "tp2, tp2, tp2, tp2, tp2, tp2", num_microbatches=4), plan_job(of, Decisions()).cost
    baselines = {baseline.name: baseline for baseline in explain_plan(by_hand, Study(request_of(of), of)).rivals}
    assert best is not None
    any_plan_s = baselines["any plan"].step_time_s
    assert any_plan_s is not None
    assert any_plan_s == pytest.approx(best.step_time_s, rel=1e-3)
    assert any_plan_s <= best.step_time_s  # a baseline may be faster in simulation, which any plan then is
