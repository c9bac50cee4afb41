"""Tests of predicted context-parallel traffic and memory against layers on fake tensors."""

from collections import Counter
from functools import cache

import pytest

from steelyard.cost.job import DeviceGroup, Job, JobConfig
from steelyard.cost.layer_load import layer_load, rank_samples
from steelyard.cost.layer_memory import working_bytes
from steelyard.hardware import parse_cluster
from steelyard.plan.dimensions import CP
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.profiles.profile import LayerProfile, Profile
from steelyard.schedules import PipelineConfig, find_schedule
from steelyard.tracer.cache import cached_trace
from steelyard.tracer.layer import CountedLayer
from tests.modules.dimensions.test_cp_work import SAMPLES, SEQ_LEN, counted
from tests.tracer.examples import HEAD_DIM, llama

METHODS = [("gather", 4), ("gather", 2), ("ulysses", 4)]
"""Methods with the number of key-value heads; ulysses over four ranks needs four of them."""
BYTES = 4


@cache
def profile(kv_heads: int, window: int | None = None) -> Profile:
    changes = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    chain = llama(num_key_value_heads=kv_heads, **changes)
    return cached_trace(chain, seq_len=SEQ_LEN, precision="fp32", degrees=(1,))


def block(kv_heads: int, window: int | None = None) -> LayerProfile:
    found = profile(kv_heads, window).layer("block", {})
    assert found is not None
    return found


def config(kv_heads: int, degree: int) -> JobConfig:
    chain = llama(num_key_value_heads=kv_heads)
    job = Job(
        chain=chain,
        groups=(DeviceGroup(profile=profile(kv_heads), cluster=parse_cluster(f"1x{degree}xcpu"), budget_bytes=2**30),),
        seq_len=SEQ_LEN,
        global_batch=SAMPLES,
        precision="fp32",
    )
    pipeline = PipelineConfig(num_stages=1, num_chunks=1, num_microbatches=1, schedule=find_schedule("1f1b"))
    return JobConfig(job=job, pipeline=pipeline)


def strategy_text(method: str, degree: int, remat: Remat) -> str:
    return f"cp{degree}" + ("+ulysses" if method == "ulysses" else "") + f" remat={remat}"


def sent(run: CountedLayer, phase: str) -> dict[str, tuple[int, float]]:
    counts = run.forward if phase == "forward" else run.backward
    return {collective: (len(calls), sum(calls)) for collective, calls in counts.collectives.items()}


def said(method: str, degree: int, remat: Remat, kv_heads: int, *phases: str) -> dict[str, tuple[int, float]]:
    strategy = parse_strategy(strategy_text(method, degree, remat))
    load = layer_load(block(kv_heads), strategy, config(kv_heads, degree))
    count, num_bytes = Counter[str](), Counter[str]()
    for each in CP.traffic(load):
        if each.phase in phases:
            count[each.collective] += each.num_calls
            num_bytes[each.collective] += each.tensor_bytes
    return {collective: (count[collective], num_bytes[collective]) for collective in count}


@pytest.mark.slow
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("method", "kv_heads"), METHODS)
def test_collectives_and_their_bytes_are_those_of_a_real_layer(
    method: str, kv_heads: int, degree: int, remat: Remat
) -> None:
    run = counted(degree, method, 0, remat, kv_heads)
    again = () if remat is Remat.NONE else ("recomputation",)
    assert said(method, degree, remat, kv_heads, "forward") == sent(run, "forward")
    assert said(method, degree, remat, kv_heads, "backward", *again) == sent(run, "backward")


@pytest.mark.slow
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("method", "kv_heads"), METHODS)
def test_no_rank_keeps_more_than_is_said(method: str, kv_heads: int, degree: int, remat: Remat) -> None:
    strategy = parse_strategy(strategy_text(method, degree, remat))
    kept = [counted(degree, method, rank, remat, kv_heads).saved_bytes for rank in (0, 1)]
    layer, priced = block(kv_heads), config(kv_heads, degree)
    traced = layer if remat is Remat.NONE else layer.recomputation(remat)
    needed = working_bytes(layer, strategy, priced)
    held = traced.saved_bytes.at(rank_samples(strategy, priced.microbatch_samples)) + needed.saved
    assert max(kept) <= held <= 1.1 * max(kept)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, SEQ_LEN // 4])
def test_keys_and_values_are_those_that_a_layer_makes_though_a_kernel_with_a_mask_reads_them_repeated(
    window: int | None,
) -> None:
    assert block(2, window).key_value_bytes.per_sample == 2 * SEQ_LEN * 2 * HEAD_DIM * BYTES
