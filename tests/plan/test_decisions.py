"""Tests of the user's decisions: stored with the plan, read back, and respected by the search."""

from pathlib import Path

import pytest

from steelyard.errors import InvalidPlanError, UserError
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.file import parse_value, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import plan_job
from steelyard.planning.pins import pins_of
from tests.planning.test_engine_fit import small_job

EVERYTHING = Decisions(
    pins=("blocks 0-1: tp=2",),
    num_stages=2,
    num_microbatches=4,
    schedules=("gpipe",),
    remats=(Remat.NONE, Remat.FULL),
    modes={"zero": (3,), "sp": (True,)},
    max_degrees={"tp": 2},
    space="paper",
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    plan = plan_job(small_job(), Decisions()).plan
    assert plan is not None
    return plan


def test_a_plan_says_nothing_of_a_search_that_was_left_free(plan: Plan) -> None:
    assert Decisions() == FREE
    assert FREE.is_free
    assert not EVERYTHING.is_free
    assert plan.asked is None


def test_decisions_survive_the_file_of_their_plan(tmp_path: Path) -> None:
    decisions = EVERYTHING.model_copy(update={"schedules": ("1f1b", "gpipe")})
    plan = plan_job(small_job(), decisions).plan
    assert plan is not None
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").asked == plan.asked == decisions


@pytest.mark.parametrize("decisions", [FREE, EVERYTHING, Decisions(uniform=True, partition="even")])
def test_decisions_are_their_single_ones_together(decisions: Decisions) -> None:
    assert FREE.with_also(*decisions.one_by_one().values()) == decisions


def test_each_decision_reads_as_on_the_command_line() -> None:
    assert list(EVERYTHING.one_by_one()) == [
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
    found = Decisions(remats=(Remat.NONE, Remat.SELECTIVE), modes={"zero": (2,)}).with_also(EVERYTHING)
    assert found.remats == (Remat.NONE,)
    assert found.modes == {"zero": (), "sp": (True,)}


def test_of_two_largest_degrees_the_smaller_holds() -> None:
    found = Decisions(max_degrees={"tp": 4, "cp": 2}).with_also(Decisions(max_degrees={"tp": 2, "fsdp": 8}))
    assert found.max_degrees == {"tp": 2, "cp": 2, "fsdp": 8}


def test_pins_of_both_hold_each_once() -> None:
    found = Decisions(pins=("tp=2", "remat=full")).with_also(Decisions(pins=("remat=full", "zero=3")))
    assert found.pins == ("tp=2", "remat=full", "zero=3")


@pytest.mark.parametrize(
    ("mine", "other", "field", "found"),
    [
        (Decisions(num_stages=2), Decisions(num_stages=4), "--stages 2", "--stages 4"),
        (Decisions(num_microbatches=8), Decisions(num_microbatches=4), "--microbatches 8", "--microbatches 4"),
        (Decisions(space="paper"), Decisions(space="full"), "--space paper", "--space full"),
        (Decisions(partition="even"), Decisions(partition="bmw"), "--partition even", "--partition bmw"),
    ],
)
def test_decisions_that_contradict_each_other_are_an_error(
    mine: Decisions, other: Decisions, field: str, found: str
) -> None:
    with pytest.raises(UserError, match="do not contradict") as raised:
        mine.with_also(other)
    assert (raised.value.field, raised.value.found) == (field, found)


def test_a_pin_of_another_model_is_named() -> None:
    with pytest.raises(UserError, match="--pin: found 'blocks 0-40'"):
        pins_of(Decisions(pins=("blocks 0-40: tp=2",)), small_job().chain)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"modes": {"zerro": [3]}}, "asked.modes"),
        ({"max_degrees": {"xp": 3}}, "asked.max_degrees"),
        ({"num_stages": 0}, "asked.num_stages"),
        ({"stages": 2}, "asked.stages"),
        ({"schedules": ["1f2b"]}, "asked.schedules[0]"),
    ],
)
def test_what_nobody_can_ask_for_is_an_error_that_names_the_key(asked: object, field: str, plan: Plan) -> None:
    with pytest.raises(InvalidPlanError) as raised:
        parse_value(
            plan.model_dump(mode="json", exclude_none=True) | {"asked": asked}, Plan, InvalidPlanError, what="plan"
        )
    assert raised.value.field == field
