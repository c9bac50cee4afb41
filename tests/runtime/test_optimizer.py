"""Tests of AdamW's learning rate and weight decay."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.modules.updates import LocalAdamW
from steelyard.runtime.optimizer import decays, learning_rate, make_optimizers
from steelyard.runtime.options import LEAST_LR_SHARE, LR_SCHEDULES, TrainOptions
from steelyard.runtime.parallel_model import parallelize_plan
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process

runs = st.builds(
    lambda schedule, warmup, rest, lr: TrainOptions(steps=warmup + rest, warmup_steps=warmup, lr=lr, schedule=schedule),
    st.sampled_from(LR_SCHEDULES),
    st.integers(0, 50),
    st.integers(1, 100),
    st.floats(1e-6, 1.0),
)


@given(runs)
def test_the_rate_rises_to_its_peak_and_then_falls(options: TrainOptions) -> None:
    rates = [learning_rate(step, options) for step in range(options.steps)]
    peak = max(0, options.warmup_steps - 1)
    assert all(later > earlier for earlier, later in pairwise(rates[: peak + 1]))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(rates[peak:]))
    assert max(rates) == pytest.approx(options.lr)
    assert min(rates[options.warmup_steps :]) >= LEAST_LR_SHARE * options.lr * (1 - 1e-9)


@given(runs)
def test_the_rate_would_end_at_a_tenth_of_the_peak_or_stays(options: TrainOptions) -> None:
    least = 1.0 if options.schedule == "constant" else LEAST_LR_SHARE
    assert learning_rate(options.steps, options) == pytest.approx(least * options.lr)


def test_the_end_of_the_rate_may_be_said() -> None:
    options = TrainOptions(steps=20, warmup_steps=0, lr=1.0, schedule="linear", min_lr=0.2)
    assert [learning_rate(step, options) for step in (0, 5, 10, 20)] == pytest.approx([1.0, 0.8, 0.6, 0.2])


def test_wsd_falls_in_the_last_fifth() -> None:
    options = TrainOptions(steps=20, warmup_steps=2, lr=1.0, schedule="wsd", min_lr=0.0)
    rates = [learning_rate(step, options) for step in range(21)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert set(rates[2:17]) == {1.0}
    assert rates[18] == pytest.approx(0.5)
    assert rates[20] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "cosin"}, "'cosin'"),
        ({"schedule": "constant", "min_lr": 1e-5}, "a schedule that decreases"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "lower it"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        TrainOptions(**given)
    assert words in str(error.value)


def decayed_names(config: str) -> tuple[set[str], set[str]]:
    """Names of all parameters that decay, and that do not, in one process."""
    strategies = ", ".join(["single"] * (CONFIGS[config]["num_hidden_layers"] + 2))
    plan = make_plan(config, strategies, num_devices=1, global_batch=2, num_microbatches=1)
    with one_process():
        model = parallelize_plan(plan)
        names = {id(parameter): path.split(".", 1)[1] for path, parameter in model.named_parameters()}
        optimizers = make_optimizers(model, TrainOptions(weight_decay=0.3))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    decayed, kept = (
        {names[id(parameter)] for group in groups if group["weight_decay"] == decay for parameter in group["params"]}
        for decay in (0.3, 0.0)
    )
    return decayed, kept


def test_norms_and_embeddings_do_not_decay() -> None:
    decayed, kept = decayed_names("llama")
    assert kept == {
        "model__embed_tokens.weight",
        "model__norm.weight",
        "block.input_layernorm.weight",
        "block.post_attention_layernorm.weight",
    }
    assert "lm_head.weight" in decayed
    assert "block.self_attn.q_proj.weight" in decayed


def test_biases_do_not_decay() -> None:
    decayed, kept = decayed_names("gpt_neox")
    assert "block.attention.query_key_value.bias" in kept
    assert not [name for name in decayed if name.endswith("bias")]


def test_a_tied_head_decays_no_more_than_the_embedding() -> None:
    decayed, kept = decayed_names("llama-tied")
    assert "model__embed_tokens.weight" in kept
    assert "lm_head.weight" not in decayed | kept  # on one device it is the embedding's
    chain = make_plan("llama-tied", "single, single, single, single", num_devices=1).chain()
    assert not decays(chain, f"{chain.num_layers - 1}.lm_head.weight", torch.nn.Parameter(torch.ones(2, 2)))


def trained(optimizer_class: type[torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[float]]:
    """The weights of one process after three steps, and the norms before clipping."""
    plan = make_plan("llama-tied", "single, single, single, single", num_devices=1, global_batch=2, num_microbatches=1)
    with one_process():
        model = parallelize_plan(plan)
        optimizers = model.make_optimizers(lambda parameters: optimizer_class(parameters, lr=1e-2, weight_decay=0.1))
        norms = []
        for step in range(3):
            tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step))
            model.train_step(lambda samples, tokens=tokens: tokens[samples])
            norms.append(model.clip_gradients(0.5).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all(type(state["exp_avg"]).__name__ == "DTensor" for each in optimizers for state in each.state.values())
        return [parameter.to_local().detach().clone() for parameter in model.parameters()], norms


@pytest.mark.slow
def test_updating_local_parts_is_adamw() -> None:
    ours, our_norms = trained(LocalAdamW)
    theirs, their_norms = trained(torch.optim.AdamW)
    assert our_norms == pytest.approx(their_norms, rel=1e-5)
    for mine, stock in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-5)


def test_clipping_is_that_of_torch() -> None:
    plan = make_plan("llama", ", ".join(["single"] * 8), num_devices=1, global_batch=2, num_microbatches=1)
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    with one_process():
        model = parallelize_plan(plan)
        model.train_step(lambda samples: tokens[samples])
        copies = [torch.nn.Parameter(parameter.to_local().detach().clone()) for parameter in model.parameters()]
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.grad.to_local().clone()
        expected = torch.nn.utils.clip_grad_norm_(copies, 0.1)
        assert model.clip_gradients(0.0).item() == pytest.approx(expected.item(), rel=1e-5)  # which clips nothing
        assert model.clip_gradients(0.1).item() == pytest.approx(expected.item(), rel=1e-5)
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.to_local(), copy.grad)
