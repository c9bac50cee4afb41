"""Tests of the optimizer as a lever: its text, its cost, and refusals; and a lever defined by a test."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import typer
from torch import Tensor
from typer.testing import CliRunner

from steelyard.cli import plan as plan_command
from steelyard.cli.options import with_levers
from steelyard.cost.compute import optimizer_s, products_s
from steelyard.cost.job import DeviceGroup, Job, JobConfig
from steelyard.cost.layer import layer_cost
from steelyard.cost.layer_load import hidden_matrices
from steelyard.cost.predict import predict_memory
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware import parse_cluster
from steelyard.levers import LEVERS, NO_LEVERS, Effects, Lever, Levers
from steelyard.levers.optimizer import LAYER_BYTES, Optimizer
from steelyard.model.chain import LayerRole
from steelyard.model.read import load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.complete import find_plan
from steelyard.runtime.dry_run import dry_run
from steelyard.tracer.cache import cached_trace, packaged_trace
from tests.cost.examples import CONFIG, measured_profile
from tests.cost.examples import job as model_job
from tests.jobs import make_job
from tests.runtime.models import make_plan

GIB = 2**30
KEPT = {"adamw": 8, "adamw-8bit": 2 * (1 + 4 / 256), "adamw-4bit": 2 * (1 / 2 + 4 / 128), "sgd": 0}
"""Bytes of a parameter."""
MOVED = {"adamw": 28, "adamw-8bit": 12 + 2 * KEPT["adamw-8bit"], "adamw-4bit": 12 + 2 * KEPT["adamw-4bit"]} | {
    "sgd": 12,
    "adafactor": 20,
    "muon": 28,
}
"""Bytes moved per parameter; for muon those of the parameters that AdamW updates."""


def chosen(word: str) -> Levers:
    return Levers.of({"optimizer": word})


def job(word: str) -> Job:
    return make_job("llama-demo", "1x2xa100-40gb", global_batch=4, seq_len=64, levers={"optimizer": word})


# what is written of it


@pytest.mark.parametrize("word", MOVED)
def test_a_text_says_one_value_and_a_value_one_text(word: str) -> None:
    assert str(Optimizer.parse(word)) == word
    assert chosen(word).texts == ({} if word == "adamw" else {"optimizer": word})
    assert chosen(word).value(Optimizer) == Optimizer(word)


def test_another_text_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        Optimizer.parse("adamw-8bits")
    assert (caught.value.field, caught.value.found) == ("--optimizer", "'adamw-8bits'")
    assert "adamw-8bit" in (caught.value.hint or "")


def test_an_unknown_lever_in_a_plan_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        small_plan("dp2, dp2, dp2, dp2", levers={"optimiser": "sgd"})
    assert "levers.optimiser" in caught.value.field
    assert "optimizer" in (caught.value.hint or "")


def test_a_plan_without_levers_says_nothing_of_them() -> None:
    options: dict[str, Any] = {"global_batch": 4, "seq_len": 64}
    plain = find_plan("llama-demo", "1x2xa100-40gb", **options)
    named = find_plan("llama-demo", "1x2xa100-40gb", **options, levers={"optimizer": "adamw", "train": None})
    assert "levers" not in json.loads(dump_json(plain))
    assert dump_json(named) == dump_json(plain)


def small_plan(*stages: str, **options: Any) -> Plan:
    sizes = {"num_microbatches": 2, "global_batch": 16, "num_devices": 2}
    return make_plan("llama-tied", *stages, **sizes | options)


# what is refused


@pytest.mark.parametrize(
    ("word", "strategy", "reason"),
    [
        ("adafactor", "fsdp2", "no fsdp"),
        ("adafactor", "fsdp2 zero2", "no fsdp"),
        *((word, strategy, "no tp, no ep") for word in ("adafactor", "muon") for strategy in ("tp2", "tp2+sp")),
    ],
)
def test_whole_matrices_under_what_divides_them_are_refused_in_plans(word: str, strategy: str, reason: str) -> None:
    levers = {"optimizer": word}
    with pytest.raises(InvalidPlanError, match=reason) as refused:
        small_plan(f"dp2, {strategy}, dp2, dp2", levers=levers)
    assert refused.value.hint == f"change the strategy, or leave out optimizer {word}"
    assert small_plan("dp2, dp2, dp2 remat=full, dp2", levers=levers).chosen_levers.value(Optimizer).word == word


MUON: dict[str, Any] = {"global_batch": 4, "seq_len": 64, "levers": {"optimizer": "muon"}}


def test_muon_beside_adapters_is_refused() -> None:
    levers = MUON["levers"] | {"train": "lora:r=4"}
    with pytest.raises(UserError, match="muon with some layers"):
        find_plan("llama-demo", "1x1xa100-40gb", **MUON | {"levers": levers})


def test_muon_for_parts_of_blocks_and_for_none_is_refused_and_for_whole_ones_planned() -> None:
    with pytest.raises(UserError, match="muon with some layers"):
        find_plan("llama-demo", "1x1xa100-40gb", **MUON, freeze=("*.self_attn",))
    with pytest.raises(UserError, match="muon with every block frozen"):
        find_plan("llama-demo", "1x1xa100-40gb", **MUON, freeze=("model.layers",))
    plan = find_plan("llama-demo", "1x1xa100-40gb", **MUON, freeze=("model.layers.0",))
    assert plan.prediction is not None


def test_muon_without_matrix_units_for_bf16_is_refused() -> None:
    with pytest.raises(UserError, match="no matrix units for bf16"):
        find_plan("llama-demo", "1x1xv100-32gb", **MUON, precision="fp16")


@pytest.mark.slow
def test_no_plan_for_adafactor_shards_matrices_and_one_for_muon_does() -> None:
    """The fastest plans with SGD and AdamW shard matrices."""
    options: dict[str, Any] = {"global_batch": 8, "seq_len": 512, "memory": 16 * GIB}
    options["decisions"] = Decisions(num_stages=1)
    plans = {
        word: find_plan("llama3.2-1b", "1x8xa100-40gb", **options, levers={"optimizer": word})
        for word in ("adafactor", "muon")
    }
    assert {each.tensor_degree for plan in plans.values() for each in plan.strategies} == {1}
    assert all(each.state_shards == 1 for each in plans["adafactor"].strategies)
    assert all(each.state_shards > 1 for each in plans["muon"].strategies)


# what it costs


@pytest.mark.parametrize("word", MOVED)
def test_the_seconds_of_its_step_go_as_the_bytes_that_it_moves(word: str) -> None:
    plain, other = (optimizer_s(1e9, job(each)) for each in ("adamw", word))
    assert other / plain == pytest.approx(MOVED[word] / MOVED["adamw"])


def test_the_seconds_of_a_measured_optimizer_are_what_was_measured_of_it() -> None:
    of = job("adamw-8bit")
    measured = {"optimizer_s_per_param": 2e-9, "optimizers": {"adamw-8bit": 7e-9, "sgd": 1e-9}}
    assert optimizer_s(1e9, of.on(profile=of.profile.model_copy(update=measured))) == pytest.approx(7.0)


def test_the_products_of_muon_on_a_cpu_take_the_measured_rate_of_bf16() -> None:
    of = model_job(parse_cluster("1x2xcpu"), precision="fp32")
    measured = measured_profile(of.chain, num_devices=2)
    layer = next(each for each in measured.layers if each.kind == "block")
    rate = layer.forward.matmul_flop.per_sample * 1e3
    older, newer = (of.on(profile=measured.model_copy(update={"bf16_flop_per_s": each})) for each in (None, 4 * rate))
    assert products_s(rate, 0.0, layer, older) == pytest.approx(1.0)
    assert products_s(rate, 0.0, layer, newer) == pytest.approx(0.25)


def test_the_seconds_of_muon_are_those_of_its_products_and_bytes() -> None:
    """A block of llama3.2-1b has two matrices of 2048 × 2048, two of 512, three of 8192."""
    options: dict[str, Any] = {"global_batch": 1, "seq_len": 64}
    seconds = {}
    for word in ("adamw", "muon"):
        plan = find_plan("llama3.2-1b", "1x1xa100-80gb", **options, levers={"optimizer": word})
        assert plan.prediction is not None
        seconds[word] = plan.prediction.stages[0].time_s["optimizer"]
    of = make_job("llama3.2-1b", "1x1xa100-80gb", **options, levers={"optimizer": "muon"})
    device, rate = of.cluster.device, of.efficiency
    flop = num_bytes = params = 0.0
    for n, count in ((2048, 2), (512, 2), (8192, 3)):
        low, high = sorted((2048, n))
        params += 16 * count * low * high
        flop += 16 * count * (20 * low**2 * high + 10 * low**3)
        num_bytes += 16 * count * (50 * low * high + 60 * low**2)
    more = flop / (rate.matmul * device.peak("bf16")) + rate.operands * num_bytes / device.known_memory_bytes_per_s()
    more += optimizer_s(params, of, 54) - optimizer_s(params, of)
    assert seconds["muon"] - seconds["adamw"] == pytest.approx(more, rel=1e-6)


def test_muon_keeps_a_momentum_of_hidden_matrices() -> None:
    kept = {}
    for word in ("adamw", "muon"):
        plan = find_plan("llama3.2-1b", "1x1xa100-80gb", global_batch=1, seq_len=64, levers={"optimizer": word})
        assert plan.prediction is not None
        kept[word] = plan.prediction.stages[0].memory_bytes["optimizer"]
    in_matrices = 16 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    assert kept["adamw"] - kept["muon"] == 4 * in_matrices


def test_a_profile_without_shapes_of_products_is_refused_for_muon() -> None:
    plan = small_plan("dp2, dp2, dp2, dp2", levers={"optimizer": "muon"})
    of = traced_job(plan, "muon")
    layers = tuple(
        each.model_copy(update={"forward": each.forward.model_copy(update={"products": ()})})
        for each in of.profile.layers
    )
    without = of.on(profile=of.profile.model_copy(update={"layers": layers}))
    with pytest.raises(UserError, match="no matrix shapes"):
        predict_memory(plan, without)


def test_a_profile_of_a_packaged_model_gets_shapes_of_products_from_a_trace() -> None:
    profile = packaged_trace(load_model("llama-demo"), seq_len=128, precision="bf16", degrees=(1,))
    assert profile is not None
    assert not any(each.forward.products for each in profile.layers)
    job = make_job("llama-demo", "1x1xa100-40gb", **MUON | {"seq_len": 128}, profile=profile)
    block = next(each for each in job.chain.layer_types if each.role is LayerRole.BLOCK)
    assert sum(count for *_, count in hidden_matrices(block, job.layer(block.name, {}))) == 7


@pytest.mark.parametrize("word", KEPT)
def test_what_it_keeps_goes_as_its_bytes_a_parameter(word: str) -> None:
    """The layers of llama3.2-1b have 1.24 billion parameters, and the head another 0.26."""
    plan = find_plan("llama3.2-1b", "1x1xa100-80gb", global_batch=1, seq_len=64, levers={"optimizer": word})
    assert plan.prediction is not None
    (stage,) = plan.prediction.stages
    params = stage.memory_bytes["parameters"] / 4
    more = stage.memory_bytes.get("optimizer", 0) - KEPT[word] * params
    assert 0 <= more <= 18 * LAYER_BYTES.get(word, 0) + 4096


def test_no_optimizer_keeps_more_than_adamw_of_the_smallest_layers() -> None:
    plan = small_plan("dp2, dp2, dp2, dp2")
    kept = {word: sum(terms["optimizer"] for terms in predict_memory(plan, traced_job(plan, word))) for word in KEPT}
    assert max(kept.values()) == kept["adamw"]


def traced_job(plan: Plan, word: str, devices: str = "1x2xcpu") -> Job:
    profile = cached_trace(plan.chain(), seq_len=plan.seq_len, precision=plan.precision, degrees=(1, 2))
    cluster = parse_cluster(devices).with_memory(GIB)
    return Job(
        chain=plan.chain(),
        groups=(DeviceGroup(profile=profile, cluster=cluster, budget_bytes=GIB),),
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        precision=plan.precision,
        levers=chosen(word),
    )


NUM_DRY_STEPS = 2
MOST = 1.15
"""Maximum ratio of predicted and found bytes; the allowance per layer is a tenth of the states of such small layers."""
LARGER = CONFIG | {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2000}
CHECKED = {
    "replicated": ("fp32", (", ".join(["dp2"] * 6),)),
    "sharded, bf16": ("bf16", ("fsdp2, fsdp2 zero2, fsdp2, fsdp2 zero1, fsdp2 remat=full, fsdp2",)),
    "tensors and sequence, bf16": ("bf16", (", ".join(["tp2+sp"] * 6),)),
    "stages": ("fp32", ("single, single, single", "single, single, single")),
}


HELD = [
    *((word, name) for word in ("adamw-8bit", "adamw-4bit", "sgd") for name in CHECKED),
    *(("adafactor", name) for name in ("replicated", "stages")),
    *(("muon", name) for name in ("replicated", "sharded, bf16", "stages")),
]
NIGHTLY = {("adamw-4bit", "replicated"), ("adamw-4bit", "tensors and sequence, bf16"), ("adamw-4bit", "stages")} | {
    *(("sgd", name) for name in CHECKED if name != "sharded, bf16"),
    *(("adamw-8bit", "replicated"), ("adafactor", "stages"), ("muon", "stages")),
}
"""Cases that repeat others: 4-bit moments have the same extra tensors as 8-bit ones, and a momentum has the shape of a
parameter; an optimizer has whole tensors under replicas as on stages, and Muon shares its matrices among replicas."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "name"), [pytest.param(*each, marks=pytest.mark.nightly if each in NIGHTLY else ()) for each in HELD]
)
def test_predicted_bytes_are_at_least_those_found_and_little_more(name: str, word: str) -> None:
    precision, stages = CHECKED[name]
    options: dict[str, Any] = {"precision": precision, "num_microbatches": 4, "global_batch": 8, "num_devices": 2}
    plan = make_plan(LARGER, *stages, **options, levers=chosen(word).texts)
    for stage, terms in enumerate(predict_memory(plan, traced_job(plan, word))):
        found = dry_run(plan, plan.stages[stage].ranks[0], backend="gloo")
        peak = max((found.first_step, found.later_steps), key=lambda each: each.total_bytes)
        assert 1.0 <= sum(terms.values()) / peak.total_bytes <= MOST, f"stage {stage}: {terms}, found {peak}"
        assert terms.get("optimizer", 0) >= found.later_steps.terms.get("optimizer", 0)


