"""What is said of the strategies of a plan's own pipeline setting."""

from steelyard.planning.explain import explain_plan, plan_verdicts
from steelyard.planning.problem import PlanOptions
from tests.cost.examples import job, plan

TWO_CHUNKS = ("fsdp4, fsdp4, fsdp4", "fsdp4, fsdp4", "fsdp4, fsdp4", "fsdp4, fsdp4, fsdp4")


def test_a_plan_in_chunks_has_a_verdict_on_every_strategy() -> None:
    of = job(global_batch=32, num_hidden_layers=8)
    in_chunks = plan(of, *TWO_CHUNKS, num_microbatches=4, num_chunks=2, schedule="interleaved-1f1b")
    verdicts = plan_verdicts(in_chunks, of, PlanOptions())
    assert {each.verdict for each in verdicts} >= {"undominated", "not offered"}
    assert {each.strategy for each in verdicts if each.kind == "block"} >= {"fsdp4", "dp4", "tp4"}


def test_a_plan_in_chunks_is_explained_with_everything() -> None:
    of = job(global_batch=32, num_hidden_layers=8)
    in_chunks = plan(of, *TWO_CHUNKS, num_microbatches=4, num_chunks=2, schedule="interleaved-1f1b")
    options = PlanOptions(num_stages=2, num_microbatches=4, max_degrees={"tp": 1})
    found = explain_plan(in_chunks, of, options, everything=True)
    assert found.verdicts
    assert {"1f1b", "gpipe"} <= {rival.name for rival in found.rivals}
