"""Tests of the kernels of GPUs on fake tensors: their work, their memory, and the times that others measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_next.modeling_qwen3_next as model_code
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from steelyard.cost.compute import work_s
from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.predict import predict, predict_memory
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.levers import Levers
from steelyard.model.read import chain_from_config, load_model
from steelyard.modules import gpu_kernels
from steelyard.modules.gpu_kernels import as_kernels
from steelyard.planning.price import warnings_of
from steelyard.profiles.profile import Work
from steelyard.profiles.shapes import Affine
from steelyard.runtime.dry_run import dry_run
from steelyard.tracer.cache import cached_trace
from steelyard.tracer.counting import OpCounter, OpCounts
from tests.cost.examples import plan
from tests.modules.split_configs import split_config
from tests.runtime.models import FAMILY_CONFIGS

GIB = 2**30
TOKENS, WIDTH = 1024, 128


def delta_rule(heads: int, value_heads: int, tokens: int = TOKENS) -> tuple[OpCounts, OpCounts]:
    """Return the counts of the gated delta rule in bf16, forward and backward."""
    with FakeTensorMode(), as_kernels(), OpCounter() as counter:
        keys = [torch.empty(1, tokens, heads, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        values = torch.empty(1, tokens, value_heads, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        gates = [torch.empty(1, tokens, value_heads, dtype=each, requires_grad=True) for each in GATES]
        found, state = model_code.torch_chunk_gated_delta_rule(*keys, values, *gates, use_qk_l2norm_in_kernel=True)
        assert (found.shape, found.dtype, state) == (values.shape, torch.bfloat16, None)
        forward, counter.counts = counter.counts, OpCounts()
        found.backward(torch.empty_like(found))
        assert keys[0].grad is not None
        assert keys[0].grad.shape == keys[0].shape
    return forward, counter.counts


GATES = (torch.float32, torch.bfloat16)


def test_one_kernel_moves_what_its_products_read_and_write() -> None:
    forward, backward = delta_rule(2, 4)
    chunk, tokens = 64, TOKENS * 4
    in_chunk = 2 * (2 * WIDTH + chunk)  # keys and queries by keys
    solutions = 2 * (chunk + 2 * WIDTH)
    by_state = 2 * (2 * WIDTH + WIDTH * WIDTH // chunk)
    rest = (chunk + 2 * WIDTH) + (2 * WIDTH + WIDTH * WIDTH // chunk)
    products = 2 * tokens * (in_chunk + solutions + by_state + rest)
    assert forward.num_kernels == 1
    assert (forward.memory_bytes, backward.memory_bytes) == (products, 2.5 * products)
    flop = 2 * tokens * (2 * chunk * WIDTH + chunk * WIDTH + 3 * WIDTH * WIDTH + chunk * WIDTH)
    assert (forward.matmul_flop, backward.matmul_flop) == (flop, 2.5 * flop)


@pytest.mark.parametrize("tokens", [1030, 1280])
def test_the_work_of_a_long_sequence_is_that_of_its_chunks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = delta_rule(1, 2, tokens)
    monkeypatch.setattr(gpu_kernels, "_COUNTED", 1024)
    monkeypatch.setattr(gpu_kernels, "_work", {})
    assert delta_rule(1, 2, tokens) == whole


def test_work_that_grows_with_the_square_of_a_sequence_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "_COUNTED", 64)
    monkeypatch.setattr(gpu_kernels, "_STEP", 16)

    def scores(one: Tensor, other: Tensor) -> Tensor:
        return one @ other.transpose(1, 2)

    with FakeTensorMode(), OpCounter() as counter:
        found = gpu_kernels._one_operation(scores)(*(torch.empty(1, 80, 8) for _ in range(2)))()
    assert found.shape == (1, 80, 80)
    assert counter.counts.matmul_flop == 2 * 80 * 80 * 8


# Seconds of flash-linear-attention 0.5.1 on an H200: QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt (MIT).
MEASURED_S = {
    (32768, 16, 64): (3.331e-3, None),
    (16384, 16, 64): (1.598e-3, None),
    (32768, 16, 48): (2.711e-3, None),
    (32768, 16, 32): (1.890e-3, 5.697e-3),
    (8192, 16, 32): (0.472e-3, 1.444e-3),
    (32768, 32, 32): (1.939e-3, None),
}


@pytest.mark.parametrize("case", MEASURED_S)
def test_times_are_those_of_short_runs_or_little_more(case: tuple[int, int, int]) -> None:
    """Clocks fall in longer runs, and the rates of the catalogue are those of training."""
    tokens, heads, value_heads = case
    of = _job({**split_config("qwen3_next")}, "1x1xh200-141gb", gpu_kernels=True)
    for counts, measured_s in zip(delta_rule(heads, value_heads), MEASURED_S[case], strict=True):
        if measured_s is not None:
            sums = ("matmul_flop", "attention_flop", "matmul_bytes", "memory_bytes")
            lines = {name: Affine(constant=0.0, per_sample=getattr(counts, name) / TOKENS) for name in sums}
            work = Work(num_kernels=1, **lines)
            assert 0.9 <= work_s(work, tokens, of) / measured_s <= 1.4


def _job(config: dict[str, object], cluster: str, *, gpu_kernels: bool) -> Job:
    chain = chain_from_config(config, name="test")
    trace = cached_trace(chain, seq_len=64, precision="bf16", degrees=(1, 2), gpu_kernels=gpu_kernels)
    machines = parse_cluster(cluster).with_memory(GIB)
    group = DeviceGroup(profile=trace, cluster=machines, budget_bytes=GIB)
    return Job(chain=chain, groups=(group,), seq_len=64, global_batch=16, precision="bf16")


DROPPING = {**FAMILY_CONFIGS["gpt2"], "n_positions": 64, "attn_pdrop": 0.1, "resid_pdrop": 0.1}


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (split_config("qwen3_next"), "fsdp2"),
        (split_config("qwen3_next"), "fsdp2 remat=full"),
        (split_config("qwen3_next"), "fsdp2 remat=selective"),
        (DROPPING, "fsdp2"),
        (DROPPING, "fsdp2 remat=selective"),
        (DROPPING, "tp2+sp"),
        (FAMILY_CONFIGS["t5"], "fsdp2"),
        (FAMILY_CONFIGS["t5"], "tp2"),
    ],
)
def test_predicted_bytes_are_those_of_a_dry_run_on_gpus(config: dict[str, object], strategy: str) -> None:
    on_gpus, on_cpus = (_job(config, "1x2xcpu", gpu_kernels=each) for each in (True, False))
    ends = strategy.partition(" ")[0]
    blocks = ", ".join([strategy] * (on_gpus.chain.num_layers - 2))
    candidate = plan(on_gpus, f"{ends}, {blocks}, {ends}", num_microbatches=2)
    found = dry_run(candidate, 0, backend="nccl")
    peak = max(found.first_step.total_bytes, found.later_steps.total_bytes)
    (predicted,), (of_reference,) = (predict_memory(candidate, each) for each in (on_gpus, on_cpus))
    assert 1.0 <= sum(predicted.values()) / peak <= 1.15
    assert sum(of_reference.values()) > sum(predicted.values())


def _passes(run: Callable[[Tensor], Tensor]) -> tuple[list[tuple[torch.dtype, int]], OpCounts, OpCounts]:
    """Return dtype and entries of the tensors that a function saves, and the counts of both passes, on GPUs."""
    saved = []
    with FakeTensorMode(), as_kernels(), OpCounter() as counter:
        given = torch.empty(1, 2, 64, 8, dtype=torch.bfloat16, requires_grad=True)
        keep = torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each)
        with keep:
            out = run(given)
        forward, counter.counts = counter.counts, OpCounts()
        torch.autograd.backward(out, torch.empty_like(out))
    return [(each.dtype, each.numel()) for each in saved], forward, counter.counts


def test_attention_moves_and_saves_no_more_with_dropout() -> None:
    plain, dropping = (
        _passes(lambda each: functional.scaled_dot_product_attention(each, each, each, None, rate, True))  # noqa: B023
        for rate in (0.0, 0.5)
    )
    assert dropping == plain
    assert dropping[1].attention_flop > 0


def test_attention_with_a_trained_bias_is_one_kernel_that_saves_no_scores() -> None:
    def biased(each: Tensor) -> Tensor:
        bias = torch.empty(1, 2, 64, 64, dtype=each.dtype, requires_grad=True)
        return functional.scaled_dot_product_attention(each, each, each, bias)

    saved, forward, backward = _passes(biased)
    plain = _passes(lambda each: functional.scaled_dot_product_attention(each, each, each))
    assert (forward.num_kernels, forward.fp32_flop) == (1, 0)
    assert (forward.attention_flop, backward.attention_flop) == (plain[1].attention_flop, plain[2].attention_flop)
    assert {dtype for dtype, entries in saved if entries == 2 * 64 * 64} == {torch.bfloat16}  # the bias alone
    assert backward.matmul_bytes - plain[2].matmul_bytes >= 2 * 2 * 64 * 64 * 2  # the bias and its gradient


def test_dropout_is_one_kernel_that_saves_a_byte_per_entry() -> None:
    saved, forward, backward = _passes(lambda each: functional.dropout(each, 0.5))
    assert saved == [(torch.bool, 1024)]
    assert (forward.num_kernels, forward.memory_bytes) == (1, 1024 * (2 + 2 + 1))
    assert (backward.num_kernels, backward.memory_bytes) == (1, 1024 * (2 + 2 + 1))
    assert _passes(lambda each: 2 * functional.dropout(each, 0.5, training=False))[1].num_kernels == 1


def test_a_norm_of_torch_is_one_kernel_that_saves_its_input() -> None:
    saved, forward, _ = _passes(lambda each: functional.rms_norm(each, (8,)))
    assert (saved, forward.num_kernels, forward.memory_bytes) == ([(torch.bfloat16, 1024)], 1, 2 * 2 * 1024)


def test_a_kernel_without_reference_code_is_no_work() -> None:
    from transformers.models.mamba2 import modeling_mamba2

    with FakeTensorMode(), as_kernels(), OpCounter() as counter:
        states = torch.empty(2, 64, 96, requires_grad=True)
        assert modeling_mamba2.mamba2_split_conv1d_scan_combined(states, *[torch.empty(8)] * 5, chunk_size=16) is None
    assert (counter.counts.num_kernels, counter.counts.memory_bytes) == (0, 0)


def test_the_packages_of_kernels_are_named_in_traces_for_gpus_and_in_warnings() -> None:
    packages = ("causal_conv1d", "flash-linear-attention")
    on_gpus, on_cpus = (_job(split_config("qwen3_next"), "1x2xh100-80gb", gpu_kernels=each) for each in (True, False))
    assert (on_gpus.profile.identity.packages, on_cpus.profile.identity.packages) == (packages, ())
    candidate = plan(on_gpus, ", ".join(["fsdp2"] * 4), num_microbatches=2)
    said = [warnings_of(each, candidate, predict(candidate, each).stages) for each in (on_gpus, on_cpus)]
    assert [any("causal_conv1d, flash-linear-attention" in line for line in lines) for lines in said] == [True, False]


BIASED = {**FAMILY_CONFIGS["t5"], "dropout_rate": 0.0}


@pytest.mark.parametrize(
    ("config", "compiled", "traces"),
    [
        (FAMILY_CONFIGS["llama"], "off", 1),
        (DROPPING, "off", 2),
        (BIASED, "off", 2),
        (DROPPING, "blocks", 2),
    ],
)
def test_one_trace_serves_cpus_and_gpus_if_no_layer_has_such_kernels(
    config: dict[str, object], compiled: str, traces: int, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"seq_len": 32, "precision": "bf16", "degrees": (1,), "folder": tmp_path}
    chain = Levers.of({"compile": compiled}).change(chain_from_config(config, name="test"))
    for on_gpus in (False, True):
        cached_trace(chain, **sizes, gpu_kernels=on_gpus)
    assert len([*tmp_path.iterdir()]) == traces


def test_a_packaged_trace_of_other_kernels_is_not_that_of_cpus(tmp_path: Path) -> None:
    chain = load_model("gpt2")
    sizes: dict[str, Any] = {"seq_len": 128, "precision": "bf16", "degrees": (1,), "folder": tmp_path}
    on_cpus, on_gpus = (cached_trace(chain, **sizes, gpu_kernels=each) for each in (False, True))
    assert len([*tmp_path.iterdir()]) == 1
    assert on_cpus.layers[1].saved_bytes.per_sample > on_gpus.layers[1].saved_bytes.per_sample


def test_compiled_blocks_are_refused_on_gpus_alone() -> None:
    chain = chain_from_config(split_config("qwen3_next"), name="test")
    compiled = Levers.of({"compile": "blocks"}).change(chain)
    with pytest.raises(UserError, match=r"(?s)--compile.*causal_conv1d, flash-linear-attention"):
        cached_trace(compiled, seq_len=64, precision="bf16", degrees=(1,), gpu_kernels=True)
