"""Where each packaged config comes from."""

import json
from importlib import resources

from steelyard.errors import InvalidModelError


def model_source(name: str) -> str:
    """The address of a packaged model's config, or what else it was made from; an unknown name is an error."""
    text = resources.files("steelyard.model").joinpath("sources.json").read_text(encoding="utf-8")
    known: dict[str, str] = json.loads(text)
    if name not in known:
        raise InvalidModelError(
            field="sources.json", found=f"nothing about {name!r}", expected="a source for every packaged config"
        )
    return known[name]
