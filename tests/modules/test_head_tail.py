"""The order in which ranks hold the tokens of a sequence."""

import pytest
import torch

from steelyard.errors import InvalidPlanError
from steelyard.modules.head_tail import head_tail_order, natural_order, pieces_of, rank_order

DEGREES = pytest.mark.parametrize("degree", [1, 2, 3, 8])


def test_two_ranks_hold_the_outer_and_the_inner_quarters() -> None:
    order, _ = head_tail_order(8, 2)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@DEGREES
def test_the_inverse_brings_tokens_back_to_natural_order(degree: int) -> None:
    order, inverse = head_tail_order(48, degree)
    tokens = torch.arange(100, 148)
    assert torch.equal(tokens[order][inverse], tokens)


@DEGREES
def test_all_ranks_see_as_many_pairs_of_tokens(degree: int) -> None:
    order, _ = head_tail_order(48, degree)
    seen = (order + 1).view(degree, -1).sum(1)
    assert seen.unique().numel() == 1


@DEGREES
def test_the_orders_of_pieces_are_inverse(degree: int) -> None:
    assert [rank_order(degree)[place] for place in natural_order(degree)] == list(range(2 * degree))
    assert {piece for rank in range(degree) for piece in pieces_of(rank, degree)} == set(range(2 * degree))


def test_a_sequence_that_two_pieces_per_rank_do_not_divide_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="a multiple of 8"):
        head_tail_order(36, 4)
