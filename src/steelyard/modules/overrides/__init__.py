"""What the structure of some model types cannot tell, one file for these types each.

To add a type: a file here that begins with what structure cannot tell and why, has the types in ``TYPES`` and makes a
model of theirs ready to be taken apart in ``prepare(model)``, in place, where twice does no harm.
`steelyard.modules.split_proof` proves the result equal to the unmodified model.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_FILES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
OVERRIDES: Mapping[str, Callable[[Any], None]] = {name: each.prepare for each in _FILES for name in each.TYPES}
"""What makes a model ready to be taken apart, by its type."""
