"""Timeline of a step as a Chrome trace-event file, for Perfetto and chrome://tracing.

Every stage is a process of the trace with up to three tracks: passes and bubbles, sends, and gradient reductions during
its passes. Times are in microseconds, rounded to nanoseconds.

For many microbatches, only the passes of the first and of the last ones are shown, where pipelines differ. One slice
replaces those between and gives their number.

The passes of the first and of the last microbatch contain their layers, and each layer its computation and collectives
by name, one after another, in proportion to their predicted seconds.

Source: Trace Event Format (Google, 2016), the types ``X`` (complete event) and ``M`` (metadata).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from steelyard.cost.predict import LayerTimes
from steelyard.cost.simulator import Bubble, Event, Send, Timeline
from steelyard.plan.plan import Plan
from steelyard.units import format_plural

MAX_EVENTS = 80_000
"""Maximum number of slices of a trace that is shown completely. Each adds about 90 bytes to the file."""
PASSES, _SENDS = range(2)
_DIRECTIONS = ("forward", "backward")
_TRACK_NAMES = {PASSES: "passes", _SENDS: "sends"}

TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice of a track: a pass, a bubble, a transfer, or a summary of several."""

    track: int
    name: str
    category: str
    microbatch: int
    start_s: float
    end_s: float
    chunk: int | None = None


def trace_events(
    timeline: Timeline, plan: Plan, *, num_shown: int, layers: Sequence[LayerTimes] = (), fixed_s: float = 0.0
) -> dict[str, Any]:
    """Return the content of a trace-event file: passes of ``num_shown`` microbatches, half the first, half the last.

    ``layers`` are all of the plan, to be shown inside the passes; none leave these whole. ``fixed_s`` are seconds of a
    step in addition to its passes.
    """
    events: list[TraceEvent] = []
    hidden = hidden_microbatches(plan.num_microbatches, num_shown)
    for stage in range(timeline.pipeline.num_stages):
        slices = list(stage_slices(timeline, stage, plan.num_chunks))
        events += _metadata(plan, stage, sorted({each.track for each in slices}))
        for track in _TRACK_NAMES:
            ordered = sorted((each for each in slices if each.track == track), key=lambda each: each.start_s)
            for each in without_hidden(ordered, hidden):
                events.append(_complete(each, stage))
                if layers and each.category in _DIRECTIONS and each.microbatch in (0, plan.num_microbatches - 1):
                    part = plan.stages[stage].parts[each.chunk or 0]
                    inside = _layer_slices(each, [layers[layer] for layer in part.layers])
                    events += (_complete(one, stage) for one in inside)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.model.name,
            "cluster": plan.cluster,
            "schedule": plan.schedule,
            "step_time_s": timeline.step_time_s + fixed_s,
            "fixed_s": fixed_s,
            "bubble_share": timeline.bubble_share(),
            "microbatches": plan.num_microbatches,
            "microbatches_shown": plan.num_microbatches - len(hidden),
        },
    }


def _layer_slices(whole: Slice, layers: Sequence[LayerTimes]) -> Iterator[Slice]:
    """Return the layers of a pass, in backward passes the last first, each with its terms if it has several."""
    terms = [(each.name, each.forward_s if whole.category == "forward" else each.backward_s) for each in layers]
    total_s = sum(sum(seconds.values()) for _, seconds in terms)
    scale, start_s = (whole.end_s - whole.start_s) / total_s if total_s else 0.0, whole.start_s
    for name, seconds in terms if whole.category == "forward" else reversed(terms):
        end_s = start_s + scale * sum(seconds.values())
        yield replace(whole, name=name, category="layer", start_s=start_s, end_s=end_s, chunk=None)
        for term, term_s in seconds.items() if len(seconds) > 1 else ():
            after_s = min(start_s + scale * term_s, end_s)
            yield replace(whole, name=term, category="term", start_s=start_s, end_s=after_s, chunk=None)
            start_s = after_s
        start_s = end_s


def default_num_shown(plan: Plan) -> int:
    """Return the number of microbatches that keeps the file below 8 MB: all unless there are very many."""
    per_microbatch = 6 * len(plan.parts)  # a forward and a backward, each with a bubble and a transfer
    return max(2, min(plan.num_microbatches, MAX_EVENTS // per_microbatch))


def hidden_microbatches(num_microbatches: int, num_shown: int) -> range:
    """Return the microbatches in the middle, which are not shown."""
    if num_shown >= num_microbatches:
        return range(0)
    return range(num_shown - num_shown // 2, num_microbatches - num_shown // 2)


def stage_slices(timeline: Timeline, stage: int, num_chunks: int) -> Iterator[Slice]:
    """Yield the slices of a stage in a step: passes, bubbles and sends."""
    for event in timeline.stages[stage]:
        work = "optimizer" if event.work == "once" else event.work
        name = work if event.microbatch < 0 else f"{work} {event.microbatch}"
        yield _slice(event, PASSES, name, event.work, event.chunk if num_chunks > 1 else None)
    for bubble in timeline.bubbles(stage):
        yield _slice(bubble, PASSES, f"bubble: {bubble.reason}", "bubble")
    for send in timeline.sends[stage]:
        name = f"send {send.payload} {send.microbatch} to stage {send.receiver}"
        yield _slice(send, _SENDS, name, "send", send.chunk if num_chunks > 1 else None)


def _slice(of: Event | Bubble | Send, track: int, name: str, category: str, chunk: int | None = None) -> Slice:
    return Slice(
        track=track,
        name=name,
        category=category,
        microbatch=of.microbatch,
        start_s=of.start_s,
        end_s=of.end_s,
        chunk=chunk,
    )


def without_hidden(slices: list[Slice], hidden: range) -> Iterator[Slice]:
    """Yield the slices, with each run of hidden microbatches summed up in one slice."""
    for is_hidden, run in groupby(slices, key=lambda each: each.microbatch in hidden):
        if not is_hidden:
            yield from run
            continue
        left_out = list(run)
        yield Slice(
            track=left_out[0].track,
            name=f"{format_plural(len(left_out), 'slice')} of microbatches {hidden[0]}–{hidden[-1]} not shown",
            category="not shown",
            microbatch=-1,
            start_s=left_out[0].start_s,
            end_s=max(each.end_s for each in left_out),
        )


def _complete(each: Slice, stage: int) -> TraceEvent:
    return {
        "name": each.name if each.chunk is None else f"{each.name} chunk {each.chunk}",
        "cat": each.category,
        "ph": "X",
        "ts": round(each.start_s * 1e6, 3),
        "dur": round((each.end_s - each.start_s) * 1e6, 3),
        "pid": stage,
        "tid": each.track,
    }


def _metadata(plan: Plan, stage: int, tracks: list[int]) -> Iterator[TraceEvent]:
    first, last = plan.stages[stage].ranks
    ranks = f"rank {first}" if first == last else f"ranks {first}–{last}"
    yield _name(stage, 0, "process_name", {"name": f"stage {stage} ({ranks})"})
    yield _name(stage, 0, "process_sort_index", {"sort_index": stage})
    for track in tracks:
        yield _name(stage, track, "thread_name", {"name": _TRACK_NAMES[track]})
        yield _name(stage, track, "thread_sort_index", {"sort_index": track})


def _name(stage: int, track: int, what: str, content: TraceEvent) -> TraceEvent:
    return {"name": what, "ph": "M", "pid": stage, "tid": track, "args": content}
