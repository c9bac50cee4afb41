"""Tests of certificates: a status and a gap, whose text is generated from them and never parsed."""

import json

import pytest

from steelyard.errors import InvalidPlanError
from steelyard.plan.file import dump_json
from steelyard.plan.prediction import Certificate
from tests.plan.examples import changed, read

OPTIMAL = Certificate(status="optimal", gap=0.0)
GAP = Certificate(status="gap", gap=0.0123)
SIMPLIFIED = Certificate(status="simplified", gap=0.0072)
SIMULATED = Certificate(status="simulated", num_simulated=5)
WORDS = {
    "optimal under the cost model: no plan in the search space is faster": OPTIMAL,
    "fastest in simulation of the search's best 5, but not by the search's closed form": SIMULATED,
    "simplest found, gap 0.72%: no plan in the search space is faster by more": SIMPLIFIED,
    "priced as given, not searched": Certificate(status="priced"),
    "optimal under the cost model to 0.01%: no plan in the search space is faster by more": Certificate(
        status="gap", gap=0.0001
    ),
    "best found, gap 0.01%: no plan in the search space is faster by more": Certificate(status="gap", gap=0.00011),
    "best found, gap 1.23%: no plan in the search space is faster by more": GAP,
    "best found in 300 s (time limit), gap 1.23%: no plan in the search space is faster by more": GAP.model_copy(
        update={"time_limit_s": 300.0}
    ),
}


@pytest.mark.parametrize(("words", "certificate"), WORDS.items())
def test_words_are_made_from_the_value(words: str, certificate: Certificate) -> None:
    assert str(certificate) == words


def test_words_in_its_place_are_an_error() -> None:
    with pytest.raises(InvalidPlanError, match=r"certificate: found 'surely the best'\n  expected: an object"):
        read(changed((["prediction", "certificate"], "surely the best")))


@pytest.mark.parametrize(
    ("certificate", "field"),
    [
        ({"status": "proven"}, "status"),
        ({"status": "gap"}, "gap"),
        ({"status": "simplified"}, "gap"),
        ({"status": "simulated", "gap": 0.1}, "num_simulated"),
        ({"status": "gap", "gap": 1.5}, "gap"),
        ({"status": "optimal", "gap": -0.1}, "gap"),
        ({"status": "optimal", "gaps": 0.0}, "gaps"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_an_error(certificate: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidPlanError, match=rf"certificate\.{field}"):
        read(changed((["prediction", "certificate"], certificate)))


@pytest.mark.slow
def test_a_certificate_written_and_read_is_the_same() -> None:
    plan = read(changed((["prediction", "certificate"], {"status": "gap", "gap": 0.0123})))
    again = json.loads(dump_json(plan))
    assert again["prediction"]["certificate"] == {"status": "gap", "gap": 0.0123}
    assert read(again) == plan


def test_only_an_optimal_plan_counts_as_such() -> None:
    assert [each.is_optimal for each in (OPTIMAL, GAP, SIMULATED, SIMPLIFIED)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("certificate", "brief"),
    [
        (OPTIMAL, "optimal"),
        (GAP, "gap 1.23%"),
        (SIMULATED, "simulated"),
        (SIMPLIFIED, "gap 0.72%"),
        (Certificate(status="priced"), "none"),
    ],
)
def test_a_word_or_two_stand_for_it(certificate: Certificate, brief: str) -> None:
    assert certificate.brief[0] == brief