@pytest.mark.parametrize("name", ["dp2", "fsdp2"])
def test_ranks_of_data_parallelism_share_the_matrices_of_muon_as_priced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    levers, done = chosen("muon"), 0.0
    matrices = levers.effects.matrices
    assert matrices is not None

    def orthogonalized(matrix: Tensor, *_: object) -> Tensor:
        nonlocal done
        done += matrices.flop_of(*sorted(matrix.shape))
        return matrix

    monkeypatch.setattr("steelyard.modules.levers.optimizer._zeropower_via_newtonschulz", orthogonalized)
    plan = make_plan(
        LARGER, ", ".join([name] * 6), num_devices=2, num_microbatches=1, global_batch=2, levers=levers.texts
    )
    dry_run(plan, 0, backend="gloo")
    monkeypatch.setattr("steelyard.cost.layer.products_s", lambda flop, *_: flop)  # at 1 FLOP/s, all else takes no time
    config = JobConfig(job=traced_job(plan, "muon", "1x2xa100-80gb"), pipeline=plan.pipeline)
    pairs = zip(map(config.job.chain.type_of, range(6)), plan.strategies, strict=True)
    priced = sum(layer_cost(*each, config).once_s["optimizer"] for each in pairs)
    assert priced == pytest.approx(done / NUM_DRY_STEPS)


