"""Where each packaged config comes from, and under which id it stands on the Hugging Face hub.

The configs hold the keys that shape a model, as published at these addresses; the parameters that follow are compared
with the published numbers (tests/model/test_packaged_models.py).
"""

import json
import re
from functools import cache
from importlib import resources

from steelyard.errors import InvalidModelError


def model_source(name: str) -> str:
    """The address of a packaged model's config, or what else it was made from; an unknown name is an error."""
    known = _sources()
    if name not in known:
        raise InvalidModelError(
            field="sources.json", found=f"nothing about {name!r}", expected="a source for every packaged config"
        )
    return known[name]


@cache
def hub_names() -> dict[str, str]:
    """The packaged name of each model by its id on the hub, written as there: ``Qwen/Qwen3-14B``."""
    found = {name: _ON_THE_HUB.fullmatch(source) for name, source in _sources().items()}
    return {match[1]: name for name, match in found.items() if match}


def _sources() -> dict[str, str]:
    text = resources.files("steelyard.model").joinpath("sources.json").read_text(encoding="utf-8")
    known: dict[str, str] = json.loads(text)
    return known


_ON_THE_HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/blob/main/config\.json")
