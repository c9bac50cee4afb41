"""Tests of advice: the usual changes come first, and predicted effects equal those of planning with the change."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from steelyard.planning.advise import Advice, advise, hints, least_bytes, single_changes
from steelyard.planning.choose import plan_request
from steelyard.planning.complete import NothingFitsError, find_plan
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import PlanRequest, make_request
from steelyard.planning.variants import Study, within

GIB = 2**30


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave time for all changes on a slow machine, which traces one change in ten seconds."""
    monkeypatch.setattr("steelyard.planning.advise.TOTAL_S", 60.0)


def _request(model: str, cluster: str, **options: object) -> PlanRequest:
    return make_request(model, cluster, **{"global_batch": 1, "seq_len": 1024, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "options", "first"),
    [
        # axolotl, LLaMA-Factory and unsloth ask for 16 GB for 16-bit LoRA of 7B, and 6 GB for QLoRA
        ("llama2-7b", "1x1xrtx-4090", {"seq_len": 2048}, ("--train lora:r=16", "--train qlora:r=16")),
        # torchtune's configuration of Llama 3 70B for one node of 8 A100: LoRA with the base sharded
        pytest.param(
            *("llama3-70b", "1x8xa100-80gb", {"global_batch": 8, "seq_len": 4096}),
            ("--train lora:r=16", "--train qlora:r=16"),
            marks=pytest.mark.nightly,
        ),
        # likewise, of a base that two cards hold only between them
        pytest.param(
            *("llama2-13b", "1x2xrtx-4090", {"global_batch": 2}, ("--train lora:r=16", "--train qlora:r=16")),
            marks=pytest.mark.nightly,
        ),
        # unsloth and litgpt: QLoRA or LoRA of 3B on cards of 12 GB
        ("llama3.2-3b", "1x1xrtx-3060", {}, ("--train qlora:r=16", "--train lora:r=16")),
    ],
)
def test_what_practitioners_do_comes_first(
    model: str,
    cluster: str,
    options: dict[str, object],
    first: tuple[str, ...],
) -> None:
    own, found, *_ = advise(_request(model, cluster, **options), asked=False)
    assert not own.fits
    assert own.missing_bytes > 10 * GIB
    assert {each.options for each in found[:2]} == set(first)
    assert all(each.fits for each in found[:2])
    keys = [(not each.fits, each.fits and each.options.count("--") > 1, each.order) for each in found]
    assert keys == sorted(keys)


@pytest.mark.slow
def test_what_is_said_of_a_change_is_what_planning_with_it_finds() -> None:
    asked = _request("llama-demo", "1x1xa100-40gb", memory="1500MiB", seq_len=128, precision="fp32")
    own, found, *_ = advise(asked, asked=False)
    assert own.fits
    for change in found:
        texts = dict(zip(change.options.split()[::2], change.options.split()[1::2], strict=True))
        levers = {name.removeprefix("--"): text for name, text in texts.items()}
        options = {"memory": "1500MiB", "seq_len": 128, "precision": "fp32", "levers": levers}
        request = replace(_request("llama-demo", "1x1xa100-40gb", **options), simplify=0.0)
        plan = plan_request(request, job_of(request)).plan
        assert plan is not None and plan.prediction is not None  # noqa: PT018
        assert change.step_s == pytest.approx(plan.prediction.step_time_s, rel=0.01)
        assert change.least_bytes is not None
        assert change.least_bytes <= 1.001 * peak_bytes(plan)
        assert change.saved_bytes == (own.least_bytes or 0) - change.least_bytes


def test_within_the_least_memory_there_is_a_plan_and_within_less_none() -> None:
    asked = {"seq_len": 128, "precision": "fp32"}
    own, *_ = advise(_request("llama-demo", "1x1xa100-40gb", **asked), asked=False)
    assert own.least_bytes is not None
    plan = find_plan(
        "llama-demo", "1x1xa100-40gb", global_batch=1, memory=own.least_bytes + 2**20, memory_margin=0.0, **asked
    )
    assert plan.prediction is not None
    with pytest.raises(NothingFitsError):
        find_plan("llama-demo", "1x1xa100-40gb", global_batch=1, memory=int(0.9 * own.least_bytes), **asked)


def test_where_states_alone_are_too_many_no_shorter_sequence_is_advised() -> None:
    with pytest.raises(NothingFitsError) as caught:
        find_plan("llama2-7b", "1x1xrtx-4090", global_batch=1, seq_len=1024)
    assert "no shorter sequence" in (caught.value.hint or "")
    with pytest.raises(NothingFitsError) as caught:
        find_plan("llama3.2-1b", "1x1xrtx-4090", global_batch=1, seq_len=131072)
    assert "or a shorter sequence" in (caught.value.hint or "")


