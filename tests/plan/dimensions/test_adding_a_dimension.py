"""Test that a dimension added in one place is enumerated, read, refused, priced, planned with and explained."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from torch import nn

from steelyard.cost.layer import layer_cost
from steelyard.cost.predict import predict
from steelyard.engines.capabilities import Capabilities
from steelyard.errors import InvalidPlanError, UserError
from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.dimensions import TWINS
from steelyard.modules.layers import build_layer
from steelyard.plan.choices import Explanation, PlanStudy
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DIMENSIONS, DP, FSDP, TP
from steelyard.plan.dimensions.dimension import (
    Batch,
    Contradiction,
    Dimension,
    Divides,
    Levels,
    Load,
    Mode,
    Placed,
    States,
    Traffic,
    Value,
    indivisible_samples,
)
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import shrunk_plan
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.explain import explain_plan
from steelyard.planning.pins import parse_pin
from steelyard.planning.problem import make_tables, problem_of
from steelyard.planning.variants import Study
from steelyard.planning.why_not import not_offered
from steelyard.report.html import ReportContents, report_page
from steelyard.runtime.mesh import PlanMesh
from steelyard.runtime.stage import shard_layer
from steelyard.search import SpaceOptions, enumerate_strategies
from steelyard.search.problem import load_problem, save_problem
from steelyard.tracer.layer import TracedLayer, fake_layer, fake_world
from tests.cost.examples import SEQ_LEN, chain, cluster, config, job, plan
from tests.cost.layer_bytes import layer_bytes
from tests.jobs import request_of

NAME = "rp"
ORDER = Mode(
    key="rp_order", texts={"ring": "", "tree": "+tree"}, pin={"ring": "ring", "tree": "tree"}, of_papers=("ring",)
)


def _contradiction(levels: Levels, _modes: Mapping[str, Value]) -> Contradiction | None:
    if DP not in {level.dimension for level in levels}:
        return None
    return Contradiction(field="parallel", expected="rp or dp in one layer", hint="write both as one level")


def _traffic(load: Load) -> Iterator[Traffic]:
    for collective in ("reduce_scatter", "all_gather"):
        yield Traffic(
            phase="step", collective=collective, tensor_bytes=load.gradient_bytes / load.strategy.state_shards
        )


RP = Dimension(
    title="replica parallelism",
    name=NAME,
    divides=Divides.SAMPLES,
    states=States.REPLICATED,
    illegal=indivisible_samples,
    traffic=_traffic,
    placement=lambda _strategy: Placed.BATCH,
    words=lambda strategy: f"samples over {strategy.degree(RP)} ranks in a ring of replicas",
    term="two halves of a reduction in a ring",
    hue="grey",
    modes=(ORDER,),
    contradiction=_contradiction,
)


@pytest.fixture(autouse=True)
def divided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Dimension and its implementation, known for one test; the strategies and numbers of ranks that the latter is
    given.
    """
    found: list[tuple[str, int]] = []
    monkeypatch.setitem(DIMENSIONS, NAME, RP)
    monkeypatch.setitem(TWINS, NAME, lambda _layer, _chain, strategy, mesh: found.append((str(strategy), mesh.size())))
    return found


SLOW = cluster(1, 4, intra_bytes_per_s=1e9)


def planned(pin: str = "rp=2", **changes: int) -> Plan:
    of = job(SLOW, **changes)
    found = plan_job(of, Decisions(num_stages=1, num_microbatches=2, pins=(pin,))).plan
    assert found is not None
    return found


# in the strategy space


def test_strategies_with_it_are_enumerated_among_the_others() -> None:
    found = enumerate_strategies(4, SpaceOptions(dimensions=(RP, TP)))
    assert {strategy.parallel for strategy in found} == {"rp4", "tp4", "rp2-tp2", "tp2-rp2"}
    assert {strategy.mode("rp_order") for strategy in found} == {"ring"}


