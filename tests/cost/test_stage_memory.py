"""The walk through a stage's passes: what lives when, on stages made by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost import stage_memory
from steelyard.cost.execution import TORCHTITAN
from steelyard.cost.layer_memory import LayerMemory
from steelyard.cost.setting import Setting
from steelyard.cost.stage_memory import PartLayers, stage_terms
from tests.cost.examples import job, setting

sizes = st.integers(0, 1000)
NO_WORK = dict.fromkeys(("saved", "input", "forward", "backward"), 0)


def layer(**changes: int | bool) -> LayerMemory:
    """Ten parameters, replicated; a hundred bytes saved."""
    of: dict[str, int | bool] = {
        "params": 10,
        "shards": 1,
        "shard": 40,
        "copy": 20,
        "keeps_copy": True,
        "kept_gradients": 40,
        "made_gradients": 20,
        "scratch": 0,
        "saved": 100,
        "input": 10,
        "forward": 30,
        "backward": 60,
    }
    of |= changes
    return LayerMemory(**{"trained_shard": of["shard"], **of})  # type: ignore[arg-type]


def stage(*layers: LayerMemory, **changes: int | bool) -> PartLayers:
    of: dict[str, int | bool] = {
        "received": 0,
        "sent": 0,
        "received_is_saved": False,
        "token_bytes": 0,
        "side_bytes": 0,
    }
    return PartLayers(layers=layers, **(of | changes))  # type: ignore[arg-type]


def total(of: PartLayers, where: Setting | None = None, index: int = 0) -> int:
    return sum(stage_terms([of], index, where or setting()).values())


@st.composite
def layers(draw: st.DrawFn) -> LayerMemory:
    params, shards = draw(st.integers(1, 100)), draw(st.sampled_from([1, 2, 8]))
    return layer(
        params=params,
        shards=shards,
        shard=4 * -(-params // shards),
        copy=2 * params,
        keeps_copy=shards == 1 or draw(st.booleans()),
        kept_gradients=4 * -(-params // shards),
        made_gradients=2 * params,
        saved=draw(sizes),
        input=draw(sizes),
        forward=draw(sizes),
        backward=draw(sizes),
    )


def test_one_layer_holds_its_states_its_copy_what_it_saved_and_what_it_works_with() -> None:
    terms = stage_terms([stage(layer(backward=40))], 0, setting())
    reduction = 10 + 20 + 40  # input gradient, new gradients, and the buffer that they are reduced in
    assert (terms["parameters"], terms["optimizer"]) == (40, 80)
    assert sum(terms.values()) == 40 + 80 + 20 + 100 + reduction


def test_layers_behind_the_one_that_works_have_freed_what_they_saved() -> None:
    """The first layer works with much in its backward pass, when the second has nothing saved any more."""
    working = stage(layer(backward=5000, saved=0), layer(saved=1000))
    assert total(working) < 5000 + 1000
    assert total(stage(layer(saved=1000), layer(backward=5000, saved=0))) > 5000 + 1000


def test_layers_before_the_one_that_works_have_no_gradients_in_the_first_backward_pass() -> None:
    last_works = stage(layer(kept_gradients=0), layer(backward=5000, kept_gradients=0))
    with_gradients = stage(layer(kept_gradients=700), layer(backward=5000, kept_gradients=700))
    assert total(with_gradients, setting(num_microbatches=1)) == total(last_works, setting(num_microbatches=1))
    few, many = (total(each, setting(num_microbatches=2)) for each in (last_works, with_gradients))
    assert many == few + 1400


def test_a_sharded_layer_holds_its_reduction_buffer_until_the_next_reduces() -> None:
    small = layer(shards=8, keeps_copy=False)
    first_pass, later = (
        total(stage(small, replace(small, backward=5000)), setting(num_microbatches=count)) for count in (1, 2)
    )
    assert later - first_pass == small.reduced + 2 * small.kept_gradients


@pytest.mark.parametrize(("num_microbatches", "held"), [(1, 0), (3, 300)])
def test_the_copy_of_a_replicated_layer_lives_until_the_last_backward_pass(num_microbatches: int, held: int) -> None:
    """Found where the layer before works: the copy has gone by then in the last pass, and not in one before."""
    with_copy, without = (
        total(stage(layer(backward=5000), layer(copy=copy)), setting(num_microbatches=num_microbatches))
        for copy in (300, 0)
    )
    assert with_copy - without == held


def test_the_buffer_of_a_replicated_layer_is_its_gradients() -> None:
    works = layer(backward=5000)
    alone, after_another = (total(each, setting(num_microbatches=1)) for each in (stage(works), stage(works, layer())))
    of_the_other = stage_terms([stage(layer())], 0, setting())
    states = of_the_other["parameters"] + of_the_other["optimizer"]
    assert after_another == alone + states + layer().kept_gradients


def test_gloo_copies_what_it_scatters_once_more() -> None:
    sharded = layer(shards=8, keeps_copy=False, input=500)
    copied = replace(sharded, scratch=sharded.reduced)
    assert total(stage(copied)) - total(stage(sharded)) == sharded.reduced - sharded.made_gradients


@pytest.mark.parametrize("num_microbatches", [4, 512])
def test_a_stage_holds_what_it_received_in_flight_and_one_gradient_each_way(num_microbatches: int) -> None:
    """Stage 1 of four has three microbatches in flight, the gradient that arrived and the one that it sent last."""
    where = setting(num_stages=4, num_microbatches=num_microbatches)
    terms = stage_terms([stage(layer(), received=10**6, sent=10**3)], 1, where)
    assert terms["pipeline buffers"] == 10**6 + 10**3
    assert terms["activations"] == 3 * (100 + 10**6 + 10**3)


def test_in_the_first_backward_pass_no_gradient_was_sent() -> None:
    for num_microbatches, sent in ((1, 0), (4, 1)):
        where = setting(num_stages=2, num_microbatches=num_microbatches)
        without, with_received = (total(stage(layer(), received=each), where, 1) for each in (0, 5))
        assert with_received - without == 5 * (1 + sent)


def torch_stages(**pipeline: Any) -> Setting:
    return setting(replace(job(), execution=TORCHTITAN), **pipeline)


def test_a_stage_of_torch_has_buffers_for_what_arrives_of_every_microbatch() -> None:
    where = torch_stages(num_stages=2, num_microbatches=4)
    assert stage_terms([stage(layer(), sent=7)], 0, where)["pipeline buffers"] == 4 * 7
    buffers = stage_terms([stage(layer(), received=5)], 1, where)["pipeline buffers"]
    assert buffers == 4 * 5 + 5  # and the gradient that was sent last


def test_what_arrived_is_not_counted_again_as_saved() -> None:
    where = setting(num_stages=2, num_microbatches=4)
    same, other = (stage(layer(), received=5, received_is_saved=flag) for flag in (True, False))
    assert total(other, where, 1) - total(same, where, 1) == 5
    assert total(same, where, 1) == total(stage(layer()), where, 1) + 5  # the gradient that was sent last


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", 3), ("gpipe", 8)])
def test_microbatches_in_flight_hold_what_they_saved(schedule: str, in_flight: int) -> None:
    where = setting(num_stages=4, num_microbatches=8, schedule=schedule)
    terms = stage_terms([stage(layer(saved=10**6))], 1, where)
    assert terms["activations"] == in_flight * 10**6


@given(st.lists(layers(), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_the_bound_is_between_what_is_always_there_and_everything_at_once(
    chosen: list[LayerMemory], num_microbatches: int
) -> None:
    found = total(stage(*chosen), setting(num_microbatches=num_microbatches))
    always = sum(3 * each.shard for each in chosen)
    everything = always + sum(
        each.kept_gradients + 3 * each.copy + each.saved + each.made_gradients + 2 * each.reduced for each in chosen
    )
    largest = max(each.forward + each.backward + each.input + each.shard for each in chosen)
    assert always <= found <= everything + largest


@given(st.lists(layers(), min_size=1, max_size=4), st.sampled_from(["saved", "forward", "backward", "input"]))
def test_a_layer_that_holds_more_never_takes_less(chosen: list[LayerMemory], field: str) -> None:
    more = [replace(each, **{field: getattr(each, field) + 100}) for each in chosen]
    assert total(stage(*more)) >= total(stage(*chosen))


@given(st.lists(layers(), min_size=1, max_size=4))
def test_a_later_stage_never_holds_more_activations(chosen: list[LayerMemory]) -> None:
    where = setting(job(), num_stages=4, num_microbatches=8)
    held = [total(stage(*chosen), where, index) for index in range(4)]
    assert held == sorted(held, reverse=True)


def interleaved() -> Setting:
    return setting(num_stages=2, num_microbatches=2, schedule="interleaved-1f1b", num_chunks=2)


def chunks(first: PartLayers, second: PartLayers, where: Setting | None = None) -> dict[str, int]:
    return stage_terms([first, second], 0, where or interleaved())


def test_a_chunk_that_pauses_keeps_its_microbatches_in_flight_its_copies_and_its_reduction_buffer() -> None:
    """Stage 0 goes forward with both microbatches in chunk 0, then in chunk 1, and back in chunk 1, then in chunk 0."""
    works = layer(forward=5000)
    assert chunks(stage(layer(saved=700)), stage(works))["activations"] == 2 * 700 + 2 * 100
    copies = [sum(chunks(stage(layer(copy=copy)), stage(works)).values()) for copy in (0, 300)]
    assert copies[1] == copies[0] + 300
    reducing = [stage(replace(layer(shards=8, keeps_copy=False), params=params)) for params in (10, 80)]
    totals = [chunks(stage(layer(backward=5000)), each) for each in reducing]
    assert (
        totals[1]["working set"] - totals[0]["working set"]
        == reducing[1].layers[0].reduced - reducing[0].layers[0].reduced
    )


def test_a_chunk_has_gradients_from_its_first_backward_pass_on() -> None:
    """Found in the first backward pass of the chunk that works with much; the later one goes back before the other."""
    works, rests = stage(layer(backward=5000)), stage(layer())
    assert "gradients" not in chunks(rests, works)
    assert chunks(works, rests)["gradients"] == layer().kept_gradients


def test_an_interleaved_stage_holds_what_arrives_ahead_and_a_gradient_each_way() -> None:
    """Ahead of its pass come one activation and two gradients at most; what it sent stays with its microbatch."""
    terms = chunks(stage(layer(), sent=1000), stage(layer(), sent=1000, received=1000))
    assert terms["pipeline buffers"] == (1 + 2) * 1000 + 1000
    assert terms["activations"] == 4 * (100 + 1000) + 2 * 1000


def test_what_an_interleaved_stage_of_torch_sent_stays_until_the_step_ends() -> None:
    """Found in the last backward pass: before it four activations and three gradients have been sent."""
    theirs = torch_stages(num_stages=2, num_microbatches=2, schedule="interleaved-1f1b", num_chunks=2)
    terms = chunks(stage(layer(), sent=1000, received=0), stage(layer(), sent=1000, received=1000), theirs)
    assert terms["pipeline buffers"] == 2 * 3000 + 4 * 1000 + 2 * 1000


@given(st.lists(layers(), min_size=1, max_size=3), st.lists(layers(), min_size=1, max_size=3))
def test_two_chunks_hold_at_least_what_each_holds_alone(first: list[LayerMemory], second: list[LayerMemory]) -> None:
    both = sum(chunks(stage(*first), stage(*second)).values())
    empty = stage(layer(**dict.fromkeys(("params", "shard", "copy", "kept_gradients", "made_gradients"), 0), **NO_WORK))
    assert both >= sum(chunks(stage(*first), empty).values())
    assert both >= sum(chunks(empty, stage(*second)).values())


@given(st.lists(layers(), min_size=2, max_size=4), sizes, sizes, st.booleans(), st.data())
def test_states_with_less_in_flight_hold_no_more(
    chosen: list[LayerMemory], received: int, sent: int, is_saved: bool, data: st.DataObject
) -> None:
    own = replace(chosen[0], saved=chosen[0].saved + received)
    parts = [stage(*each, received=received, sent=sent, received_is_saved=is_saved) for each in ([own], [own, *chosen])]
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b"]))
    is_interleaved = schedule == "interleaved-1f1b"
    where = data.draw(st.sampled_from([setting, torch_stages]))(
        num_stages=4, num_microbatches=8, schedule=schedule, num_chunks=2 if is_interleaved else 1
    )
    index, parts = data.draw(st.integers(0, 3)), parts if is_interleaved else parts[1:]
    found = stage_terms(parts, index, where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_memory, "_moments", lambda *of: tuple(stage_memory._all_moments(*of[:3]).items()))
        assert found == stage_terms(parts, index, where)


runs = st.lists(st.tuples(layers(), st.integers(1, 8)), min_size=1, max_size=4)


@pytest.mark.slow
@given(runs, runs, st.sampled_from(["1f1b", "interleaved-1f1b"]), st.integers(0, 3), st.booleans())
def test_layers_amid_others_like_them_hold_no_more(
    first: list[tuple[LayerMemory, int]],
    second: list[tuple[LayerMemory, int]],
    schedule: str,
    index: int,
    is_frozen: bool,
) -> None:
    if is_frozen:
        first = [
            (replace(each, kept_gradients=0, made_gradients=0, has_backward=False), count) for each, count in first
        ]
    is_interleaved = schedule == "interleaved-1f1b"
    where = setting(num_stages=4, num_microbatches=8, schedule=schedule, num_chunks=2 if is_interleaved else 1)
    chosen = [[each for each, count in part for _ in range(count)] for part in (first, second)][: 1 + is_interleaved]
    told_apart = [stage(*map(replace, part), received=7, sent=5) for part in chosen]
    assert stage_terms([stage(*part, received=7, sent=5) for part in chosen], index, where) == stage_terms(
        told_apart, index, where
    )


def test_a_walk_looks_at_no_more_states_of_a_pipeline_that_is_twice_as_deep() -> None:
    few, many = (
        stage_memory._moments(0, setting(num_stages=count, num_microbatches=8).pipeline, (2,), False)
        for count in (4, 8)
    )
    assert len(many) <= len(few)
