"""Tests of rows with experts and context parallelism as plans, against counts by hand."""

from dataclasses import replace

import pytest
from published_runs.forecast import Forecast, forecast
from published_runs.frameworks import framework_of, torchtitan_of
from published_runs.rows import PublishedRun

from steelyard.cost.predict import predict
from steelyard.engines.megatron import MEGATRON
from steelyard.engines.megatron_bridge import TE_SPEEDUP
from steelyard.plan.dimensions import CP
from steelyard.plan.strategy import Strategy
from tests.benchmarks.published_runs.examples import case, run_of

TITAN = "torchtitan"
SPARSE_ROW = {
    "moe_experts": "8",
    "moe_topk": "2",
    "moe_ffn": "1024",
    "moe_dense_layers": "0",
    "moe_shared_experts": "0",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "4",
    "etp": "1",
    "dp_shard": "8",
    "mbs": "1",
    "gbs": "8",
    "compile": "False",
}


def block_strategy(**cells: str) -> Strategy:
    return case(TITAN, **SPARSE_ROW | cells).plan.strategies[1]


def test_experts_over_data_ranks_are_a_degree_of_the_plan() -> None:
    assert block_strategy().expert_degree == 4


def test_ranks_that_divide_experts_and_tensors_alike_count_as_tp() -> None:
    """Eight ranks hold all experts once; two of them are one tensor-parallel pair."""
    found = block_strategy(ep="8", tp="2", dp_shard="4", gbs="4")
    assert (found.tensor_degree, found.expert_degree) == (2, 4)


def test_dense_blocks_come_first_and_have_no_experts() -> None:
    found = case(TITAN, **SPARSE_ROW | {"moe_dense_layers": "3"})
    chain, strategies = found.job.chain, found.plan.strategies
    layer_types = [chain.type_of(layer).num_experts > 0 for layer in range(1, chain.num_layers - 1)]
    assert layer_types == [False] * 3 + [True] * (len(layer_types) - 3)
    assert [each.expert_degree > 1 for each in strategies[1:-1]] == layer_types


@pytest.mark.parametrize(
    ("text", "dispatcher"),
    [("alltoall", "all-to-all"), ("flex deepep", "deep"), ("allgather, sequential", "all-gather")],
)
def test_a_row_says_how_tokens_are_sent(text: str, dispatcher: str) -> None:
    alike = SPARSE_ROW | {"framework": "Megatron-Core, TE", "zero_stage": "1", "overlap": ""}
    assert case(TITAN, **alike | {"moe_dispatcher": text}).job.execution.dispatcher == dispatcher


def test_an_exchange_sends_a_token_to_each_of_its_experts() -> None:
    found = case(TITAN, **SPARSE_ROW).job
    assert found.profile.layers[1].divided_experts is not None
    (sent,) = found.profile.layers[1].divided_experts[0].forward_collectives
    assert sent.tensor_bytes.per_sample / sent.count == 2 * 2 * found.seq_len * found.chain.hidden_size


def test_forced_routing_is_even_and_natural_routing_is_not() -> None:
    assert case(TITAN, **SPARSE_ROW | {"moe_balance": "forced"}).job.imbalance == 1.0
    assert case(TITAN, **SPARSE_ROW | {"moe_balance": "aux_loss (not forced)"}).job.imbalance > 1.0


def test_a_part_of_the_sequence_is_a_level_of_the_plan_and_takes_less_memory() -> None:
    degrees = {"gpus": "8", "tp": "1", "pp": "1", "ep": "1", "mbs": "1", "gbs": "4"}
    whole = case(TITAN, **degrees | {"cp": "1", "dp_shard": "8", "gbs": "8"})
    divided = case(TITAN, **degrees | {"cp": "2", "dp_shard": "8"})
    assert divided.plan.strategies[1].degree(CP) == 2
    one, other = (predict(each.plan, each.job).stages[0].memory_bytes["activations"] for each in (whole, divided))
    assert other < 0.6 * one


def test_workspaces_of_kernels_and_the_last_rank_are_counted_for_megatron_core() -> None:
    golden = {
        "framework": "Megatron-Core, TE",
        "attention": "TE, backend auto (deterministic algorithms only)",
        "mem_kind": "torch max_memory_allocated of the last rank (last pipeline stage)",
        "zero_stage": "1",
    }
    found = case(TITAN, **golden)
    assert found.reports == "last"
    runs = [PublishedRun(cells={**found.run.cells, "gpu": gpu, "gpu_mem_gb": "80"}) for gpu in ("A100", "H100")]
    old, new = (forecast(run) for run in runs)
    assert isinstance(old, Forecast)
    assert isinstance(new, Forecast)
    assert new.peak_bytes - old.peak_bytes == 28 * 2**20
    assert replace(found, workspace_bytes=0).workspace_bytes < found.workspace_bytes


def kernels_of(framework: str, **cells: str) -> int:
    found = case(TITAN, **SPARSE_ROW | {"framework": framework} | cells).job
    block = found.layer("block", {}, expert_degree=4)
    assert block is not None
    return block.forward.num_kernels


