"""Joins two measurements of one thing: more numbers of samples, more shapes of layers, more collectives."""

from collections.abc import Hashable

from steelyard.errors import InvalidProfileError
from steelyard.profiles.profile import LayerProfile, Profile

_MAY_DIFFER = "created"


def merge_profiles(a: Profile, b: Profile) -> Profile:
    """What either profile knows; where both know it, what ``b`` (the later one) says.

    Raises `InvalidProfileError` naming the first part of the identities that differs, apart from the date.
    """
    first, second = a.identity.model_dump(), b.identity.model_dump()
    for field, found in second.items():
        is_known = None not in (found, first[field])
        if field != _MAY_DIFFER and is_known and found != first[field]:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=repr(found),
                expected=f"{first[field]!r}, as in the profile that it is merged into",
                hint="merge profiles of one model on one machine only; keep the others in files of their own",
            )
    layers = {_layer_key(layer): layer for layer in a.layers}
    for later in b.layers:
        earlier = layers.get(_layer_key(later))
        layers[_layer_key(later)] = later if earlier is None else _merge_times(earlier, later)
    collectives = {
        (collective.kind, collective.group_size, collective.strided): collective
        for collective in (*a.collectives, *b.collectives)
    }
    optimizer_s = b.optimizer_s_per_param
    return b.model_copy(
        update={
            "layers": tuple(layers.values()),
            "collectives": tuple(collectives.values()),
            "optimizer_s_per_param": a.optimizer_s_per_param if optimizer_s is None else optimizer_s,
            "busy_speeds": b.busy_speeds or a.busy_speeds,
            "sharding": b.sharding or a.sharding,
            "reserved_over_allocated": b.reserved_over_allocated or a.reserved_over_allocated,
        }
    )


def _merge_times(earlier: LayerProfile, later: LayerProfile) -> LayerProfile:
    """The later counts with the times of both, sorted by samples."""
    times = {time.samples: time for time in (*earlier.times, *later.times)}
    return later.model_copy(update={"times": tuple(times[samples] for samples in sorted(times))})


def _layer_key(layer: LayerProfile) -> Hashable:
    return layer.kind, frozenset(layer.degrees.items())
