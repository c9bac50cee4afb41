"""Tests of costs of several pipeline configurations built together."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.build import KnownCosts
from steelyard.cost.job import Job
from steelyard.cost.layer import layer_cost
from steelyard.cost.layer_load import refusal
from steelyard.cost.memory import layer_rows
from steelyard.engines.megatron import MEGATRON
from steelyard.hardware import parse_cluster
from steelyard.plan.decisions import Decisions
from steelyard.plan.strategy import Remat
from steelyard.planning.problem import stage_strategies
from tests.cost.examples import chain, config, job, measured_profile
from tests.cost.layer_bytes import layer_bytes
from tests.jobs import make_job

COUNTS = (1, 2, 4, 8, 16, 32, 64)


def measured_job() -> Job:
    machine = parse_cluster("1x4xcpu").with_memory(2**30)
    return job(machine, precision="fp32").on(profile=measured_profile(chain()))


def mixtral() -> Job:
    return make_job(
        "mixtral-8x7b", "1x8xh100-80gb", global_batch=64, seq_len=4096, precision="bf16", memory=None, profile=None
    )


def job_of_a_framework() -> Job:
    return replace(job(), engine=MEGATRON)


@pytest.mark.slow
@pytest.mark.parametrize("of", [job, measured_job, mixtral, job_of_a_framework])
def test_configs_priced_together_cost_what_each_does_alone(of) -> None:
    own, known = of(), KnownCosts(COUNTS)
    for count in COUNTS:
        where = config(own, num_microbatches=count)
        strategies = stage_strategies(own, where.devices_per_stage, Decisions())
        costs = known.of(where, strategies)
        time_s = costs.time_s(range(len(own.chain.layer_types)), where)
        allowed = [
            [refusal(layer_type, each, where) is None for each in strategies] for layer_type in own.chain.layer_types
        ]
        assert costs.legal.tolist() == allowed
        rows = layer_rows(where, strategies, costs.legal)
        assert np.array_equal(costs.rows.terms, rows.counted(own).terms)
        for row, column in np.argwhere(costs.legal).tolist():
            cost = layer_cost(own.chain.layer_types[row], strategies[column], where)
            assert time_s[row, column] == cost.microbatch_s + sum(cost.once_s.values()) / count
            own_bytes = layer_bytes(own.chain.layer_types[row], strategies[column], where)
            assert rows.terms[:6, row, column].sum() == sum(own_bytes.static_bytes.values())
            assert rows.terms[6, row, column] == own_bytes.activation_bytes
            assert rows.of_tensors.works[row, column] == own_bytes.transient_bytes
    assert any(each.remat is not Remat.NONE for each in strategies)