# a lever of a test: one class and one entry


@dataclass(frozen=True, slots=True)
class Momentum(Lever):
    """SGD with momentum, in so many bytes."""

    num_bytes: int = 0

    name: ClassVar[str] = "momentum"
    help: ClassVar[str] = "Bytes of a momentum."

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(int(text))

    def __str__(self) -> str:
        return str(self.num_bytes)

    @property
    def is_default(self) -> bool:
        return not self.num_bytes

    def effects(self, effects: Effects) -> Effects:
        return replace(effects, state_bytes=float(self.num_bytes), update_bytes=12.0 + 2 * self.num_bytes)


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVERS, "momentum", Momentum)


@pytest.mark.usefixtures("momentum")
def test_a_lever_more_is_planned_and_priced_and_written(tmp_path: Path) -> None:
    find: Callable[..., Plan] = find_plan
    plain, changed = (
        find("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers=levers)
        for levers in ({}, {"momentum": "2"})
    )
    assert plain.prediction is not None
    assert changed.prediction is not None
    before, after = (each.prediction.stages[0] for each in (plain, changed))
    assert after.memory_bytes["optimizer"] < before.memory_bytes["optimizer"] / 3
    assert after.time_s["optimizer"] == pytest.approx(before.time_s["optimizer"] * 16 / 28)
    write_plan(changed, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").chosen_levers == Levers((Momentum(2),))
    assert plain.chosen_levers == NO_LEVERS


@pytest.mark.usefixtures("momentum")
def test_a_lever_more_has_an_option(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(with_levers(plan_command.plan.__wrapped__))
    job = ["llama-demo", "--cluster", "1x1xa100-40gb", "--global-batch", "1", "--seq-len", "64", "--momentum", "2"]
    result = CliRunner().invoke(app, [*job, "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "momentum 2" in result.output
    assert json.loads((tmp_path / "plan.json").read_text())["levers"] == {"momentum": "2"}
