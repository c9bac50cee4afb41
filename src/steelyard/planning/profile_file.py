"""Profile files: which one a plan was made from, and whether that is still there as it was."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from steelyard.errors import InvalidProfileError
from steelyard.plan.cost_source import CostSource, ProfileFile
from steelyard.plan.file import parse_file
from steelyard.profiles.profile import Profile

GivenProfiles = str | Path | Profile | Mapping[str, str | Path | Profile]
"""One profile; or of several pools one each by name, which the command line writes ``old=a.json,new=b.json``."""


def pool_profiles(given: GivenProfiles | None, names: Sequence[str]) -> Mapping[str, str | Path | Profile]:
    """The profiles of the pools of these names; raises `InvalidProfileError` for one that is of none of them."""
    if given is None:
        return {}
    pairs = [each.partition("=")[::2] for each in given.split(",")] if isinstance(given, str) else []
    found = given if isinstance(given, Mapping) else dict(pairs)
    is_one = isinstance(given, Path | Profile)
    if is_one or len(pairs) > len(found) or not all(name in names and file for name, file in found.items()):
        raise InvalidProfileError(
            field="--profile",
            found="one profile" if is_one else repr(given) if isinstance(given, str) else ", ".join(found),
            expected=f"POOL=FILE, divided by commas, at most one for each pool of {', '.join(names)}",
            hint="measure each device type by itself with `steelyard profile`; pools without a file are traced",
        )
    return found


def read_profile(path: str | Path) -> tuple[Profile, ProfileFile]:
    """The profile in a file, and what a plan keeps of the file to find it again; raises `InvalidProfileError`."""
    profile = parse_file(Path(path), Profile, InvalidProfileError, what="profile")
    return profile, ProfileFile(path=str(path), sha256=_sha256(Path(path)))


def recorded_profile(source: CostSource, *, folder: Path | None) -> Path:
    """The file of the measured profile that a plan's costs came from, as it was then.

    Looked for where it was, and in the plan's ``folder`` under its path and its name. Raises `InvalidProfileError` that
    says what became of it.
    """
    if source.file is None:
        raise _not_at_hand("a plan made from a measured profile, of which it names no file")
    path = Path(source.file.path)
    places = [path] if folder is None else [path, folder / path, folder / path.name]
    found = [place for place in places if place.is_file()]
    for place in found:
        if _sha256(place) == source.file.sha256:
            return place
    if found:
        raise _not_at_hand(f"{found[0]}, which has changed since the plan was made from it")
    raise _not_at_hand(f"no file {path}, from which the plan was made, here or beside the plan")


def _not_at_hand(found: str) -> InvalidProfileError:
    return InvalidProfileError(
        field="--profile",
        found=found,
        expected="the profile that the plan was made from",
        hint="add --profile with the path of one of this model and machine",
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
