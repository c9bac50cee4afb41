"""Tests that only a schedule's own module names it; others ask the registry."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import steelyard
from steelyard.schedules import SCHEDULES

SOURCE = Path(steelyard.__file__).parent
NAMES = {
    name
    for each in SCHEDULES.values()
    for name in (each.name, each.title, each.torch_name, each.torchtitan_name, each.megatron_name)
    if name is not None
}
NAMED = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in sorted(NAMES, key=len, reverse=True)))
MODULES = {type(each).__module__ for each in SCHEDULES.values()}


def texts_and_names(tree: ast.AST) -> Iterator[str]:
    """Texts that do not stand by themselves, as docstrings do, and names that are used or imported."""
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def names_a_schedule(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return bool(imports & MODULES) or any(NAMED.search(text) for text in texts_and_names(tree))


@pytest.mark.slow
def test_no_other_module_names_a_schedule() -> None:
    outside = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "schedules"]
    found = {path.relative_to(SOURCE).as_posix() for path in outside if names_a_schedule(path)}
    assert found == set()


def test_every_schedule_has_a_module_of_its_own() -> None:
    assert len(MODULES) == len(SCHEDULES)
    assert all(module.startswith("steelyard.schedules.") for module in MODULES)
