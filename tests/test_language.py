"""The language of docstrings and messages: openings, and the words of the field (docs/reference/glossary.md)."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"
PACKAGES = sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")

OPENINGS = re.compile(
    r"(?:As|At|Behind|Beside|By|For|From|How|In|Its|Of|On|Over|That|Those|To|Under|What|When|"
    r"Where|Which|Why|With|Within|The same)\b"
)
"""A docstring opens with a verb or a noun, so with none of these."""
THIRD_PERSON = re.compile(
    r"(?:Adds|Asks|Begins|Builds|Calls|Carries|Checks|Chooses|Compares|Computes|Creates|Divides|Does|"
    r"Draws|Ends|Fills|Finds|Gathers|Gives|Goes|Has|Holds|Is|Joins|Keeps|Leaves|Lets|Loads|"
    r"Makes|Marks|Moves|Names|Opens|Plays|Prepares|Prints|Proves|Puts|Quantizes|Raises|Reads|"
    r"Records|Reduces|Refuses|Registers|Releases|Removes|Replaces|Returns|Runs|Saves|Says|Scales|"
    r"Searches|Sends|Sets|Shows|Sorts|Splits|Starts|Stops|Takes|Tells|Trains|Tries|Turns|Updates|"
    r"Waits|Writes)\b"
)
"""A function's docstring opens with the imperative."""
PRIVATE = re.compile(
    r"\b(?:but for|on (?:its|their) own|what \w+ takes?|walk(?:s|ed)?|rivals?|twins?|plain n-D|beforehand)\b",
    re.IGNORECASE,
)
UNCLEAR = re.compile(r"\b(?:beside|pools of unlike|first weights|of one's own|to the letter)\b")
"""Words that messages avoid, because users do not know them."""


def docstrings(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield every docstring of a file: its place, ``function`` for that of a function, and its text on one line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for place, statement in enumerate(body):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                where = f"{path.relative_to(SOURCE)}:{statement.lineno}"
                yield where, "function" if is_function and place == 0 else "", " ".join(statement.value.value.split())


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every text of a file that is no docstring and has several words: its place and the text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents
        if is_text and " " in node.value:
            yield f"{path.relative_to(SOURCE)}:{node.lineno}", node.value


def faults(package: str) -> Iterator[str]:
    """Yield the faults in the docstrings and messages of a package."""
    for path in sorted((SOURCE / package).rglob("*.py")):
        for where, kind, text in docstrings(path):
            if OPENINGS.match(text):
                yield f"{where}: opens with no verb or noun: {text[:60]}"
            if kind and THIRD_PERSON.match(text):
                yield f"{where}: opens with no imperative: {text[:60]}"
            if found := PRIVATE.search(text):
                yield f"{where}: says {found[0]!r}: {text[:60]}"
        for where, text in messages(path):
            if found := PRIVATE.search(text) or UNCLEAR.search(text):
                yield f"{where}: says {found[0]!r}: {text[:60]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_with_a_verb_or_a_noun_and_use_the_words_of_the_field(package):
    assert list(faults(package)) == []


def test_a_fault_of_each_kind_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.py").write_text(
        '"""What a file is."""\n\n\ndef f():\n    """Returns one."""\n\n\nX = "beside x"\n"""All but for one."""\n'
    )
    assert [fault.split(":")[0] for fault in faults("one")] == ["one/file.py"] * 4
