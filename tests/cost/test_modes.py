"""Tests that device type and link type are explicit, not derived from which rates are known."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.context import PROCESS_BYTES, context_bytes, slack_fraction
from steelyard.cost.job import Job
from steelyard.cost.layer import layer_cost
from steelyard.cost.layer_memory import layer_states
from steelyard.cost.predict import predict, predict_memory
from steelyard.cost.switching import switch_table
from steelyard.engines.execution import OURS, Execution, StateBytes
from steelyard.engines.native import NATIVE
from steelyard.hardware import Backend
from steelyard.levers import Effects
from steelyard.plan.strategy import parse_strategy
from steelyard.profiles.profile import MeasuredTime
from tests.cost.examples import config, job, plan


def measured_job(**of_the_device: object) -> Job:
    """A job with a measured profile, on a device that differs from the usual GPU as said."""
    of = job()
    times = tuple(MeasuredTime(samples=n, forward_s=n * 1e-6, backward_s=n * 2e-6) for n in (1, 64))
    identity = of.profile.identity.model_copy(update={"method": "measured", "num_devices": 8})
    layers = tuple(layer.model_copy(update={"times": times}) for layer in of.profile.layers)
    profile = of.profile.model_copy(
        update={"identity": identity, "layers": layers, "optimizer_s_per_param": 1e-12, "step_overhead_s": 1e-4}
    )
    device = replace(of.cluster.device, **of_the_device)
    return of.on(profile=profile, cluster=of.cluster.on(device=device))


WITHOUT_RATES = {"peak_flop_per_s": {}, "memory_bytes_per_s": None}


def test_a_gpu_whose_rates_only_a_profile_knows_has_a_context() -> None:
    assert context_bytes(config(measured_job(**WITHOUT_RATES))) == PROCESS_BYTES


def test_a_gpu_whose_rates_only_a_profile_knows_has_an_allocator_that_keeps_a_reserve() -> None:
    of = measured_job(**WITHOUT_RATES)
    assert slack_fraction(of) == OURS.reserve
    measured = of.on(profile=of.profile.model_copy(update={"reserved_over_allocated": 1.25}))
    assert slack_fraction(measured) == 0.25


def test_a_gpu_whose_rates_only_a_profile_knows_communicates_beside_compute() -> None:
    strategy = parse_strategy("fsdp8")
    known, unknown = measured_job(), measured_job(**WITHOUT_RATES)
    layer_type = known.chain.layer_types[1]
    hidden, same = (layer_cost(layer_type, strategy, config(of, num_microbatches=4)) for of in (known, unknown))
    on_a_host = layer_cost(
        layer_type, strategy, config(measured_job(type="cpu", backend=Backend.GLOO), num_microbatches=4)
    )
    assert same.forward_s == hidden.forward_s
    assert same.backward_s["fsdp"] < on_a_host.backward_s["fsdp"]


def test_a_plan_for_gpus_costs_the_same_whether_their_rates_are_known_or_not_if_all_was_measured() -> None:
    known, unknown = measured_job(), measured_job(**WITHOUT_RATES)
    of_known, of_unknown = (
        predict(plan(of, "fsdp8, fsdp8, tp8+sp, dp8, fsdp4-tp2, fsdp8", num_microbatches=2), of)
        for of in (known, unknown)
    )
    assert of_known.stages == of_unknown.stages
    assert of_known.step_time_s == of_unknown.step_time_s
    assert of_unknown.mfu is None


def test_processes_of_a_host_whose_rates_are_known_have_neither_context_nor_reserve() -> None:
    of = measured_job(type="cpu", backend=Backend.GLOO)
    (terms,) = predict_memory(plan(of, "fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=1), of)
    assert not {"context", "allocator slack"} & set(terms)


def test_only_over_gloo_an_all_to_all_is_a_gathering() -> None:
    strategies = (parse_strategy("fsdp8"), parse_strategy("tp8+sp"))
    known, unknown, gloo = (
        switch_table(strategies, config(measured_job(**changes)))
        for changes in ({}, WITHOUT_RATES, {"backend": Backend.GLOO})
    )
    assert np.array_equal(known, unknown)
    assert gloo[1, 0, 1] > known[1, 0, 1]


def test_only_gloo_copies_what_it_scatters() -> None:
    of_nccl, of_gloo = (
        predict_memory(plan(of, "fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=2), of)[0]
        for of in (measured_job(), measured_job(backend=Backend.GLOO))
    )
    assert of_gloo["working set"] >= of_nccl["working set"]
    states = [
        layer_states(of.chain.layer_types[1], parse_strategy("fsdp8"), config(of))
        for of in (measured_job(), measured_job(backend=Backend.GLOO))
    ]
    assert states[1].reduced_states(is_first=False) > states[0].reduced_states(is_first=False)
    held_back = replace(measured_job(), engine=replace(NATIVE, execution=Execution(overlaps_data=False)))
    same = predict_memory(plan(held_back, "fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=2), held_back)
    assert same[0] == of_nccl


OWN = StateBytes(parameters=2, gradients=4, optimizer=12, zero=1)


def test_a_framework_says_who_keeps_its_states() -> None:
    assert OURS.states is None
    assert not OURS.keeps_own_buffers
    assert Execution(states=OWN).keeps_own_buffers


@pytest.mark.parametrize(("zero", "shard_degree", "shards"), [(0, None, 1), (1, None, 8), (1, 4, 4), (3, 16, 8)])
def test_the_optimizer_is_divided_from_zero_1_on_over_no_more_ranks_than_there_are(
    zero: int, shard_degree: int | None, shards: int
) -> None:
    own = Execution(states=replace(OWN, zero=zero), shard_degree=shard_degree)
    assert own.optimizer_shards(8) == shards
    assert replace(own, states=None).optimizer_shards(8) == 1


@pytest.mark.parametrize(
    ("zero", "divided"),
    [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")), (3, ("optimizer", "gradients", "parameters"))],
)
def test_each_zero_stage_divides_one_part_more(zero: int, divided: tuple[str, ...]) -> None:
    kept = replace(OWN, zero=zero).kept_bytes(80, parse_strategy("dp8"), None)
    whole = {"parameters": 160, "gradients": 320, "optimizer": 960}
    assert kept == {name: num_bytes // (8 if name in divided else 1) for name, num_bytes in whole.items()}


def test_divided_experts_share_no_optimizer_state_beyond_their_replicas() -> None:
    own = StateBytes(parameters=2, gradients=4, optimizer=12, zero=1)
    kept = own.kept_bytes(80 + 160, parse_strategy("dp8 ep4"), None, expert_params=160)
    assert kept == {"parameters": 2 * (80 + 40), "gradients": 4 * (80 + 40), "optimizer": 12 * (10 + 20)}


def test_frozen_parameters_are_kept_once_without_gradients_and_states() -> None:
    own = StateBytes(parameters=4, gradients=4, optimizer=8, zero=0)
    single = parse_strategy("single")
    assert own.of_frozen.kept_bytes(80, single, None) == {"parameters": 160, "gradients": 0, "optimizer": 0}
    wider = replace(own, frozen=4).of_frozen.kept_bytes(80, single, None)
    assert wider["parameters"] == 320


def test_another_optimizer_keeps_as_much_of_moments_in_every_framework_and_master_copies_beside() -> None:
    eight_bit = Effects(state_bytes=2.0)
    single = parse_strategy("single")
    in_bf16 = StateBytes(parameters=2, gradients=2, optimizer=4, zero=0)
    assert in_bf16.kept_bytes(80, single, None, effects=eight_bit)["optimizer"] == 160
    assert in_bf16.kept_bytes(80, single, None, effects=Effects())["optimizer"] == 320
    assert OWN.kept_bytes(80, single, None, effects=eight_bit)["optimizer"] == 80 * (12 - 8 + 2)


def test_gradients_that_are_freed_are_there_as_activations_no_longer_are() -> None:
    same = ", ".join(["dp8"] * 6)
    kept = replace(job(), engine=replace(NATIVE, execution=Execution(states=replace(OWN, zero=0))))
    freed = replace(kept, engine=replace(NATIVE, execution=replace(kept.execution, frees_gradients=True)))
    one, several = (plan(kept, same, num_microbatches=count) for count in (1, 2))
    whole = predict_memory(one, kept)[0]
    assert predict_memory(one, freed)[0].get("gradients", 0) < whole["gradients"]
    assert predict_memory(several, freed) == predict_memory(several, kept)
