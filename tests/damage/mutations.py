"""Damage to a JSON value, to the text of a file, and to the arguments of a command."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 5, 7, -1, 100, 1000, 65536, 10**6, 10**9, -(2**63)),
    *(2**31, 2**48, 2**62, 2**63 - 1, 2**63, 10**18, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-9, 1e-300, 1e15, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan")),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", " ", "x", "yes", "8", "größe", "\ud800", "\x00", "\x1b[2J", "[bold]", "a" * 5000),
    *("single", "dp2", "fsdp2-tp2", "tp1000000007", "1f1b", "interleaved-1f1b", "full", "a100-80gb", "llama3-8b"),
    *("../..", "/dev/null", "/dev/zero", [], {}, [[]], {"": None}, [0, 1], [0, 10**9], ["x"] * 3, [None] * 1000),
    {"a": {"b": {"c": 1}}},
)
KEYS = ("", "version", "name", "layers", "sp", "zero", "ep", "remat", "bogus", "\ud800", "a" * 300)
SNIPPETS = (
    *("{", "}", "[", "]", ",", ":", '"', "\\", "\x00", "é", "\n", "-", "---", "NaN", "Infinity", "1e999", "\\ud800"),
    *("&a", "*a", "!!python/object:x", "!!int", "!!timestamp x", "<<: 3", "? [1]", "2001-99-99", "1:99", "%YAML"),
    *("9" * 5000, "[" * 900, '{"a":' * 900),
)


def damaged_value(content: Any, random: Random) -> Any:
    """The content after one to three changes at random places: removed, doubled, swapped, or another value."""
    content = copy.deepcopy(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(content))
        if places:
            _change(*random.choice(places), places, random)
    return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each key or index in it."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        items = inner.items() if isinstance(inner, dict) else enumerate(inner)
        for key, item in items:
            yield inner, key
            if isinstance(item, dict | list):
                waiting.append(item)


def _change(inner: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    match random.choice(("number", "number", "value", "value", "scale", "remove", "swap", "add", "repeat")):
        case "number":
            inner[key] = random.choice(NUMBERS)
        case "value":
            inner[key] = copy.deepcopy(random.choice(VALUES))
        case "scale":
            inner[key] = _scaled(inner[key], random)
        case "remove":
            del inner[key]
        case "swap":
            other, place = random.choice(places)
            inner[key] = copy.deepcopy(other[place])
        case "add" if isinstance(inner, dict):
            inner[random.choice(KEYS)] = copy.deepcopy(random.choice(VALUES + NUMBERS))
        case "repeat" if isinstance(inner, list):
            inner.insert(random.randrange(len(inner)), copy.deepcopy(inner[key]))


def _scaled(value: Any, random: Random) -> Any:
    """A number somewhat or far larger, smaller or next to it; a text with a letter less, or another one."""
    if isinstance(value, str) and value:
        place = random.randrange(len(value))
        return value[:place] + random.choice(("", "x", "-", "0", "9999999")) + value[place + 1 :]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    change = random.choice((value + 1, value - 1, value * 2, value * 3, value * 1000, value * 10**9, -value))
    return change if random.random() < 0.8 else float(change) if abs(change) < 1e300 else change


def damaged_text(text: str, random: Random) -> bytes:
    """The text of a file cut off, with bytes flipped, or with something in it that means something."""
    match random.choice(("cut", "flip", "insert", "insert", "double")):
        case "cut":
            return text.encode(errors="replace")[: random.randrange(len(text) + 1)]
        case "flip":
            content = bytearray(text.encode(errors="replace"))
            for _ in range(random.choice((1, 1, 5))):
                if content:
                    content[random.randrange(len(content))] = random.randrange(256)
            return bytes(content)
        case "insert":
            place = random.randrange(len(text) + 1)
            return (text[:place] + random.choice(SNIPPETS) + text[place:]).encode(errors="replace")
        case _:
            return (text + text).encode(errors="replace")


def damaged_arguments(arguments: list[str], random: Random) -> list[str]:
    """The arguments with one to two of them missing, twice, or of another value."""
    arguments = list(arguments)
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(1, len(arguments)) if len(arguments) > 1 else 0
        match random.choice(("replace", "replace", "replace", "remove", "repeat", "scale")):
            case "replace":
                arguments[place] = _as_argument(random.choice(NUMBERS + VALUES))
            case "remove":
                del arguments[place]
            case "repeat":
                arguments.insert(place, arguments[place])
            case _:
                arguments[place] = _as_argument(_scaled(arguments[place], random))
        if not arguments:
            break
    return arguments


def _as_argument(value: Any) -> str:
    """Text as the command line could pass it: no NUL, and other values become JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\x00", "0").encode(errors="surrogatepass").decode(errors="surrogateescape")
