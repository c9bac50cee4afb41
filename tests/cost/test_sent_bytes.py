"""Tests of the collectives of a layer's states, runtime against parallelism dimensions: calls, bytes, ranks."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.cost.job import JobConfig
from steelyard.cost.layer_load import layer_load, layer_profile, traffic_group
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.runtime.parallel_model import parallelize_plan
from steelyard.tracer.cache import cached_trace
from tests.cost.examples import SEQ_LEN, cluster, job, plan
from tests.schedules.examples import pipeline

NUM_DEVICES, MICROBATCHES = 8, 3

Sent = Counter[tuple[str, int, int]]
"""Calls by collective, bytes of the whole tensor, and ranks that take part."""


@contextmanager
def _recorded(found: Sent) -> Iterator[None]:
    """Record the collectives of the context, except the loss's, over the world."""

    def noting(name: str, whole: str) -> Any:
        call = getattr(dist, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            tensor, group = kwargs.get(whole, args[0] if args else None), kwargs.get("group")
            if group is not None:
                dimension = name.removesuffix("_single")
                found[dimension, tensor.numel() * tensor.element_size(), dist.get_world_size(group)] += 1
            return call(*args, **kwargs)

        return run

    wholes = {"all_gather_single": "output", "reduce_scatter_single": "input", "all_reduce": "tensor"}
    with ExitStack() as stack:
        for name, whole in wholes.items():
            stack.enter_context(mock.patch.object(dist, name, noting(name, whole)))
        yield


def issued(candidate: Plan) -> Sent:
    """Return the collectives of the second step, which is like every later one."""
    dist.init_process_group("fake", rank=0, world_size=candidate.num_devices, store=FakeStore())
    found: Sent = Counter()
    try:
        model = parallelize_plan(candidate)
        for _ in range(2):
            found.clear()
            with _recorded(found):
                model.train_step(lambda samples: torch.zeros((len(samples), SEQ_LEN + 1), dtype=torch.long))
    finally:
        dist.destroy_process_group()
    return found


def predicted(text: str, config: JobConfig) -> Sent:
    found: Sent = Counter()
    strategy, chain = parse_strategy(text), config.job.chain
    for type_index in chain.layers:
        load = layer_load(layer_profile(chain.layer_types[type_index], strategy, config), strategy, config)
        for dimension in strategy.dimensions:
            for each in dimension.traffic(load):
                ranks = traffic_group(each.over, dimension, strategy, config.devices_per_stage).size
                times = 1 if each.phase == "step" else config.pipeline.num_microbatches
                found[each.collective, int(each.tensor_bytes / each.num_calls), ranks] += each.num_calls * times
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["fsdp8", "dp2-fsdp4", "dp4-fsdp2", "dp2-fsdp4 zero2", "fsdp8 zero1", "dp2-fsdp4 zero1"]
)
def test_states_are_sent_as_often_as_priced_in_bytes_and_over_ranks_that_are_priced(text: str) -> None:
    """The head is an exception: FSDP gathers it ahead once more as the step ends (`steelyard.cost.stage_memory`)."""
    of = job(cluster(), global_batch=NUM_DEVICES * MICROBATCHES)
    traced = of.on(profile=cached_trace(of.chain, seq_len=SEQ_LEN, precision="bf16", degrees=(1,)))
    config = JobConfig(job=traced, pipeline=pipeline(1, MICROBATCHES, "1f1b", 1))
    candidate = plan(traced, ", ".join([text] * of.chain.num_layers), num_microbatches=MICROBATCHES)
    wanted = predicted(text, config)
    wanted[_gathered_head(text, config)] += 1
    assert issued(candidate) == wanted


def _gathered_head(text: str, config: JobConfig) -> tuple[str, int, int]:
    strategy = parse_strategy(text)
    layer = layer_profile(config.job.chain.layer_types[config.job.chain.layers[-1]], strategy, config)
    return "all_gather", int(layer_load(layer, strategy, config).parameter_bytes), strategy.state_shards
