"""Tests of requests: the same one from the shell and from Python, and one clear error for a contradiction."""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.errors import CombinedError, UserError
from steelyard.levers import Levers
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json, write_plan
from steelyard.plan.strategy import Remat
from steelyard.planning import request as requests
from steelyard.planning.complete import complete, find_plan
from steelyard.planning.request import PlanRequest, make_request
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from tests.cost.examples import CONFIG, chain, measured_profile
from tests.runtime.models import FAMILY_CONFIGS

SMALL = "{folder}/small.json"
ONE = "1x2xa100-80gb"
POOLS = "1x1xh100-80gb+1x1xa100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Typed options and call arguments; the rest is a batch of 8 samples of 32 tokens."""

    words: tuple[object, ...] = ()
    called: dict[str, Any] = field(default_factory=dict)
    model: str = SMALL
    cluster: str = ONE
    seq_len: int = 32


def deciding(*words: object, cluster: str = ONE, **decisions: Any) -> Asked:
    return Asked(words=words, called={"decisions": Decisions(**decisions)}, cluster=cluster)


ASKED = {
    "nothing more": Asked(),
    "a packaged model": Asked(model="llama-demo", seq_len=128),
    "an encoder": Asked(model="{folder}/bert.json"),
    "several nodes": Asked(cluster="2x1xh100-80gb"),
    "pools": deciding("--microbatches", 4, cluster=POOLS, num_microbatches=4),
    "pools within memory": Asked(words=("--memory", "1500MiB"), called={"memory": "1500MiB"}, cluster=POOLS),
    "memory": Asked(words=("--memory", "1400MiB"), called={"memory": "1400MiB"}),
    "a margin": Asked(words=("--memory-margin", 0.3), called={"memory_margin": 0.3}),
    "precision": Asked(words=("--precision", "fp32"), called={"precision": "fp32"}),
    "pins": deciding("--pin", "blocks 0-1: tp=2", "--pin", "remat=full", pins=("blocks 0-1: tp=2", "remat=full")),
    "stages and microbatches": deciding("--stages", 2, "--microbatches", 4, num_stages=2, num_microbatches=4),
    "schedules": deciding("--schedule", "gpipe,1f1b", schedules=("gpipe", "1f1b")),
    "remat": deciding("--remat", "none,full", remats=(Remat.NONE, Remat.FULL)),
    "zero": deciding("--zero", "2", modes={"zero": (2,)}),
    "a largest degree": deciding("--max-tp", 1, max_degrees={"tp": 1}),
    "the papers' space": deciding("--space", "paper", space="paper"),
    "other cuts": deciding("--partition", "even", partition="even"),
    "one strategy": deciding("--uniform", uniform=True),
    "something frozen": Asked(words=("--freeze", "model.embed_tokens"), called={"freeze": "model.embed_tokens"}),
    "uneven experts": Asked(model="{folder}/mixtral.json", words=("--imbalance", 1.5), called={"imbalance": 1.5}),
    "a measured run": Asked(
        words=("--calibrate", "{folder}/record.json"), called={"calibration": ("{folder}/record.json",)}
    ),
    "a measured profile": Asked(
        words=("--profile", "{folder}/profile.json", "--memory", "1GiB", "--precision", "fp32"),
        called={"profile": "{folder}/profile.json", "memory": "1GiB", "precision": "fp32"},
        cluster="1x4xcpu",
    ),
}
OTHERWISE = {
    "the largest batch": Asked(words=("--global-batch", "max"), called={"global_batch": "max"}),
    "a sample for each device": Asked(words=(), called={"global_batch": "devices"}),
    "the longest sequence": Asked(
        model="{folder}/gpt2.json",
        words=("--global-batch", 8, "--seq-len", "max"),
        called={"global_batch": 8, "seq_len": "max"},
    ),
    "the fewest devices": Asked(
        words=("--global-batch", 8, "--objective", "devices"), called={"global_batch": 8, "objective": "devices"}
    ),
    "another network": Asked(
        words=("--global-batch", 8, "--network", "ethernet-10"),
        called={"global_batch": 8, "network": "ethernet-10"},
        cluster="2x1xa100-80gb",
    ),
    "days and costs": Asked(
        words=("--global-batch", 8, "--tokens", "15T", "--price", 2.5),
        called={"global_batch": 8, "tokens": 15 * 10**12, "price": 2.5},
    ),
    "fewer plans beside it": Asked(
        words=("--global-batch", 8, "--top", 2, "--fallbacks", 0),
        called={"global_batch": 8, "num_alternatives": 2, "num_next_best": 1, "num_fallbacks": 0},
    ),
}
"""Options that `find_plan` has no argument for."""