def test_its_modes_are_enumerated_with_it() -> None:
    found = enumerate_strategies(4, SpaceOptions(dimensions=(RP,), modes={}))
    assert {strategy.mode("rp_order") for strategy in found} == {"ring", "tree"}


def test_a_largest_degree_holds_for_it() -> None:
    found = enumerate_strategies(8, SpaceOptions(dimensions=(RP, TP), max_degrees={NAME: 2}))
    assert {strategy.degree(RP) for strategy in found} == {1, 2}


def test_the_papers_space_leaves_it_out() -> None:
    left_out = {str(strategy): reason for strategy, reason in not_offered(job(SLOW), 4, Decisions(space="paper"))}
    assert left_out["rp4"] == "rp is left out of the search"


@pytest.mark.parametrize("text", ["rp4", "rp2-tp2+sp", "fsdp2-rp2+tree zero2", "tp2-rp2+tree remat=full"])
def test_it_is_written_and_read(text: str) -> None:
    assert str(parse_strategy(text)) == text


def test_what_it_cannot_stand_beside_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidPlanError, match=r"rp or dp in one layer\n.*write both as one level"):
        parse_strategy("rp2-dp2")


def test_its_mode_without_it_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match=r"\+tree only together with rp"):
        parse_strategy("dp4+tree")


@pytest.mark.parametrize(("samples", "reason"), [(8, None), (6, "data degree 4 (rp4) does not divide the 6 samples")])
def test_a_layer_takes_it_or_says_why_not(samples: int, reason: str | None) -> None:
    found = illegal_reason(
        chain().layer_types[1], parse_strategy("rp4"), Batch(microbatch_samples=samples, seq_len=SEQ_LEN)
    )
    assert (found is None) if reason is None else (found is not None and found.startswith(reason))


# in costs and plans


def test_its_seconds_are_a_term_of_their_own() -> None:
    cost = layer_cost(chain().layer_types[1], parse_strategy("rp4"), config(job(SLOW)))
    assert cost.once_s[NAME] > 0
    assert NAME not in layer_cost(chain().layer_types[1], parse_strategy("dp4"), config(job(SLOW))).once_s


def test_its_two_halves_cost_as_much_as_the_sum_that_they_are() -> None:
    halves, whole = (
        layer_cost(chain().layer_types[1], parse_strategy(f"{dimension}4"), config(job(SLOW))) for dimension in (RP, DP)
    )
    assert halves.once_s[NAME] == pytest.approx(whole.once_s[DP.name])


def test_it_takes_the_memory_of_replicas() -> None:
    mine, replicas = (
        layer_bytes(chain().layer_types[1], parse_strategy(f"{dimension}4"), config(job(SLOW)))
        for dimension in (RP, DP)
    )
    assert mine.static_bytes == replicas.static_bytes


def test_a_pinned_plan_has_it_on_every_layer() -> None:
    found = planned()
    assert {strategy.degree(RP) for strategy in found.strategies} == {2}
    assert found.prediction is not None
    assert found.prediction.step_time_s == predict(found, job(SLOW)).step_time_s
    assert found.prediction.stages[0].time_s[NAME] > 0


def test_it_is_searched_where_nothing_is_said() -> None:
    tables = make_tables(job(SLOW), Decisions(num_stages=1, num_microbatches=2))[0].tables
    assert {2, 4} <= {strategy.degree(RP) for strategy in tables.strategies}


def test_one_of_its_modes_may_be_left_out() -> None:
    options = Decisions(num_stages=1, num_microbatches=2, modes={"rp_order": ("tree",)})
    tables = make_tables(job(SLOW), options)[0].tables
    assert {strategy.mode("rp_order") for strategy in tables.strategies if strategy.degree(RP) > 1} == {"tree"}


