"""Tests of the order in which ranks hold the tokens of a sequence."""

import pytest
import torch

from steelyard.errors import InvalidPlanError
from steelyard.modules.context_attention import in_order, natural_order, pieces_of, rank_order

DEGREES = pytest.mark.parametrize("degree", [1, 2, 3, 8])


def tokens_in_rank_order(seq_len: int, degree: int) -> torch.Tensor:
    """The natural places [1, S] of all tokens, those of one rank after those of another."""
    return in_order(torch.arange(seq_len).unsqueeze(0), rank_order(degree))


def test_two_ranks_hold_the_outer_and_the_inner_quarters() -> None:
    assert tokens_in_rank_order(8, 2).tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]


@DEGREES
def test_the_inverse_brings_tokens_back_to_natural_order(degree: int) -> None:
    ranked = tokens_in_rank_order(48, degree)
    assert torch.equal(in_order(ranked, natural_order(degree)), torch.arange(48).unsqueeze(0))


@DEGREES
def test_all_ranks_see_as_many_pairs_of_tokens(degree: int) -> None:
    seen = (tokens_in_rank_order(48, degree) + 1).view(degree, -1).sum(1)
    assert seen.unique().numel() == 1


@DEGREES
def test_the_orders_of_pieces_are_inverse(degree: int) -> None:
    assert [rank_order(degree)[place] for place in natural_order(degree)] == list(range(2 * degree))
    assert {piece for rank in range(degree) for piece in pieces_of(rank, degree)} == set(range(2 * degree))


def test_a_sequence_that_two_pieces_per_rank_do_not_divide_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="a multiple of 8"):
        tokens_in_rank_order(36, 4)
