"""Tests that dropout repeats where it must and differs where it must."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

import steelyard
from steelyard.modules.layers import has_dropout, seed_dropout
from steelyard.modules.own_proof import Built, own_model
from steelyard.plan.plan import Plan
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from tests.modules.own_models import BLOCKS, CASES, NanoBlock
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process

pytestmark = pytest.mark.slow

DROPPING = {**CONFIGS["gpt_neox"], "hidden_dropout": 0.2, "attention_dropout": 0.2}
SAME = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(0))


GPT = {
    **{"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256},
    **{"embd_pdrop": 0.2, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}
IN_THE_EMBEDDING = {"called": {**DROPPING, "attention_dropout": 0.0}, "stubbed": GPT}
"""Models whose embedding calls modules in sequence, and one whose embedding is the stubbed model."""


def one_device_plan(config: dict[str, Any], remat: str) -> Plan:
    block = "single" if remat == "none" else f"single remat={remat}"
    return make_plan(config, f"single, {block}, {block}, single", num_devices=1, global_batch=2, num_microbatches=2)


def losses(
    *, seed: int = 0, start: int = 0, num_steps: int = 2, config: dict[str, Any] = DROPPING, **change: Any
) -> list[float]:
    """Losses of one process that trains on the same sample again and again, with a learning rate of zero."""
    plan = one_device_plan({**config, **change}, "none")
    with one_process():
        model = parallelize_plan(plan, seed=0)
        model._seed = seed
        model.num_steps = start
        return [model.train_step(lambda indices: SAME.expand(len(indices), -1)).item() for _ in range(num_steps)]


def gradients(model: ParallelModel) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


def test_two_runs_are_the_same_to_the_bit() -> None:
    assert losses() == losses()


def test_every_step_drops_other_entries() -> None:
    assert len(set(losses(num_steps=3))) == 3


def test_every_seed_drops_other_entries() -> None:
    assert losses(seed=0) != losses(seed=1)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    assert losses(start=1, num_steps=1) == losses(num_steps=2)[1:]


def test_without_dropout_steps_repeat() -> None:
    assert len(set(losses(hidden_dropout=0.0, attention_dropout=0.0))) == 1


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_recomputed_layers_drop_the_same_entries(remat: str) -> None:
    found = {}
    for choice in ("none", remat):
        with one_process():
            model = parallelize_plan(one_device_plan(DROPPING, choice), seed=0)
            model.train_step(lambda indices: SAME.expand(len(indices), -1))
            found[choice] = gradients(model)
    for kept, recomputed in zip(found["none"], found[remat], strict=True):
        assert torch.equal(kept, recomputed)


def test_the_generators_of_the_users_loop_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    losses()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("where", IN_THE_EMBEDDING)
def test_what_an_embedding_drops_depends_on_no_generator_of_the_users(where: str) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(losses(num_steps=1, config=IN_THE_EMBEDDING[where]))
    assert found[0] == found[1]


@pytest.mark.parametrize("where", IN_THE_EMBEDDING)
def test_an_embedding_in_eval_mode_drops_nothing(where: str) -> None:
    with one_process():
        loop = parallelize_plan(one_device_plan(IN_THE_EMBEDDING[where], "none"), seed=0).chunks[0].loop
        found, context = {}, SimpleNamespace(model_kwargs={})
        for mode in (True, False):
            loop.train(mode)
            found[mode] = [loop.layers["0"](SAME[:, :-1], context) for _ in range(2)]
    assert not torch.equal(*found[True])
    assert torch.equal(*found[False])


class Noisy(NanoBlock):
    """A block that draws by a function, which no attribute of it shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.2, self.training))


def test_what_a_module_of_ones_own_draws_depends_on_no_generator_of_the_users() -> None:
    case = CASES["nanogpt"]
    own = own_model(Built(module=_noisy(), sample=case.sample)).split
    strategies = ", ".join(["single"] * len(own.layers))
    plan = make_plan(
        None, strategies, split=own, num_devices=1, global_batch=4, num_microbatches=1, seq_len=own.seq_len
    )
    found = []
    for seed in (1, 2):
        module = _noisy()
        torch.manual_seed(seed)
        with one_process():
            model = steelyard.parallelize(module, plan)
            found.append([model.train_step(lambda _: case.sample).item() for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def _noisy() -> torch.nn.Module:
    module = CASES["nanogpt"].module()
    for number in range(BLOCKS):
        module.transformer.h[number] = Noisy()
    return module


def test_microbatches_of_a_step_drop_other_entries() -> None:
    draws = []
    for microbatch in range(8):
        seed_dropout(0, 0, microbatch, 1, 0)
        draws.append(tuple(torch.rand(4).tolist()))
    assert len(set(draws)) == 8


def test_the_seed_depends_on_the_order_of_its_parts() -> None:
    draws = []
    for parts in ((1, 2), (2, 1)):
        seed_dropout(*parts)
        draws.append(torch.rand(4).tolist())
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (torch.nn.Dropout(0.1), True),
        (torch.nn.Dropout(0.0), False),
        (torch.nn.Linear(2, 2), False),
        (SwitchTransformersTop1Router(SwitchTransformersConfig(router_jitter_noise=0.01)), True),
        (SwitchTransformersTop1Router(SwitchTransformersConfig(router_jitter_noise=0.0)), False),
    ],
)
def test_dropout_and_the_noise_of_routers_are_found_in_a_module(module: torch.nn.Module, expected: bool) -> None:
    assert has_dropout(torch.nn.Sequential(module)) is expected
