"""Tests of compiled blocks: their text, their traces and dry runs, and refusals."""

import json
import shutil
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from steelyard.cost.predict import predict_memory
from steelyard.errors import InvalidModelError, InvalidPlanError, UserError
from steelyard.hardware.parse import pools_from_yaml
from steelyard.levers import Levers
from steelyard.levers.compiled_blocks import CompiledBlocks
from steelyard.model.chain import LayerRole
from steelyard.model.read import chain_from_config
from steelyard.modules.levers.compiled_blocks import change_layer
from steelyard.plan.file import dump_json
from steelyard.plan.stages import legal_shapes
from steelyard.plan.strategy import Remat
from steelyard.planning.advise import Change, advise, hints
from steelyard.planning.complete import find_plan
from steelyard.planning.request import PlanRequest, make_request
from steelyard.profiles.profile import LayerProfile, Recomputation
from steelyard.runtime.dry_run import dry_run
from steelyard.runtime.optimizer import make_optimizers
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from steelyard.runtime.peak_memory import LiveStorages
from steelyard.tracer.cache import cached_trace
from tests.levers.test_train import _job
from tests.runtime.compile_cases import compiled_plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS
from tests.runtime.processes import one_process
from tests.sample import sampled

WIDE = {**CONFIGS["llama"], "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704, "vocab_size": 512}
JOB: dict[str, Any] = {"global_batch": 4, "seq_len": 64}
SIZES: dict[str, Any] = {"num_microbatches": 2, "global_batch": 32, "num_devices": 2, "seq_len": 64}
MODEL = "test"
"""Name of models in `make_plan`."""
BLOCKS = {"compile": "blocks"}
PROCESSES = """
version: 1
num_nodes: 1
devices_per_node: 2
device: {name: a100, kind: cpu, memory_GiB: 40, peak_TFLOPs: {bf16: 312, fp32: 19.5}, memory_bandwidth_GBps: 1555}
intra_link: pcie-4
"""
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


# what is written of it


@pytest.mark.parametrize("word", ["off", "blocks"])
def test_a_text_says_one_value_and_a_value_one_text(word: str) -> None:
    assert str(CompiledBlocks.parse(word)) == word
    assert Levers.of({"compile": word}).texts == ({} if word == "off" else {"compile": word})


def test_another_text_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        CompiledBlocks.parse("block")
    assert (caught.value.field, caught.value.found) == ("--compile", "'block'")
    assert "blocks" in (caught.value.hint or "")


# what is refused


@pytest.mark.parametrize(("config", "strategy", "reason"), [("llama", "cp2", "no cp"), ("mixtral", "dp2 ep2", "no ep")])
def test_dimensions_that_exchange_in_the_middle_of_a_block_are_refused(config: str, strategy: str, reason: str) -> None:
    sizes: dict[str, Any] = {"num_microbatches": 1, "global_batch": 4, "num_devices": 2, "seq_len": 32}
    layers = ", ".join(["dp2", strategy, *["dp2"] * FAMILY_CONFIGS[config]["num_hidden_layers"]])
    with pytest.raises(InvalidPlanError, match=reason):
        compiled_plan(FAMILY_CONFIGS[config], layers, **sizes)


def test_quantized_weights_are_refused_before_any_search() -> None:
    with pytest.raises(UserError, match="together with --base"):
        make_request("llama-demo", "1x1xa100-40gb", **JOB, levers=BLOCKS | {"train": "lora", "base": "nf4"})


@pytest.mark.parametrize(
    ("config", "train", "can_divide"),
    [
        (FAMILY_CONFIGS["llama"], "lora:r=4", True),
        (FAMILY_CONFIGS["llama"], "lora:r=4,dropout=0.1", False),
        (FAMILY_CONFIGS["gpt2"] | {"resid_pdrop": 0.1}, "full", False),
    ],
)
def test_compiled_blocks_that_drop_entries_are_not_divided_by_tp(
    config: dict[str, Any], train: str, can_divide: bool
) -> None:
    """PyTorch 2.13 mixes up states of random generators and meshes among what it saves."""
    chain = Levers.of(BLOCKS | {"train": train}).change(chain_from_config(config, name=MODEL))
    shapes = {each.role: list(legal_shapes(each, 2, 16)) for each in chain.layer_types}
    assert bool(shapes[LayerRole.BLOCK]) == can_divide
    assert shapes[LayerRole.HEAD]


def test_an_engine_that_compiles_by_itself_is_refused() -> None:
    with pytest.raises(UserError, match="with the engine torchtitan"):
        make_request("llama3.1-8b", "1x8xh100-80gb", global_batch=8, seq_len=64, engine="torchtitan", levers=BLOCKS)


@pytest.mark.parametrize(("device_type", "needed"), [("cpu", "C\\+\\+ compiler"), ("gpu", "triton")])
def test_a_host_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, device_type: Any, needed: str) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=needed):
        Levers.of(BLOCKS).check_host(device_type)
    Levers.of({}).check_host(device_type)


