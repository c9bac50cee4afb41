"""Tests of plans over heterogeneous device groups: exact over orders and sizes, against single groups and even cuts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job, stage_configs
from steelyard.cost.predict import predict, predict_memory
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware import parse_cluster, parse_pools
from steelyard.hardware.files import find_network
from steelyard.hardware.parse import pools_from_yaml
from steelyard.hardware.values import joined_pools
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json, read_plan, write_plan
from steelyard.planning.choose import NUM_RESCORED, accept, plan_job
from steelyard.planning.complete import complete, find_plan
from steelyard.planning.explain import explain_pools
from steelyard.planning.price import bare_plan, priced_or_reason, with_price
from steelyard.planning.problem import LEVELS, GroupSpace, PlacedPipeline, make_tables
from steelyard.planning.request import make_request, read_profile, request_of_plan
from steelyard.planning.variants import Study, even_plan, group_answers
from steelyard.search import search
from tests.cost.examples import SEQ_LEN, chain, measured_profile
from tests.jobs import job_of, make_job, request_of
from tests.sample import sampled

GIB = 2**30
OPTIONS = Decisions(max_degrees={"tp": 2}, modes={"zero": (3,), "sp": (False,)})


def narrower(**more):
    """Return the decisions of `OPTIONS` with more restrictions."""
    return OPTIONS.with_also(Decisions(**more))


GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_positions": 1024, "vocab_size": 5_000}
"""Model with tied matrices, whose exchange depends on the number of stages."""
TIED = {**GPT2, "n_layer": 10}


def pooled(cluster, *, batch=8, memory=None, model="tinyllama-1.1b", **more):
    pools = parse_pools(cluster) if isinstance(cluster, str) else cluster
    return make_job(model, pools, global_batch=batch, seq_len=1024, precision="bf16", memory=memory, **more)


def alone(cluster, *, batch=8, memory=None):
    return make_job(
        "tinyllama-1.1b",
        cluster,
        global_batch=batch,
        seq_len=1024,
        precision="bf16",
        memory=memory,
        profile=None,
    )


def every_config(space: GroupSpace) -> list[PlacedPipeline]:
    """All configurations in all orders of their pools."""
    return [order for each in space.configs() for order in space.orders(each)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "memory"),
    [
        pytest.param("1x2xh100-80gb+1x2xa100-80gb", None, marks=pytest.mark.nightly),
        ("1x2xh100-80gb+1x2xa100-80gb", "8GiB"),
        ("1x2xh100-80gb+1x2xl4+1x1xa100-80gb", "10GiB"),
    ],
)
def test_the_plan_is_as_fast_as_the_best_of_all_orders_and_sizes(cluster, memory):
    job = pooled(cluster, memory=memory)
    options = narrower(num_microbatches=4)
    space = GroupSpace(job, options)
    every = accept(job, [space.tables(each) for each in every_config(space)], num_alternatives=0)
    found = accept(job, make_tables(job, options))
    assert found.search.best.score_s <= every.search.best.score_s * (1 + 1e-6)
    assert max(found.search.lower_bound_s, every.search.lower_bound_s) <= found.search.best.score_s * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "memory"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("tinyllama-1.1b", "4GiB"), ("tinyllama-1.1b", None), (TIED, "4GiB"))
        ),
        *(("tinyllama-1.1b", "8GiB"), (TIED, "8GiB"), (TIED, None)),
    ],
)
def test_no_plan_of_a_config_is_faster_than_its_bounds(model, memory):
    job = pooled("1x2xh100-80gb+1x4xa100-40gb", memory=memory, model=model)
    space = GroupSpace(job, narrower(num_microbatches=8))
    configs = [each for each in every_config(space) if len(each.placement.pools) == 2]
    assert configs
    for config in configs:
        found = accept(job, [space.tables(config)], num_alternatives=0).ranked
        step_s = found[0].outcome.score_s if found else math.inf
        bounds = [config.bound_s, *(space.next_bound_s(config, level) for level in range(LEVELS))]
        assert max(bounds) <= step_s
        assert space.next_bound_s(config, LEVELS - 1, step_s) <= step_s


def test_the_bound_by_times_is_the_same_for_every_order():
    space = GroupSpace(pooled("1x2xh100-80gb+1x4xa100-40gb+1x2xl4"), narrower(num_microbatches=8))
    configs = [each for each in space.configs() if len(each.placement.pools) == 3]
    assert configs
    for config in configs:
        bounds = [space.next_bound_s(order, 0) for order in space.orders(config)]
        assert len(bounds) == 6
        assert max(bounds) == pytest.approx(min(bounds), rel=1e-9)


@pytest.mark.slow
def test_a_search_without_time_ends_with_the_gap_that_it_leaves():
    job = pooled("1x2xh100-80gb+1x2xa100-80gb", memory="8GiB")
    found = accept(job, make_tables(job, OPTIONS), time_limit_s=0.0)
    best = accept(job, make_tables(job, OPTIONS))
    assert found.ranked
    assert found.search.status == "feasible"
    assert found.search.lower_bound_s <= best.search.best.score_s <= found.search.best.score_s


@pytest.mark.slow
def test_the_simulator_ranks_the_best_plans_of_the_best_configs():
    job = pooled("1x2xh100-80gb+1x2xa100-80gb", memory="8GiB")
    plan = plan_job(job, OPTIONS).plan
    assert plan.prediction.certificate.status == "simulated"
    others = plan.prediction.alternatives
    assert len(others) == NUM_RESCORED - 1
    assert not any(each.is_bound for each in others)
    assert all(each.step_time_s >= plan.prediction.step_time_s for each in others)


@pytest.mark.slow
def test_bytes_of_the_search_are_those_of_the_prediction():
    job = pooled("1x2xh100-80gb+1x4xa100-40gb")
    space = GroupSpace(job, narrower(num_microbatches=4))
    for config in every_config(space):
        outcome = search([space.tables(config)], usable_bytes(job)).best
        if outcome is None:
            continue
        plan = bare_plan(job, outcome.tables, outcome.solution)
        spared = [usable_bytes(job) - usable_bytes(each.job) for each in stage_configs(plan, job)]
        found = [sum(terms.values()) - terms.get("allocator slack", 0) for terms in predict_memory(plan, job)]
        added = [each.total_bytes for each in outcome.solution.stages]
        rounded = outcome.tables.pipeline.num_passes * (outcome.tables.pipeline.num_chunks > 1)
        for num_bytes, own, more in zip(added, found, spared, strict=True):
            assert 0 <= num_bytes - own - more <= rounded


def test_times_of_the_search_are_those_of_the_prediction():
    job = pooled("1x2xh100-80gb+1x4xa100-40gb")
    space = GroupSpace(job, narrower(num_microbatches=4))
    configs = [each for each in every_config(space) if len(each.placement.pools) == 2]
    for config in configs:
        outcome = search([space.tables(config)], usable_bytes(job)).best
        plan = bare_plan(job, outcome.tables, outcome.solution)
        for stage, predicted in zip(outcome.solution.stages, predict(plan, job).stages, strict=True):
            own_s = predicted.total_time_s - predicted.time_s.get("pipeline", 0.0)
            assert own_s == pytest.approx(stage.layer_s + stage.switch_s)


@pytest.mark.slow
@pytest.mark.parametrize("batch", sampled([4, 8, 32], [8]))
def test_pools_of_equal_devices_are_no_worse_than_one_cluster_cut_between_them(batch):
    whole = parse_cluster("2x4xa100-80gb")
    half = whole.on(num_nodes=1, inter_link=None)
    halves = joined_pools([half.on(name="left"), half.on(name="right")], [whole.inter_link] * 2)
    options = narrower(num_stages=2, schedules=("1f1b", "gpipe"))
    one = plan_job(alone("2x4xa100-80gb", batch=batch), options).plan
    two = plan_job(pooled(halves, batch=batch), options).plan
    assert one.prediction.certificate.is_optimal
    assert two.prediction.certificate.is_optimal
    assert two.prediction.lower_bound_s <= one.prediction.lower_bound_s * (1 + 1e-9)


def test_a_pool_that_slows_the_rest_is_left_out_and_the_plan_says_so():
    job = pooled("1x4xh100-80gb+1x1xl4", batch=64)
    plan = plan_job(job, OPTIONS).plan
    assert plan.cluster == "1x4xh100-80gb"
    used, left = plan.prediction.pools
    assert (used.num_stages, left.name, left.num_stages) == (plan.num_stages, "1x1xl4", 0)
    assert left.reason
    assert plan.stages == plan_job(job.by_group[0], OPTIONS).plan.stages


@pytest.mark.slow
def test_unlike_budgets_are_kept_by_every_stage():
    job = pooled("1x2xh100-80gb+1x2xa100-40gb", memory=None, batch=64)
    small = job.by_group[0].on(budget_bytes=9 * GIB)
    job = Job.over((small, job.by_group[1].on(budget_bytes=14 * GIB)))
    plan = plan_job(job, OPTIONS).plan
    budgets = [config.job.budget_bytes for config in stage_configs(plan, job)]
    assert plan.prediction.stage_budgets() == tuple(budgets)
    assert all(stage.total_bytes <= budget for stage, budget in zip(plan.prediction.stages, budgets, strict=True))


def test_where_nothing_fits_the_nearest_miss_is_said():
    result = plan_job(pooled("1x1xh100-80gb+1x1xa100-40gb", memory="3GiB"), OPTIONS)
    assert result.plan is None
    assert "more per device" in result.miss_text


@pytest.mark.slow
@pytest.mark.parametrize("memory", sampled(["1GiB", "3GiB"], ["3GiB"]))
def test_the_nearest_miss_is_that_of_the_config_that_misses_least(memory):
    job = pooled("1x2xh100-80gb+1x2xa100-80gb", memory=memory, batch=32)
    space = GroupSpace(job, OPTIONS)
    every = accept(job, [space.tables(each) for each in every_config(space)], num_alternatives=0)
    missed = plan_job(job, OPTIONS).miss
    assert missed.miss_bytes == every.search.nearest_miss.miss_bytes
    more = job.by_group[0].budget_bytes + missed.miss_bytes * 11 // 10
    assert plan_job(pooled("1x2xh100-80gb+1x2xa100-80gb", memory=more, batch=32), OPTIONS).plan


def test_a_slower_link_between_pools_never_makes_the_plan_faster():
    pools = parse_pools("1x2xh100-80gb+1x2xa100-80gb")
    options, steps = narrower(num_stages=2), []
    for name in ("infiniband-hdr", "ethernet-10"):
        links = tuple(find_network(name, devices_per_node=2) for _ in pools.pools)
        steps.append(plan_job(pooled(joined_pools(pools.pools, links)), options).plan.prediction.step_time_s)
    assert steps[0] < steps[1]


@pytest.mark.slow
def test_a_plan_over_pools_is_compared_with_each_of_them_and_with_even_cuts():
    job = pooled("1x2xa100-80gb+1x2xh100-80gb", batch=32)  # not in the order of the plan
    plan = plan_job(job, OPTIONS).plan
    answers = group_answers(Study(request_of(job, OPTIONS), job))
    baselines = [each.beside(plan.prediction.step_time_s) for each in answers]
    names = [each.name for each in baselines]
    assert names == ["1x2xa100-80gb alone", "1x2xh100-80gb alone", "even cuts over all pools"]
    assert all(each.step_time_s >= plan.prediction.step_time_s for each in baselines)
    again = explain_pools(plan, Study(request_of_plan(plan, decisions=OPTIONS))).rivals
    assert {each.name: each.step_time_s for each in again} == {
        each.name: pytest.approx(each.step_time_s) for each in baselines
    }


AMP = Path(__file__).parents[2] / "benchmarks" / "data" / "pools" / "amp.yaml"
GPT2_MEDIUM = GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 52256}
QUICK = {"num_next_best": 0, "num_fallbacks": 0}
MIXED = {
    "tied matrices, slow links": {"model": GPT2_MEDIUM, "cluster": str(AMP), "global_batch": 32, "precision": "fp32"},
    "alike": {"model": "tinyllama-1.1b", "cluster": "1x2xh100-80gb+1x2xa100-80gb", "global_batch": 32},
    "one slows the rest": {"model": "tinyllama-1.1b", "cluster": "1x4xh100-80gb+1x1xl4", "global_batch": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "time_limit_s"),
    [
        *(("alike", 0.0), ("alike", 300.0), ("one slows the rest", 300.0), ("tied matrices, slow links", 300.0)),
        pytest.param("one slows the rest", 0.0, marks=pytest.mark.nightly),
        pytest.param("tied matrices, slow links", 0.0, marks=pytest.mark.nightly),
    ],
)
def test_no_group_alone_and_no_even_cut_is_faster_than_the_plan(name, time_limit_s):
    decided = narrower(schedules=("1f1b", "gpipe"))
    plan = complete(
        make_request(**MIXED[name], seq_len=1024, decisions=decided, time_limit_s=time_limit_s, **QUICK)
    ).plan
    times = [each.step_time_s for each in plan.prediction.baselines if each.step_time_s is not None]
    assert len(plan.prediction.baselines) == len(plan.prediction.pools) + 1
    assert plan.prediction.step_time_s <= min(times)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_time_s
    shown = {each.name for each in plan.prediction.pools if each.num_stages}
    assert shown == {each.name for each in plan.stage_pools()}


def test_a_group_alone_that_may_have_other_stages_than_decided_says_so():
    plan = complete(make_request(**MIXED["alike"], seq_len=1024, decisions=narrower(num_stages=2), **QUICK)).plan
    first, *_ = plan.prediction.baselines
    assert first.name == "1x2xh100-80gb alone, any number of stages"
    assert plan.num_stages == 2


@pytest.mark.slow
def test_a_group_alone_costs_among_all_groups_what_it_costs_by_itself():
    """Identically divided copies of a tied matrix exchange less, which tables over two groups cannot express."""
    job = pooled("1x2xh100-80gb+1x4xa100-40gb", model={**GPT2, "n_layer": 10})
    options = narrower(num_microbatches=8)
    space = GroupSpace(job, options)
    for config in (each for each in space.configs() if len(each.placement.pools) == 1):
        of = job.by_group[config.placement.pools[0]]
        (own,) = (each for each in make_tables(of, options) if each.pipeline == config.pipeline)
        joint, alone = (
            [each.outcome.score_s for each in accept(on, [tables]).ranked]
            for on, tables in ((job, space.tables(config)), (of, own))
        )
        assert joint == alone
        assert all(space.next_bound_s(config, level) <= step_s for level in range(LEVELS) for step_s in joint)


def test_even_cuts_give_all_stages_as_many_devices_and_layers():
    plan = even_plan(pooled("1x2xh100-80gb+1x4xa100-80gb"), OPTIONS)
    assert len({stage.num_devices for stage in plan.stages}) == 1
    sizes = [len(stage.layers) for stage in plan.parts]
    assert max(sizes) - min(sizes) <= 1


def test_the_job_of_a_plan_keeps_the_budgets_that_it_was_made_for():
    job = pooled("1x2xh100-80gb+1x2xa100-80gb", memory="20GiB", batch=32)
    plan = plan_job(job, OPTIONS).plan
    assert predict(plan, job_of(plan)).step_time_s == pytest.approx(plan.prediction.step_time_s)
    assert {pool.budget_bytes for pool in job_of(plan).groups} == {20 * GIB}


def test_a_plan_over_pools_that_is_priced_again_trains_its_tokens_at_the_new_speed():
    job = pooled("1x2xh100-80gb+1x2xa100-80gb", batch=32)
    plan = plan_job(job, OPTIONS).plan.with_training(10**12, price=2.0)
    slowed = Job.over([each.on(time_factor=2.0) for each in job.by_group])
    again = with_price(plan, slowed)
    assert again.prediction.step_time_s > 1.5 * plan.prediction.step_time_s
    factor = again.prediction.step_time_s / plan.prediction.step_time_s
    assert again.training.days == pytest.approx(plan.training.days * factor)


def test_a_plan_whose_pools_are_not_there_is_named():
    plan = plan_job(pooled("1x2xh100-80gb+1x2xa100-80gb", batch=32), narrower(num_stages=2)).plan
    with pytest.raises(
        UserError, match=r"^cluster: found the device group '1x2x(h|a)100-80gb'\n.*one of 1x2xl4, 1x4xa100"
    ):
        priced_or_reason(plan, Path("plan.json"), cluster="1x2xl4+1x4xa100-80gb")
    with pytest.raises(UserError, match=r"^--cluster: found 1x4xa100-80gb for a plan over"):
        request_of_plan(plan, cluster="1x4xa100-80gb")


def test_other_partitions_are_refused():
    with pytest.raises(UserError, match=r"^--partition: found --partition with several device groups"):
        pooled("1x2xh100-80gb+1x2xa100-80gb", decisions=narrower(partition="bmw"))


def test_python_takes_pools_as_the_command_line_does():
    asked = {"global_batch": 16, "seq_len": 256, "decisions": narrower(num_stages=2)}
    plan = find_plan("tinyllama-1.1b", "1x2xh100-80gb+1x2xa100-80gb", **asked)
    assert len(plan.stage_pools()) == 2
    with pytest.raises(UserError, match=r"^--profile: found 'profile.json'\n.*NAME=FILE"):
        find_plan("tinyllama-1.1b", "1x2xh100-80gb+1x2xa100-80gb", profile="profile.json", **asked)


@pytest.mark.slow
def test_what_leaves_no_margin_in_any_pool_is_taken_with_a_warning_that_names_the_pool():
    job = pooled(parse_pools("1x2xh100-80gb+1x2xa100-80gb"), batch=8)
    roomy = plan_job(job, OPTIONS)
    assert roomy.has_margin
    assert roomy.plan.prediction.warnings == ()
    missed = plan_job(with_memory(job, GIB, margin=0), OPTIONS)
    assert missed.plan is None
    least = int(missed.miss.needed_bytes * 1.09)
    found = plan_job(with_memory(job, least, margin=least // 20), OPTIONS)
    assert found.plan is not None
    assert not found.has_margin
    assert all(pool.margin_bytes == 0 for pool in found.plan.prediction.pools)
    assert any("h100-80gb: no plan was found that leaves" in each for each in found.plan.prediction.warnings)


def with_memory(job, has_bytes, *, margin):
    """The job on devices of this memory, ``margin`` of which is to be left free."""
    pools = [
        pool.on(cluster=pool.cluster.with_memory(has_bytes), budget_bytes=has_bytes - margin, margin_bytes=margin)
        for pool in job.by_group
    ]
    return Job.over(pools)


CPU_POOLS = """
version: 1
link: loopback
pools:
  - {name: quick, num_nodes: 1, devices_per_node: 2, device: {name: a, kind: cpu, memory_GiB: 8}, intra_link: loopback}
  - {name: slow, num_nodes: 1, devices_per_node: 2, device: {name: b, kind: cpu, memory_GiB: 8}, intra_link: loopback}
