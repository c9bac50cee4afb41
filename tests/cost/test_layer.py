"""Tests of time and memory of a layer: the constants, each term, and the laws."""

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.build import build_tables, usable_bytes
from steelyard.cost.communication import Group
from steelyard.cost.compute import optimizer_s, step_overhead_s
from steelyard.cost.context import (
    GROUP_BYTES,
    NETWORK_BYTES,
    PAIR_BYTES,
    PEER_BYTES,
    PROCESS_BYTES,
    communicator_bytes,
    context_bytes,
)
from steelyard.cost.efficiency import efficiency_of
from steelyard.cost.job import COMPUTE_BYTES, JobConfig
from steelyard.cost.layer import LayerCost, exposed_s, layer_cost
from steelyard.cost.layer_load import levels_group
from steelyard.engines.execution import OURS, Execution, StateBytes
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.errors import InvalidProfileError
from steelyard.plan.strategy import parse_strategy
from steelyard.profiles.profile import ShardingTime
from tests.cost.examples import PARAMS, SEQ_LEN, cluster, collective_s, config, job, unprofiled_job
from tests.cost.layer_bytes import LayerBytes, layer_bytes

BLOCK = PARAMS["block"]
STRATEGIES = ("dp8", "fsdp8", "fsdp8 zero2", "fsdp8 zero1", "tp8", "tp8+sp", "fsdp4-tp2", "dp2-tp4+sp", "tp2-fsdp4")
texts = st.sampled_from([text + remat for text in STRATEGIES for remat in ("", " remat=selective", " remat=full")])
seconds = st.floats(0, 1e3)
kappas = st.floats(1, 2)


def block(text: str, where: JobConfig | None = None) -> LayerCost[float]:
    where = where or config()
    return layer_cost(where.job.chain.layer_types[1], parse_strategy(text), where)


def held(text: str, where: JobConfig | None = None) -> LayerBytes:
    where = where or config()
    return layer_bytes(where.job.chain.layer_types[1], parse_strategy(text), where)


# constants


def test_one_parameter_takes_sixteen_bytes_of_states_and_a_copy_to_compute_with() -> None:
    assert sum(held("dp8", config(num_microbatches=8)).static_bytes.values()) == (16 + 2) * BLOCK


def test_fsdp_divides_all_states_and_keeps_no_copy() -> None:
    assert held("fsdp8", config(num_microbatches=8)).static_bytes == {
        "parameters": 4 * BLOCK // 8,
        "gradients": 4 * BLOCK // 8,
        "optimizer": 8 * BLOCK // 8,
    }


def test_no_gradients_are_kept_with_one_microbatch() -> None:
    assert "gradients" not in held("fsdp8").static_bytes


def test_zero_2_keeps_a_copy_of_the_whole_layer_between_forward_and_backward() -> None:
    extra = sum(held("fsdp8 zero2").static_bytes.values()) - sum(held("fsdp8").static_bytes.values())
    assert extra == 2 * BLOCK


def test_zero_1_keeps_whole_gradients_in_the_type_that_reduces_and_divides_other_states() -> None:
    assert held("fsdp8 zero1", config(num_microbatches=8)).static_bytes == {
        "parameters": 4 * BLOCK // 8,
        "gradients": 4 * BLOCK,
        "optimizer": 8 * BLOCK // 8,
        "gathered parameters": 2 * BLOCK,
    }


@pytest.mark.parametrize(("text", "copies"), [("dp8", 0), ("fsdp8", 0), ("fsdp8 zero2", 4), ("fsdp8 zero1", 4)])
def test_a_replicated_layer_computes_on_its_own_parameters_in_fp32(text: str, copies: int) -> None:
    found = held(text, config(job(precision="fp32"))).static_bytes
    assert found.get("gathered parameters", 0) == copies * BLOCK


def test_bytes_of_the_precisions() -> None:
    assert (COMPUTE_BYTES["bf16"], COMPUTE_BYTES["fp32"]) == (2, 4)


def test_the_slack_is_a_fraction() -> None:
    assert 0 < OURS.reserve < 0.25


