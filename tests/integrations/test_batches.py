"""Tests that batches of collators become samples of a plan, or are refused."""

from typing import Any

import pytest
import torch

from steelyard.errors import InvalidDataError, UserError
from steelyard.integrations.batches import check_task, planned_batch
from steelyard.plan.plan import Plan
from tests.runtime.feature_cases import CASES
from tests.runtime.models import FAMILY_CONFIGS, make_plan

TOKENS = torch.arange(1, 13).view(2, 6)


def plan(config: str = "llama") -> Plan:
    stages = "single, single, single, single"
    seq_len = 17 if config == "vit" else 8
    sizes = {"num_devices": 1, "global_batch": 4, "num_microbatches": 1, "seq_len": seq_len}
    return make_plan(FAMILY_CONFIGS[config], stages, **sizes)


def batch(**given: Any) -> dict[str, Any]:
    return {"input_ids": TOKENS, "labels": TOKENS, **given}


def test_labels_lie_where_they_are_predicted_and_what_is_missing_is_no_target() -> None:
    found = planned_batch(batch(attention_mask=torch.ones_like(TOKENS)), plan())
    assert found.samples.inputs.shape == found.samples.labels.shape == (4, 8)
    assert found.samples.inputs[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert found.samples.labels[0].tolist() == [2, 3, 4, 5, 6, -100, -100, -100]
    assert (found.samples.labels[2:] == -100).all()
    assert (found.num_targets, found.num_samples) == (10, 2)
    assert found.read([1]).inputs.tolist() == [[7, 8, 9, 10, 11, 12, 0, 0]]


def test_labels_that_are_shifted_already_stay() -> None:
    found = planned_batch(batch(shift_labels=TOKENS), plan())
    assert found.samples.labels[0].tolist() == [1, 2, 3, 4, 5, 6, -100, -100]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"labels": None}, "input_ids and labels"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)}, "padding before tokens"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "an attention mask with more than two dims"),
        ({"decoder_input_ids": TOKENS + 1}, "decoder_input_ids that differ from the labels"),
        ({"token_type_ids": torch.ones_like(TOKENS)}, "one segment"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "packing_strategy='wrapped'"),
        ({"pixel_values": torch.zeros(2, 3)}, "a batch with pixel_values"),
        ({"input_ids": torch.ones(2, 9).long()}, "at most the 8 tokens"),
        (
            {"input_ids": torch.ones(5, 6).long(), "labels": torch.ones(5, 6).long()},
            "at most 4, the plan's global batch",
        ),
    ],
)
def test_what_the_plan_cannot_train_on_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDataError) as error:
        planned_batch(batch(**given), plan())
    assert words in str(error.value)


def test_attention_that_is_not_causal_is_given_a_mask_of_padding() -> None:
    found = planned_batch(batch(attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)), plan("bert"))
    assert found.model_kwargs is not None
    assert found.model_kwargs([1])["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert found.model_kwargs([3])["attention_mask"].tolist() == [[1] * 8]  # attention to nothing is undefined
    eight = torch.ones(2, 8).long()
    assert planned_batch({"input_ids": eight, "labels": eight}, plan("bert")).model_kwargs is None


def test_packed_sequences_keep_their_positions() -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    found = planned_batch(batch(position_ids=places), plan())
    assert {name: each.tolist()[:1] for name, each in found.arguments.items()} == {
        "position_ids": [[0, 1, 2, 0, 1, 2, 0, 0]]
    }
    # transformers does not separate them if it is given a mask
    both = planned_batch(batch(position_ids=places, attention_mask=torch.ones_like(TOKENS)), plan())
    assert list(both.arguments) == ["position_ids", "attention_mask"]
    assert not planned_batch(batch(position_ids=torch.arange(6)[None]), plan()).arguments


def test_images_have_a_label_each() -> None:
    images = torch.zeros(3, 3, 16, 16)
    found = planned_batch({"pixel_values": images, "labels": torch.tensor([1, 2, 3])}, plan("vit"))
    assert (found.samples.inputs.shape, found.samples.labels.tolist()) == ((4, 3, 16, 16), [1, 2, 3, -100])
    assert found.num_targets == 3


def test_a_plan_whose_samples_no_collator_makes_is_refused() -> None:
    check_task(plan("vit"))
    with pytest.raises(UserError, match="a plan for speech-seq2seq"):
        check_task(CASES["whisper, one stage"].plan)