"""
ASKED = {"global_batch": 8, "seq_len": SEQ_LEN, "precision": "fp32"}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Two device groups of processes, and the profile of each by name; the slow one takes three times as long."""
    folder, quick = tmp_path_factory.mktemp("profiles"), measured_profile(chain(num_layers=8), num_devices=2)
    slow = quick.model_copy(update={"layers": tuple(three_times(layer) for layer in quick.layers)})
    paths = {"quick": folder / "quick.json", "slow": folder / "slow.json"}
    for name, profile in (("quick", quick), ("slow", slow)):
        paths[name].write_text(dump_json(profile))
    return pools_from_yaml(CPU_POOLS), paths


def three_times(layer):
    times = [
        time.model_copy(update={"forward_s": 3 * time.forward_s, "backward_s": 3 * time.backward_s})
        for time in layer.times
    ]
    return layer.model_copy(update={"times": tuple(times)})


def test_each_pool_is_priced_by_its_own_measured_profile_and_the_slow_one_gets_fewer_layers(profiled):
    cluster, paths = profiled
    text = ",".join(f"{name}={path}" for name, path in paths.items())
    job = make_job(chain(num_layers=8), cluster, profile=text, **ASKED)
    plan = plan_job(job, narrower(num_stages=2, num_microbatches=4)).plan
    layers = dict(
        zip((pool.name for pool in plan.stage_pools()), map(len, (s.layers for s in plan.parts)), strict=True)
    )
    assert layers["quick"] > 2 * layers["slow"]
    files = {use.name: use.profile.file.path for use in plan.prediction.pools}
    assert files == {name: str(path) for name, path in paths.items()}
    again = job_of(plan)
    assert predict(plan, again).step_time_s == pytest.approx(plan.prediction.step_time_s)
    swapped = dict(zip(paths, reversed(paths.values()), strict=True))
    assert predict(plan, job_of(plan, profile=swapped)).step_time_s > plan.prediction.step_time_s


