"""User errors: each says what was found, what was expected and what to do next.

Every class here is a mistake in the user's input, so the command line prints it without a traceback and exits with
code 2. Results that are not mistakes ("nothing fits", "time ran out") are values with a status, never exceptions.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class UserError(Exception):
    """Raised if the user's input cannot be used. ``field`` names the place in the words of the file or command."""

    exit_code = 2

    def __init__(self, *, field: str, found: str, expected: str, hint: str = "") -> None:
        self.field = field
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self.__str__())

    def parts(self) -> dict[str, str]:
        """Return the arguments to rebuild the error: ``InvalidPlanError(**error.parts() | {"field": "stages"})``."""
        return {name: getattr(self, name) for name in ("field", "found", "expected", "hint")}

    def __str__(self) -> str:
        lines = [f"{_shown(self.field)}: found {_shown(self.found)}", f"  expected: {_shown(self.expected)}"]
        if self.hint:
            lines.append(f"  to fix: {_shown(self.hint)}")
        return "\n".join(lines)


class CombinedError(UserError):
    """Several independent mistakes. Its parts are those of the first one."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__(**errors[0].parts())

    def __str__(self) -> str:
        return "\nerror: ".join(map(str, self.errors))


def all_of(*reads: Callable[[], Any]) -> list[Any]:
    """Return the results of these functions. Raises all their mistakes as one `CombinedError`, a single one as is."""
    found, wrong = [], []
    for read in reads:
        try:
            found.append(read())
        except UserError as error:
            wrong.append(error)
    if wrong:
        raise CombinedError(wrong) if len(wrong) > 1 else wrong[0]
    return found


class InvalidModelError(UserError):
    """A model name or a ``config.json`` that cannot be read as a chain of known layers."""


class AbsentTargetsError(InvalidModelError):
    """Targets of adapters that name no module of the model, beside ``present`` ones that do."""

    def __init__(self, *, absent: Sequence[str] = (), present: Sequence[str] = (), **parts: str) -> None:
        self.absent = tuple(absent)
        self.present = tuple(present)
        super().__init__(**parts)


class InvalidClusterError(UserError):
    """A cluster, device or link that is unknown or inconsistent."""


class InvalidProfileError(UserError):
    """A profile file that cannot be read, or that is not sufficient for a prediction."""


class InvalidPlanError(UserError):
    """A plan file that cannot be read, contradicts itself, or does not belong to this model or world size."""


class InvalidProblemError(UserError):
    """A table of costs that cannot be searched (negative, not a number, missing or ragged)."""


class InvalidCheckpointError(UserError):
    """A checkpoint or weights that cannot be read, written, or used by this run."""


class InvalidDataError(UserError):
    """Training data that is missing, empty or too short."""

    def __init__(self, *, found: str, expected: str, hint: str = "", field: str = "data") -> None:
        super().__init__(field=field, found=found, expected=expected, hint=hint)


_COMPARED = 100
"""Maximum number of characters of a name that are compared, because the time grows with their square."""
MOST_SHOWN = 500
"""Maximum number of characters of a part of a message, because user input may have any length."""


def _shown(text: str) -> str:
    """Return the text in characters that any terminal can print, cut off if it is too long."""
    printable = text.encode(errors="backslashreplace").decode()
    return printable if len(printable) <= MOST_SHOWN else printable[:MOST_SHOWN] + "…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; empty if it has none."""
    return next(iter(str(error).strip().splitlines()), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that lists the known names closest to a misspelt one, or all of them if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:_COMPARED], names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names)
