"""What a user asked for: kept with the plan, read from it again, and what a search under it may still choose."""

from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.errors import InvalidPlanError, UserError
from steelyard.plan.asked import Asked
from steelyard.plan.file import parse_value, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import plan_job
from steelyard.planning.demands import asked_in, demands_of, narrowed
from steelyard.planning.pins import parse_pin
from steelyard.planning.problem import PlanOptions
from tests.planning.test_framework_fit import small_job

NUM_LAYERS = 6
EVERYTHING = PlanOptions(
    pins=(parse_pin("blocks 0-1: tp=2", option="--pin", num_layers=NUM_LAYERS),),
    num_stages=2,
    num_microbatches=4,
    schedules=("gpipe",),
    remats=(Remat.NONE, Remat.FULL),
    variants={"zero": (3,), "sp": (True,)},
    max_degrees={"tp": 2},
    space="paper",
)


def test_nothing_is_asked_by_options_that_leave_everything_free() -> None:
    assert asked_in(PlanOptions()) is None


def test_what_is_asked_survives_its_file(tmp_path: Path) -> None:
    options = replace(EVERYTHING, schedules=("1f1b", "gpipe"))
    plan = plan_job(small_job(), options).plan
    assert plan is not None
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").asked == plan.asked == asked_in(options)


def test_a_search_under_what_is_asked_has_the_options_that_asked() -> None:
    assert narrowed(PlanOptions(), demands_of(asked_in(EVERYTHING), num_layers=NUM_LAYERS)) == EVERYTHING


def test_each_demand_reads_as_on_the_command_line() -> None:
    found = [demand.text for demand in demands_of(asked_in(EVERYTHING), num_layers=NUM_LAYERS)]
    assert found == [
        "--pin 'blocks 0-1: tp=2'",
        "--stages 2",
        "--microbatches 4",
        "--schedule gpipe",
        "--remat none,full",
        "--zero 3",
        "--sp on",
        "--max-tp 2",
        "--space paper",
    ]


def test_choices_that_are_narrow_already_become_narrower() -> None:
    options = PlanOptions(remats=(Remat.NONE, Remat.SELECTIVE), variants={"zero": (2,)})
    found = narrowed(options, demands_of(asked_in(EVERYTHING), num_layers=NUM_LAYERS))
    assert (found.remats, found.variants["zero"]) == ((Remat.NONE,), ())


def test_a_pin_of_another_model_is_named() -> None:
    with pytest.raises(UserError, match="--pin: found 'blocks 0-40'"):
        demands_of(Asked(pins=("blocks 0-40: tp=2",)), num_layers=NUM_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"variants": {"zerro": [3]}}, "asked.variants"),
        ({"max_degrees": {"xp": 3}}, "asked.max_degrees"),
        ({"num_stages": 0}, "asked.num_stages"),
        ({"stages": 2}, "asked.stages"),
        ({"schedules": ["1f2b"]}, "asked.schedules[0]"),
    ],
)
def test_what_nobody_can_ask_for_is_an_error_that_names_the_key(asked: object, field: str) -> None:
    plan = plan_job(small_job(), PlanOptions()).plan
    assert plan is not None
    with pytest.raises(InvalidPlanError) as raised:
        parse_value(
            plan.model_dump(mode="json", exclude_none=True) | {"asked": asked}, Plan, InvalidPlanError, what="plan"
        )
    assert raised.value.field == field
