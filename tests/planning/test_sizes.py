"""Tests of the longest sequences: the plan of the longest length that fits, to within 1/8, and what limits it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.planning import sizes
from steelyard.planning.request import PlanRequest
from steelyard.planning.sizes import Trials, longest_sequence
from steelyard.planning.variants import Study, Variant
from tests.cost.examples import job
from tests.runtime.models import FAMILY_CONFIGS

OF = job()


def find(monkeypatch: pytest.MonkeyPatch, fitting: int, chain: ModelChain = OF.chain, *, free: int = 10**9) -> Trials:
    """Find the longest sequence on devices on which ``fitting`` tokens fit, and no more; those above ``free`` use the
    margin.
    """

    def plan(study: Study, variant: Variant) -> Any:
        request = variant.change(study.request)
        length, top = request.seq_len, request.num_alternatives
        assert length is not None
        found = SimpleNamespace(prediction=SimpleNamespace(tokens_per_s_per_device=1.0)) if length <= fitting else None
        reason = f"{length - fitting} tokens too many, {top} shown"
        return SimpleNamespace(job=replace(OF, seq_len=length), plan=found, miss_text=reason, has_margin=length <= free)

    monkeypatch.setattr(Study, "plan", plan)
    asked = PlanRequest(chain=chain, cluster=OF.cluster, global_batch=8, seq_len=None, num_alternatives=0)
    return longest_sequence(asked)


@pytest.mark.parametrize("fitting", [1024, 1500, 5000, 8192, 12345, 100_000, 131_072, 1_000_000])
def test_the_length_found_fits_and_an_eighth_more_does_not(monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    found = find(monkeypatch, fitting)
    taken = found.result.job.seq_len
    assert taken % sizes.STEP_TOKENS == 0
    assert taken <= fitting < taken + max(sizes.STEP_TOKENS, taken // 8)


@pytest.mark.parametrize("fitting", [5000, 100_000])
def test_what_binds_is_of_the_shortest_length_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    found = find(monkeypatch, fitting)
    short = min(each.size for each in found.tried if each.tokens_per_s is None)
    assert found.stopped == f"{short} tokens do not fit: {short - fitting} tokens too many, 0 shown"


def test_the_length_found_leaves_the_margin_free(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(monkeypatch, 100_000, free=50_000)
    assert 50_000 - found.result.job.seq_len < 50_000 // 8
    assert found.result.has_margin
    assert "only fit under pressure" in found.stopped
    assert ", under pressure" in "".join(found.lines("{} tokens"))


def test_where_no_length_leaves_the_margin_free_one_is_taken_under_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(monkeypatch, 5000, free=0)
    assert found.result.plan is not None
    assert found.stopped == "no plan leaves the memory margin free, however short the sequences"


def test_no_length_is_tried_twice_and_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [each.size for each in find(monkeypatch, 1_000_000).tried]
    assert len(set(tried)) == len(tried) <= 12


def test_where_the_shortest_does_not_fit_the_nearest_miss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(monkeypatch, 100)
    assert found.result.plan is None
    assert found.result.job.seq_len == sizes.STEP_TOKENS


def test_a_model_of_learned_positions_ends_at_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["gpt2"] | {"n_positions": 2048}, name="gpt2")
    found = find(monkeypatch, 10**9, chain)
    assert found.result.job.seq_len == 2048
    assert "positions" in found.stopped


def test_a_model_of_images_has_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["vit"], name="vit")
    with pytest.raises(UserError) as raised:
        find(monkeypatch, 10**9, chain)
    assert raised.value.field == "--seq-len"