PLANNED = ("nothing more", "pools", "days and costs")
"""Options for which both also plan: every other file is that of an equal request."""


def cases(asked: dict[str, Asked]) -> list[Any]:
    return [pytest.param(each, id=name) for name, each in asked.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of models, of a measured profile and of a measured run."""
    made = tmp_path_factory.mktemp("asked")
    configs = {"small": CONFIG, **{name: FAMILY_CONFIGS[name] for name in ("bert", "gpt2", "mixtral")}}
    for name, config in configs.items():
        (made / f"{name}.json").write_text(json.dumps(config))
    (made / "profile.json").write_text(dump_json(measured_profile(chain())))
    record = RunRecord(
        model_name="small",
        config_hash=chain().config_hash,
        device="NVIDIA A100-SXM4-80GB",
        num_devices=4,
        strategies=(),
        num_warmup_steps=1,
        median_step_s=3.0,
        tokens_per_s=1.0,
        steps=(StepRecord(step=1, loss=1.0, time_s=3.0, grad_norm=1.0),),
        ranks=(RankRecord(rank=0, stage=0, peak_bytes=1, memory_method="test", num_params=1),),
        predicted_step_s=2.0,
    )
    (made / "record.json").write_text(dump_json(record))
    return made


def at(folder: Path, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(at(folder, each) for each in value)
    return value.format(folder=folder) if isinstance(value, str) else value


def words_of(asked: Asked, folder: Path, path: Path) -> list[str]:
    """The command that writes a plan; it prints JSON, for which other engines are not compared."""
    batch = () if asked in OTHERWISE.values() else ("--global-batch", 8)
    length = () if "--seq-len" in asked.words else ("--seq-len", asked.seq_len)
    words = [asked.model, "--cluster", asked.cluster, *asked.words, *batch, *length, "--json", "-o", path]
    return ["plan", *(str(at(folder, each)) for each in words)]


def called(asked: Asked, folder: Path) -> dict[str, Any]:
    return {name: at(folder, value) for name, value in asked.called.items()}


class RequestedError(Exception):
    """The request for which a plan was to be searched."""


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(request: PlanRequest, **_: Any) -> None:
        raise RequestedError(request)

    monkeypatch.setattr("steelyard.planning.complete.complete", complete)
    monkeypatch.setattr("steelyard.cli.plan.complete", complete)


def request_of_words(words: list[str]) -> PlanRequest:
    raised = CliRunner().invoke(app, words).exception
    assert isinstance(raised, RequestedError), raised
    return raised.args[0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("asked", cases(ASKED))
def test_the_shell_and_python_ask_for_the_same_plan(asked: Asked, folder: Path, tmp_path: Path) -> None:
    sizes = {"global_batch": 8, "seq_len": asked.seq_len} | called(asked, folder)
    with pytest.raises(RequestedError) as raised:
        find_plan(at(folder, asked.model), asked.cluster, **sizes)
    assert request_of_words(words_of(asked, folder, tmp_path / "plan.json")) == raised.value.args[0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("asked", cases(OTHERWISE))
def test_the_shell_asks_for_what_a_request_says(asked: Asked, folder: Path, tmp_path: Path) -> None:
    expected = make_request(at(folder, asked.model), asked.cluster, **{"seq_len": 32} | called(asked, folder))
    assert request_of_words(words_of(asked, folder, tmp_path / "plan.json")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_the_shell_and_a_request_get_the_same_file(name: str, folder: Path, tmp_path: Path) -> None:
    asked = (ASKED | OTHERWISE)[name]
    sizes = {"global_batch": 8, "seq_len": asked.seq_len}
    plan = complete(make_request(at(folder, asked.model), asked.cluster, **sizes | called(asked, folder))).plan
    assert plan is not None
    write_plan(plan, tmp_path / "called.json")
    result = CliRunner().invoke(app, words_of(asked, folder, tmp_path / "typed.json"))
    assert result.exit_code == 0, result.exception or result.output
    assert (tmp_path / "typed.json").read_bytes() == (tmp_path / "called.json").read_bytes()


# contradictions


def request(**changes: Any) -> PlanRequest:
    asked: dict[str, Any] = {"model": chain(), "cluster": "1x8xa100-80gb", "global_batch": 16, "seq_len": 32}
    return make_request(**asked | changes)


@cache
def mixtral() -> ModelChain:
    return chain_from_config(FAMILY_CONFIGS["mixtral"], name="mixtral")


@cache
def short_gpt2() -> ModelChain:
    return chain_from_config(FAMILY_CONFIGS["gpt2"] | {"n_positions": 64}, name="gpt2")


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"global_batch": 0}, "--global-batch", "1 to 262144"),
        ({"seq_len": 2**24 + 1}, "--seq-len", "1 to 16777216"),
        ({"global_batch": 2**18, "seq_len": 2**24}, "--global-batch", "tokens a step"),
        ({"model": short_gpt2, "seq_len": 65}, "--seq-len", "at most 64"),
        ({"imbalance": 1.5}, "--imbalance", "a model with experts"),
        ({"model": mixtral, "imbalance": 0.5}, "--imbalance", "1 (every rank's experts get as many tokens) to 8"),
        ({"model": mixtral, "imbalance": 9.0}, "--imbalance", "to 8"),
        ({"memory": 0}, "--memory", "1 to "),
        ({"memory_margin": 0.95}, "--memory-margin", "from 0 to 0.9"),
        ({"global_batch": "max", "objective": "devices"}, "--global-batch", "max with --objective devices"),
        ({"seq_len": "max", "global_batch": "max"}, "--seq-len", "max with --global-batch max"),
        ({"seq_len": "max", "objective": "devices"}, "--seq-len", "max with --objective devices"),
        ({"seq_len": "max", "profile": measured_profile(chain())}, "--seq-len", "max with --profile"),
        ({"cluster": POOLS, "seq_len": "max"}, "--seq-len", "several device groups"),
        ({"cluster": POOLS, "global_batch": "max"}, "--global-batch", "several device groups"),
        ({"cluster": POOLS, "objective": "devices"}, "--objective", "several device groups"),
        ({"cluster": POOLS, "calibration": (Path("run.json"),)}, "--calibrate", "several device groups"),
        ({"cluster": POOLS, "decisions": Decisions(pins=("tp=2",))}, "--pin", "several device groups"),
        ({"cluster": POOLS, "decisions": Decisions(partition="even")}, "--partition", "several device groups"),
        ({"cluster": POOLS, "decisions": Decisions(uniform=True)}, "--uniform", "several device groups"),
        ({"decisions": Decisions(pins=("blocks 0-40: tp=2",))}, "--pin", "blocks 0-40"),
        ({"price": 2.5}, "--price", "a price without tokens"),
    ],
)
def test_a_contradiction_is_one_clear_error(changes: dict[str, Any], field: str, text: str) -> None:
    if callable(model := changes.get("model")):
        changes = changes | {"model": model()}
    with pytest.raises(UserError) as raised:
        request(**changes)
    assert not isinstance(raised.value, CombinedError)
    assert raised.value.field == field
    assert text in str(raised.value)
    assert raised.value.hint


def test_a_module_that_cannot_compute_in_bf16_is_planned_in_fp32_alone() -> None:
    from steelyard.modules.own_proof import Built, own_model
    from tests.modules.own_models import CASES

    case = CASES["nanogpt"]
    own = own_model(Built(module=case.module(), sample=case.sample, loss=case.loss, blocks=None))
    told = request(model="nanogpt", own=own, seq_len=None).chain
    failing = replace(told, split=told.split.model_copy(update={"no_bf16": "expected Float"}))
    with pytest.raises(UserError, match=r"precision: found bf16 .*expected Float\n.*\n.*plan with fp32"):
        request(model=failing, seq_len=None)
    assert request(model=failing, seq_len=None, precision="fp32").precision == "fp32"


def test_another_request_is_checked_as_the_first_was() -> None:
    with pytest.raises(UserError, match="--global-batch: found 0"):
        replace(request(), global_batch=0)


def test_what_is_misspelt_is_reported_together() -> None:
    with pytest.raises(CombinedError) as raised:
        request(model="llama-dem", cluster="1x8xa100-80g", memory="20 sacks", profile="nowhere.json")
    told = str(raised.value)
    assert len(raised.value.errors) == told.count(": found ") == 4
    for text in ("llama-demo", "a100-80gb", "20 sacks", "nowhere.json"):
        assert text in told


def test_one_thing_that_is_misspelt_is_an_error_of_its_own_kind() -> None:
    with pytest.raises(UserError, match="a100-80gb") as raised:
        request(cluster="1x8xa100-80g")
    assert not isinstance(raised.value, CombinedError)


def test_a_model_is_not_split_for_a_cluster_that_is_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(load_model("llama-demo").config)))

    def split(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is read")

    monkeypatch.setattr(requests, "load_model", split)
    with pytest.raises(UserError, match="a100-80gb"):
        request(model=str(config), cluster="1x8xa100-80g")


def test_what_is_frozen_beside_adapters_is_found_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, levers = load_model("llama-demo"), Levers.of({"train": "lora:r=4"})
    found = requests.changed_chain(model, levers, ())
    (kept,) = (tmp_path / "steelyard" / "frozen").iterdir()
    with monkeypatch.context() as without_torch:
        without_torch.setattr(requests, "import_module", None)
        assert requests.changed_chain(model, levers, ()) == found
    kept.write_text("{")
    assert requests.changed_chain(model, levers, ()) == found
    assert "cannot be read" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"base": "nf4"}, {"loss": "chunked"}, {"compile": "blocks", "optimizer": "sgd"}])
def test_levers_join_adapters_as_if_asked_for_together(more: dict[str, str]) -> None:
    adapters = {"train": "lora:r=8"}

    def asked(levers: dict[str, str]) -> PlanRequest:
        return make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers=levers)

    assert requests.with_levers(asked(adapters), more) == asked(adapters | more)
    frozen = make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, freeze=["*.norm"])
    with pytest.raises(UserError, match="a model with frozen parameters"):
        requests.with_levers(frozen, adapters)


def test_a_transformers_config_or_model_is_planned_as_its_config_file(tmp_path: Path) -> None:
    config = LlamaConfig(**{key: value for key, value in FAMILY_CONFIGS["llama"].items() if key != "model_type"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "model")
    given = (tmp_path / "model" / "config.json", config, model)
    plans = [find_plan(each, ONE, global_batch=8, seq_len=32) for each in given]
    assert plans[0] == plans[1] == plans[2]


def test_a_precision_without_a_meaning_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"found 'float32'(.|\n)*did you mean fp32"):
        find_plan("gpt2", ONE, global_batch=8, seq_len=32, precision="float32")  # type: ignore[arg-type]
