"""Tests of a tiny model measured by two processes; times are not compared with numbers because machines differ."""

import time

import pytest

from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.processes.failure import RankFailedError
from steelyard.profiler import launch
from steelyard.profiler.launch import launch_profiler
from steelyard.profiles.profile import Profile, merge_profiles
from steelyard.tracer.trace import trace
from tests.jobs import make_job
from tests.processes.forking_agent import fork_ranks
from tests.profiler.examples import CONFIG, SEQ_LEN, empty_trace, tiny_chain
from tests.shapes import tp_shape

pytestmark = pytest.mark.processes

SAMPLES = [1, 512]


@pytest.fixture(scope="module")
def profile():
    traced = trace(tiny_chain(), seq_len=SEQ_LEN, precision="fp32", degrees=[1, 2, 4])
    options = {"num_processes": 2, "samples": SAMPLES, "budget_s": 0.5, "began_s": time.time()}
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        return launch_profiler(tiny_chain(), traced, **options)


def test_every_layer_that_the_processes_can_run_is_timed_at_every_size(profile):
    measured = [(layer.kind, layer.degrees, [time.samples for time in layer.times]) for layer in profile.layers]
    shapes = [tp_shape(1), tp_shape(2), tp_shape(2, sp=True)]
    expected = [(layer_type, shape, SAMPLES) for layer_type in ("embedding", "block", "head") for shape in shapes]
    assert len(measured) == len(expected)
    assert all(each in measured for each in expected)


def test_a_block_takes_longer_for_many_times_the_samples(profile):
    few, many = profile.layer("block", tp_shape(1, False)).times
    assert few.forward_s + few.backward_s < many.forward_s + many.backward_s


def test_every_collective_over_two_ranks_is_there_once(profile):
    found = [(c.kind, c.group_size, c.strided) for c in profile.collectives]
    collectives = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    assert sorted(found) == sorted((collective, 2, False) for collective in collectives)


def test_what_a_step_takes_beside_its_layers_is_positive(profile):
    assert profile.optimizer_s_per_param > 0
    assert profile.optimizers.keys() == {"adamw-8bit", "adamw-4bit", "adafactor", "sgd"}
    assert min(profile.optimizers.values()) > 0
    assert profile.bf16_flop_per_s > 1e6
    assert profile.step_overhead_s > 0
    assert [each.group_size for each in profile.sharding] == [2]
    assert 1 <= profile.overlap_slowdown <= 2


def test_the_identity_says_where_it_was_measured(profile):
    identity = profile.identity
    assert (identity.method, identity.device_kind, identity.num_devices) == ("measured", "cpu", 2)
    assert identity.config_hash == tiny_chain().config_hash


def test_it_survives_json_and_merging_with_itself(profile):
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    assert merge_profiles(profile, profile) == profile


def test_a_process_is_never_slower_while_fewer_compute(profile):
    assert len(profile.busy_speeds) == 2
    assert profile.busy_speeds[0] >= profile.busy_speeds[1] == 1.0


def test_a_cpu_reserves_nothing_beside_what_tensors_hold(profile):
    assert profile.reserved_over_allocated is None
    assert profile.identity.driver == "none"


@pytest.mark.parametrize(
    ("text", "sent"),
    [("cp=2, remat=none", "all_gather"), ("cp=2, cp_method=ulysses, remat=none", "all_to_all")],
)
def test_a_plan_with_context_parallelism_is_priced_from_it(profile, text, sent):
    """Each of two ranks has half of the one sample; in both passes of both blocks it waits for the other."""
    of = make_job(CONFIG, "1x2xcpu", global_batch=1, seq_len=SEQ_LEN, precision="fp32", memory="1GiB", profile=profile)
    found = plan_job(of, Decisions(pins=(text,))).plan
    assert {each.token_degree for each in found.strategies} == {2}
    halves = [profile.layer(layer_type, {}).time_s(0.5) for layer_type in ("embedding", "block", "block", "head")]
    (stage,) = found.prediction.stages
    assert stage.time_s["compute"] == pytest.approx(sum(each.forward_s + each.backward_s for each in halves))
    assert stage.time_s["cp"] >= 2 * 2 * profile.collective(sent, 2, strided=False).latency_s


def test_a_failing_process_ends_the_launch_and_shows_its_error(monkeypatch, capfd):
    fork_ranks(monkeypatch)
    monkeypatch.setattr(launch, "_MODULE", "steelyard.profiler.missing")
    with pytest.raises(RankFailedError, match="exit code") as raised:
        launch_profiler(tiny_chain(), empty_trace(), num_processes=2, samples=[1])
    assert "steelyard.profiler.missing" in capfd.readouterr().err + str(raised.value)