@pytest.mark.parametrize(
    ("num_nodes", "num_stages", "extra"),
    [
        (1, 1, 0),
        (1, 2, PAIR_BYTES + PEER_BYTES),
        (1, 4, GROUP_BYTES + 2 * PEER_BYTES),
        (2, 2, PAIR_BYTES + NETWORK_BYTES),
        (2, 4, GROUP_BYTES + 2 * PEER_BYTES),
    ],
)
def test_the_channels_to_other_stages_take_memory_where_there_are_any(
    num_nodes: int, num_stages: int, extra: int
) -> None:
    of = job(cluster(num_nodes, 4))
    assert context_bytes(config(of, num_stages=num_stages, num_microbatches=4)) == PROCESS_BYTES + extra


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("fsdp8", GROUP_BYTES),
        ("dp8", GROUP_BYTES),
        ("fsdp4-tp2", GROUP_BYTES + PAIR_BYTES),
        ("dp2-fsdp4", PAIR_BYTES + GROUP_BYTES),
        ("fsdp2-cp2-tp2", GROUP_BYTES + 2 * PAIR_BYTES),
        ("fsdp1-cp8", GROUP_BYTES),
    ],
)
def test_each_group_of_a_strategy_has_a_communicator(text: str, num_bytes: int) -> None:
    """States are gathered over fsdp and cp together, keys over cp, whose ranks are the same where that is all."""
    of = config(job(cluster(2, 4)), num_microbatches=1)
    assert communicator_bytes(of.job.chain.layer_types[1], parse_strategy(text), of) == num_bytes
    processes = config(unprofiled_job())
    assert communicator_bytes(of.job.chain.layer_types[1], parse_strategy("fsdp4"), processes) == 0


def test_efficiencies_are_fractions() -> None:
    for name in ("matmul", "attention", "memory"):
        assert 0 < getattr(efficiency_of("h100-80gb", "infiniband-ndr"), name) < 1


def test_the_optimizer_reads_16_and_writes_12_bytes_of_a_parameter() -> None:
    assert optimizer_s(1e9, job()) == pytest.approx(28e9 / (job().efficiency.memory * 1e12))


def test_processes_of_one_host_have_no_context_and_no_slack() -> None:
    unprofiled = unprofiled_job()
    assert context_bytes(config(unprofiled)) == 0
    assert usable_bytes(unprofiled) == unprofiled.budget_bytes


# time


def test_compute_time_is_work_over_the_reached_rates() -> None:
    samples, rate = 8, job().efficiency
    each = 2e9 / (rate.matmul * 100e12) + 1e8 / (rate.attention * 100e12)
    each += rate.operands * 1e6 / 1e12 + 1e6 / (rate.memory * 1e12)
    expected = samples * each + 20 * rate.ramp_s
    assert block("dp8").forward_s["compute"] == pytest.approx(expected)


def test_tp_pays_its_two_all_reduces_in_each_direction() -> None:
    where = config(job(global_batch=8))
    tensor_bytes = 8 * SEQ_LEN * 64 * 2
    group, of = Group(size=8, stride=1, span=8), where.job
    once = collective_s("all_reduce", tensor_bytes, group, of.cluster, of.profile, of.efficiency.links)
    once += 7 * 7 * of.efficiency.jitter_s
    cost = block("tp8", where)
    assert cost.forward_s["tp"] == pytest.approx(2 * once)
    assert cost.backward_s["tp"] == pytest.approx(2 * once)


def test_a_layer_too_small_for_the_host_takes_as_long_as_its_launches() -> None:
    where = config(job(global_batch=8))
    cost, rates = block("dp8", where), where.job.efficiency
    assert sum(cost.forward_s.values()) == pytest.approx(20 * rates.traced_launch_s)
    assert sum(cost.backward_s.values()) == pytest.approx(20 * rates.traced_backward_launch_s)


def test_a_framework_that_does_not_launch_one_by_one_never_waits_for_the_host() -> None:
    of = replace(job(global_batch=8), engine=replace(NATIVE, execution=Execution(eager_launch=False)))
    assert "host" not in block("dp8", config(of)).forward_s


