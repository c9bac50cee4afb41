"""Tests of the number of slices in which the gradients of shared parameters are summed."""

import pytest

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.stages import num_slices
from steelyard.plan.strategy import parse_strategy
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS


def _slices(chain: ModelChain, *, edges: tuple[str, str], shared: int = 0) -> int | None:
    first, last = (parse_strategy(edge) for edge in edges)
    between = [parse_strategy("dp4")] * (chain.num_layers - 2)
    return num_slices(chain.shared[shared], [first, *between, last], chain)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (("tp4", "tp4+sp"), None),
        (("fsdp4", "fsdp4 zero2"), None),
        (("dp4", "fsdp4"), 4),
        (("fsdp2-tp2", "tp2-fsdp2"), 8),
        (("tp4", "fsdp4"), 16),
        (("fsdp4", "dp2-tp2 remat=full"), 8),
    ],
)
def test_copies_that_are_divided_differently_meet_in_slices(edges: tuple[str, str], expected: int | None) -> None:
    assert _slices(chain_from_config(CONFIGS["llama-tied"], name="llama-tied"), edges=edges) == expected


def test_what_blocks_share_is_gathered_at_once() -> None:
    chain = chain_from_config(FAMILY_CONFIGS["t5"], name="t5")
    strategies = [parse_strategy("dp4")] * chain.num_layers
    assert [num_slices(shared, strategies, chain) for shared in chain.shared] == [None] * 3
    strategies[2] = parse_strategy("tp4")
    assert [num_slices(shared, strategies, chain) for shared in chain.shared] == [None, 1, None]
