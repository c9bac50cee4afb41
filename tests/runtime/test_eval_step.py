"""Tests of batch evaluation: loss without dropout, and no change to the training."""

import pytest
import torch

import steelyard
from steelyard.modules.build import build_model
from steelyard.modules.model_inputs import IGNORED
from steelyard.modules.own_proof import Built, own_model
from steelyard.runtime.data.tokens import Samples
from tests.modules.own_models import CASES, SAMPLES
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.runtime.processes import one_process

CONFIG = FAMILY_CONFIGS["gpt2"] | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
TOKENS = torch.arange(4 * 17).view(4, 17) % 64


def test_evaluation_is_the_model_in_evaluation_mode_and_leaves_training_as_it_was() -> None:
    plan = make_plan(
        CONFIG, "single, single, single, single", num_devices=1, global_batch=4, num_microbatches=2, seq_len=16
    )
    whole = build_model(plan.chain(), seed=1).eval()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            whole(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten()
        )
    with one_process():
        model = steelyard.parallelize(build_model(plan.chain(), seed=1).train(), plan)
        trained = model.train_step(lambda samples: TOKENS[samples])
        before, drawn = [each.grad.clone() for each in model.parameters()], torch.get_rng_state()
        evaluated = model.eval_step(lambda samples: TOKENS[samples])
        assert evaluated.item() == pytest.approx(expected.item(), rel=1e-5)
        assert abs(trained.item() - expected.item()) > 1e-3
        assert all(torch.equal(old, each.grad) for old, each in zip(before, model.parameters(), strict=True))
        assert torch.equal(drawn, torch.get_rng_state())
        assert model.num_steps == 1
        assert model.chunks[0].training
        assert not evaluated.requires_grad


def test_the_loss_is_the_mean_over_the_targets_that_there_are() -> None:
    plan = make_plan(
        "qwen2", "single, single, single, single", num_devices=1, num_microbatches=2, seq_len=16, global_batch=4
    )
    whole = build_model(plan.chain(), seed=1).eval()
    labels = TOKENS[:, 1:].clone()
    labels[1, 3:] = labels[2] = IGNORED
    with torch.no_grad():
        logits = whole(TOKENS[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    with one_process():
        model = steelyard.parallelize(build_model(plan.chain(), seed=1), plan)
        count = int((labels != IGNORED).sum())
        given = model.eval_step(lambda rows: Samples(inputs=TOKENS[rows, :-1], labels=labels[rows]), num_targets=count)
        assert given.item() == pytest.approx(expected.item(), rel=1e-5)
        assert model.eval_step(lambda rows: TOKENS[rows]).item() != pytest.approx(expected.item(), rel=1e-3)


def test_a_module_of_ones_own_is_evaluated_by_the_loss_that_it_trains_on() -> None:
    case = CASES["nanogpt"]
    own = own_model(Built(module=case.module(), sample=case.sample)).split
    sizes = {"num_devices": 1, "num_microbatches": 2, "seq_len": own.seq_len, "global_batch": SAMPLES}
    plan = make_plan(None, ", ".join(["single"] * len(own.layers)), split=own, **sizes)

    def read(samples: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(each[samples] for each in case.sample)

    with one_process():
        model = steelyard.parallelize(case.module(), plan)
        evaluated = model.eval_step(read)
        assert not evaluated.requires_grad
        assert evaluated.item() == pytest.approx(model.train_step(read).item(), rel=1e-5)
