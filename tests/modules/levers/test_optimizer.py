"""Tests of the levers' optimizers against the originals, on one tensor of every shape."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steelyard.levers import Effects
from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import BLOCK
from steelyard.levers.optimizer import Optimizer as Lever
from steelyard.modules.levers.optimizer import make_optimizer, stored, take
from steelyard.runtime.peak_memory import held_tensors

BETAS, DECAY, STEPS = (0.9, 0.95), 0.1, 4
SHAPES = ((512, 1024), (300,), (2048, 2), (1000, 1025))
"""Numbers of entries: more than one update, too few to quantize, just enough, and several updates with a rest."""


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def trained(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters after some steps with learning rates set as in a run."""
    group = optimizer.param_groups[0]
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        group["lr"] = torch.tensor(0.01 * (step + 1)) if isinstance(group["lr"], Tensor) else 0.01 * (step + 1)
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in group["params"]]


def made(word: str, *shapes: tuple[int, ...]) -> Optimizer:
    groups = [{"params": parameters(*shapes), "weight_decay": DECAY}]
    return make_optimizer(Lever(word), groups, offload=Offload(), matrices=(), lr=0.01, betas=BETAS)


@pytest.mark.slow
@pytest.mark.parametrize("word", BLOCK)
def test_a_quantized_update_is_that_of_torchao_bit_by_bit(word: str) -> None:
    ours = trained(made(word, *SHAPES))
    from torchao.optim import AdamW4bit, AdamW8bit

    theirs = {"adamw-8bit": AdamW8bit, "adamw-4bit": AdamW4bit}[word]
    options = {"lr": 0.01, "betas": BETAS, "weight_decay": DECAY}
    with torch.compiler.set_stance("force_eager"):
        expected = trained(theirs(parameters(*SHAPES), **options))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("word", ["adamw", "sgd", "adafactor"])
def test_an_update_is_that_of_torch(word: str) -> None:
    theirs = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, betas=BETAS, weight_decay=DECAY),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.01, weight_decay=DECAY),
        "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01, weight_decay=DECAY),
    }[word]
    for mine, stock in zip(trained(made(word, *SHAPES)), trained(theirs(parameters(*SHAPES))), strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-6)


def kept_bytes(word: str, shape: tuple[int, ...]) -> int:
    """Bytes kept of a tensor of this shape besides the step count."""
    optimizer = made(word, shape)
    trained(optimizer)
    (state,) = optimizer.state.values()
    return sum(each.nbytes for slot, value in state.items() if slot != "step" for each in held_tensors(value))


TABLE_BYTES = {"adamw-8bit": 2 * 256 * 4, "adamw-4bit": 2 * 16 * 4}


@pytest.mark.parametrize("word", BLOCK)
def test_what_is_kept_of_a_large_tensor_is_what_plans_count_and_tables(word: str) -> None:
    counted = Lever(word).effects(Effects()).state_bytes * 64 * 256
    assert kept_bytes(word, (64, 256)) == counted + TABLE_BYTES[word]


@pytest.mark.parametrize(
    ("word", "shape", "expected"),
    [
        ("adamw-8bit", (64, 63), 8 * 64 * 63),
        ("adamw-8bit", (64, 65), 2 * (64 * 65 + 4 * 65) + TABLE_BYTES["adamw-8bit"]),
        ("adamw-8bit", (97, 65), 8 * 97 * 65),
        ("adamw-4bit", (64, 65), 2 * (64 * 65 // 2 + 4 * 65) + TABLE_BYTES["adamw-4bit"]),
        ("sgd", (64, 64), 0),
        ("adafactor", (64, 32), 4 * (64 + 32)),
        ("adafactor", (64,), 4 * 64),
    ],
)
def test_what_is_kept_of_other_tensors(word: str, shape: tuple[int, ...], expected: int) -> None:
    if word == "sgd":
        assert not made(word, shape).state
        return
    assert kept_bytes(word, shape) == expected


@pytest.mark.parametrize("word", BLOCK)
def test_a_state_that_is_stored_and_taken_is_the_same_but_for_rounding_in_fp32(word: str) -> None:
    optimizer = made(word, (512, 1024))
    trained(optimizer)
    (state,) = optimizer.state.values()
    for slot in ("exp_avg", "exp_avg_sq"):
        values = stored(state[slot])
        assert (type(values), values.dtype) == (Tensor, torch.float32)
        take(state[slot], values)
        torch.testing.assert_close(stored(state[slot]), values, rtol=1e-6, atol=0)
