"""Checks for the packages that training needs. Planning a packaged model needs none of them."""

from importlib import metadata
from importlib.util import find_spec

from steelyard.errors import UserError

TRAINING = ("torch", "transformers")
"""Packages of `steelyard[train]`, which the planner does not need."""


class NotInstalledError(UserError):
    """Raised if a request needs the packages of `steelyard[train]` and they are not installed."""


def require_training(purpose: str) -> None:
    """Raise `NotInstalledError` unless the packages for training can be imported. ``purpose`` says why they are
    needed."""
    missing = [name for name in TRAINING if not _is_importable(name)]
    if missing:
        raise NotInstalledError(
            field=", ".join(missing),
            found="not installed in this environment, in which only packaged models can be planned",
            expected=f"{' and '.join(TRAINING)}, because {purpose}",
            hint='for GPUs: pip install "steelyard[train]" (on Linux PyPI has the torch for CUDA); for CPUs before it: '
            "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )


def installed_version(name: str) -> str | None:
    """Return the version of a package without its build (``2.13.0`` of ``2.13.0+cpu``); None if not installed."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def is_as_made(made_with: dict[str, str]) -> bool:
    """Return whether results made with these versions are valid here: no other version of them is installed."""
    return all(installed_version(name) in (None, version) for name, version in made_with.items())


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
