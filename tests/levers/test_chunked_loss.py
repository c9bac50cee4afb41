"""Tests of the loss in chunks: its text, its savings, and refusals."""

import pytest

from steelyard.cost.predict import predict_memory
from steelyard.errors import UserError
from steelyard.levers.chunked_loss import ChunkedLoss
from steelyard.planning.request import make_request
from steelyard.runtime.dry_run import dry_run
from tests.levers.test_train import _job
from tests.runtime.lora_cases import lora_plan
from tests.runtime.models import CONFIGS

WIDE = {**CONFIGS["llama"], "num_hidden_layers": 2, "vocab_size": 4096}


@pytest.mark.parametrize(
    ("text", "expected"), [("whole", "whole"), ("chunked", "chunked:8"), ("chunked:4", "chunked:4")]
)
def test_a_text_says_one_value_and_a_value_one_text(text: str, expected: str) -> None:
    assert str(ChunkedLoss.parse(text)) == expected
    assert ChunkedLoss.parse(expected) == ChunkedLoss.parse(text)


@pytest.mark.parametrize("text", ["chunked:1", "chunked:", "chunked:x", "chunks", "whole:2", "chunked:2000", ""])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        ChunkedLoss.parse(text)
    assert caught.value.field == "--loss"


def test_a_model_of_another_task_is_refused_before_any_search() -> None:
    with pytest.raises(UserError, match="predicts the next token"):
        make_request("bert-large", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"loss": "chunked"})


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["dp2, dp2, dp2, dp2", "fsdp2, fsdp2, fsdp2, fsdp2", "tp2, tp2, tp2, tp2"])
def test_logits_are_never_whole_and_that_is_predicted(stages: str) -> None:
    """Whole the fp32 logits [8, 64, 4096] and their gradient are 8 MiB each."""
    sizes = {"num_microbatches": 2, "global_batch": 32, "num_devices": 2, "seq_len": 64, "precision": "bf16"}
    peaks = {}
    for loss in ("whole", "chunked:8"):
        plan = lora_plan("full", WIDE, stages, loss=loss, **sizes)
        (terms,) = predict_memory(plan, _job(plan))
        found = dry_run(plan, 0, backend="gloo")
        peaks[loss] = max(found.first_step.total_bytes, found.later_steps.total_bytes)
        assert 1.0 <= sum(terms.values()) / peaks[loss] <= 1.1, f"{loss}: {terms}, found {found.later_steps}"
    assert peaks["chunked:8"] < 0.75 * peaks["whole"]
