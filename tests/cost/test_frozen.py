"""Tests of frozen parts: predicted bytes against `steelyard check`, and laws of the cost of freezing."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.predict import predict, predict_memory
from steelyard.cost.switching import switch_table
from steelyard.hardware import parse_cluster
from steelyard.model.chain import ModelChain, frozen_chain
from steelyard.model.read import chain_from_config
from steelyard.modules.freezing import find_freeze
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.precision import Precision
from steelyard.profiles.profile import Profile
from steelyard.runtime.dry_run import dry_run
from steelyard.runtime.peak_memory import TERMS
from steelyard.tracer.cache import cached_trace
from steelyard.tracer.trace import trace
from tests.cost.examples import CONFIG, config, plan
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS

GIB = 2**30
SIZES = {"hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 256, "num_key_value_heads": 4}
FIRST = ("model.embed_tokens", "model.layers.0", "model.layers.1")
FREEZES = {
    "the first layers": FIRST,
    "layers before and behind": (*FIRST, "model.layers.3"),
    "parts of layers": ("model.embed_tokens", "model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.3.mlp"),
    "all but the head": ("model",),
    "all but the embedding": ("model.layers", "model.norm", "lm_head"),
}
STAGES = {
    "replicated": ("dp4, dp4, dp4, dp4, dp4, dp4",),
    "sharded": ("fsdp4, fsdp4, fsdp4, fsdp4, fsdp4, fsdp4",),
    "kept gathered": ("fsdp4 zero2, fsdp4 zero2, fsdp4 zero2, fsdp4 zero2, fsdp4 zero2, fsdp4 zero2",),
    "kept whole": ("fsdp4 zero1, fsdp4 zero1, fsdp4 zero1, fsdp4 zero1, fsdp4 zero1, fsdp4 zero1",),
    "kept whole, two stages": ("fsdp2 zero1, fsdp2 zero1, fsdp2 zero1", "fsdp2 zero1, fsdp2 zero1, fsdp2 zero1"),
    "full remat": ("fsdp4, dp4 remat=full, fsdp4 remat=full, fsdp4 remat=full, dp4 remat=full, fsdp4",),
    "selective remat": ("fsdp4, dp4 remat=selective, fsdp4 remat=selective, fsdp4 remat=selective, dp4, fsdp4",),
    "tensors": ("fsdp2-tp2, tp2-dp2, fsdp2-tp2+sp, dp2-tp2, fsdp2-tp2+sp, fsdp2-tp2",),
    "hybrid": ("dp2-fsdp2, dp2-fsdp2, dp2-fsdp2, dp2-fsdp2, dp2-fsdp2, dp2-fsdp2",),
    "two stages": ("fsdp2, dp2, fsdp2", "dp2, fsdp2, fsdp2"),
    "two stages of layouts": ("tp2, fsdp2", "fsdp2, tp2, dp2, fsdp2"),
}


@cache
def _chain(freeze: str | None) -> ModelChain:
    plain = chain_from_config(CONFIG | SIZES | {"vocab_size": 512}, name="llama")
    return plain if freeze is None else frozen_chain(plain, find_freeze(plain, FREEZES[freeze]))


@cache
def _trace(freeze: str | None, precision: Precision) -> Profile:
    return cached_trace(_chain(freeze), seq_len=128, precision=precision, degrees=(1, 2))


def _job(freeze: str | None, precision: Precision, cluster: str) -> Job:
    return Job(
        chain=_chain(freeze),
        groups=(
            DeviceGroup(
                profile=_trace(freeze, precision),
                cluster=parse_cluster(cluster).with_memory(GIB) if "cpu" in cluster else parse_cluster(cluster),
                budget_bytes=GIB,
            ),
        ),
        seq_len=128,
        global_batch=64,
        precision=precision,
    )


def _plan(stages: str, of: Job) -> Plan:
    found = plan(of, *STAGES[stages], num_microbatches=2 * len(STAGES[stages]))
    return found.model_copy(update={"model": found.model.model_copy(update={"frozen": of.chain.freeze})})


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
def test_freezing_never_costs_memory_or_time(stages: str) -> None:
    whole = _job(None, "bf16", "1x4xa100-80gb")
    before = predict(_plan(stages, whole), whole)
    for freeze in FREEZES:
        part = _job(freeze, "bf16", "1x4xa100-80gb")
        after = predict(_plan(stages, part), part)
        assert after.step_time_s < before.step_time_s, freeze
        for one, other in zip(before.stages, after.stages, strict=True):
            assert other.total_bytes <= one.total_bytes, freeze
            assert other.memory_bytes.get("optimizer", 0) <= one.memory_bytes["optimizer"], freeze


PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
IN_TURN = [
    (freeze, stages, PRECISIONS[(row + column) % 2])
    for row, freeze in enumerate(FREEZES)
    for column, stages in enumerate(STAGES)
]
"""Every freeze under every division, and each of these in both precisions, which take turns."""
IN_BF16 = {stages: [each for each in IN_TURN if each[1:] == (stages, "bf16")] for stages in STAGES}
SAMPLE = [cases[place // 2 % len(cases)] for place, cases in enumerate(IN_BF16.values())]
"""Every division under one freeze, every freeze under two divisions or three."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "stages", "precision"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly) for case in IN_TURN],
)
def test_predicted_bytes_are_at_least_those_found_and_little_more(
    freeze: str, stages: str, precision: Precision
) -> None:
    of = _job(freeze, precision, "1x4xcpu")
    candidate = _plan(stages, of)
    for stage, terms in enumerate(predict_memory(candidate, of)):
        assert set(terms) <= set(TERMS)
        found = dry_run(candidate, candidate.stages[stage].ranks[0], backend="gloo")
        peak = max(found.first_step.total_bytes, found.later_steps.total_bytes)
        assert 1.0 <= sum(terms.values()) / peak <= 1.2, f"stage {stage}: {terms}, found {found.later_steps}"