def test_a_plan_with_it_is_written_and_read(tmp_path: Path) -> None:
    found = planned("rp=2, rp_order=tree")
    assert {strategy.mode("rp_order") for strategy in found.strategies} == {"tree"}
    write_plan(found, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == found


def test_a_problem_with_it_is_written_and_read(tmp_path: Path) -> None:
    problem = problem_of(job(SLOW), make_tables(job(SLOW), Decisions(num_stages=1, num_microbatches=2)))
    save_problem(tmp_path / "problem.json", problem)
    (tables,) = load_problem(tmp_path / "problem.json").configs
    assert tables.strategies == problem.configs[0].strategies


def test_a_plan_with_it_is_shrunk() -> None:
    found = plan(job(SLOW), "rp4, rp4, rp4, rp2-tp2, tp4, rp4", num_microbatches=2)
    small = shrunk_plan(found)
    assert {str(strategy) for strategy in small.strategies} == {"rp4", "rp2-tp2", "tp4"}
    assert small.microbatch_samples == 4


# in pins, explanations and reports


@pytest.mark.parametrize(
    ("text", "allowed"), [("rp=2", True), ("rp=4", False), ("rp_order=ring", True), ("rp2-tp2", True)]
)
def test_a_pin_asks_for_it(text: str, allowed: bool) -> None:
    assert parse_pin(text, option="--pin", num_layers=6).allows(parse_strategy("rp2-tp2")) is allowed


def test_a_pin_of_an_unknown_value_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"rp_order=ring\|tree"):
        parse_pin("rp_order=star", option="--pin", num_layers=6)


def explained(found: Plan) -> Explanation:
    of = job(SLOW)
    request = request_of(of, Decisions(num_stages=1, num_microbatches=2))
    return explain_plan(found, Study(request, of))


def test_what_a_plan_would_be_without_it_is_among_its_baselines() -> None:
    baselines = {baseline.name: baseline for baseline in explained(planned()).rivals}
    assert "without rp" in baselines
    assert NAME not in baselines["without rp"].strategies


def test_what_a_plan_would_be_without_its_mode_is_among_its_baselines() -> None:
    assert "without tree" in {baseline.name for baseline in explained(planned("rp=2, rp_order=tree")).rivals}


def test_a_report_says_what_its_ranks_do_and_what_its_seconds_are() -> None:
    found = planned()
    study = PlanStudy(scope="", explanation=Explanation(binds=""))
    page = report_page(ReportContents(plan=found, plan_file="plan.json", study=study))
    assert "samples over 2 ranks in a ring of replicas" in page
    assert RP.term in page


def test_a_framework_that_lacks_it_says_so() -> None:
    capabilities = Capabilities(mixes_layers=False, dimensions=frozenset({frozenset({FSDP})}))
    assert capabilities.refusal(parse_strategy("rp4")) == "rp in one layer"


# in real layers


def meta_model(of: ModelChain) -> nn.Module:
    model = build_meta_model(of)
    prepare_model(model, of)
    return model


def test_its_twin_is_given_every_layer_that_uses_it(divided: list[tuple[str, int]]) -> None:
    with fake_world(2) as mesh:
        where = TracedLayer(
            chain=chain(),
            layer=1,
            seq_len=SEQ_LEN,
            precision="fp32",
            mesh=mesh,
            strategy=parse_strategy("rp2"),
            model=meta_model(chain()),
        )
        with fake_layer(where):
            pass
    assert divided == [("rp2", 2)]


def test_a_dimension_without_a_twin_is_refused_when_a_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TWINS, NAME)
    model = meta_model(chain())
    layer = build_layer(model, chain(), 1, Remat.NONE)
    with fake_world(2) as mesh:
        unused = PlanMesh(world=mesh, stage_index=0, axis_names=("ranks",), runs={})
        with pytest.raises(InvalidPlanError, match="rp in rp2\n  expected: dimensions that the runtime supports: tp"):
            shard_layer(layer, chain(), parse_strategy("rp2"), unused, "fp32")