def test_a_plan_over_pools_finds_its_profiles_beside_its_file_and_says_where_one_is_gone(profiled, tmp_path):
    cluster, paths = profiled
    job = make_job(chain(num_layers=8), cluster, profile=paths, **ASKED)
    plan = plan_job(job, narrower(num_stages=2, num_microbatches=4)).plan
    moved = [path.rename(tmp_path / path.name) for path in paths.values()]
    try:
        _, found = priced_or_reason(plan, tmp_path / "plan.json")
        assert predict(plan, found).step_time_s == pytest.approx(plan.prediction.step_time_s)
        assert priced_or_reason(plan, tmp_path / "elsewhere" / "plan.json").startswith("no file ")
    finally:
        for path, old in zip(moved, paths.values(), strict=True):
            path.rename(old)


@pytest.mark.parametrize(
    "given",
    ["{quick}", "quick={quick},quick={quick}", "fast={quick}", "quick=", ""],
    ids=["no pool", "twice", "unknown pool", "no file", "nothing"],
)
def test_profiles_that_do_not_name_their_pools_are_refused(profiled, given):
    cluster, paths = profiled
    with pytest.raises(UserError, match=r"^--profile: found .*\n.*NAME=FILE.* each device group of quick, slow"):
        make_job(chain(num_layers=8), cluster, profile=given.format(**paths), **ASKED)