def test_a_zero_1_framework_scatters_gradients_and_gathers_parameters_once_a_step() -> None:
    states = StateBytes(parameters=2, gradients=4, optimizer=12, zero=1)
    of = replace(job(), engine=replace(NATIVE, execution=Execution(states=states, overlaps_data=False)))
    group = Group(size=8, stride=1, span=8)
    gather = collective_s("all_gather", 2 * BLOCK, group, of.cluster, of.profile, of.efficiency.links)
    scatter = collective_s("reduce_scatter", 4 * BLOCK, group, of.cluster, of.profile, of.efficiency.links)
    once = block("dp8", config(of)).once_s
    assert once["dp"] == pytest.approx(gather + scatter)
    assert once["optimizer"] == pytest.approx(optimizer_s(BLOCK / 8, of))


def test_a_zero_1_framework_shards_the_optimizer_alone() -> None:
    states = StateBytes(parameters=2, gradients=4, optimizer=12, zero=1)
    of = replace(job(), engine=replace(NATIVE, execution=Execution(states=states)))
    assert held("dp8", config(of)).static_bytes == {
        "parameters": 2 * BLOCK,
        "gradients": 4 * BLOCK,
        "optimizer": 12 * BLOCK // 8,
    }


def test_a_calibrated_job_takes_every_time_by_its_factor() -> None:
    of = job().on(time_factor=1.5)
    plain, slower = block("fsdp8"), block("fsdp8", config(of))
    for before, after in zip(
        (plain.forward_s, plain.backward_s, plain.once_s),
        (slower.forward_s, slower.backward_s, slower.once_s),
        strict=True,
    ):
        assert after == pytest.approx({name: 1.5 * seconds for name, seconds in before.items()})
    assert step_overhead_s(of) == pytest.approx(1.5 * step_overhead_s(job()))


def test_dp_reduces_once_a_step_whatever_the_number_of_microbatches() -> None:
    few, many = (block("dp8", config(num_microbatches=count)) for count in (1, 8))
    assert "dp" not in many.forward_s | many.backward_s
    assert many.once_s["dp"] > 0
    assert many.once_s.keys() == few.once_s.keys()


def test_fsdp_gathers_in_forward_and_again_in_backward_with_a_reduce_scatter() -> None:
    where = config()
    cost = block("fsdp8", where)
    group = Group(size=8, stride=1, span=8)
    of = where.job
    gather = collective_s("all_gather", 2 * BLOCK, group, of.cluster, of.profile, of.efficiency.links)
    scatter = collective_s("reduce_scatter", 4 * BLOCK, group, of.cluster, of.profile, of.efficiency.links)
    forward_s, backward_s = (
        sum(seconds for name, seconds in terms.items() if name != "fsdp") for terms in (cost.forward_s, cost.backward_s)
    )
    kappa = of.profile.overlap_slowdown
    assert cost.forward_s["fsdp"] == pytest.approx(exposed_s(forward_s, gather, kappa))
    assert cost.backward_s["fsdp"] == pytest.approx(exposed_s(backward_s, gather + scatter, kappa))


def test_zero_2_does_not_gather_again() -> None:
    assert block("fsdp8 zero2").backward_s["fsdp"] < block("fsdp8").backward_s["fsdp"]


def test_zero_1_sends_once_a_step_what_zero_2_sends_in_every_microbatch() -> None:
    where = config(job(cluster(1, 8)), num_microbatches=4)
    whole, kept = block("fsdp8 zero1", where), block("fsdp8 zero2", where)
    assert whole.microbatch_s < kept.microbatch_s
    assert whole.once_s["fsdp"] == pytest.approx(kept.forward_s["fsdp"] + kept.backward_s["fsdp"])
    assert "fsdp" not in kept.once_s


@pytest.mark.parametrize("text", ["fsdp8", "dp2-fsdp4", "fsdp4-tp2"])
def test_zero_1_is_zero_2_with_one_microbatch(text: str) -> None:
    where = config(job(cluster(1, 8)), num_microbatches=1)
    assert held(f"{text} zero1", where) == held(f"{text} zero2", where)
    whole, kept = block(f"{text} zero1", where), block(f"{text} zero2", where)
    of_step = (each.microbatch_s + sum(each.once_s.values()) for each in (whole, kept))
    assert next(of_step) == pytest.approx(next(of_step))


