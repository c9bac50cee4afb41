"""Plans by what a stage holds as each layer works: faster, accepted, and with a smaller gap."""

import pytest

from steelyard.cost.predict import predict_memory
from steelyard.plan.decisions import Decisions
from steelyard.planning import acceptance, walked_search
from steelyard.planning.acceptance import accept
from steelyard.planning.problem import make_tables
from tests.jobs import make_job


@pytest.mark.slow
def test_layers_as_they_work_give_faster_plans_that_fit_and_a_smaller_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(
        "llama2-13b",
        "2x8xa100-40gb",
        global_batch=128,
        seq_len=4096,
        precision="bf16",
        memory="18GiB",
        profile=None,
    )
    tables = make_tables(job, Decisions())
    found = accept(job, tables)
    best = found.ranked[0]
    assert all(sum(terms.values()) <= job.budget_bytes for terms in predict_memory(best.plan, job))
    monkeypatch.setattr(acceptance, "search_as_layers_work", lambda *_: None)
    without = accept(job, tables)
    assert best.outcome.score_s < without.ranked[0].outcome.score_s
    assert found.search.gap < without.search.gap
    assert without.search.lower_bound_s <= found.search.lower_bound_s <= best.outcome.score_s


def test_the_fastest_plan_of_one_stage_is_told_from_all_others_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(
        "llama3-8b",
        "1x8xa100-80gb",
        global_batch=64,
        seq_len=4096,
        precision="bf16",
        memory="30GiB",
        profile=None,
    )
    tables = make_tables(job, Decisions(num_stages=1))
    found = accept(job, tables).search
    assert found.status == "optimal"
    for each in (acceptance, walked_search):
        monkeypatch.setattr(each, "search_all_states", lambda _: None)
    without = accept(job, tables).search
    assert without.status == "feasible"
    assert without.lower_bound_s < found.best.score_s <= without.best.score_s
