"""Tests that a public function names the argument that is of another type, and accepts what its annotation says."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import steelyard
from steelyard.arguments import checked
from steelyard.errors import UserError
from steelyard.planning.advise import advise
from steelyard.planning.frontier import find_trade_offs
from steelyard.planning.request import PlanRequest, make_request

FUNCTIONS = [getattr(steelyard, name) for name in steelyard.__all__ if inspect.isfunction(getattr(steelyard, name))]
STEPS = ("train_step", "eval_step", "predict_step", "make_optimizers", "clip_gradients")


def typed_arguments() -> list[Any]:
    methods = [getattr(steelyard.ParallelModel, name) for name in STEPS]
    return [
        pytest.param(function, name, id=f"{function.__name__}-{name}")
        for function in (*FUNCTIONS, *methods, make_request, advise, find_trade_offs)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation not in (Any, "Any", inspect.Parameter.empty)
    ]


@pytest.mark.parametrize(("function", "name"), typed_arguments())
def test_a_public_function_names_an_argument_of_another_type(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(UserError, match="of the type object") as raised:
        function(**{name: object()})
    assert raised.value.field == name
    assert f"help({function.__name__})" in raised.value.hint


@checked
def taking(
    number: int = 0,
    *,
    share: float | None = None,
    size: int | Literal["max"] = "max",
    names: str | Sequence[str] = (),
    parts: Iterable[int] = (),
    texts: Mapping[str, str] | None = None,
    read: Callable[[int], int] = abs,
    kind: Literal["time", "devices"] = "time",
) -> int:
    return number


@pytest.mark.parametrize(
    "given",
    [
        {"number": "8"},
        {"number": 8.0},
        {"number": True},
        {"number": None},
        {"share": "0.5"},
        {"share": False},
        {"size": "most"},
        {"names": [3]},
        {"names": b"a"},
        {"parts": "a"},
        {"parts": ["a"]},
        {"texts": {"a": 1}},
        {"texts": ["a"]},
        {"read": 3},
        {"kind": "tim"},
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        taking(**given)
    assert raised.value.field == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {"number": 8},
        {"share": 1},
        {"size": 3},
        {"size": "max"},
        {"names": "a"},
        {"names": ("a", "b")},
        {"parts": iter([1])},
        {"texts": {"a": "b"}},
        {"texts": None},
        {"read": len},
    ],
)
def test_a_value_of_the_type_is_accepted(given: dict[str, Any]) -> None:
    assert taking(**given) == given.get("number", 0)


def test_a_misspelt_text_names_the_nearest_and_an_unknown_argument_is_pythons_error() -> None:
    with pytest.raises(UserError, match=r"'time' or 'devices'\n.*did you mean time"):
        taking(kind="tim")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nummer"):
        taking(nummer=3)  # type: ignore[call-arg]


def test_a_request_checks_its_own_fields() -> None:
    with pytest.raises(UserError, match=r"simplify: found '1', of the type str"):
        make_request("llama-demo", "1x1xa100-40gb", global_batch=8, seq_len=32, simplify="1")
    assert "simplify" in inspect.signature(PlanRequest).parameters


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"pins": "tp=2"}, "pins", "a valid tuple"),
        ({"num_stages": "two"}, "num_stages", "a valid integer"),
        ({"num_stage": 2}, "num_stage", "num_stages"),
        ({"modes": {"zeros": (1,)}}, "modes", "zero"),
    ],
)
def test_decisions_name_the_wrong_field(given: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as raised:
        steelyard.Decisions(**given)
    assert raised.value.field == field


def test_a_cluster_file_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        steelyard.find_plan("llama-demo", tmp_path / "nowhere.yaml", global_batch=8, seq_len=32)


@pytest.mark.parametrize("name", ["sample", "loss", "blocks"])
def test_arguments_of_an_own_module_are_refused_for_a_named_model(name: str) -> None:
    given: dict[str, Any] = {name: {"sample": 1, "loss": max, "blocks": "h"}[name]}
    with pytest.raises(UserError, match=r"a torch\.nn\.Module of your own") as raised:
        steelyard.find_plan("llama-demo", "1x1xa100-40gb", global_batch=8, seq_len=32, **given)
    assert raised.value.field == name