@pytest.mark.slow
def test_no_gradient_is_sent_to_a_stage_of_which_nothing_is_trained() -> None:
    whole, part = (_job(each, "bf16", "1x4xa100-80gb") for each in (None, "the first layers"))
    found = (predict(_plan("two stages", of), of).timeline.sends for of in (whole, part))
    sent = [{each.payload for of_stage in sends for each in of_stage} for sends in found]
    assert sent == [{"activation", "gradient"}, {"activation"}]


@pytest.mark.slow
def test_a_switch_behind_what_is_frozen_has_no_way_back() -> None:
    strategies = (parse_strategy("dp4"), parse_strategy("tp4"))
    whole, part = (_job(each, "bf16", "1x4xa100-80gb") for each in (None, "the first layers"))
    both, there = (
        switch_table(strategies, config(of, num_stages=1, num_microbatches=4))[of.chain.layers[3]]
        for of in (whole, part)
    )
    assert both[0, 1] == pytest.approx(there[0, 1] + there[1, 0])


@pytest.mark.slow
def test_layers_before_the_first_trained_one_have_no_backward_pass() -> None:
    profile = _trace("the first layers", "bf16")
    for layer_type in ("embedding, frozen", "block, frozen"):
        layer = profile.layer(layer_type, {})
        assert not layer.has_backward
        assert (layer.saved_bytes.at(4), layer.backward_transient_bytes.at(4)) == (0, 0)
        assert layer.backward.matmul_flop.at(4) == 0
        assert layer.trained.num_params == 0
        assert [each.work.num_kernels for each in layer.recomputations] == [0] * len(layer.recomputations)


@pytest.mark.slow
def test_a_frozen_layer_behind_a_trained_one_passes_gradients_on_at_half_the_work() -> None:
    frozen = _trace("layers before and behind", "bf16").layer("block, frozen after trained layers", {})
    trained = _trace(None, "bf16").layer("block", {})
    assert frozen.has_backward
    assert frozen.forward == trained.forward
    assert frozen.backward.matmul_flop.at(4) == pytest.approx(trained.backward.matmul_flop.at(4) / 2)
    assert frozen.saved_bytes.at(4) < trained.saved_bytes.at(4)


@pytest.mark.slow
def test_the_first_trained_layer_makes_no_gradient_of_its_input() -> None:
    profile = _trace("the first layers", "bf16")
    first, later = (profile.layer(layer_type, {}) for layer_type in ("block, after frozen layers", "block"))
    assert first.backward.matmul_flop == later.backward.matmul_flop  # that of its norm's weight runs through all of it
    assert first.backward.num_kernels < later.backward.num_kernels
    assert first.trained == first


@pytest.mark.slow
def test_parts_of_a_layer_are_traced_as_they_are_frozen() -> None:
    of = _trace("parts of layers", "bf16").layers
    attention, mlp = 4 * 128 * 128 * 3 // 4, 3 * 128 * 352
    frozen = {each.kind: each.frozen_params for each in of if not each.degrees}
    assert sorted(filter(None, frozen.values())) == sorted([512 * 128, attention, mlp])


@pytest.mark.slow
def test_a_trace_of_which_nothing_is_frozen_says_nothing_of_it() -> None:
    assert "frozen" not in _trace(None, "bf16").model_dump_json()


@pytest.mark.slow
def test_a_frozen_tower_of_images_makes_a_step_shorter_and_states_smaller() -> None:
    plain = chain_from_config(split_config("llava"), name="small llava", split=SPLITS["llava"])
    frozen = frozen_chain(plain, find_freeze(plain, ["model.vision_tower"]))
    jobs = [
        replace(
            _job(None, "bf16", "1x4xa100-80gb").on(profile=trace(each, seq_len=16, precision="bf16", degrees=(1,))),
            chain=each,
            seq_len=16,
        )
        for each in (plain, frozen)
    ]
    strategies = ", ".join(["fsdp4"] * plain.num_layers)
    before, after = (predict(_of(plan(of, strategies, num_microbatches=2), of), of) for of in jobs)
    assert after.step_time_s < before.step_time_s
    assert after.stages[0].total_bytes < before.stages[0].total_bytes


def _of(found: Plan, job: Job) -> Plan:
    return found.model_copy(update={"model": found.model.model_copy(update={"frozen": job.chain.freeze})})