def test_transformer_engine_computes_each_local_expert_by_two_matmuls_and_in_fp8_by_two_casts_beside() -> None:
    alike = {"compile": "True", "zero_stage": "1", "dp_shard": "8"}
    local, all_of_them = kernels_of("Megatron-Core, TE", **alike), kernels_of("Megatron-Core, local (mcore)", **alike)
    assert local - all_of_them == 2 * 2
    assert kernels_of("Megatron-Core, TE", precision="fp8", **alike) - all_of_them == 4 * 2


def test_experts_do_not_gain_from_fast_linear_layers() -> None:
    """Their matmuls count as so many more FLOP as the linear layers' rate is higher."""
    alike = {"gpu": "H100", "gpu_mem_gb": "80", "compile": "True", "moe_dispatcher": "alltoall"}

    def matmul_flop(framework: str, ffn: int) -> float:
        found = case(TITAN, **SPARSE_ROW | alike | {"framework": framework, "moe_ffn": str(ffn)}).job
        return found.profile.layers[1].forward.matmul_flop.per_sample

    tuned, usual = (matmul_flop(each, 1024) - matmul_flop(each, 512) for each in ("NeMo 25.02", "Megatron-Core, TE"))
    assert tuned == pytest.approx(TE_SPEEDUP * usual)
    assert MEGATRON.execution.tuned_linear_speedup == 1.0


def test_torchtitan_has_its_loss_in_pieces_since_a_month_or_where_it_says_so() -> None:
    names = {
        "torchtitan 9dec370 / torch 1963fc8 (2024-12)": 1,
        "torchtitan e23bb707d (2025-03), FSDP2, chunked cross entropy": 8,
        "torchtitan 58b034444 (2026-05), FSDP2": 8,
        "torchtitan 27aa49077 (2026-06), graph_trainer (aot_fx_trace)": 1,
        "torchtitan (FSDP2)": 1,
    }
    kernels = {name: torchtitan_of(name, []).execution.kernels for name in names}
    assert {name: each.loss_pieces for name, each in kernels.items() if each} == names


@pytest.mark.parametrize(
    ("version", "fuses"), [("torchtitan (2025-01)", False), ("torchtitan (2025-08)", True), ("torchtitan", True)]
)
def test_norms_that_are_not_compiled_are_one_kernel_since_july_2025(version: str, fuses: bool) -> None:
    plain, compiled = (torchtitan_of(version, said).execution.kernels for said in ([], ["compile"]))
    assert plain is not None
    assert compiled is not None
    assert (plain.norm, compiled.norm) == (fuses, True)


@pytest.mark.parametrize(
    ("framework", "cells", "engine"),
    [
        ("Megatron-Core, TE", {"moe_dispatcher": "allgather", "moe_balance": "forced"}, "megatron+allgather+balanced"),
        ("Megatron-Core, TE", {"options": "fused cross entropy native"}, "megatron+fused-loss"),
        ("Megatron-Core, TE", {"options": "Megatron-FSDP"}, "megatron-fsdp"),
        ("Primus (Megatron-Core)", {"options": "manual gc, fused cross entropy"}, "megatron+balanced"),
        ("NeMo 25.02", {"cuda_graph": "full", "overlap": "TP comm"}, "megatron-bridge+balanced+cuda-graphs"),
        ("torchtitan (2026-07)", {"compile": "True", "overlap": "async TP"}, "torchtitan+compile+async-tp"),
    ],
)
def test_what_a_row_switches_on_is_an_option_of_the_products_engine(
    framework: str, cells: dict[str, str], engine: str
) -> None:
    found = framework_of(run_of(TITAN, framework=framework, **{"compile": "False", "overlap": ""} | cells))
    assert found is not None
    assert found.engine.name == engine


@pytest.mark.parametrize(
    ("name", "detail", "expected"),
    [
        ("torchtitan c4e229115 (2025-09), FSDP2", "per-op", ("half of the matmuls", (4, 2), True)),
        ("torchtitan 2271b6386 (2025-01), FSDP2", "per-op", ("half of the matmuls", (12, 4), True)),
        ("torchtitan 1234567 (2026-07), FSDP2", "per-op", ("half of the matmuls", (4, 2), False)),
        ("torchtitan 27aa49077 (2026-06), graph_trainer", "graph pass", ("no matmul", (12, 4), True)),
        ("torchtitan fca8ab7be (2026-03), graph_trainer", "graph pass", ("half of the matmuls", (12, 4), True)),
    ],
)
def test_what_torchtitan_compiles_and_keeps_is_a_matter_of_its_version(
    name: str, detail: str, expected: tuple[str, tuple[int, int], bool]
) -> None:
    cells = {"framework": name, "act_ckpt": "selective", "act_ckpt_detail": detail, "compile": "True"}
    kernels = case(TITAN, **SPARSE_ROW | cells).job.execution.kernels
    assert kernels is not None
    assert (kernels.selective, kernels.loss_bytes, kernels.eager_routing) == expected


def test_torchs_stages_keep_layers_gathered_whatever_the_zero_stage() -> None:
    piped, flat = (block_strategy(pp=pp, dp_shard=shard, gbs=shard) for pp, shard in (("2", "4"), ("1", "8")))
    assert [each.mode("zero") for each in (piped, flat)] == [1, 3]