class _Printing(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return hidden + 1


def test_a_block_that_cannot_be_traced_as_one_function_is_refused() -> None:
    layer = SimpleNamespace(block=_Printing(), layer_type=SimpleNamespace(name="block"), remat=Remat.NONE)
    change_layer(CompiledBlocks("blocks"), layer)
    with pytest.raises(InvalidModelError, match="blocks of block") as caught:
        layer.compiled(torch.zeros(2))
    assert caught.value.field == "--compile"


class _Sink(nn.Module):
    """Scores with one more that no token has, as gpt-oss computes them: the place of the largest is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(4, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([hidden @ hidden.mT, self.sink.expand(len(hidden), 4, 1)], dim=-1)
        chances = torch.softmax(scores - scores.max(dim=-1, keepdim=True).values, dim=-1)
        return chances[..., :-1] @ hidden


def test_all_results_of_an_operation_are_of_the_kernel_that_makes_it() -> None:
    with FakeTensorMode():
        layer = SimpleNamespace(block=_Sink(), layer_type=SimpleNamespace(name="block"), remat=Remat.NONE, drops=False)
        change_layer(CompiledBlocks("blocks"), layer)
        hidden = torch.zeros(2, 4, 8, requires_grad=True)
        layer.compiled(hidden).sum().backward()
        assert hidden.grad is not None


# what is seen of it


def blocks_of(config: dict[str, Any], levers: dict[str, str], *degrees: int) -> dict[str, LayerProfile]:
    """The traced blocks by their shape, of 64 tokens in bf16; for `WIDE` the trace that its plans are priced by."""
    chain = Levers.of(levers).change(chain_from_config(config, name=MODEL))
    profile = cached_trace(chain, seq_len=SIZES["seq_len"], precision="bf16", degrees=degrees)
    return {layer.shape_text: layer for layer in profile.layers if layer.kind == "block"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degree"),
    [("llama", 2), *(pytest.param(name, 1, marks=pytest.mark.nightly) for name in ("mixtral", "gpt2"))],
)
def test_kernels_and_bytes_are_fewer_and_work_and_messages_the_same(name: str, degree: int) -> None:
    config = WIDE if name == "llama" else FAMILY_CONFIGS[name]
    plain, compiled = (blocks_of(config, levers, degree) for levers in ({}, BLOCKS))
    assert plain.keys() == compiled.keys()
    for shape, before in plain.items():
        after = compiled[shape]
        for one, other in ((before.forward, after.forward), (before.backward, after.backward)):
            assert other.num_kernels < one.num_kernels
            assert other.memory_bytes.at(4) < one.memory_bytes.at(4)
            assert other.matmul_flop == one.matmul_flop
            assert other.attention_flop == one.attention_flop
        assert after.saved_bytes.at(4) <= before.saved_bytes.at(4)
        assert after.forward_collectives == before.forward_collectives
        assert after.backward_collectives == before.backward_collectives
        assert _of(after, "selective").saved_bytes.at(4) <= after.saved_bytes.at(4)
        assert _of(after, "full").saved_bytes == _of(before, "full").saved_bytes


def _of(layer: LayerProfile, remat: str) -> Recomputation:
    return layer.recomputation(remat)


@pytest.mark.slow
def test_norm_and_activation_of_a_block_are_one_kernel_each() -> None:
    """Llama has 7 products and attention, 2 norms (one with the sum before it), the activation times the other product,
    rotary embedding of queries and of keys, and the last sum."""
    layer = blocks_of(WIDE, BLOCKS, 2)["undivided"]
    assert layer.forward.num_kernels == 8 + 6


CHECKED = {
    "replicated, fp32": ("fp32", (", ".join(["dp2"] * 6),)),
    "sharded": ("bf16", ("fsdp2, fsdp2, fsdp2 remat=full, fsdp2 remat=full, fsdp2 remat=selective, fsdp2",)),
    "tensors": ("bf16", ("tp2, tp2+sp, tp2+sp, tp2 remat=selective, tp2+sp, tp2",)),
    "stages": ("bf16", ("single, single, single", "single, single, single")),
}
OF_ONE_TRACE = ("sharded", "tensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CHECKED, OF_ONE_TRACE))
def test_predicted_bytes_are_at_least_those_found_and_little_more(name: str) -> None:
    precision, stages = CHECKED[name]
    plan = compiled_plan(WIDE, *stages, **SIZES, precision=precision)
    for stage, terms in enumerate(predict_memory(plan, _job(plan))):
        found = dry_run(plan, plan.stages[stage].ranks[0], backend="gloo")
        peak = max(found.first_step.total_bytes, found.later_steps.total_bytes)
        assert 1.0 <= sum(terms.values()) / peak <= 1.1, f"stage {stage}: {terms}, found {found.later_steps}"


def _zeros(samples: Sequence[int]) -> torch.Tensor:
    return torch.zeros((len(samples), 65), dtype=torch.long)


def _graphs_of_two_steps(model: ParallelModel) -> int:
    """Run without a memory meter, under which PyTorch compiles again in a process that has traced other models."""
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model.train_step(_zeros)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("remat", sampled(["none", "selective", "full"], ["selective"]))
def test_a_dry_run_finds_the_bytes_of_steps_that_inductor_compiled(remat: str) -> None:
    block = "single" if remat == "none" else f"single remat={remat}"
    sizes = {"num_microbatches": 2, "global_batch": 4, "num_devices": 1, "seq_len": 64}
    config = WIDE | {"num_hidden_layers": 2}
    plan = compiled_plan(config, ", ".join(["single", *[block] * 2, "single"]), **sizes, precision="bf16")
    found = dry_run(plan, 0, backend="gloo")
    torch._dynamo.reset()
    with one_process():
        assert _graphs_of_two_steps(parallelize_plan(plan)) == 1, "equal blocks are compiled once"
        model = parallelize_plan(plan)
        (optimizer,) = make_optimizers(model, TrainOptions())
        for expected in (found.first_step, found.later_steps):
            states = [each for state in optimizer.state.values() for each in state.values()]
            with LiveStorages([*model.parameters(), *states]) as meter:
                model.train_step(_zeros)
                model.clip_gradients(1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert 0.999 <= expected.total_bytes / meter.peak_bytes <= 1.05


# what is planned with it


@pytest.mark.slow
def test_a_step_is_faster_and_the_plan_says_why() -> None:
    """On processes with the rates of a GPU: `blocks_of` has made their traces, which are not those for GPUs."""
    cluster = pools_from_yaml(PROCESSES)
    chain = chain_from_config(WIDE, name=MODEL)
    plain, compiled = (find_plan(chain, cluster, **JOB, precision="bf16", levers=levers) for levers in ({}, BLOCKS))
    assert plain.prediction is not None
    assert compiled.prediction is not None
    assert compiled.prediction.step_time_s < plain.prediction.step_time_s
    assert json.loads(dump_json(compiled))["levers"] == BLOCKS


def test_advice_tries_it_where_it_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Mapping[str, str]] = []

    def left_out(_request: PlanRequest, change: Change, *_: object) -> str:
        tried.append(change.levers)
        return "not tried here"

    monkeypatch.setattr("steelyard.planning.advise._try", left_out)
    request = make_request("llama-demo", "1x1xa100-40gb", **JOB)
    advise(request)
    assert BLOCKS in tried
    tried.clear()
    assert list(hints(request)) == []
    assert tried
    assert BLOCKS not in tried
