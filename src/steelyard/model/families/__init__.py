"""The families of models that do not split by their structure as they should, one module each; this is the registry.

A new family is one more module with a ``FAMILY`` and one more name here: see docs/adding-a-model.md.
"""

from collections.abc import Mapping

from steelyard.model.family import Family

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family] = {}