def test_zero_1_moves_fewer_bytes_than_replicas_that_sum_fp32_gradients() -> None:
    """Two thirds of them: it gathers new parameters in compute precision, and steps an eighth of them on each rank."""
    where = config(job(cluster(1, 8)), num_microbatches=8)
    whole, replicated = block("fsdp8 zero1", where).once_s, block("dp8", where).once_s
    assert whole["optimizer"] == pytest.approx(replicated["optimizer"] / 8)
    assert sum(whole.values()) < sum(replicated.values())


def test_full_remat_runs_the_forward_pass_again_and_one_of_its_two_reductions() -> None:
    cost = block("tp8 remat=full", config(job(global_batch=4096)))
    assert cost.backward_s["remat"] == pytest.approx(cost.forward_s["compute"] + cost.forward_s["tp"] / 2)


def test_a_tied_model_pays_for_the_exchange_of_its_gradients_in_embedding_and_head() -> None:
    where = config(job(tie_word_embeddings=True), num_stages=2, num_microbatches=2)
    costs = [layer_cost(layer_type, parse_strategy("fsdp4"), where) for layer_type in where.job.chain.layer_types]
    assert ["tied" in cost.once_s for cost in costs] == [True, False, True]
    untied = config(job(), num_stages=2, num_microbatches=2)
    assert "tied" not in layer_cost(untied.job.chain.layer_types[0], parse_strategy("fsdp4"), untied).once_s


def test_a_tied_head_takes_the_memory_of_an_untied_one() -> None:
    tied, untied = (config(job(tie_word_embeddings=tie)) for tie in (True, False))
    costs = [layer_bytes(where.job.chain.layer_types[2], parse_strategy("fsdp8"), where) for where in (tied, untied)]
    assert costs[0].static_bytes == costs[1].static_bytes
    assert costs[0].transient_bytes == costs[1].transient_bytes


def test_a_degree_that_the_profile_lacks_is_an_error() -> None:
    where = config()
    only_whole = where.job.profile.model_copy(update={"layers": where.job.profile.layers[:1]})
    with pytest.raises(InvalidProfileError, match="no entry for tp 8"):
        block("tp8", config(where.job.on(profile=only_whole)))


def test_the_groups_of_a_level_are_as_strided_as_the_levels_inside_it() -> None:
    strategy = parse_strategy("fsdp4-tp2")
    assert levels_group(strategy, strategy.levels[:1], 8) == Group(size=4, stride=2, span=8)
    assert levels_group(strategy, strategy.levels[1:], 8) == Group(size=2, stride=1, span=8)


@given(seconds, seconds)
def test_without_slowdown_the_shorter_of_two_hides_behind_the_longer(compute_s: float, communication_s: float) -> None:
    total = compute_s + exposed_s(compute_s, communication_s, 1.0)
    assert isclose(total, max(compute_s, communication_s), abs_tol=1e-9)


@given(seconds, seconds, kappas)
def test_overlap_takes_at_least_the_longer_and_at_most_both_slowed_down(c: float, d: float, kappa: float) -> None:
    exposed = exposed_s(c, d, kappa)
    assert max(c, d) - 1e-9 <= c + exposed <= c + d + 1e-9
    assert exposed >= -1e-9


@pytest.mark.slow
@given(texts, st.floats(1, 100))
def test_a_faster_link_never_slows_a_layer_down(text: str, factor: float) -> None:
    slow = block(text, config(job(cluster(intra_bytes_per_s=1e9))))
    fast = block(text, config(job(cluster(intra_bytes_per_s=1e9 * factor))))
    assert fast.microbatch_s <= slow.microbatch_s * (1 + 1e-12)
    assert sum(fast.once_s.values()) <= sum(slow.once_s.values()) * (1 + 1e-12)


# memory


