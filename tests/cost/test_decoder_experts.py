"""Tests of the cost that routed experts add to a block, against counts worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from steelyard.cost.decoder import DecoderShape, decoder_layer
from steelyard.cost.decoder_experts import Experts
from steelyard.engines.execution import FUSED
from steelyard.engines.megatron import KERNELS
from steelyard.engines.megatron_bridge import MEGATRON_BRIDGE
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.levers.lever import Adapters
from steelyard.model.chain import LayerRole, LayerType
from steelyard.profiles.profile import LayerProfile

TOKENS, HIDDEN, WIDTH, COUNT, TOP_K = 64, 16, 32, 8, 2
DENSE = LayerType(name="block", role=LayerRole.BLOCK)
SPARSE = LayerType(name="block", role=LayerRole.BLOCK, num_experts=COUNT)


def block(layer_type: LayerType = SPARSE, *, tp: int = 1, etp: int = 1, kernels=FUSED, **more: Any) -> LayerProfile:  # type: ignore[no-untyped-def]
    shape = DecoderShape(
        hidden=HIDDEN,
        heads=4,
        kv_heads=4,
        head_dim=4,
        ffn=0,
        gated=True,
        vocab=128,
        seq_len=TOKENS,
        rotary=True,
        experts=Experts(count=COUNT, top_k=TOP_K, ffn=WIDTH, etp=etp),
    )
    return decoder_layer(shape, kernels, layer_type, tp=tp, sp=tp > 1, **more)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_rank_holds_its_share_of_all_experts(tp: int, degree: int) -> None:
    found = block(tp=tp)
    assert found.expert_params == COUNT * 3 * HIDDEN * WIDTH // tp
    work = found.forward.with_experts_over(degree)
    assert work.expert_weight_bytes == 2 * found.expert_params / degree


def test_a_rank_computes_as_many_pairs_as_its_tokens_have() -> None:
    flop = 2 * TOKENS * TOP_K * 3 * HIDDEN * WIDTH
    for tp, etp in ((1, 1), (2, 1), (2, 2)):
        of_block, of_others = (block(each, tp=tp, etp=etp).forward.matmul_flop.at(1) for each in (SPARSE, DENSE))
        assert of_block - of_others == pytest.approx(flop / tp)


def test_tensor_parallel_ranks_that_hold_whole_experts_compute_unevenly() -> None:
    others = block(DENSE, tp=2).forward.matmul_flop.at(1)
    even, uneven, by_width = (
        block(tp=2, etp=etp, imbalance=imbalance).forward.matmul_flop.at(1) - others
        for etp, imbalance in ((1, 1.0), (1, 1.5), (2, 1.5))
    )
    assert uneven == pytest.approx(1.5 * even)
    assert by_width == pytest.approx(even)


def test_experts_that_ranks_divide_get_tokens_by_exchange() -> None:
    found = block(tp=2)
    assert found.divided_experts is not None
    sent = [each for each in found.divided_experts[0].forward_collectives if each.kind == "all_to_all"]
    assert [(each.count, each.tensor_bytes.at(1)) for each in sent] == [(2, 2 * 2 * TOKENS * HIDDEN * TOP_K / 2)]


def test_kernels_of_each_expert_are_fewer_where_a_rank_has_fewer() -> None:
    forward = block(kernels=KERNELS).forward
    assert forward.num_kernels - forward.with_experts_over(4).num_kernels == 2 * (COUNT - COUNT // 4)


def test_torchtitan_computes_experts_again_and_keeps_what_an_exchange_brought() -> None:
    """torchtitan's policy saves the results of all-to-alls; there are none if ranks hold all experts."""
    kernels = TORCHTITAN.execution.kernels
    own, whole = block(kernels=kernels), block(kernels=FUSED)
    ours, theirs = (each.recomputation("selective") for each in (whole, own))
    dense = block(DENSE, kernels=kernels).recomputation("selective")
    pairs = TOKENS * TOP_K
    assert own.divided_experts is not None
    received = [each.recomputation("selective").saved_bytes.at(1) for each in (own, *own.divided_experts)]
    assert [each - dense.saved_bytes.at(1) for each in received] == [0, 2 * HIDDEN * pairs, 4 * HIDDEN * pairs]
    assert theirs.work.matmul_flop.at(1) - dense.work.matmul_flop.at(1) == 2 * pairs * 3 * HIDDEN * WIDTH
    assert ours.saved_bytes.at(1) > theirs.saved_bytes.at(1)


