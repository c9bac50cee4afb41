"""Tests that a plan has what its row says, and that rows that cannot be priced are skipped with a reason."""

from collections import Counter

import pytest
from published_runs.jobs import Case, Skipped, case_of
from published_runs.rows import PublishedRun, read_runs

from steelyard.engines.execution import StateBytes
from steelyard.plan.strategy import Remat
from tests.benchmarks.published_runs.examples import case, outcomes, run_of, sample
from tests.shapes import tp_shape

ULTRA, VTRAIN, MEGATRON = "ultrascale_playbook", "vtrain", "megatron_lm"


@pytest.mark.parametrize("run", [run for run in sample() if run.is_open], ids=lambda run: run.id)
def test_the_plan_has_the_degrees_of_the_row(run) -> None:  # type: ignore[no-untyped-def]
    found = case_of(run)
    assert not isinstance(found, Skipped)
    plan, strategy = found.plan, found.plan.strategies[1]
    degrees = strategy.tensor_degree, plan.num_stages, strategy.data_degree, plan.num_devices, plan.global_batch
    assert degrees == tuple(run.count(column) for column in ("tp", "pp", "dp", "gpus", "gbs"))


def test_chunks_are_interleaved() -> None:
    found = case(MEGATRON, pp="4", vpp="2", gpus="32", dp="1", tp="8", gbs="64", mbs="1", layers="48")
    assert (found.plan.schedule, found.plan.num_chunks, len(found.plan.parts)) == ("interleaved-1f1b", 2, 8)


def test_fewer_microbatches_than_stages_do_the_passes_of_gpipe() -> None:
    found = case(ULTRA, pp="4", tp="1", dp="2", gpus="8", mbs="1", gbs="4", zero_stage="0")
    assert found.plan.schedule == "gpipe"


@pytest.mark.parametrize(("text", "remat"), [("none", Remat.NONE), ("full", Remat.FULL), ("", Remat.NONE)])
def test_blocks_recompute_what_the_row_says(text: str, remat: Remat) -> None:
    assert case(VTRAIN, act_ckpt=text).plan.strategies[1].remat is remat


def test_half_of_the_blocks_are_recomputed_where_the_row_says_every_second() -> None:
    detail = "every k-th layer (repo default k=2; k not stated)"
    remats = [each.remat for each in case("torchtitan", act_ckpt="selective", act_ckpt_detail=detail).plan.strategies]
    assert Counter(remats[1:-1]) == {Remat.FULL: 16, Remat.NONE: 16}


def test_what_a_row_leaves_open_is_the_frameworks_default() -> None:
    maxtext = case("torchtitan", framework="MaxText", act_ckpt="", act_ckpt_detail="")
    assert maxtext.plan.strategies[1].remat is Remat.FULL
    degrees = {"tp": "2", "dp": "4", "pp": "1", "gpus": "8", "mbs": "1", "gbs": "8", "sp": ""}
    assert case(VTRAIN, framework="NeMo 25.02", **degrees).plan.strategies[1].mode("sp")
    assert not case(VTRAIN, **degrees).plan.strategies[1].mode("sp")
    for framework, stage in (("NeMo 25.02", 1), ("Megatron-LM", 0)):
        states = case(VTRAIN, framework=framework, zero_stage="", **degrees).job.execution.states
        assert isinstance(states, StateBytes)
        assert states.zero == stage


def test_a_tied_matrix_on_one_rank_is_held_once() -> None:
    one = case(ULTRA, tied_emb="True", pp="1", tp="1", dp="8", gpus="8", zero_stage="0", mbs="1", gbs="64")
    head = one.job.profile.layer("head", tp_shape(1, False))
    assert head is not None
    assert head.num_params == one.job.chain.hidden_size
    assert not one.job.chain.tied_embeddings


def test_a_tied_matrix_across_stages_is_exchanged() -> None:
    assert case(ULTRA, tied_emb="True", pp="2", tp="1", dp="4", gpus="8", mbs="1", gbs="64").job.chain.tied_embeddings


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"moe_experts": "8"}, "moe_dense_layers missing"),
        ({"decoder_layers": "12"}, "encoder-decoder"),
        ({"precision": "fp32"}, "fp32 or TF32"),
        ({"model": "deepseek-v3"}, "widths of latent attention missing"),
        ({"offload": "optimizer"}, "offload"),
        ({"schedule": "ZB-1p"}, "zero-bubble schedule"),
        ({"mbs": ""}, "mbs missing"),
        ({"vocab": ""}, "vocab missing"),
        ({"gpu": "TPU v9"}, "device not known"),
        ({"framework": "of one's own"}, "framework not known"),
        ({"tp": "3"}, "--tp, --cp and --pp: a divisor of 4"),
        ({"gbs": "7"}, "--micro-batch: a divisor of 7"),
        ({"act_ckpt": "some"}, "act_ckpt some"),
    ],
)
def test_what_cannot_be_priced_is_skipped_with_its_reason(cells: dict[str, str], reason: str) -> None:
    found = case_of(run_of(VTRAIN, **cells))
    assert isinstance(found, Skipped)
    assert reason in found.reason


@pytest.mark.slow
def test_rows_of_every_published_source_become_cases_but_where_sizes_or_precision_are_not_stated() -> None:
    """Zero-bubble's rows lack the vocabulary or a schedule that is priced, Sailor's the type that computes;
    Automodel's of earlier dates do not say what is computed again, and how Fast-LLM runs is not known."""
    by_source: dict[str, list[PublishedRun]] = {}
    for run in read_runs():
        by_source.setdefault(run.source, []).append(run)
    skipped = {source for source, runs in by_source.items() if not any(isinstance(case_of(run), Case) for run in runs)}
    assert skipped == {"zero_bubble", "sailor_validation", "automodel_history", "fast_llm"}


@pytest.mark.slow
def test_every_row_has_a_prediction_or_a_reason() -> None:
    ids = Counter(outcome.run.id for outcome in outcomes())
    assert ids == Counter(run.id for run in sample())
