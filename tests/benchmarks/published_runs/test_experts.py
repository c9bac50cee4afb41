"""Rows with experts and context parallelism as plans, against counts worked out by hand."""

from dataclasses import replace

import pytest
from published_runs.experts import ExpertRank, Experts
from published_runs.forecast import Forecast, forecast
from published_runs.rows import PublishedRun
from published_runs.shapes import SPARSE

from steelyard.cost.predict import predict
from steelyard.plan.dimensions import CP
from steelyard.plan.strategy import Strategy
from tests.benchmarks.published_runs.examples import case

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


def rank(**changed: int) -> ExpertRank:
    sizes = {"tokens": 64, "hidden": 16, "tp": 1, "ep": 1, "etp": 1, "node_ranks": 8} | changed
    experts = Experts(count=8, top_k=2, ffn=32)
    return ExpertRank(experts=experts, gated=True, imbalance=1.0, **sizes)  # type: ignore[arg-type]


def block_strategy(**cells: str) -> Strategy:
    return case(TITAN, **SPARSE_ROW | cells).plan.strategies[1]


def test_experts_over_data_ranks_are_a_degree_of_the_plan() -> None:
    assert block_strategy().expert_degree == 4


def test_ranks_that_divide_experts_and_tensors_alike_count_as_tp() -> None:
    """Eight ranks hold all experts once; two of them are one tensor-parallel pair."""
    found = block_strategy(ep="8", tp="2", dp_shard="4", gbs="4")
    assert (found.tensor_degree, found.expert_degree) == (2, 4)


def test_a_rank_holds_its_share_of_all_experts_however_they_are_divided() -> None:
    whole = rank().params
    assert whole == 8 * 3 * 16 * 32
    for degrees in ({"ep": 8, "tp": 2}, {"ep": 4, "tp": 2, "etp": 2}, {"ep": 8}, {"ep": 2, "tp": 2}):
        found = rank(**degrees)
        assert found.params // found.outside_tp == whole // (degrees["ep"] * degrees.get("etp", 1))


def test_dense_blocks_come_first_and_have_no_experts() -> None:
    found = case(TITAN, **SPARSE_ROW | {"moe_dense_layers": "3"})
    chain, strategies = found.job.chain, found.plan.strategies
    layer_types = [chain.type_of(layer).name == SPARSE for layer in range(1, chain.num_layers - 1)]
    assert layer_types == [False] * 3 + [True] * (len(layer_types) - 3)
    assert [each.expert_degree > 1 for each in strategies[1:-1]] == layer_types


@pytest.mark.parametrize(
    ("dispatcher", "copies"), [("alltoall", 2.0), ("flex deepep", 4 * (1 - (3 / 4) ** 2)), ("allgather", 4.0)]
)
def test_a_dispatcher_sends_as_many_copies_of_a_token_as_it_is_said_to(dispatcher: str, copies: float) -> None:
    found = case(TITAN, **SPARSE_ROW | {"moe_dispatcher": dispatcher})
    block = found.job.profile.layers[1]
    (sent,) = [each for each in block.forward_collectives if each.kind == "all_to_all"]
    one_copy = 2 * found.job.seq_len * found.job.chain.hidden_size
    assert sent.tensor_bytes.per_sample / sent.count == pytest.approx(copies * one_copy)


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
    return case(TITAN, **SPARSE_ROW | {"framework": framework} | cells).job.profile.layers[1].forward.num_kernels


def test_transformer_engine_computes_each_local_expert_by_two_matmuls_and_in_fp8_by_two_casts_beside() -> None:
    alike = {"compile": "True", "zero_stage": "1", "dp_shard": "8"}
    local, all_of_them = kernels_of("Megatron-Core, TE", **alike), kernels_of("Megatron-Core, local (mcore)", **alike)
    assert local - all_of_them == 2 * 2
    assert kernels_of("Megatron-Core, TE", precision="fp8", **alike) - all_of_them == 4 * 2


def test_experts_do_not_gain_from_fast_linear_layers() -> None:
    """Their matmuls count as so many more FLOP as the linear layers' rate is higher."""
    alike = {"gpu": "H100", "gpu_mem_gb": "80", "compile": "True", "moe_dispatcher": "alltoall"}
    dense = {"moe_experts": "", "ffn": "1024", "ep": "1"}

    def matmuls_s(framework: str, **cells: str) -> float:
        found = case(TITAN, **SPARSE_ROW | alike | {"framework": framework} | cells).job
        return found.profile.layers[1].forward.matmul_flop.per_sample / found.execution.linear_speedup

    def of_experts_s(framework: str) -> float:
        without = matmuls_s(framework, moe_ffn="1")
        return matmuls_s(framework) - without

    assert of_experts_s("NeMo 25.02") == pytest.approx(of_experts_s("Megatron-Core, TE"))
    assert matmuls_s("NeMo 25.02", **dense) < matmuls_s("Megatron-Core, TE", **dense)
