"""Tests of run records: round trip, and named mistakes."""

import json

import pytest

from steelyard.errors import InvalidProfileError
from steelyard.plan.file import dump_json, parse_value
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord

RECORD = RunRecord(
    model_name="tiny",
    config_hash="0123456789abcdef",
    device="cpu",
    num_devices=2,
    strategies=("dp2", "tp2"),
    num_warmup_steps=1,
    median_step_s=0.5,
    tokens_per_s=128.0,
    steps=(StepRecord(step=1, loss=5.5, time_s=0.5, grad_norm=1.0),),
    ranks=(RankRecord(rank=0, stage=0, peak_bytes=10, memory_method="counted", num_params=3),),
)


def read(content):
    return parse_value(content, RunRecord, InvalidProfileError, what="record")


@pytest.mark.parametrize(
    "record",
    [RECORD, RECORD.model_copy(update={"predicted_step_s": 0.25, "predicted_peak_bytes": (1, 2)})],
    ids=["without a prediction", "with a prediction"],
)
def test_a_record_written_and_read_is_the_same(record):
    assert read(json.loads(dump_json(record))) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "^version: found 2"),
        ({"median": 1}, "(?s)^median: found the unknown key.*did you mean median_step_s"),
        ({"median_step_s": 0.0}, "^median_step_s: found 0.0\n.*greater than or equal to 0.0000"),
        ({"num_devices": "2"}, "^num_devices: found '2'\n.*a valid integer"),
        ({"steps": [{"step": 1}]}, r"^steps\[0\]\.loss: found nothing"),
    ],
)
def test_a_mistake_in_a_record_names_its_place(changes, message):
    with pytest.raises(InvalidProfileError, match=message):
        read({**RECORD.model_dump(mode="json", exclude_none=True), **changes})