def test_recipes_of_megatron_bridge_keep_no_copies_for_putting_tokens_in_order() -> None:
    kernels = MEGATRON_BRIDGE.execution.kernels
    found, dense = (block(each, kernels=kernels).saved_bytes.at(1) for each in (SPARSE, DENSE))
    assert found - dense == 2 * TOKENS * TOP_K * (HIDDEN + 3 * WIDTH)
    assert block(kernels=KERNELS).saved_bytes.at(1) - found == 4 * 2 * TOKENS * TOP_K * HIDDEN


def test_beside_adapters_experts_have_no_gradients_of_weights() -> None:
    adapters = Adapters(rank=2, targets=frozenset({"q_proj"}), has_dropout=False)
    trained, frozen = block(), block(adapters=adapters)
    assert (frozen.expert_params, frozen.frozen_expert_params) == (trained.expert_params,) * 2
    assert frozen.num_params - frozen.frozen_params == 2 * (HIDDEN + HIDDEN)
    dense = block(DENSE, adapters=adapters).backward.matmul_flop.at(1)
    assert 2 * (frozen.backward.matmul_flop.at(1) - dense) == trained.backward.matmul_flop.at(1) - block(
        DENSE
    ).backward.matmul_flop.at(1)


def test_torchtitan_moves_each_pair_by_operations_of_its_own_and_further_between_ranks() -> None:
    """Taken, to fp32, weighed, back and added: 30 bytes of an entry; in order of experts and back: 8 more."""
    eager = TORCHTITAN.execution.kernels
    assert eager is not None
    found = block(kernels=eager)
    fused = block(kernels=replace(eager, eager_routing=False))
    entries = TOKENS * TOP_K * HIDDEN

    def more(ours: LayerProfile, theirs: LayerProfile) -> list[float]:
        passes = ((ours.forward, theirs.forward), (ours.backward, theirs.backward))
        return [(mine.memory_bytes.at(1) - other.memory_bytes.at(1)) / entries for mine, other in passes]

    assert more(found, fused) == [30 - 8, 46 - 16]
    assert found.divided_experts is not None
    assert fused.divided_experts is not None
    assert more(found.divided_experts[0], fused.divided_experts[0]) == [38 - 8, 58 - 16]
    dense = block(DENSE, kernels=eager).backward_transient_bytes.at(1)
    assert found.backward_transient_bytes.at(1) - dense == max(12 * HIDDEN, 4 * HIDDEN + 4 * WIDTH) * TOKENS * TOP_K


def test_the_activation_of_experts_alone_is_computed_again() -> None:
    kernels = replace(FUSED, selective=("moe_act", "mlp"))
    adapters = Adapters(rank=2, targets=frozenset({"q_proj"}), has_dropout=False)
    whole, adapted = block(kernels=kernels), block(kernels=kernels, adapters=adapters)
    again = whole.recomputation("selective")
    pairs = TOKENS * TOP_K
    assert whole.saved_bytes.at(1) - again.saved_bytes.at(1) == 2 * pairs * WIDTH
    assert again.work.memory_bytes.at(1) == 2 * pairs * 3 * WIDTH
    assert again.work.matmul_flop.at(1) == 0
    assert adapted.saved_bytes == adapted.recomputation("selective").saved_bytes  # which no gradient reads
