"""Tests of profiles: interpolation, look-up, and named mistakes in a file."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard.errors import InvalidProfileError
from steelyard.plan.file import dump_json, parse_file, parse_value
from steelyard.profiles.profile import Affine, CollectiveProfile, LayerProfile, MeasuredTime, Profile
from tests.shapes import tp_shape

AFFINE = {"constant": 1.0, "per_sample": 2.0}
WORK = {
    "matmul_flop": AFFINE,
    "attention_flop": AFFINE,
    "matmul_bytes": AFFINE,
    "memory_bytes": AFFINE,
    "num_kernels": 7,
}
RECOMPUTATION = {
    "remat": "full",
    "work": WORK,
    "collectives": [{"kind": "all_reduce", "count": 1, "tensor_bytes": AFFINE}],
    "saved_bytes": AFFINE,
    "forward_transient_bytes": AFFINE,
    "backward_transient_bytes": AFFINE,
}
LAYER = {
    "kind": "block",
    "num_params": 12,
    "forward": WORK,
    "backward": WORK,
    "forward_collectives": [{"kind": "all_reduce", "count": 2, "tensor_bytes": AFFINE}],
    "saved_bytes": AFFINE,
    "input_bytes": AFFINE,
    "forward_transient_bytes": AFFINE,
    "backward_transient_bytes": AFFINE,
    "recomputations": [RECOMPUTATION, {**RECOMPUTATION, "remat": "selective"}],
    "times": [
        {"samples": 1, "forward_s": 0.5, "backward_s": 1.0, "selective_s": 0.1, "full_s": 0.4},
        {"samples": 4, "forward_s": 0.75, "backward_s": 1.5, "selective_s": 0.2, "full_s": 0.6},
    ],
}
COLLECTIVE = {
    "kind": "all_reduce",
    "group_size": 2,
    "strided": False,
    "latency_s": 1e-5,
    "bytes_per_s": 1e9,
    "max_relative_error": 0.1,
}
PROFILE = {
    "version": 3,
    "identity": {
        "method": "measured",
        "model_name": "tiny",
        "config_hash": "0123456789abcdef",
        "seq_len": 64,
        "precision": "fp32",
        "device": "cpu",
        "num_devices": 4,
        "torch": "2.13.0",
        "transformers": "5.0.0",
        "created": "2026-11-21",
    },
    "layers": [LAYER, {**LAYER, "degrees": {"tp": 2}}, {**LAYER, "degrees": {"tp": 2, "sp": 2}}],
    "collectives": [COLLECTIVE, {**COLLECTIVE, "strided": True, "latency_s": 2e-5}, {**COLLECTIVE, "group_size": 4}],
    "optimizer_s_per_param": 1e-9,
}


def read(content):
    return parse_value(content, Profile, InvalidProfileError, what="profile")


def changed(path, value):
    """The valid profile with the value at ``path`` replaced; ``...`` removes the key."""
    content = json.loads(json.dumps(PROFILE))
    *parents, last = path
    inner = content
    for part in parents:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return content


def layer_with(times):
    measured = [MeasuredTime(samples=samples, forward_s=s, backward_s=2 * s) for samples, s in sorted(times.items())]
    return read(PROFILE).layers[0].model_copy(update={"times": tuple(measured)})


seconds = st.floats(1e-6, 100)
curves = st.dictionaries(st.integers(1, 64), seconds, min_size=1, max_size=6)


@st.composite
def monotone_curves(draw):
    """Seconds that do not fall with more samples, ties included."""
    times = draw(curves)
    return dict(zip(sorted(times), sorted(times.values()), strict=True))


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.integers(0, 1000))
def test_an_affine_quantity_is_constant_plus_samples_times_slope(constant, per_sample, samples):
    assert Affine(constant=constant, per_sample=per_sample).at(samples) == constant + per_sample * samples


def test_an_affine_quantity_is_zero_unless_stated():
    assert Affine().at(5) == 0


@given(curves)
def test_time_is_exact_at_measured_sizes(times):
    layer = layer_with(times)
    for samples, expected_s in times.items():
        assert layer.time_s(samples).forward_s == pytest.approx(expected_s, rel=1e-12)
        assert layer.time_s(samples).backward_s == pytest.approx(2 * expected_s, rel=1e-12)


@given(curves)
def test_time_between_measured_sizes_lies_between_their_times(times):
    layer = layer_with(times)
    for (low, low_s), (high, high_s) in pairwise(sorted(times.items())):
        for samples in range(low, high + 1):
            forward_s = layer.time_s(samples).forward_s
            assert min(low_s, high_s) * (1 - 1e-9) <= forward_s <= max(low_s, high_s) * (1 + 1e-9)


@given(monotone_curves())
def test_more_samples_never_take_less_time_where_measurements_agree(times):
    layer = layer_with(times)
    sizes = range(-(-min(times) // 2), 2 * max(times) + 1)
    found = [layer.time_s(samples).forward_s for samples in sizes]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(found))


@given(curves)
def test_every_time_in_reach_is_positive(times):
    layer = layer_with(times)
    for samples in (max(1, -(-min(times) // 2)), 2 * max(times)):
        assert layer.time_s(samples).forward_s > 0


@given(st.integers(2, 64), seconds)
def test_one_measured_size_is_scaled_in_proportion(samples, measured_s):
    assert layer_with({samples: measured_s}).time_s(2 * samples).forward_s == pytest.approx(2 * measured_s)


def test_the_line_through_the_last_two_sizes_goes_on_to_twice_the_largest():
    assert layer_with({2: 1.0, 4: 2.0}).time_s(8).forward_s == pytest.approx(4.0)


def test_the_line_through_the_first_two_sizes_goes_down_to_half_the_smallest():
    assert layer_with({4: 2.0, 8: 3.0}).time_s(2).forward_s == pytest.approx(1.5)


@pytest.mark.slow
@given(st.dictionaries(st.integers(1, 2), seconds, min_size=1), st.sampled_from([1 / 16, 0.25, 0.5, 0.75]))
def test_a_part_of_a_sample_never_takes_less_than_its_part_of_the_smallest_size(times, part):
    smallest_s = times[min(times)] / min(times)
    assert layer_with(times).time_s(part).forward_s >= part * smallest_s * (1 - 1e-9)


def test_a_part_of_a_sample_takes_what_every_size_takes_and_its_part_of_the_rest():
    assert layer_with({1: 1.1, 2: 2.1}).time_s(1 / 16).forward_s == pytest.approx(0.1 + 1 / 16)


def test_a_part_of_a_sample_is_out_of_reach_where_one_sample_is():
    with pytest.raises(InvalidProfileError, match=r"near 0\.25 samples"):
        layer_with({4: 1.0, 8: 2.0}).time_s(0.25)


@given(curves, st.integers(0, 1000))
def test_a_size_far_from_every_measurement_is_an_error(times, samples):
    assume(samples * 2 < min(times) or samples > 2 * max(times))
    with pytest.raises(InvalidProfileError, match=f"near {samples} samples") as caught:
        layer_with(times).time_s(samples)
    assert caught.value.field == "layers.block.times"


def test_a_layer_without_measurements_has_no_time():
    with pytest.raises(InvalidProfileError, match=r"measurements for \[\] samples"):
        layer_with({}).time_s(1)


@pytest.mark.parametrize("samples", [(2, 1), (1, 1), (1, 4, 2)])
def test_measurements_out_of_order_or_repeated_are_an_error(samples):
    times = [{"samples": size, "forward_s": 1.0, "backward_s": 1.0} for size in samples]
    with pytest.raises(InvalidProfileError, match=r"^layers\.block\.times: .*\n.*in ascending order"):
        read(changed(["layers", 0, "times"], times))


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_a_layer_is_found_by_layer_type_degree_and_sp(tp, sp):
    layer = read(PROFILE).layer("block", tp_shape(tp, sp))
    assert isinstance(layer, LayerProfile)
    assert layer.degrees == tp_shape(tp, sp)


def test_sp_makes_no_difference_without_tp():
    profile = read(PROFILE)
    assert profile.layer("block", tp_shape(1, True)) == profile.layer("block", tp_shape(1, False))


@pytest.mark.parametrize(("layer_type", "tp"), [("head", 1), ("block", 4)])
def test_a_layer_that_was_not_profiled_is_none(layer_type, tp):
    assert read(PROFILE).layer(layer_type, tp_shape(tp, False)) is None


def test_a_collective_is_found_by_name_group_and_stride():
    found = read(PROFILE).collective("all_reduce", 2, strided=True)
    assert isinstance(found, CollectiveProfile)
    assert (found.group_size, found.strided, found.latency_s) == (2, True, 2e-5)


def test_a_collective_over_neighbours_stands_in_for_strided_ranks():
    found = read(PROFILE).collective("all_reduce", 4, strided=True)
    assert isinstance(found, CollectiveProfile)
    assert (found.group_size, found.strided) == (4, False)


@pytest.mark.parametrize(("collective", "group_size"), [("all_gather", 2), ("all_reduce", 8)])
def test_a_collective_that_was_not_measured_is_none(collective, group_size):
    assert read(PROFILE).collective(collective, group_size, strided=False) is None


def test_a_profile_written_and_read_is_the_same(tmp_path):
    profile = read(PROFILE)
    path = tmp_path / "profile.json"
    path.write_text(dump_json(profile))
    assert parse_file(path, Profile, InvalidProfileError, what="profile") == profile


@pytest.mark.parametrize(("method", "is_measured"), [("measured", True), ("traced", False)])
def test_an_identity_says_whether_seconds_were_measured(method, is_measured):
    identity = read(PROFILE).identity.model_copy(update={"method": method})
    assert identity.is_measured is is_measured


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 2, r"^version: found 2\n.*3, the profile version"),
        (["identity", "seqlen"], 64, r"(?s)^identity\.seqlen: found the unknown key.*did you mean seq_len"),
        (["layers", 1, "parms"], 3, r"(?s)^layers\[1\]\.parms: .*did you mean .*num_params"),
        (
            ["layers", 0, "forward", "num_kernel"],
            3,
            r"(?s)^layers\[0\]\.forward\.num_kernel: .*did you mean num_kernels",
        ),
        (["layers", 0, "times", 0, "forwards"], 3, r"(?s)^layers\[0\]\.times\[0\]\.forwards: .*did you mean forward_s"),
        (
            ["layers", 0, "saved_bytes", "slope"],
            3,
            r"(?s)^layers\[0\]\.saved_bytes\.slope: .*one of constant, per_sample",
        ),
        (["collectives", 0, "latency"], 3, r"(?s)^collectives\[0\]\.latency: .*did you mean latency_s"),
        (["layers", 0, "saved_bytes"], ..., r"^layers\[0\]\.saved_bytes: found nothing"),
        (["identity"], ..., r"^identity: found nothing"),
        (["layers"], [], r"^layers: found \[\]\n.*at least 1"),
        (["layers", 1, "degrees", "tp"], 1, r"^layers\[1\]\.degrees\.tp: found 1\n.*greater than or equal to 2"),
        (["layers", 1, "degrees", "tp"], "2", r"^layers\[1\]\.degrees\.tp: found '2'\n.*a valid integer"),
        (
            ["layers", 0, "times", 0, "forward_s"],
            0,
            r"^layers\[0\]\.times\[0\]\.forward_s: found 0.*\n.*greater than or equal to 0.0000",
        ),
        (["layers", 0, "times", 0, "samples"], 0, r"^layers\[0\]\.times\[0\]\.samples: found 0\n"),
        (["layers", 0, "saved_bytes", "constant"], float("nan"), r"^layers\[0\]\.saved_bytes\.constant: found nan\n"),
        (["collectives", 0, "kind"], "all_sum", r"^collectives\[0\]\.kind: found 'all_sum'\n.*'all_reduce'"),
        (["collectives", 0, "group_size"], 1, r"^collectives\[0\]\.group_size: found 1\n"),
        (["collectives", 0, "bytes_per_s"], 0, r"^collectives\[0\]\.bytes_per_s: found 0"),
        (["collectives", 0, "latency_s"], -1, r"^collectives\[0\]\.latency_s: found -1"),
        (["identity", "method"], "guessed", r"^identity\.method: found 'guessed'\n.*'traced' or 'measured'"),
        (["overlap_slowdown"], 0.5, r"^overlap_slowdown: found 0.5\n.*greater than or equal to 1"),
    ],
)
def test_a_mistake_in_a_profile_names_its_place(path, value, message):
    with pytest.raises(InvalidProfileError, match=message):
        read(changed(path, value))


@pytest.mark.parametrize("content", [[], None, 3, "profile"])
def test_a_profile_that_is_no_object_is_an_error(content):
    with pytest.raises(InvalidProfileError, match=r"^file: found .*\n.*an object"):
        read(content)


def test_a_missing_profile_is_an_error_that_names_the_path(tmp_path):
    with pytest.raises(InvalidProfileError, match=r"^profile: found no file .*absent\.json"):
        parse_file(tmp_path / "absent.json", Profile, InvalidProfileError, what="profile")


@given(st.integers(0, 3000))
def test_a_truncated_profile_is_an_error(length):
    text = dump_json(read(PROFILE))
    assume(length < len(text.rstrip()))
    with pytest.raises(InvalidProfileError, match="complete JSON file"):
        parse_text(text[:length])


def parse_text(text):
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return parse_file(Path(file.name), Profile, InvalidProfileError, what="profile")


def test_a_layer_knows_its_remat_choices():
    layer = read(PROFILE).layers[0]
    assert [layer.recomputation(remat).remat for remat in ("full", "selective")] == ["full", "selective"]


def test_a_remat_choice_without_an_entry_is_an_error():
    content = changed(["layers", 0, "recomputations"], [RECOMPUTATION])
    with pytest.raises(InvalidProfileError, match="no entry for remat selective"):
        read(content).layers[0].recomputation("selective")


@pytest.mark.parametrize(("samples", "selective_s", "full_s"), [(1, 0.1, 0.4), (2, 0.4 / 3, 1.4 / 3), (4, 0.2, 0.6)])
def test_seconds_of_remat_are_interpolated_like_the_others(samples, selective_s, full_s):
    layer = read(PROFILE).layers[0]
    assert layer.recomputation_s("selective", samples) == pytest.approx(selective_s)
    assert layer.recomputation_s("full", samples) == pytest.approx(full_s)


def test_seconds_of_remat_that_were_not_measured_are_an_error():
    content = changed(["layers", 0, "times", 1, "selective_s"], ...)
    with pytest.raises(InvalidProfileError, match="no seconds of remat selective"):
        read(content).layers[0].recomputation_s("selective", 2)


@pytest.mark.parametrize("key", ["work", "saved_bytes", "forward_transient_bytes", "backward_transient_bytes"])
def test_a_remat_choice_says_all_that_it_costs(key):
    with pytest.raises(InvalidProfileError, match=key):
        read(changed(["layers", 0, "recomputations", 0, key], ...))


def test_an_unknown_remat_choice_is_an_error():
    with pytest.raises(InvalidProfileError, match="'selective' or 'full'"):
        read(changed(["layers", 0, "recomputations", 0, "remat"], "some"))