def test_full_remat_keeps_the_input_alone() -> None:
    where = config()
    samples = 64 // 8
    assert held("dp8 remat=full", where).activation_bytes == samples * SEQ_LEN * 64 * 2
    assert held("dp8", where).activation_bytes == 64 + 10 * samples * SEQ_LEN * 64 * 2


def test_what_full_remat_recomputes_is_in_the_working_set() -> None:
    kept, recomputed = held("fsdp8"), held("fsdp8 remat=full")
    difference = recomputed.transient_bytes - kept.transient_bytes
    assert difference == kept.activation_bytes - recomputed.activation_bytes


def test_the_working_set_of_fsdp_holds_a_copy_and_gradients_beside_a_copy_and_a_reduction_buffer() -> None:
    where = config(job(global_batch=8), num_microbatches=8)
    activations = 4 * 2 * SEQ_LEN * 64
    assert held("fsdp8", where).transient_bytes == max((2 + 2) * BLOCK + activations, 3 * 2 * BLOCK)
    tables = build_tables(config(num_microbatches=8), (parse_strategy("fsdp8"), parse_strategy("fsdp8 zero2")))
    assert tables.buffers_of[:, 1].tolist() == [[0, 0], [2 * BLOCK, 0], [4 * BLOCK, 4 * BLOCK]]