def test_a_link_between_pools_whose_rate_is_known_is_not_priced_by_what_was_measured_inside_one(profiled):
    cluster, paths = profiled
    link = replace(find_network("ethernet-10", devices_per_node=2), bytes_per_s=1e4)
    slow_link = joined_pools(cluster.pools, [link, link])
    steps = []
    for each in (cluster, slow_link):
        job = make_job(chain(num_layers=8), each, profile=paths, **ASKED)
        plan = even_plan(job, narrower(num_stages=2))
        steps.append(predict(plan, job).step_time_s)
    assert steps[1] > 10 * steps[0]


def test_processes_of_a_pool_that_share_cores_are_faster_while_others_of_theirs_wait(profiled):
    cluster, paths = profiled
    profiles = {name: read_profile(path)[0] for name, path in paths.items()}
    shared = profiles | {"slow": profiles["slow"].model_copy(update={"busy_speeds": (2.0, 1.0)})}
    options = narrower(num_stages=4, num_microbatches=2)
    steps = []
    for each in (profiles, shared):
        job = make_job(chain(num_layers=8), cluster, profile=each, **ASKED)
        plan = even_plan(job, options)
        assert [pool.name for pool in plan.stage_pools()] == ["quick", "quick", "slow", "slow"]
        steps.append(predict(plan, job).step_time_s)
    assert steps[1] < steps[0]


