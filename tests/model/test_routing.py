"""Tests of the number of places that a token is sent to, against enumeration and counts by hand."""

from itertools import combinations, product
from math import isclose

import pytest

from steelyard.errors import InvalidModelError
from steelyard.model.family import Routing


def counted(top_k: int, groups: int, chosen: int, places: int) -> float:
    """Mean number of places over all choices of groups, and in them of an expert's spot, again and again."""
    spots = max(groups, places)
    each_group, each_place = spots // groups, spots // places
    found = [
        len({spot // each_place for spot in picked})
        for of_groups in combinations(range(groups), chosen)
        for picked in product(
            [group * each_group + at for group in of_groups for at in range(each_group)], repeat=top_k
        )
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("places", [1, 2, 4, 12])
def test_places_are_the_mean_over_all_choices(top_k: int, groups: int, chosen: int, places: int) -> None:
    if groups % places and places % groups:
        groups = chosen = 1
    found = Routing(top_k=top_k, num_groups=groups, chosen_groups=chosen).places(places)
    assert isclose(found, counted(top_k, groups, chosen, places))


def test_groups_that_are_not_whole_on_places_count_as_none() -> None:
    assert Routing(top_k=2, num_groups=4, chosen_groups=2).places(6) == Routing(top_k=2).places(6)


def test_a_config_says_the_experts_of_a_token_and_its_groups() -> None:
    config = {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    assert Routing.of(config) == Routing(top_k=8, num_groups=8, chosen_groups=4)
    assert Routing.of({"moe_topk": 2}) == Routing(top_k=2)


def test_a_config_without_the_experts_of_a_token_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="num_experts_per_tok"):
        Routing.of({"hidden_size": 8})