def test_the_working_set_of_dp_holds_new_gradients_and_a_reduction_buffer_at_least() -> None:
    assert held("dp8", config(job(global_batch=8))).transient_bytes >= (2 + 4) * BLOCK


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_hold_what_they_sent_in_flight_and_a_gradient_each_way(num_stages: int) -> None:
    """However many microbatches there are; ranks of tp without sp hold all of it each."""
    for text, copies in (("dp8", 1), ("tp8", 8)):
        where = config(num_stages=num_stages, num_microbatches=8)
        strategy = parse_strategy(text.replace("8", str(8 // num_stages)))
        share = where.activation_bytes * (copies // num_stages or 1) // (8 // num_stages)
        tables = build_tables(where, (strategy,))
        last = tables.last_types[1]
        assert (tables.activation_bytes[last] - tables.activation_bytes[1]).tolist() == [share]
        assert (tables.static_bytes[last] - tables.static_bytes[1]).tolist() == [share]
        assert tables.received is not None
        assert tables.received.num_bytes(1, num_stages - 1).tolist() == [[share]]


def test_the_stages_of_torch_have_a_buffer_for_every_microbatch() -> None:
    where = config(replace(job(), engine=TORCHTITAN), num_stages=2, num_microbatches=8)
    tables, share = build_tables(where, (parse_strategy("dp4"),)), where.activation_bytes // 4
    assert (tables.static_bytes[tables.last_types[1]] - tables.static_bytes[1]).tolist() == [8 * share]
    assert tables.received is not None
    assert tables.received.num_bytes(1, 1).tolist() == [[(8 - 1 + 1) * share]]


class TestWholeGradients:
    """Frameworks that reduce the gradients of shards in the last backward pass of a step alone."""

    def where(self, where: str, num_microbatches: int) -> JobConfig:
        theirs = replace(job(cluster(1, 8)), engine=replace(NATIVE, execution=Execution(whole_gradients=where)))
        return config(theirs, num_microbatches=num_microbatches)

    def test_they_stay_whole_and_are_sent_once_a_step(self) -> None:
        own, other = (self.where(where, 4) for where in ("never", "always"))
        kept = [held("fsdp8", each).static_bytes["gradients"] for each in (own, other)]
        assert kept[1] > kept[0] * 3
        ours, theirs = (block("fsdp8", each) for each in (own, other))
        assert theirs.microbatch_s < ours.microbatch_s
        assert "fsdp" not in ours.once_s
        assert 0 < theirs.once_s["fsdp"] < ours.microbatch_s - theirs.microbatch_s, "half the bytes, in bf16"

    def test_one_microbatch_keeps_what_it_always_did(self) -> None:
        ours, theirs = (held("fsdp8", self.where(where, 1)) for where in ("never", "always"))
        assert theirs.static_bytes == ours.static_bytes

    @pytest.mark.parametrize(("text", "where"), [("dp8", "always"), ("fsdp4-tp2", "without tp")])
    def test_other_layers_are_as_they_are_here(self, text: str, where: str) -> None:
        for of in (block, held):
            assert of(text, self.where(where, 4)) == of(text, self.where("never", 4))


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", 4), ("gpipe", 8)])
def test_every_microbatch_in_flight_has_positions_and_rotary_embeddings(schedule: str, in_flight: int) -> None:
    where = config(num_stages=4, num_microbatches=8, schedule=schedule)
    shared = build_tables(where, (parse_strategy("dp2"),)).overhead_of(0) - context_bytes(where)
    rotary = 2 * 8 * 2  # cosines and sines of a head of 8, in bf16
    assert shared == in_flight * SEQ_LEN * (8 + rotary)


@given(texts, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["fp32", "bf16"]))
def test_no_term_of_memory_is_negative(text: str, num_microbatches: int, precision: str) -> None:
    cost = held(text, config(job(precision=precision), num_microbatches=num_microbatches))
    assert all(value > 0 for value in cost.static_bytes.values())
    assert cost.activation_bytes > 0
    assert cost.transient_bytes > 0


@given(texts)
def test_more_samples_never_take_less_memory_or_time(text: str) -> None:
    small, large = (block(text, config(num_microbatches=count)) for count in (8, 2))
    few, many = (held(text, config(num_microbatches=count)) for count in (8, 2))
    assert many.activation_bytes >= few.activation_bytes
    assert many.transient_bytes >= few.transient_bytes
    assert large.microbatch_s >= small.microbatch_s * (1 - 1e-12)


class TestFrameworks:
    """Effects of framework differences from the runtime on the cost of a plan, each in the required direction."""

    STATES = StateBytes(parameters=2, gradients=4, optimizer=12, zero=1)

    def once_s(self, execution: Execution) -> float:
        return sum(block("dp16", self.where(execution)).once_s.values())

    def where(self, execution: Execution) -> JobConfig:
        return config(replace(job(cluster(2, 8)), engine=replace(NATIVE, execution=execution)))

    def test_cutting_a_layers_gradients_into_pieces_costs_their_latencies(self) -> None:
        one, six = (Execution(states=self.STATES, overlaps_data=False, shard_pieces=count) for count in (1, 6))
        assert self.once_s(six) > self.once_s(one)

    def test_gradients_in_fp32_cost_more_to_reduce_than_in_bf16(self) -> None:
        half, whole = (Execution(states=self.STATES, overlaps_data=False, reduce_bytes=count) for count in (2, 4))
        assert self.once_s(whole) > self.once_s(half)

    def test_a_reduction_beside_compute_never_costs_more_than_one_after_it(self) -> None:
        beside, after = (Execution(states=self.STATES, overlaps_data=overlaps) for overlaps in (True, False))
        assert self.once_s(beside) <= self.once_s(after)


def test_what_sharding_takes_beside_its_collectives_is_paid_by_sharded_layers_alone() -> None:
    plain = job()
    measured = (ShardingTime(group_size=2, seconds=1.0), ShardingTime(group_size=8, seconds=3.0))
    hooked = plain.on(profile=plain.profile.model_copy(update={"sharding": measured}))
    for text, expected in (("fsdp8", 3.0), ("fsdp8 zero2", 3.0), ("fsdp2-tp4", 1.0), ("dp8", 0.0), ("tp8", 0.0)):
        costs = [block(text, config(each)) for each in (plain, hooked)]
        before_s, after_s = (sum((*cost.forward_s.values(), *cost.backward_s.values())) for cost in costs)
        assert after_s - before_s == pytest.approx(expected), text


def test_adding_gradients_of_a_microbatch_moves_bytes_of_what_a_rank_trains() -> None:
    of = replace(job(), engine=replace(NATIVE, execution=Execution(accumulation_bytes=10)))
    before, after = (block("dp8", config(each)).backward_s["compute"] for each in (job(), of))
    assert after - before == pytest.approx(10 * BLOCK / (job().efficiency.memory * 1e12))
