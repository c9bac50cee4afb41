"""Tests of traces against closed forms, the real module and a real layer on the CPU."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, build_model, layer_modules
from steelyard.modules.layers import BlockLayer, LayerContext, build_layer, shared_inputs_of
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.precision import Precision
from steelyard.profiles.profile import LayerProfile
from steelyard.tracer.counting import OpCounter
from steelyard.tracer.layer import TracedLayer, fake_world, observe
from steelyard.tracer.trace import trace
from tests.shapes import tp_shape
from tests.tracer.examples import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SEQ_LEN, VOCAB, llama
from tests.tracer.traces import FAMILIES, known, traced

families = pytest.mark.parametrize("family", FAMILIES)
LAYER_TYPES = ("embedding", "block", "head")
layer_types = pytest.mark.parametrize("layer_type", LAYER_TYPES)
degrees = pytest.mark.parametrize("tp", [2, 4])
sequence_parallel = pytest.mark.parametrize("sp", [False, True])


def layer(
    family: str, layer_type: str, tp: int = 1, *, sp: bool = False, precision: Precision = "bf16"
) -> LayerProfile:
    found = traced(family, precision).layer(layer_type, tp_shape(tp, sp))
    assert found is not None
    return found


@pytest.mark.slow
def test_a_trace_in_fp16_is_that_in_bf16() -> None:
    narrow, same = (trace(llama(), seq_len=SEQ_LEN, precision=each, degrees=(1, 2)) for each in ("fp16", "bf16"))
    assert narrow.layers == same.layers


@cache
def real_params(family: str) -> dict[str, int]:
    chain = known(family)
    model = build_model(chain, seed=0)
    return {
        chain.type_of(index).name: sum(
            parameter.numel()
            for module in layer_modules(model, chain, index).values()
            for parameter in module.parameters()
        )
        for index in (0, 1, chain.num_layers - 1)
    }


def matrix_params(family: str, tp: int = 1) -> int:
    """Entries of the matrices of a block on one rank: what its matmuls multiply by."""
    if family == "llama":
        return (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * FFN) // tp
    return (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN) // tp


# work


@pytest.mark.slow
@families
def test_parameters_are_those_of_the_real_module(family: str) -> None:
    assert {dimension: layer(family, dimension).num_params for dimension in LAYER_TYPES} == real_params(family)


@pytest.mark.slow
@families
def test_a_block_takes_two_flop_per_matrix_entry_and_token_forward_and_four_backward(family: str) -> None:
    block = layer(family, "block")
    forward = 2 * matrix_params(family) * 3 * SEQ_LEN
    assert block.forward.matmul_flop.at(3) == forward
    assert block.backward.matmul_flop.at(3) == 2 * forward


@pytest.mark.slow
@families
def test_the_head_takes_two_flop_per_entry_and_token_forward_and_four_backward(family: str) -> None:
    head = layer(family, "head")
    assert head.forward.matmul_flop.at(1) == 2 * HIDDEN * VOCAB * SEQ_LEN
    assert head.backward.matmul_flop.at(1) == 4 * HIDDEN * VOCAB * SEQ_LEN


@families
def test_causal_attention_takes_half_of_the_full_square(family: str) -> None:
    attention = layer(family, "block").forward.attention_flop.at(1)
    assert attention == 4 * SEQ_LEN**2 * HIDDEN / 2


@families
def test_the_backward_pass_of_attention_takes_two_and_a_half_forward_passes(family: str) -> None:
    block = layer(family, "block")
    assert block.backward.attention_flop.at(1) == 2.5 * block.forward.attention_flop.at(1)


def test_the_embedding_multiplies_no_matrices() -> None:
    embedding = layer("llama", "embedding")
    assert embedding.forward.matmul_flop.at(1) == embedding.backward.matmul_flop.at(1) == 0


@families
@degrees
@sequence_parallel
def test_tp_divides_flop_exactly(family: str, tp: int, sp: bool) -> None:
    for layer_type in ("block", "head"):
        whole, part = layer(family, layer_type), layer(family, layer_type, tp, sp=sp)
        for direction in ("forward", "backward"):
            for work in ("matmul_flop", "attention_flop"):
                expected = getattr(getattr(whole, direction), work).at(2) / tp
                assert getattr(getattr(part, direction), work).at(2) == expected


@degrees
@layer_types
def test_tp_divides_the_matrices_and_keeps_the_norms_whole(tp: int, layer_type: str) -> None:
    norms = {"embedding": 0, "block": 2 * HIDDEN, "head": HIDDEN}[layer_type]
    whole = layer("llama", layer_type).num_params
    assert layer("llama", layer_type, tp).num_params == (whole - norms) // tp + norms


@pytest.mark.slow
@families
@layer_types
@sequence_parallel
def test_a_trace_is_affine_in_the_samples(family: str, layer_type: str, sp: bool) -> None:
    """The line through 2 and 8 samples meets a third size: exactly, or from above where it is of a maximum."""
    chain = known(family)
    index = {"embedding": 0, "block": 1, "head": chain.num_layers - 1}[layer_type]
    with fake_world(2) as mesh:
        model = build_meta_model(chain)
        strategy = parse_strategy("single" if mesh.size() == 1 else f"tp{mesh.size()}" + "+sp" * sp)
        where = TracedLayer(
            chain=chain, layer=index, seq_len=SEQ_LEN, precision="bf16", mesh=mesh, strategy=strategy, model=model
        )
        seen = observe(where, (5,))[0].plain
    line = layer(family, layer_type, 2, sp=sp)
    assert line.saved_bytes.at(5) == seen.saved_bytes
    assert line.input_bytes.at(5) == seen.input_bytes
    for direction in ("forward", "backward"):
        work, counts = getattr(line, direction), getattr(seen, direction)
        for name in ("matmul_flop", "attention_flop"):
            assert getattr(work, name).at(5) == pytest.approx(getattr(counts, name))
        for name in ("matmul_bytes", "memory_bytes"):
            assert getattr(work, name).at(5) == pytest.approx(getattr(counts, name))
    assert line.forward_transient_bytes.at(5) >= seen.forward_peak_bytes - seen.saved_bytes
    assert line.backward_transient_bytes.at(5) >= seen.backward_peak_bytes - seen.saved_bytes


# collectives


def _calls(profile: LayerProfile, direction: str) -> dict[str, tuple[int, float]]:
    counts = getattr(profile, f"{direction}_collectives")
    return {each.kind: (each.count, each.tensor_bytes.at(1)) for each in counts}


HIDDEN_BYTES = SEQ_LEN * HIDDEN * 2


@degrees
def test_without_sp_a_block_reduces_its_hidden_state_twice_in_each_direction(tp: int) -> None:
    block = layer("llama", "block", tp)
    assert _calls(block, "forward") == {"all_reduce": (2, 2 * HIDDEN_BYTES)}
    assert _calls(block, "backward") == {"all_reduce": (2, 2 * HIDDEN_BYTES)}


@degrees
def test_with_sp_a_block_gathers_twice_and_scatters_twice_forward(tp: int) -> None:
    block = layer("llama", "block", tp, sp=True)
    assert _calls(block, "forward") == {
        "all_gather": (2, 2 * HIDDEN_BYTES),
        "reduce_scatter": (2, 2 * HIDDEN_BYTES),
    }


@degrees
def test_with_sp_the_backward_pass_moves_the_hidden_state_as_often_as_the_forward_pass(tp: int) -> None:
    calls = _calls(layer("llama", "block", tp, sp=True), "backward")
    assert calls["all_gather"] == (2, 2 * HIDDEN_BYTES)
    assert calls["reduce_scatter"] == (2, 2 * HIDDEN_BYTES)


@layer_types
def test_without_tp_nothing_is_communicated(layer_type: str) -> None:
    alone = layer("llama", layer_type)
    assert alone.forward_collectives == alone.backward_collectives == ()


def test_an_unknown_collective_is_an_error() -> None:
    with fake_world(2) as mesh, FakeTensorMode(), OpCounter():
        tensor = torch.zeros(4)
        with pytest.raises(InvalidModelError, match="broadcast"):
            torch.ops._c10d_functional.broadcast(tensor, 0, mesh.get_group().group_name)


def test_an_operation_that_reads_nothing_counts_what_it_writes() -> None:
    with FakeTensorMode():
        like = torch.empty(8, 4)
        for make, num_bytes in (
            (lambda: like.new_empty(16, 4), 0),
            (lambda: like.new_zeros(16, 4), 16 * 4 * 4),
            (lambda: torch.zeros_like(like), 8 * 4 * 4),
            (lambda: torch.empty(8, 4).copy_(like), 2 * 8 * 4 * 4),
        ):
            with OpCounter() as counter:
                make()
            assert counter.counts.memory_bytes == num_bytes


def test_tracing_inside_a_process_group_leaves_it_as_it_was() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    own = dist.group.WORLD
    try:
        found = trace(known("llama"), seq_len=SEQ_LEN, precision="bf16", degrees=[1])
        assert (dist.group.WORLD, dist.get_rank()) == (own, 1)
    finally:
        dist.destroy_process_group()
    assert found.layers == trace(known("llama"), seq_len=SEQ_LEN, precision="bf16", degrees=[1]).layers


def test_a_trace_leaves_no_process_group_behind() -> None:
    traced("llama", "bf16")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_degree_that_does_not_divide_is_left_out() -> None:
    odd = trace(llama(intermediate_size=90), seq_len=SEQ_LEN, precision="fp32", degrees=[1, 4])
    assert odd.layer("block", tp_shape(4, False)) is None
    assert odd.layer("head", tp_shape(4, False)) is not None


# memory


def test_saved_bytes_of_a_llama_block_are_what_autograd_must_keep() -> None:
    """Per token, with h hidden, f FFN width, g = KV heads × head size and a heads, in bf16:

    input 2h; each of two norms its input in fp32 4h, the inverse root 4, the normed state 2h, and scaled 2h; query 2h,
    key and value 2g each, attention's result 2h and its log-sum-exp 4a; gate, its activation, up and product 2f each.
    """
    h, f, g, a = HIDDEN, FFN, KV_HEADS * HEAD_DIM, HEADS
    norm = 4 * h + 4 + 2 * h + 2 * h
    per_token = 2 * h + 2 * norm + (2 * h + 2 * 2 * g + 2 * h + 4 * a) + 4 * 2 * f
    assert layer("llama", "block").saved_bytes.at(3) == 3 * SEQ_LEN * per_token


def test_saved_bytes_of_a_gpt_neox_block_are_what_autograd_must_keep() -> None:
    """Per token in bf16: input 2h; each of two norms its result 2h and two statistics; the fused projection 6h, of
    which value is a view; rotated query and key 2h each; attention's result 2h and its log-sum-exp 4a, and the result
    again with the heads side by side 2h; FFN 2f, activated 2f.
    """
    h, f, a = HIDDEN, FFN, HEADS
    per_token = 2 * h + 2 * (2 * h) + (6 * h + 2 * 2 * h + 2 * 2 * h + 4 * a) + 2 * 2 * f
    statistics = 2 * 2 * 2
    assert layer("gpt_neox", "block").saved_bytes.at(3) == 3 * SEQ_LEN * (per_token + statistics)


@degrees
def test_sp_divides_what_the_norms_keep(tp: int) -> None:
    whole, part = (layer("llama", "block", tp, sp=sp).saved_bytes.at(1) for sp in (False, True))
    norms = 2 * (4 * HIDDEN + 4 + 2 * HIDDEN)  # without the scaled state, which is gathered for the matmuls
    divided = SEQ_LEN * (norms + 2 * HIDDEN)
    assert whole - part >= divided * (1 - 1 / tp)


def test_a_config_that_asks_for_eager_attention_keeps_the_scores_of_every_head() -> None:
    chain = llama(attn_implementation="eager")
    eager, fused = (
        max(each.saved_bytes.at(1) for each in trace(one, seq_len=SEQ_LEN, precision="fp32", degrees=(1,)).layers)
        for one in (chain, llama())
    )
    assert "no fused kernel" in "".join(chain.warnings(SEQ_LEN))
    scores, sums, keys = HEADS * SEQ_LEN * SEQ_LEN, HEADS * SEQ_LEN, SEQ_LEN * (HEADS - KV_HEADS) * HEAD_DIM
    assert eager - fused == 4 * (scores - sums + 2 * keys)  # keys and values are repeated for every head


def test_full_remat_keeps_the_hidden_state_alone() -> None:
    assert layer("llama", "block").input_bytes.at(1) == SEQ_LEN * HIDDEN * 2
    assert layer("llama", "block", 4, sp=True).input_bytes.at(1) == SEQ_LEN * HIDDEN * 2 / 4


@pytest.mark.slow
@families
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_bytes_are_the_storages_that_a_real_layer_packs(family: str, precision: Precision) -> None:
    block, context, inputs = _real_block(known(family), precision)
    ignored = {tensor.untyped_storage()._cdata for tensor in _constants(block, context)}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            storages[storage._cdata] = storage
        return tensor

    storages[inputs.untyped_storage()._cdata] = inputs.untyped_storage()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(inputs, context)
    packed = sum(storage.nbytes() for storage in storages.values())
    assert output.shape == inputs.shape
    assert layer(family, "block", precision=precision).saved_bytes.at(2) == packed


@pytest.mark.slow
@families
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_working_memory_is_that_of_a_real_layer(family: str, precision: Precision) -> None:
    """The peak of live storages beyond saved ones, parameters and gradients, seen while real tensors are computed."""
    block, context, inputs = _real_block(known(family), precision)
    counter = OpCounter()
    counter.ignore(_constants(block, context))
    counter.watch([inputs])
    with counter:
        output = block(inputs, context)
        events = len(counter.log)
        output.backward(torch.ones_like(output))
    gradients = counter.storage_ids(parameter.grad for parameter in block.parameters())
    live, history = 0, [0]
    for key, size in counter.log:
        live += 0 if key in gradients else size
        history.append(live)
    found = layer(family, "block", precision=precision)
    saved = found.saved_bytes.at(2)
    assert found.forward_transient_bytes.at(2) == max(history[: events + 1]) - saved
    assert found.backward_transient_bytes.at(2) == max(history[events:]) - saved


def _real_block(chain: ModelChain, precision: Precision) -> tuple[BlockLayer, LayerContext, Tensor]:
    """The first block with weights, its context, and two samples."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = build_model(chain, seed=0)
    block = build_layer(model, chain, 1, Remat.NONE).to(dtype)
    assert isinstance(block, BlockLayer)
    side = shared_inputs_of([block], model, chain, torch.device("cpu"))
    context = LayerContext(side=side(SEQ_LEN, dtype, torch.device("cpu")))
    return block, context, torch.randn((2, SEQ_LEN, HIDDEN), dtype=dtype, requires_grad=True)


def _constants(block: BlockLayer, context: LayerContext) -> list[Tensor]:
    return [*block.parameters(), *context.side.tensors()]
