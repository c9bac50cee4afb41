import pytest

from steelyard.errors import InvalidProfileError
from steelyard.profiles.profile import CollectiveProfile, MeasuredTime, Profile, merge_profiles
from tests.profiler.examples import empty_layer, identity

MEASURED = {"method": "measured", "device": "cpu", "num_devices": 2}


def times(*samples, seconds=1.0):
    return tuple(MeasuredTime(samples=count, forward_s=seconds, backward_s=seconds) for count in samples)


def collective(collective="all_reduce", group_size=2, strided=False, latency_s=1.0):
    return CollectiveProfile(
        kind=collective,
        group_size=group_size,
        strided=strided,
        latency_s=latency_s,
        bytes_per_s=1.0,
        max_relative_error=0.0,
    )


def profile(*layers, collectives=(), optimizer_s_per_param=None, **identity_changes):
    return Profile(
        identity=identity(**MEASURED, **identity_changes),
        layers=layers,
        collectives=collectives,
        optimizer_s_per_param=optimizer_s_per_param,
    )


def test_times_of_one_layer_are_united_and_sorted_by_samples():
    merged = merge_profiles(
        profile(empty_layer("block", times=times(1, 4))), profile(empty_layer("block", times=times(2)))
    )
    assert [time.samples for time in merged.layers[0].times] == [1, 2, 4]


def test_the_later_time_wins():
    merged = merge_profiles(
        profile(empty_layer("block", times=times(1, seconds=1.0))),
        profile(empty_layer("block", times=times(1, seconds=2.0))),
    )
    assert [time.forward_s for time in merged.layers[0].times] == [2.0]


def test_layers_and_collectives_of_either_are_kept():
    merged = merge_profiles(
        profile(empty_layer("block"), collectives=(collective(), collective(strided=True))),
        profile(empty_layer("block", tp=2), collectives=(collective(latency_s=2.0), collective("all_gather"))),
    )
    assert [(layer.kind, layer.degrees) for layer in merged.layers] == [("block", {}), ("block", {"tp": 2})]
    assert [(c.kind, c.strided, c.latency_s) for c in merged.collectives] == [
        ("all_reduce", False, 2.0),
        ("all_reduce", True, 1.0),
        ("all_gather", False, 1.0),
    ]


def test_the_optimizer_is_kept_where_the_later_profile_has_none():
    layer = empty_layer("block")
    first = profile(layer, optimizer_s_per_param=1.0).model_copy(update={"optimizers": {"sgd": 0.5}})
    merged = merge_profiles(first, profile(layer))
    assert (merged.optimizer_s_per_param, merged.optimizers) == (1.0, {"sgd": 0.5})


def test_merging_a_profile_with_itself_changes_nothing():
    whole = profile(empty_layer("block", times=times(1, 2)), collectives=(collective(),), optimizer_s_per_param=1.0)
    assert merge_profiles(whole, whole) == whole


def test_merging_is_associative():
    a = profile(empty_layer("block", times=times(1, 2, seconds=1.0)), collectives=(collective(),))
    b = profile(empty_layer("block", times=times(2, 3, seconds=2.0)), optimizer_s_per_param=1.0)
    c = profile(empty_layer("head", times=times(1, seconds=3.0)), collectives=(collective(latency_s=9.0),))
    assert merge_profiles(merge_profiles(a, b), c) == merge_profiles(a, merge_profiles(b, c))


def test_only_the_date_may_differ():
    merged = merge_profiles(profile(empty_layer("block")), profile(empty_layer("block"), created="later"))
    assert merged.identity.created == "later"


@pytest.mark.parametrize("field", ["model_name", "config_hash", "seq_len", "torch", "precision"])
def test_profiles_of_different_things_are_not_merged(field):
    other = {"model_name": "x", "config_hash": "x", "seq_len": 99, "torch": "x", "precision": "bf16"}[field]
    with pytest.raises(InvalidProfileError, match=f"identity.{field}"):
        merge_profiles(profile(empty_layer("block")), profile(empty_layer("block"), **{field: other}))


@pytest.mark.parametrize("earlier", [None, "cpu"])
def test_a_profile_that_never_said_its_device_type_is_merged(earlier):
    merged = merge_profiles(
        profile(empty_layer("block"), device_kind=earlier), profile(empty_layer("block"), device_kind="cpu")
    )
    assert merged.identity.device_kind == "cpu"


def test_profiles_of_unlike_device_types_are_not_merged():
    with pytest.raises(InvalidProfileError, match=r"identity\.device_kind"):
        merge_profiles(
            profile(empty_layer("block"), device_kind="gpu"), profile(empty_layer("block"), device_kind="cpu")
        )