@pytest.mark.slow
def test_hints_name_what_fits_alone() -> None:
    found = list(hints(_request("llama2-7b", "1x1xrtx-4090", seq_len=2048)))
    assert 1 <= len(found) <= 3
    assert all("--train" in each or "--offload parameters" in each for each in found)
    assert "--train" in found[0]
    assert list(hints(_request("llama2-7b", "1x1xrtx-4090+1x1xa100-40gb"))) == []


def test_what_saves_time_comes_first_then_the_cheapest_memory_then_what_does_not_fit() -> None:
    kind = {"result": "exact", "least_bytes": GIB, "missing_bytes": 0}
    cheap = Advice(options="--a x", saved_bytes=2 * GIB, step_s=2.0, slowdown=1.0, **kind)
    dear = replace(cheap, saved_bytes=GIB)
    faster = replace(dear, saved_bytes=0, step_s=0.9, slowdown=-0.1)
    none = replace(cheap, step_s=float("inf"), missing_bytes=5)
    assert faster.order < cheap.order < dear.order < none.order


def test_what_needs_no_other_trace_is_tried_after_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, *[12.0] * 1000])
    monkeypatch.setattr("steelyard.planning.advise.TOTAL_S", 10.0)
    monkeypatch.setattr("steelyard.planning.advise.time", SimpleNamespace(process_time=lambda: next(times)))
    _, found, _, untried = advise(_request("llama-demo", "1x1xrtx-4090", seq_len=64))
    tried = {each.options.split()[0] for each in found}
    assert "--optimizer" in tried
    assert tried.isdisjoint({"--train", "--compile"})
    assert "--train lora:r=16" in untried


def test_options_of_an_engine_are_advised_alone_and_in_pairs() -> None:
    asked = _request("llama3-8b", "1x4xh100-80gb", seq_len=4096, global_batch=16, engine="megatron+bf16-moments")
    own, found, left_out, _ = advise(asked, asked=False)
    options = [each.options for each in found]
    gradients, overlap = (f"--engine megatron+bf16-moments+{name}" for name in ("bf16-gradients", "tp-overlap"))
    assert {gradients, overlap} <= {*options}
    assert options.index(gradients) < options.index(f"{gradients}+tp-overlap")
    assert all(each.gains_on(own) for each in found)
    assert not any("balanced" in each or each.endswith("+bf16-moments") for each in (*options, *left_out))
    (no_gain,) = (each for each in left_out if each.startswith("no gain"))
    assert "+deepep" in no_gain
    refused = [each for each in left_out if each.startswith("not possible with the engine megatron+bf16-moments: ")]
    assert "--train lora" in refused[0]
    assert "--optimizer adamw-8bit" in refused[0]
    chosen = next(each for each in found if each.options == overlap)
    request = replace(asked, engine=asked.engine.with_options(["tp-overlap"]), simplify=0.0)
    plan = plan_request(request, job_of(request)).plan
    assert plan is not None
    assert chosen.step_s == pytest.approx(plan.step_s, rel=0.01)


@pytest.mark.slow
def test_advice_for_an_engine_says_what_it_does_not_run() -> None:
    asked = _request("llama-demo", "1x1xa100-40gb", seq_len=128, engine="deepspeed")
    _, found, left_out, _ = advise(asked)
    assert any("adafactor" in each and "the engine deepspeed" in each for each in left_out)
    assert {"--train lora:r=16", "--optimizer adamw-8bit"} <= {each.options for each in found}


def test_the_minimum_memory_of_an_engine_of_one_strategy_holds_a_plan() -> None:
    request = make_request("gpt2", "1x1xrtx-4090", seq_len=512, global_batch=8, engine="accelerate", memory_margin=0.0)
    study = Study(request)
    least = least_bytes(study)
    assert least is not None
    assert study.answer(within("", least)).plan is not None
    assert study.answer(within("", least - 2**20)).plan is None


def test_a_base_in_4_bits_is_offered_for_adapters() -> None:
    adapters = _request("llama-demo", "1x1xa100-40gb", seq_len=64, levers={"train": "lora:r=8"})
    assert {"base": "nf4"} in list(single_changes(adapters, asked=False))
    assert not any("base" in each for each in single_changes(_request("llama-demo", "1x1xa100-40gb"), asked=False))
