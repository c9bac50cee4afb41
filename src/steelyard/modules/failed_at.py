"""Where in the code of a model of transformers an error came up: what a user can look up, or report."""

import linecache
import traceback
from types import FrameType


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames of the model's own code through which an error came, and their lines."""
    return [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_of_a_model(frame)]


def failed_at(error: BaseException) -> str:
    """The line of the model's own code at which an error came up, behind a blank; empty where that is not known."""
    if not (frames := frames_of(error)):
        return ""
    frame, line = frames[-1]
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f" in {frame.f_code.co_qualname} of {frame.f_globals['__name__']}, line {line}: {text}"


def _is_of_a_model(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("transformers.models.")
