"""Tests of pins that no strategy can meet: one clear reason each, from the requested dimension."""

from dataclasses import replace

import pytest

from steelyard.errors import UserError
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.planning import job
from steelyard.planning.complete import find_plan
from steelyard.planning.pins import parse_pin
from steelyard.planning.problem import make_tables
from steelyard.planning.request import PlanRequest, make_request
from steelyard.planning.why_not import impossible, refuse_impossible
from tests.cost.examples import cluster
from tests.cost.examples import job as tables_job
from tests.runtime.models import FAMILY_CONFIGS


def asking(name: str, seq_len: int = 32, **changes: object) -> PlanRequest:
    """Return a request on 8 devices with 16 samples; nothing is traced."""
    chain = chain_from_config(FAMILY_CONFIGS[name] | changes, name=name)
    return make_request(chain, "1x8xh100-80gb", global_batch=16, seq_len=seq_len)


@pytest.fixture(scope="module")
def requests() -> dict[str, PlanRequest]:
    return {
        "mixtral": asking("mixtral", num_local_experts=8, num_key_value_heads=2),
        "llama": asking("llama"),
        "llama, 28 tokens": asking("llama", seq_len=28),
        "bert": asking("bert"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pin", "reason"),
    [
        ("mixtral", "ep=3", "ep 3 does not divide the 8 experts"),
        ("mixtral", "blocks 0-1: ep=3", "ep 3 does not divide the 8 experts"),
        ("mixtral", "embedding: ep=2", "ep needs experts, and the embedding layers have none"),
        ("llama", "ep=2", "ep: the model has no experts"),
        ("llama", "blocks 0-1: ep=2", "ep: the model has no experts"),
        ("llama", "cp=3", "cp 3 needs a sequence length that is a multiple of 6, not 32"),
        ("llama, 28 tokens", "cp=4", "cp 4 needs a sequence length that is a multiple of 8, not 28"),
        ("bert", "cp=2", "cp: only causal attention in one kernel can be divided by tokens"),
        ("mixtral", "cp=4, cp_method=ulysses", "ulysses over cp 4 does not divide the 2 key-value heads of a rank"),
        ("mixtral", "blocks 0-1: tp=8", "tp 8 does not divide the 4 attention heads"),
        ("llama", "fsdp=3", "data degree 3 (fsdp3) does not divide the 16 samples of a microbatch"),
        ("llama", "fsdp=16", "fsdp16 takes 16 ranks, which do not divide the 8 devices"),
        ("llama", "dp=2, fsdp=2, tp=4", "dp2-fsdp2-tp4 takes 16 ranks, which do not divide the 8 devices"),
        ("llama", "dp=8, zero=2", "dp8-fsdp2 zero2 takes 16 ranks, which do not divide the 8 devices"),
        ("llama", "dp16-tp2", "dp16-tp2 takes 32 ranks, which do not divide the 8 devices"),
    ],
)
def test_what_no_strategy_has_is_refused_with_the_reason_of_its_dimension(
    requests: dict[str, PlanRequest], name: str, pin: str, reason: str
) -> None:
    request = requests[name]
    found = impossible(request, parse_pin(pin, option="--pin", num_layers=request.chain.num_layers))
    assert [each.removeprefix("for the block layers: ") for each in found] == [reason]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pin", ["ep=4", "ep=4, fsdp=2", "ep", "fsdp, remat=full", "tp=2", "cp=2", "remat=full", "single", "sp=on", "zero=3"]
)
def test_what_some_strategy_has_is_not(requests: dict[str, PlanRequest], pin: str) -> None:
    assert impossible(requests["mixtral"], parse_pin(pin, option="--pin", num_layers=4)) == ()


def test_dp_inside_fsdp_is_an_error_that_says_how_to_write_both() -> None:
    with pytest.raises(UserError, match=r"expected: dp outside fsdp.*\n.*write the dp level first, as in dp4-fsdp8"):
        parse_pin("fsdp4-dp2", option="--pin", num_layers=4)


@pytest.mark.slow
def test_a_pin_that_no_strategy_has_is_refused_before_the_model_is_traced(
    requests: dict[str, PlanRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "cached_trace", pytest.fail)
    chain = requests["bert"].chain
    decisions = Decisions(pins=("cp=2",))
    with pytest.raises(UserError, match=r"--cp: found 2\n.*only causal attention in one kernel"):
        find_plan(chain, "1x8xh100-80gb", global_batch=16, seq_len=32, decisions=decisions)


@pytest.mark.slow
def test_a_batch_that_is_searched_for_has_room_for_every_pin(requests: dict[str, PlanRequest]) -> None:
    asked = replace(requests["llama"], global_batch=None, decisions=Decisions(pins=("fsdp=8",)))
    refuse_impossible(asked)


@pytest.mark.parametrize(
    ("text", "hint"), [("pp", "stages=2"), ("pp4", "stages=4"), ("pp=4", "stages=4"), ("blocks: pp=2", "stages=2")]
)
@pytest.mark.parametrize("option", ["--pin", "--why-not"])
def test_a_pin_of_the_pipeline_is_told_that_stages_are_asked_for(text: str, hint: str, option: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_pin(text, option=option, num_layers=4)
    assert "pp is the pipeline" in caught.value.expected
    assert f"write {option} {hint}, or stages=1 for no pipeline" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pin", "words"),
    [("tp2", "tp2 is for 2 devices, and a stage has 8; write tp=2"), ("dp2-tp2", "a stage has 8; write dp=2, tp=2")],
)
def test_a_strategy_for_fewer_devices_than_a_stage_has_is_told_how_to_write_its_degrees(pin: str, words: str) -> None:
    decisions = Decisions(num_stages=1, pins=(pin,))
    with pytest.raises(UserError, match=words):
        find_plan(FAMILY_CONFIGS["llama"], "1x8xh100-80gb", global_batch=16, seq_len=32, decisions=decisions)


@pytest.mark.parametrize(
    ("decisions", "asked", "reason"),
    [
        (Decisions(pins=("stages=3",)), "--pin 'stages=3'", "stages among 1, 2, 4, 8, microbatches among 1"),
        (Decisions(schedules=("interleaved-1f1b",)), "--schedule interleaved-1f1b", "as many microbatches"),
    ],
)
def test_decisions_without_a_pipeline_are_named_with_those_there_are(
    decisions: Decisions, asked: str, reason: str
) -> None:
    of = tables_job(cluster(1, 8), num_hidden_layers=6, global_batch=1)
    with pytest.raises(UserError, match="pipeline") as caught:
        make_tables(of, decisions)
    assert caught.value.found == f"no configuration with {asked}"
    assert reason in caught.value.expected
