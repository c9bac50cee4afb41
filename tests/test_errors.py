"""Tests of errors: their messages, and that every one is a user's mistake."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import errors
from steelyard.errors import CombinedError, InvalidPlanError, UserError, nearest

SUBCLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, UserError) and kind != UserError
]


def test_the_message_names_field_found_expected_and_hint():
    error = UserError(field="stages[0].ranks", found="[0, 3]", expected="[0, 1]", hint="count again")
    assert str(error) == "stages[0].ranks: found [0, 3]\n  expected: [0, 1]\n  to fix: count again"


def test_a_message_without_hint_has_no_line_for_it():
    assert str(UserError(field="a", found="b", expected="c")) == "a: found b\n  expected: c"


def test_the_same_mistake_can_be_made_again_of_another_field():
    first = InvalidPlanError(field="parallel", found="'x'", expected="a kind", hint="write dp")
    again = InvalidPlanError(**first.parts() | {"field": "stages[0].parallel"})
    assert str(again) == str(first).replace("parallel:", "stages[0].parallel:")


def test_the_parts_of_a_message_can_be_read():
    error = UserError(field="a", found="b", expected="c", hint="d")
    assert (error.field, error.found, error.expected, error.hint) == ("a", "b", "c", "d")


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_every_kind_of_mistake_exits_with_code_2(kind):
    assert kind.exit_code == 2


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_every_kind_of_mistake_is_caught_as_a_user_error(kind):
    parts = {"field": "a", "found": "b", "expected": "c"}
    with pytest.raises(UserError, match="found b"):
        raise CombinedError([UserError(**parts)]) if kind is CombinedError else kind(**parts)


def test_nearest_names_a_misspelt_name():
    assert nearest("schedul", ["schedule", "stages", "model"]) == "did you mean schedule?"


def test_nearest_names_several_close_names():
    assert nearest("llama2-7", ["llama2-7b", "llama2-70b", "other"]) == "did you mean llama2-7b or llama2-70b?"


def test_nearest_lists_every_name_when_none_is_close():
    assert nearest("zzzz", ["b", "a"]) == "known: a, b"


@given(st.sets(st.text("abcdef", min_size=1, max_size=8), min_size=1), st.data())
def test_a_known_name_is_nearest_to_itself(known, data):
    name = data.draw(st.sampled_from(sorted(known)))
    assert nearest(name, known).startswith(f"did you mean {name}")
