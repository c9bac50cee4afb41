"""What users write in options: one of several words, or a number that may be ``max``.

What a command shows while it works: a line on standard error that goes away, and nothing with ``--json``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

from rich.console import Console

from steelyard.errors import UserError, nearest
from steelyard.limits import MOST_PIXELS
from steelyard.plan.plan import Precision


@contextmanager
def progress(first: str, *, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done now; shows nothing if ``silent`` or if nobody watches."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(first) as status:
        yield status.update


Chosen = TypeVar("Chosen")
_MOST_DIGITS = 20


def parse_size(option: str, text: str, most: int) -> int | Literal["max"]:
    """A number of samples or tokens, or ``max``; raises `UserError` for anything else."""
    if text == "max":
        return "max"
    if not _is_number(text, most):
        raise UserError(
            field=option,
            found=repr(text),
            expected=f"a whole number of 1 or more, at most {most}, or max",
            hint=f"write for example {option} 64",
        )
    return int(text)


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """Height and width in ``448`` or ``448x672``; raises `UserError` for anything else."""
    if text is None:
        return None
    sides = text.split("x")
    if len(sides) > 2 or any(not _is_number(side, MOST_PIXELS) for side in sides):
        raise UserError(
            field="--image-size",
            found=repr(text),
            expected=f"the pixels of a side, or HEIGHTxWIDTH, at most {MOST_PIXELS}",
            hint="write for example --image-size 448",
        )
    return int(sides[0]), int(sides[-1])


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS and 0 < int(text) <= most


def check_choices(option: str, text: str, known: Mapping[str, Chosen]) -> tuple[Chosen, ...]:
    """The values of the names in ``none,full``, each once; raises `UserError` naming the known ones for another."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(
                field=option,
                found=repr(name),
                expected="one or more of " + ", ".join(known) + ", separated by commas",
                hint=nearest(name, known),
            )
    return tuple(known[name] for name in names)


def check_precision(text: str) -> Precision:
    """The precision that a user named; raises `UserError` for another one."""
    found: Precision = check_choice("--precision", text, Precision)
    return found


def check_choice(option: str, text: str, choices: Any) -> Any:
    """``text`` if it is one of the literal ``choices``; raises `UserError` naming them for anything else."""
    known = get_args(choices)
    if text not in known:
        raise UserError(
            field=option, found=repr(text), expected="one of " + ", ".join(known), hint=nearest(text, known)
        )
    return text
