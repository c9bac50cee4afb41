"""What of the packages that train is installed: planning a packaged model needs none of them."""

from importlib import metadata
from importlib.util import find_spec

from steelyard.errors import UserError

TRAINING = ("torch", "transformers")
"""What `steelyard[train]` brings and the planner does without."""


class NotInstalledError(UserError):
    """Something was asked for that needs the packages of `steelyard[train]`."""


def require_training(purpose: str) -> None:
    """Raises `NotInstalledError` unless the packages that train can be imported; ``purpose`` is what needs them."""
    missing = [name for name in TRAINING if not _is_importable(name)]
    if missing:
        raise NotInstalledError(
            field=", ".join(missing),
            found="not installed in this environment, where only planning packaged models works",
            expected=f"{' and '.join(TRAINING)}, since {purpose}",
            hint='for GPUs: pip install "steelyard[train]" (on Linux PyPI has the torch for CUDA); for CPUs before it: '
            "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )


def installed_version(name: str) -> str | None:
    """The version of an installed package without its build (``2.13.0`` of ``2.13.0+cpu``); None where it is not."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def is_as_made(made_with: dict[str, str]) -> bool:
    """Whether what these versions made holds here: no other version is installed of any of them."""
    return all(installed_version(name) in (None, version) for name, version in made_with.items())


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
