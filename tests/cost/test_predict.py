"""Tests of a plan's prediction against the search's tables and against known answers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from steelyard.cost.build import build_tables
from steelyard.cost.context import communicator_bytes, context_bytes, slack_fraction
from steelyard.cost.job import Job, stage_configs
from steelyard.cost.predict import model_flop_per_s, predict, predict_memory
from steelyard.errors import InvalidPlanError, UserError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePlan, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.profiles.profile import Affine
from steelyard.search.evaluate import Solution, evaluate
from tests.cost.examples import SEQ_LEN, cluster, config, job, plan, unprofiled_job
from tests.runtime.models import FAMILY_CONFIGS

ONE_STAGE = ("fsdp8, dp8, fsdp4-tp2+sp, tp8, dp2-tp4 remat=full, fsdp8 zero2",)
TWO_STAGES = ("fsdp4, dp4, tp4", "tp2-fsdp2+sp, fsdp4 remat=full, dp4")
FOUR_STAGES = ("fsdp2, dp2", "tp2", "tp2+sp remat=full", "dp2, fsdp2")


def by_tables(of: Job, candidate: Plan) -> Solution:
    """Same choice, priced from cost tables as in the search."""
    where = config(
        of,
        num_stages=len(candidate.stages),
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
    )
    strategies = tuple(dict.fromkeys(candidate.strategies))
    boundaries = [stage.first_layer for stage in candidate.parts] + [of.chain.num_layers]
    return evaluate(build_tables(where, strategies), boundaries, [strategies.index(s) for s in candidate.strategies])


@pytest.mark.parametrize("stages", [ONE_STAGE, TWO_STAGES, FOUR_STAGES], ids=["one", "two", "four"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_reported_terms_add_up_to_what_the_search_minimised(stages: tuple[str, ...], schedule: str) -> None:
    of = job()
    candidate = plan(of, *stages, num_microbatches=4, schedule=schedule)
    found, expected = predict(candidate, of), by_tables(of, candidate)
    for mine, theirs in zip(found.stages, expected.stages, strict=True):
        assert mine.total_time_s == pytest.approx(theirs.time_s, rel=1e-12)
        assert mine.time_s.get("switch", 0.0) == pytest.approx(theirs.switch_s, rel=1e-12)
        assert mine.time_s.get("pipeline", 0.0) == pytest.approx(theirs.transfer_s, rel=1e-12)


@pytest.mark.parametrize("stages", [ONE_STAGE, TWO_STAGES, FOUR_STAGES], ids=["one", "two", "four"])
def test_the_process_and_the_slack_of_the_allocator_are_terms_of_their_own(stages: tuple[str, ...]) -> None:
    of = job(global_batch=128)
    candidate = plan(of, *stages, num_microbatches=4)
    for index, stage in enumerate(predict(candidate, of).stages):
        config, layers = stage_configs(candidate, of)[index], candidate.parts[index].layers
        groups = [communicator_bytes(of.chain.type_of(layer), candidate.strategies[layer], config) for layer in layers]
        tensors = stage.total_bytes - stage.memory_bytes["allocator slack"]
        assert stage.memory_bytes["allocator slack"] == int(slack_fraction(of) * tensors)
        own = stage.memory_bytes["context"] - context_bytes(config)
        assert min(groups) <= own <= max(groups)


def test_memory_alone_is_predicted_without_times() -> None:
    of = unprofiled_job()
    candidate = plan(of, ", ".join(["fsdp4"] * 6), num_microbatches=4)
    (terms,) = predict_memory(candidate, of)
    assert terms["parameters"] > 0
    assert "context" not in terms
    with pytest.raises(UserError, match="steelyard profile"):
        predict(candidate, of)


def test_one_stage_takes_the_step_time_that_the_search_minimised() -> None:
    of = job()
    candidate = plan(of, *ONE_STAGE, num_microbatches=4)
    assert predict(candidate, of).timeline.step_time_s == pytest.approx(by_tables(of, candidate).step_s, rel=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tied_matrices_that_are_divided_alike_gather_nothing(num_stages: int) -> None:
    of = job(tie_word_embeddings=True)
    middle = "fsdp8, fsdp8, fsdp8, fsdp8" if num_stages == 1 else "fsdp4, fsdp4 || fsdp4, fsdp4"
    degree = 4 // num_stages

    def tied_s(last: str) -> float:
        text = f"fsdp{degree}-tp2, {middle}, {last}"
        candidate = plan(of, *text.split(" || "), num_microbatches=4)
        return sum(stage.time_s.get("tied", 0.0) for stage in predict(candidate, of).stages)

    alike_s, gathered_s = tied_s(f"fsdp{degree}-tp2+sp"), tied_s(f"tp2-fsdp{degree}")
    assert (alike_s > 0) == (num_stages > 1)
    assert gathered_s > 2 * alike_s


def test_stages_of_unlike_sizes_are_priced_each_by_its_own_devices() -> None:
    of = job()
    candidate = plan(of, *ONE_STAGE, num_microbatches=4)
    whole = candidate.parts[0]
    layers, size = whole.last_layer + 1, whole.num_devices
    unlike = candidate.model_copy(
        update={
            "stages": (
                StagePlan(ranks=(0, size - 2), runs=fold_runs(0, (parse_strategy(f"fsdp{size - 1}"),))),
                StagePlan(ranks=(size - 1, size - 1), runs=fold_runs(1, (parse_strategy("single"),) * (layers - 1))),
            )
        }
    )
    first, last = predict(unlike, of).stages
    assert "fsdp" in first.time_s
    assert "fsdp" not in last.time_s
    assert last.time_s["pipeline"] > 0


def test_a_plan_for_another_batch_is_an_error() -> None:
    candidate = plan(job(), *ONE_STAGE, num_microbatches=4)
    with pytest.raises(InvalidPlanError, match="global_batch"):
        predict(candidate, job(global_batch=32))


def test_a_plan_that_fills_more_than_the_budget_does_not_fit() -> None:
    of = job()
    candidate = plan(of, *ONE_STAGE, num_microbatches=4)
    total = predict(candidate, of).stages[0].total_bytes
    assert predict(candidate, of.on(budget_bytes=total)).fits
    assert not predict(candidate, of.on(budget_bytes=total - 1)).fits


def test_more_samples_in_flight_hold_more_activations() -> None:
    of = job()
    stages = TWO_STAGES
    one_f_one_b, gpipe = (
        predict(plan(of, *stages, num_microbatches=4, schedule=schedule), of) for schedule in ("1f1b", "gpipe")
    )
    for stage in range(2):
        assert gpipe.stages[stage].memory_bytes["activations"] > one_f_one_b.stages[stage].memory_bytes["activations"]
        assert gpipe.stages[stage].total_bytes > one_f_one_b.stages[stage].total_bytes


PARAMS, HIDDEN, NUM_BLOCKS = 1e6, 64, 4


def attending(of: Job, *, in_kernels: float, in_products: float = 0.0, counted: bool = True) -> Job:
    """The job with 2 FLOP per parameter and token, and attention of 4·s²·h a block: so much of it in each way."""
    layers = []
    for layer in of.profile.layers:
        square = 4.0 * HIDDEN * SEQ_LEN**2 if layer.kind == "block" else 0.0
        work = {
            "matmul_flop": Affine(per_sample=2 * PARAMS * SEQ_LEN + in_products * square),
            "attention_flop": Affine(per_sample=in_kernels * square),
        }
        update = {"forward": layer.forward.model_copy(update=work)}
        layers.append(layer.model_copy(update=update | ({"square_flop": Affine(per_sample=square)} if counted else {})))
    return of.on(profile=of.profile.model_copy(update={"layers": tuple(layers)}))


def share_of_attention(of: Job) -> float:
    """The part of 12·s·h a token and block that is counted as attention."""
    found = model_flop_per_s(of, 1e6)
    assert found is not None
    return (found / 1e6 - 6 * PARAMS * of.chain.num_layers) / (12 * NUM_BLOCKS * HIDDEN * SEQ_LEN)


@pytest.mark.parametrize("ways", [{"in_kernels": 0.5}, {"in_kernels": 1.0}, {"in_kernels": 0.0, "in_products": 1.0}])
def test_mfu_counts_half_of_causal_attention_whatever_its_kernels_compute(ways: dict[str, float]) -> None:
    assert share_of_attention(attending(job(), **ways)) == pytest.approx(0.5)


def test_mfu_of_a_profile_without_the_square_counts_what_kernels_compute() -> None:
    assert share_of_attention(attending(job(), in_kernels=0.5, counted=False)) == pytest.approx(0.5)


def chain_of(model_type: str, **changes: Any) -> ModelChain:
    return chain_from_config(FAMILY_CONFIGS[model_type] | changes, name=model_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain_to_read", "words", "shares"),
    [
        (partial(chain_of, "llama"), "causal", [0.5]),
        (partial(chain_of, "mistral", sliding_window=16), "sliding over 16 tokens", [0.25 - 0.125 / 4]),
        (partial(chain_of, "mistral", sliding_window=64), "causal", [0.5]),
        (partial(chain_of, "bert"), "bidirectional", [1.0]),
        (partial(chain_of, "t5"), "bidirectional and causal", [1.0, 0.75]),
        (partial(load_model, "phi-3-mini"), "causal", [0.5]),
    ],
    ids=["llama", "window", "window of all", "bert", "t5", "split"],
)
def test_attention_is_counted_as_the_model_has_it(
    chain_to_read: Callable[[], ModelChain], words: str, shares: list[float]
) -> None:
    chain = chain_to_read()
    blocks = [layer_type for layer_type in chain.layer_types if layer_type.role is LayerRole.BLOCK]
    assert [chain.attended_share(layer_type, 64) for layer_type in blocks] == shares
    assert chain.attention_words(64) == words


def test_a_split_model_whose_config_has_a_window_slides_in_all_blocks() -> None:
    assert load_model("phi-3-mini").attention_words(4096) == "sliding over 2047 tokens"
    assert load_model("gpt-oss-20b").attention_words(4096) == "sliding over 128 tokens and causal"


def test_the_prediction_says_how_attention_is_counted() -> None:
    of = job()
    cost = predict(plan(of, *ONE_STAGE, num_microbatches=4), of)
    assert cost.mfu_attention == "causal"


def test_mfu_is_the_model_flop_of_a_second_over_the_peak_and_names_six_times_the_parameters() -> None:
    of = attending(job(), in_kernels=0.5)
    cost = predict(plan(of, *ONE_STAGE, num_microbatches=4), of)
    square = NUM_BLOCKS * 12 * HIDDEN * SEQ_LEN / 2
    flop_per_token = 6 * PARAMS * of.chain.num_layers + square
    assert cost.model_flop_per_s == pytest.approx(flop_per_token * cost.tokens_per_s_per_device)
    assert cost.mfu == pytest.approx(flop_per_token * cost.tokens_per_s_per_device / of.peak_flop_per_s)


def test_more_devices_take_a_faster_step() -> None:
    eight, four = (job(cluster(1, devices), global_batch=4096) for devices in (8, 4))
    slow = predict(plan(four, ", ".join(["fsdp4"] * 6), num_microbatches=1), four)
    fast = predict(plan(eight, ", ".join(["fsdp8"] * 6), num_microbatches=1), eight)
    assert fast.timeline.step_time_s < slow.timeline.step_time_s


TWO_CHUNKS = ("fsdp4, dp4", "tp4", "tp2-fsdp2+sp", "fsdp4 remat=full, dp4")


def test_an_interleaved_plan_is_predicted_for_each_stage_with_all_its_chunks() -> None:
    of = job()
    found = predict(plan(of, *TWO_CHUNKS, num_microbatches=4, num_chunks=2, schedule="interleaved-1f1b"), of)
    apart = predict(plan(job(cluster(1, 16)), *TWO_CHUNKS, num_microbatches=4), job(cluster(1, 16)))
    for stage in range(2):
        chunks = (apart.stages[stage], apart.stages[stage + 2])
        for term in ("compute", "fsdp", "optimizer"):
            together = sum(chunk.time_s.get(term, 0.0) for chunk in chunks)
            assert found.stages[stage].time_s.get(term, 0.0) == pytest.approx(together)
        for term in ("parameters", "optimizer"):
            together = sum(chunk.memory_bytes[term] for chunk in chunks)
            assert found.stages[stage].memory_bytes[term] == together


def test_interleaving_shortens_the_step_and_holds_more_activations() -> None:
    of = job(num_hidden_layers=14)
    parts = ["tp2+sp, tp2+sp"] * 8
    halves = [", ".join((first, second)) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    plain = predict(plan(of, *halves, num_microbatches=8), of)
    interleaved = predict(plan(of, *parts, num_microbatches=8, num_chunks=2, schedule="interleaved-1f1b"), of)
    assert interleaved.timeline.step_time_s < plain.timeline.step_time_s
    for chunked, whole in zip(interleaved.stages[:-1], plain.stages[:-1], strict=True):
        assert chunked.memory_bytes["activations"] > whole.memory_bytes["activations"]


def test_the_last_stage_hands_over_to_the_first_across_all_between() -> None:
    """The first and the last stage of two nodes exchange chunks over the slow link."""
    fast, slow = (job(cluster(2, 4, inter_bytes_per_s=rate)) for rate in (100e9, 1e6))
    found = [
        predict(plan(of, *["tp4"] * 6, num_microbatches=4, num_chunks=3, schedule="interleaved-1f1b"), of)
        for of in (fast, slow)
    ]
    assert found[1].stages[0].time_s["pipeline"] > 100 * found[0].stages[0].time_s["pipeline"]
