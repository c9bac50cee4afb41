"""Tests of the timeline file against the trace event format and against the timeline that it shows."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from steelyard.cost.predict import layer_times, predict
from steelyard.cost.simulator import StageTimes, Timeline
from steelyard.plan.plan import Plan
from steelyard.report.trace_events import default_num_shown, trace_events
from tests.cost.examples import cluster, job, plan, simulated

TIMES = StageTimes(forward_s=1e-3, backward_s=2e-3, once_s=5e-4, transfer_s=1e-4)


def interleaved(num_microbatches: int = 8) -> tuple[Plan, Timeline]:
    candidate = plan(
        job(),
        *("tp4", "tp4, tp4", "tp4", "tp4, tp4"),
        num_microbatches=num_microbatches,
        num_chunks=2,
        schedule="interleaved-1f1b",
    )
    return candidate, simulated([TIMES] * 4, num_microbatches, "interleaved-1f1b", num_chunks=2)


def slices(content: dict) -> list[dict]:
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def test_every_event_has_the_fields_of_its_type() -> None:
    candidate, timeline = interleaved()
    content = json.loads(json.dumps(trace_events(timeline, candidate, num_shown=8)))
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert set(event["args"]) <= {"name", "sort_index"}


def test_slices_of_one_track_do_not_overlap() -> None:
    candidate, timeline = interleaved()
    tracks: dict[tuple[int, int], list[dict]] = {}
    for event in slices(trace_events(timeline, candidate, num_shown=8)):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in tracks.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 2e-3, "nanoseconds of rounding"


def test_every_pass_send_and_bubble_is_shown_and_named() -> None:
    candidate, timeline = interleaved()
    events = slices(trace_events(timeline, candidate, num_shown=8))
    found = Counter(event["cat"] for event in events)
    assert found["forward"] == found["backward"] == 2 * 2 * 8
    assert found["send"] == 2 * 3 * 8
    assert found["once"] == 4
    assert found["bubble"] == sum(len(timeline.bubbles(stage)) for stage in range(2))
    names = {event["name"] for event in events}
    assert {"forward 0 chunk 0", "backward 7 chunk 1", "send activation 3 to stage 1 chunk 0"} <= names
    assert {"bubble: pipeline fills", "bubble: waits for gradient", "optimizer chunk 0"} <= names


def test_the_file_ends_with_the_step() -> None:
    candidate, timeline = interleaved()
    content = trace_events(timeline, candidate, num_shown=8)
    assert max(event["ts"] + event["dur"] for event in slices(content)) == pytest.approx(timeline.step_time_s * 1e6)
    assert content["otherData"]["step_time_s"] == timeline.step_time_s


def test_stages_are_named_with_their_ranks() -> None:
    candidate, timeline = interleaved()
    events = trace_events(timeline, candidate, num_shown=8)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["stage 0 (ranks 0–3)", "stage 1 (ranks 4–7)"]


def test_microbatches_in_the_middle_are_left_out_and_said_to_be() -> None:
    candidate, timeline = interleaved(num_microbatches=32)
    content = trace_events(timeline, candidate, num_shown=4)
    events = slices(content)
    shown = {event["name"].split()[1] for event in events if event["cat"] == "forward"}
    assert shown == {"0", "1", "30", "31"}
    assert any("of microbatches 2–29 not shown" in event["name"] for event in events)
    assert content["otherData"]["microbatches_shown"] == 4
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.step_time_s * 1e6)


@pytest.mark.slow
def test_sixteen_stages_of_512_microbatches_are_shown_whole_in_less_than_8_mb() -> None:
    of = job(cluster(2, 8), global_batch=512, num_hidden_layers=14)
    candidate = plan(of, *["single"] * 16, num_microbatches=512)
    uneven = [replace(TIMES, forward_s=1e-3 * (1 + stage / 37)) for stage in range(16)]
    num_shown = default_num_shown(candidate)
    content = trace_events(simulated(uneven, 512, "1f1b"), candidate, num_shown=num_shown)
    assert num_shown == 512
    assert len(json.dumps(content, separators=(",", ":"))) < 8e6


def test_very_long_steps_are_shown_in_part_unless_asked_otherwise() -> None:
    candidate, _ = interleaved(num_microbatches=64)
    many = candidate.model_copy(update={"num_microbatches": 2**20})
    assert 2 <= default_num_shown(many) < 2**20


def test_the_layers_of_a_pass_fill_it_in_order_and_their_terms_fill_them() -> None:
    of = job()
    candidate = plan(of, "fsdp4, fsdp4, tp4", "tp4, fsdp4, fsdp4", num_microbatches=4)
    timeline, layers = predict(candidate, of).timeline, layer_times(candidate, of)
    events = slices(trace_events(timeline, candidate, num_shown=4, layers=layers))
    passes = [event for event in events if event["pid"] == 1 and event["cat"] in ("forward", "backward")]
    first, last = passes[0], passes[-1]
    assert [each["name"] for each in inside(first, events, "layer")] == ["block 2", "block 3", "head"]
    assert [each["name"] for each in inside(last, events, "layer")] == ["head", "block 3", "block 2"]
    for whole in (first, last):
        parts = inside(whole, events, "layer")
        assert sum(each["dur"] for each in parts) == pytest.approx(whole["dur"], abs=0.01)
        for layer in parts:
            terms = inside(layer, events, "term")
            assert {"compute", "fsdp"} <= {each["name"] for each in terms} or layer["name"] == "block 2"
            assert sum(each["dur"] for each in terms) == pytest.approx(layer["dur"], abs=0.02)
    assert not inside(passes[2], events, "layer"), "of other microbatches than the first and the last"


def inside(whole: dict, events: list[dict], category: str) -> list[dict]:
    end = whole["ts"] + whole["dur"] + 2e-3
    return [
        event
        for event in events
        if (event["pid"], event["tid"], event["cat"]) == (whole["pid"], whole["tid"], category)
        and whole["ts"] - 2e-3 <= event["ts"]
        and event["ts"] + event["dur"] <= end
    ]