def test_a_number_of_stages_that_one_pool_alone_cannot_have_is_searched_over_both():
    plan = plan_job(pooled("1x2xh100-80gb+1x1xa100-80gb", batch=8), narrower(num_stages=2)).plan
    assert plan.num_stages == 2


def test_a_plan_over_pools_that_are_described_in_full_is_read_back_from_its_file(profiled, tmp_path):
    cluster, paths = profiled
    job = make_job(chain(num_layers=8), cluster, profile=paths, **ASKED)
    plan = plan_job(job, narrower(num_stages=2)).plan
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_job_on_some_of_its_groups_shares_what_is_known_of_their_costs():
    job = pooled("1x2xh100-80gb+1x2xa100-80gb+1x2xl4")
    some = job.only(["1x2xl4", "1x2xh100-80gb"])
    assert some.hardware.name == "1x2xl4+1x2xh100-80gb"
    assert all(own is known for own, known in zip(some.by_group, (job.by_group[2], job.by_group[0]), strict=True))
    assert job.only(["1x2xl4"]) is job.by_group[2]
    assert Job.over(job.by_group[:1]) is job.by_group[0]
    with pytest.raises(
        InvalidPlanError, match=r"^cluster: found the device group '1x2xt4'\n.*one of 1x2xh100-80gb, 1x2xa100"
    ):
        job.only(["1x2xl4", "1x2xt4"])


def test_a_number_of_stages_that_no_pools_can_have_is_refused():
    with pytest.raises(UserError, match=r"^--stages: found 7"):
        plan_job(pooled("1x2xh100-80gb+1x2xa100-80gb"), narrower(num_stages=7))


def test_a_batch_that_no_pipeline_over_pools_can_divide_is_told_as_the_miss():
    job = pooled("1x4xh100-80gb+1x4xa100-80gb", batch=1)
    result = plan_job(job, Decisions(max_degrees={"tp": 1, "fsdp": 1, "cp": 1}, num_stages=2))
    assert result.plan is None
    assert result.miss_text == "a batch that some pipeline over these device groups can divide among its ranks"
