"""Selection of the cases that `make test` runs, of many similar ones; `make nightly` runs all.

A sample is chosen by structure: every feature of an omitted case is in a selected one.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FAMILIES = ("llama", "gpt_neox", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "bert", "vit", "t5", "swin")
"""Sample of `tests.runtime.models.FAMILY_CONFIGS`: shared key heads, one matrix for queries and keys, transposed
matrices and a table of positions, windows and a tied head, experts, latent attention, no mask, images, an encoder, and
stages."""
TYPES = (
    *("qwen3_next", "opt", "rembert", "granite", "bloom", "cohere2", "biogpt", "helium", "glm4", "apertus", "xglm"),
    *("phi3", "mamba", "qwen2_moe", "deepseek_v2", "gpt_oss"),
)
"""Sample of `tests.modules.split_configs.SPLIT_CONFIGS`. The first line has every field, style, operation and reason of
all splits; the second is split for other tests anyway, or has its own kind of experts or attention."""


def sampled(names: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """The names, or numbers, as parameters of a test."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def asked(request: pytest.FixtureRequest, parameter: str = "name") -> list[str]:
    """The values of a parameter in the tests of the module that are to run: what a launch for all of them must try."""
    items = [item for item in request.session.items if item.path == request.path]
    given = [getattr(item, "callspec").params for item in items if hasattr(item, "callspec")]  # noqa: B009
    return list(dict.fromkeys(params[parameter] for params in given if parameter in params))
