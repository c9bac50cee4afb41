"""Tests of work and memory of a rank under cp on fake tensors: equal shares of work, no gathered keys."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.dimensions.cp import apply_context_parallel, own_context
from steelyard.modules.layers import LayerContext, build_layer, shared_inputs_of
from steelyard.plan.dimensions import CP
from steelyard.plan.dimensions.dimension import Load
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.tracer.layer import CountedLayer, count_passes, make_fake
from tests.tracer.examples import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, llama

BLOCK, SAMPLES, SEQ_LEN, BYTES = 1, 2, 128, 4
WHOLE_FLOP = 4 * SAMPLES * SEQ_LEN**2 * HEADS * HEAD_DIM / 2
"""Causal attention of all samples in one process: two products of S × S / 2 scores."""
KEYS_BYTES = 2 * SAMPLES * SEQ_LEN * KV_HEADS * HEAD_DIM * BYTES
"""Keys and values of whole sequences."""


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


@cache
def counted(
    degree: int, method: str = "gather", rank: int = 0, remat: Remat = Remat.NONE, kv_heads: int = KV_HEADS
) -> CountedLayer:
    """One block of a rank, forward and backward."""
    chain: ModelChain = llama(num_key_value_heads=kv_heads)
    model = build_meta_model(chain)
    prepare_model(model, chain)
    layer = build_layer(model, chain, BLOCK, remat)
    shared_inputs = shared_inputs_of([layer], model, chain, torch.device("cpu"))
    with fake_ranks(rank, degree) as mesh, FakeTensorMode(allow_non_fake_inputs=False):
        make_fake(layer, torch.float32)
        side = shared_inputs(SEQ_LEN, torch.float32, torch.device("cpu"))
        context = LayerContext(side=side)
        constants = side.tensors()
        if degree > 1:
            apply_context_parallel(layer, mesh, method)
            constants += own_context(context, mesh).side.tensors()
        hidden = torch.empty((SAMPLES, SEQ_LEN // degree, HIDDEN), requires_grad=True)
        return count_passes(layer, lambda: (layer(hidden, context),), inputs=(hidden,), constants=constants)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("degree", [2, 4])
def test_every_rank_does_an_equal_share_of_causal_attention(method: str, degree: int) -> None:
    forward = [counted(degree, method, rank).forward.attention_flop for rank in range(degree)]
    backward = [counted(degree, method, rank).backward.attention_flop for rank in range(degree)]
    assert forward == [WHOLE_FLOP / degree] * degree == [counted(1).forward.attention_flop / degree] * degree
    assert backward == [counted(1).backward.attention_flop / degree] * degree


def test_gather_communicates_keys_and_values_whole_in_each_direction() -> None:
    run = counted(4)
    assert run.forward.collectives == {"all_gather": [KEYS_BYTES]}
    assert run.backward.collectives == {"all_gather": [KEYS_BYTES], "reduce_scatter": [KEYS_BYTES]}


def test_ulysses_communicates_what_a_rank_has_of_queries_keys_values_and_outputs() -> None:
    run = counted(4, "ulysses")
    query = SAMPLES * SEQ_LEN // 4 * HEADS * HEAD_DIM * BYTES
    assert run.forward.collectives == {"all_to_all": [query + KEYS_BYTES / 4, query]}
    assert run.backward.collectives == {"all_to_all": [query, query + KEYS_BYTES / 4]}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "collective"), [("gather", "all_gather"), ("ulysses", "all_to_all")])
def test_full_remat_communicates_again_as_in_its_forward_pass(method: str, collective: str) -> None:
    plain, again = counted(4, method), counted(4, method, remat=Remat.FULL)
    assert again.forward.collectives == plain.forward.collectives
    more = again.backward.beyond(plain.backward).collectives
    assert dict(more) == {collective: plain.forward.collectives[collective]}


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_selective_remat_neither_communicates_nor_attends_again(method: str) -> None:
    plain, again = counted(4, method), counted(4, method, remat=Remat.SELECTIVE)
    assert again.forward.collectives == plain.forward.collectives
    assert again.backward.collectives == plain.backward.collectives
    assert again.backward.attention_flop == plain.backward.attention_flop


def traffic(text: str) -> dict[str, dict[str, list[float]]]:
    """Bytes of each call per phase of a microbatch, by collective, as the implementation in `plan.dimensions` gives
    them.
    """
    strategy = parse_strategy(text)
    query = SAMPLES * SEQ_LEN * HEADS * HEAD_DIM * BYTES
    exchanging = ("forward", "backward") + ("recomputation",) * (strategy.remat is Remat.FULL)
    load = Load(
        strategy=strategy,
        parameter_bytes=0.0,
        gradient_bytes=0.0,
        traced={},
        exchanging=exchanging,
        key_value_bytes=KEYS_BYTES,
        attention_bytes=(2 * query + KEYS_BYTES) / strategy.degree(CP),
    )
    found: dict[str, dict[str, list[float]]] = {}
    for each in CP.traffic(load):
        if each.phase != "step":
            calls = found.setdefault(each.phase, {}).setdefault(each.collective, [])
            calls += [each.tensor_bytes / each.num_calls] * each.num_calls
    return found


@pytest.mark.parametrize(("method", "written"), [("gather", "cp4"), ("ulysses", "cp4+ulysses")])
@pytest.mark.parametrize("remat", Remat)
def test_calls_and_bytes_are_those_that_its_collective_says(method: str, written: str, remat: Remat) -> None:
    plain, real = counted(4, method), counted(4, method, remat=remat)
    again = real.backward.beyond(plain.backward).collectives
    said = traffic(f"{written} remat={remat}")
    assert summed(said["forward"]) == summed(real.forward.collectives)
    assert summed(said["backward"]) == summed(plain.backward.collectives)
    if remat is not Remat.NONE:
        assert summed(said.get("recomputation", {})) == summed(again)


def summed(calls: Mapping[str, list[float]]) -> dict[str, tuple[int, float]]:
    """Number of calls and bytes of all of them, by collective."""
    return {collective: (len(each), sum(each)) for collective, each in calls.items()}


@pytest.mark.slow
@pytest.mark.parametrize("remat", Remat)
def test_no_remat_choice_keeps_gathered_keys(remat: Remat) -> None:
    """More key-value heads add to what is kept as many bytes as a rank has of their tokens, and no more."""
    many, few = counted(4, remat=remat, kv_heads=8), counted(4, remat=remat, kv_heads=4)
    assert many.saved_bytes - few.saved_bytes <= 2 * KEYS_BYTES / 4


@pytest.mark.slow
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_keeps_about_its_share(degree: int, remat: Remat) -> None:
    assert counted(degree, remat=remat).saved_bytes == pytest.approx(
        counted(1, remat=remat).saved_bytes / degree, rel=0.1
    )
