"""Tests that Trainer arguments that contradict a plan are refused with the plan's value, and others kept."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from steelyard.errors import CombinedError, UserError
from steelyard.integrations.training_arguments import planned_arguments
from steelyard.plan.plan import Plan
from tests.runtime.models import make_plan

TEXT = "dp2, dp2 remat=full, dp2, dp2"


def plan(**options: Any) -> Plan:
    return make_plan("qwen2", TEXT, num_devices=2, global_batch=16, num_microbatches=2, **options)


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per_device_train_batch_size": 2}, ("2 in TrainingArguments", "4, because the plan has 16 samples")),
        ({"per_device_eval_batch_size": 2}, ("2 in TrainingArguments", "in 2 microbatches over 2 ranks")),
        ({"gradient_accumulation_steps": 8}, ("8 in TrainingArguments", "2, because the plan has 16 samples")),
        ({"bf16": True}, ("True in TrainingArguments", "because the plan computes in fp32")),
        ({"auto_find_batch_size": True}, ("True in TrainingArguments", "the plan divides the model")),
        ({"optim": "sgd"}, ("OptimizerNames.SGD", "the optimizer of the plan, adamw")),
        ({"adam_epsilon": 1e-6}, ("1e-06 in", "1e-08")),
        ({"torch_compile": True}, ("True in", "the plan compiles nothing")),
        ({"label_smoothing_factor": 0.1}, ("0.1 in", "without smoothing")),
        ({"neftune_noise_alpha": 5.0}, ("5.0 in", "the plan assumes an unchanged embedding")),
    ],
)
def test_what_contradicts_the_plan_is_one_error_that_names_both(
    tmp_path: Path, given: dict[str, Any], words: tuple[str, str]
) -> None:
    with pytest.raises(UserError) as error:
        planned_arguments(arguments(tmp_path, **given), plan())
    (name,) = given
    assert str(error.value).startswith(f"{name}: found")
    assert all(word in str(error.value) for word in words), error.value
    assert f"leave {name} out" in str(error.value)


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as error:
        planned_arguments(arguments(tmp_path, gradient_accumulation_steps=3, optim="adafactor"), plan())
    assert "gradient_accumulation_steps" in str(error.value)
    assert "optim" in str(error.value)


def test_what_the_plan_has_may_be_said(tmp_path: Path) -> None:
    given = arguments(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        activation_checkpointing=True,
        optim="adamw_torch",
        learning_rate=1e-3,
    )
    found = planned_arguments(given, plan(precision="bf16"))
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (16, 1)
    assert (found.bf16, found.mixed_precision, found.activation_checkpointing) == (False, "no", False)
    assert found.learning_rate == 1e-3
    assert (given.per_device_train_batch_size, given.bf16) == (4, True)
