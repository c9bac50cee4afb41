"""Replacement of every integer of every file by values that are invalid as an index."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from tests.damage.cases import COMMANDS, TARGETS, Case, file_name, file_text

BEYOND = (-1, 2**63, 2**64)
"""Values that no number of a file may have."""
WITHIN = (0, 1, 2, 3)
"""Values that many numbers may have."""

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of the whole numbers in the content of a file; of a list those in its first, second and last entry."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield place
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = [(index, value[index]) for index in sorted({0, 1, len(value) - 1} & {*range(len(value))})]
    for key, item in items:
        yield from places(item, (*place, key))


def changed(content: Any, place: Place, number: int) -> Any:
    """The content with another number at a place."""
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = number
    return content


def number_cases(
    whole: Mapping[str, Any], values: int, others: Sequence[int] = BEYOND, within: Place = ()
) -> Iterator[Case]:
    """Yield cases with a wrong number for every place, or those in a part, each through another command that reads the
    file."""
    numbers, turn = count(), count()
    for sort, content in whole.items():
        commands = [command for often, command, read in COMMANDS if sort in read.split() and often > 1]  # no searches
        for place in places(content):
            if place[: len(within)] != within:
                continue
            found = content
            for key in place:
                last, found = found, found[key]
            wrong = (found + 1, len(last), 2**31, *others)[: max(values, 3)]
            for value in (wrong[next(turn) % len(wrong)] for _ in range(values)):
                seed = next(numbers)
                random = Random(seed)
                arguments = random.choice(commands).replace("TARGET", random.choice(TARGETS)).split(" ")
                files = {file_name(sort): file_text(sort, changed(content, place, value))}
                yield Case(seed=seed, arguments=arguments, files=files)
