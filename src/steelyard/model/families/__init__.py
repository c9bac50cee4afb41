"""The families of models that steelyard plans and trains, one module each; this list is the registry.

A new family is one more module with a ``FAMILY`` and one more name here: see docs/adding-a-model.md.
"""

from collections.abc import Mapping

from steelyard.errors import InvalidModelError, nearest
from steelyard.model.families import (
    bert,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    swin,
    t5,
    vit,
)
from steelyard.model.family import Family

__all__ = ["FAMILIES", "family_of"]

_MODULES = (
    bert,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    swin,
    t5,
    vit,
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def family_of(model_type: str) -> Family:
    """The family of a config's ``model_type``; raises `InvalidModelError` for one that is not known."""
    if model_type not in FAMILIES:
        raise InvalidModelError(
            field="model_type",
            found=repr(model_type) if model_type else "nothing",
            expected="one of " + ", ".join(sorted(FAMILIES)),
            hint=_hint(model_type),
        )
    return FAMILIES[model_type]


def _hint(model_type: str) -> str:
    close = nearest(model_type, FAMILIES)
    missing = (
        "the types that the installed transformers knows are split by their structure where they can be; "
        "docs/adding-a-model.md says how, and how to write a family file"
    )
    return f"{close} Else {missing}" if close.endswith("?") else missing
