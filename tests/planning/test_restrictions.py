"""A plan without one of its means is never faster than the plan, also where the search ends with a gap."""

import pytest

from steelyard.plan.decisions import Decisions
from steelyard.planning import acceptance, walked_search
from steelyard.planning.acceptance import accept
from steelyard.planning.problem import make_tables
from steelyard.planning.restrictions import means_of, restricted
from tests.jobs import make_job


@pytest.mark.slow
def test_no_plan_without_a_means_of_the_best_one_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (acceptance, walked_search):
        monkeypatch.setattr(each, "search_all_states", lambda _: None)  # which closes the gap
    job = make_job(
        "mixtral-8x7b",
        "2x8xh100-80gb",
        global_batch=128,
        seq_len=4096,
        precision="bf16",
        memory=None,
        memory_margin=0.05,
        profile=None,
    )
    tables = [each.tables for each in make_tables(job, Decisions())]
    found = accept(job, tables)
    best = found.ranked[0]
    assert found.search.status != "optimal", "this job is here for its gap"
    for name, keeps in means_of(best.plan).items():
        without = accept(job, [restricted(each, keeps) for each in tables], num_alternatives=0)
        assert all(each.outcome.score_s >= best.outcome.score_s * (1 - 1e-9) for each in without.ranked), name
