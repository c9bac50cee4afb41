"""Errors for models that do not split, with the line of the model's code that failed, if one did."""

import linecache
import traceback
from collections.abc import Mapping
from types import FrameType

from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from steelyard.errors import InvalidModelError, first_line
from steelyard.model.split import ModelSplit

HINT = "docs/how-to/your-own-model.md lists the requirements for a module"


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the traceback frames of an error that are in the model's own code, with their line numbers."""
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("transformers.models.")
    ]


def failed_at(error: BaseException) -> str:
    """Describe the line of the model's code that raised an error, after a space; empty if it is unknown."""
    if not (frames := frames_of(error)):
        return ""
    frame, line = frames[-1]
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f" in {frame.f_code.co_qualname} of {frame.f_globals['__name__']}, line {line}: {text}"


def failed_pass(config: PreTrainedConfig, error: Exception) -> InvalidModelError:
    """Build the error for a failed forward pass: a layer type without mask or positions, or the error raised."""
    listed = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if isinstance(error, KeyError) and (frames := frames_of(error)) and error.args[0] in listed:
        mappings = [each for each in frames[-1][0].f_locals.values() if isinstance(each, Mapping)]
        known = sorted({key for each in mappings for key in each if key in ALLOWED_LAYER_TYPES})
        return InvalidModelError(
            field=f"layer_types.{list(listed).index(error.args[0])}",
            found=f"{error.args[0]!r}, which {config.model_type} does not know",
            expected=f"a layer type of {config.model_type}" + (f", for example {', '.join(known)}" if known else ""),
            hint="compare with the config.json that the model was published with",
        )
    what = f"{type(error).__name__}: {first_line(error)[:120]}"
    return not_split(config, f"its forward pass fails on meta tensors{failed_at(error)} ({what})")


_SPLIT = (
    "an embedding, one list of blocks and a head, with one hidden state between them; or an encoder and "
    "a decoder with one list of blocks each, where decoder blocks read the encoder output"
)


def not_split(of: PreTrainedConfig | ModelSplit, found: str, expected: str = _SPLIT) -> InvalidModelError:
    """Build the error for a Transformers model that cannot be split because of ``found``."""
    return InvalidModelError(
        field="model_type",
        found=f"{of.model_type}: {found}",
        expected=expected,
        hint="docs/how-to/adding-a-model.md explains how to describe a model that does not split automatically",
    )


def refused(place: str, found: str, expected: str = "a chain of blocks", hint: str = HINT) -> InvalidModelError:
    """Build the error for a module that cannot be split, with the path of a module and the finding there."""
    return InvalidModelError(field=place or "forward", found=found, expected=expected, hint=hint)
