"""Tests of Muon for hidden matrices and AdamW for the rest: updates as in torch, steps as the lever says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.utils.flop_counter import FlopCounterMode

from steelyard.levers import Levers
from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import Optimizer
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.runtime.optimizer import hidden_matrices
from steelyard.runtime.parallel_model import parallelize_plan
from steelyard.runtime.peak_memory import LiveStorages
from tests.runtime.family_cases import FAMILY_CONFIGS
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process

SHAPES = [(96, 160), (160, 96), (128, 128), (8, 512), (1, 64)]
UPDATE = Levers.of({"optimizer": "muon"}).effects.matrices
OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


def parameter(*shape: int) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape))
    made.grad = torch.randn(shape)
    return made


def copy_of(one: nn.Parameter, *shape: int) -> nn.Parameter:
    assert one.grad is not None
    copy = nn.Parameter(one.detach().clone().reshape(shape or one.shape))
    copy.grad = one.grad.clone().reshape(copy.shape)
    return copy


def test_matrices_are_updated_as_by_muon_and_all_else_as_by_adamw() -> None:
    torch.manual_seed(0)
    matrix, parts, table, norm = parameter(48, 64), parameter(32, 3, 16), parameter(96, 32), parameter(64)
    copies = copy_of(matrix), copy_of(parts, 32, 48), copy_of(table), copy_of(norm)
    groups = [{"params": [matrix, parts, table], "weight_decay": 0.1}, {"params": [norm], "weight_decay": 0.0}]
    ours = make_optimizer(
        Optimizer("muon"), groups, offload=Offload(), matrices={id(matrix), id(parts)}, lr=0.02, betas=(0.9, 0.95)
    )
    muon = Muon(copies[:2], weight_decay=0.1, **OPTIONS)
    adamw = AdamW(
        [{"params": [copies[2]], "weight_decay": 0.1}, {"params": [copies[3]], "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        for each in (ours, muon, adamw):
            for group in each.param_groups:
                group["lr"] = 0.02 / (step + 1)
            each.step()
    for mine, stock in zip((matrix, parts, table, norm), copies, strict=True):
        torch.testing.assert_close(mine.detach().reshape(stock.shape), stock.detach())
    assert ours.state[matrix].keys() == {"momentum_buffer"}
    assert ours.state[norm].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_torch_does_and_holds_what_the_lever_says(shape: tuple[int, int]) -> None:
    assert UPDATE is not None
    (m, n), one = sorted(shape), parameter(*shape)
    optimizer = Muon([one], **OPTIONS)
    optimizer.step()
    with FlopCounterMode(display=False) as flop:
        optimizer.step()
    assert flop.get_total_flops() == UPDATE.flop_of(m, n)
    kept: list[Tensor] = list(optimizer.state[one].values())
    assert sum(each.nbytes for each in kept) == UPDATE.state_bytes * one.numel()
    assert one.grad is not None
    with LiveStorages([one, one.grad, *kept]) as meter:
        meter.peak_bytes = before = meter.live_bytes
        optimizer.step()
        assert meter.peak_bytes - before == UPDATE.buffer_bytes_of(m, n)


def names_of_matrices(config: dict[str, Any], num_layers: int) -> tuple[set[str], set[str]]:
    """Return the names of the parameters with two or more dims: hidden matrices, and all others."""
    strategies = ", ".join(["single"] * num_layers)
    plan = make_plan(config, strategies, num_devices=1, global_batch=2, num_microbatches=1, seq_len=16)
    with one_process():
        model = parallelize_plan(plan)
        matrices = hidden_matrices(model)
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for path, each in model.named_parameters():
            if each.ndim > 1:
                found[id(each) in matrices].add(path.split(".", 1)[1].removeprefix("block."))
    return found[True], found[False]


def test_embeddings_and_the_head_are_no_hidden_matrices() -> None:
    matrices, others = names_of_matrices(CONFIGS["llama-tied"] | {"tie_word_embeddings": False}, 4)
    assert others == {"model__embed_tokens.weight", "lm_head.weight"}
    assert names_of_matrices(CONFIGS["llama-tied"], 4) == (matrices, {"model__embed_tokens.weight"})
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} < matrices


def test_routers_and_routed_experts_are_no_hidden_matrices() -> None:
    matrices, others = names_of_matrices(FAMILY_CONFIGS["mixtral"], 4)
    assert {"mlp.gate.weight", "mlp.experts.down_proj", "mlp.experts.gate_up_proj"} < others
    assert matrices == {f"self_attn.{name}_proj.weight" for name in "qkvo"}


def test_a_table_in_a_block_is_no_hidden_matrix() -> None:
    matrices, others = names_of_matrices(FAMILY_CONFIGS["t5"], 7)
    assert "layer.0.SelfAttention.relative_attention_bias.weight" in others
    assert "layer.0.SelfAttention.q.weight" in matrices


def test_a_matrix_that_is_stored_in_parts_is_one() -> None:
    matrices, _ = names_of_matrices(FAMILY_CONFIGS["gpt2"], 4)
    assert {"attn.c_attn.weight", "mlp.c_fc.weight"} < matrices
