"""A chain of plain modules is traced as it is: kinds by structure, work and memory in closed form."""

import pytest
import torch
from torch import Tensor, nn

from steelyard.errors import InvalidModelError
from steelyard.tracer.modules import trace_modules

WIDTH, INNER, LENGTH = 16, 48, 8


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


def chain(*inner: int) -> list[nn.Module]:
    return [nn.Embedding(32, WIDTH), *(Block(each) for each in inner), nn.Linear(WIDTH, 32, bias=False)]


def ids() -> Tensor:
    return torch.empty(LENGTH, dtype=torch.long, device="meta")


def test_blocks_of_one_structure_are_one_kind() -> None:
    found = trace_modules(chain(INNER, INNER, 32, INNER), ids())
    assert found.kinds == ("kind 0", "kind 1", "kind 1", "kind 2", "kind 1", "kind 3")


def test_a_block_takes_two_flop_per_matrix_entry_and_token_forward_and_four_backward() -> None:
    block = trace_modules(chain(INNER), ids()).of_block(1)
    forward = 2 * 2 * WIDTH * INNER * LENGTH
    assert block.forward.matmul_flop.at(3) == 3 * forward
    assert block.backward.matmul_flop.at(3) == 2 * 3 * forward


def test_parameters_are_those_of_the_modules() -> None:
    blocks = chain(INNER)
    found = trace_modules(blocks, ids())
    assert [found.of_block(place).num_params for place in range(3)] == [32 * WIDTH, 2 * WIDTH * INNER, 32 * WIDTH]


def test_saved_bytes_are_what_autograd_must_keep() -> None:
    """Input and what relu returned, in bf16; under full remat the input alone."""
    block = trace_modules(chain(INNER), ids()).of_block(1)
    assert block.saved_bytes.at(5) == 5 * LENGTH * 2 * (WIDTH + INNER)
    assert block.recomputation("full").saved_bytes.at(5) == 5 * LENGTH * 2 * WIDTH


def test_selective_remat_keeps_the_matrix_products() -> None:
    block = trace_modules(chain(INNER), ids()).of_block(1)
    assert block.recomputation("selective").work.matmul_flop.at(2) == 0
    assert block.recomputation("full").work.matmul_flop.at(2) > 0


def test_the_same_module_on_other_shapes_is_another_kind() -> None:
    class Halve(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden[:, ::2]

    found = trace_modules([nn.Embedding(32, WIDTH), Block(INNER), Halve(), Block(INNER)], ids())
    assert found.kinds[1] != found.kinds[3]
    assert found.of_block(3).forward.matmul_flop.at(1) == found.of_block(1).forward.matmul_flop.at(1) / 2


def test_the_modules_are_left_as_they_were() -> None:
    blocks = chain(INNER)
    before = blocks[1].up.weight.clone()
    trace_modules(blocks, ids())
    assert torch.equal(blocks[1].up.weight, before)


def test_a_block_that_returns_no_tensor_is_an_error() -> None:
    with pytest.raises(InvalidModelError, match=r"blocks\[1\]: found a block that returns tuple"):
        trace_modules([nn.Embedding(32, WIDTH), nn.LSTM(WIDTH, WIDTH)], ids())


def test_no_blocks_are_an_error() -> None:
    with pytest.raises(InvalidModelError, match="one or more modules"):
        trace_modules([], ids())
