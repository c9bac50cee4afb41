"""Tests of the project's shape: imports without torch, docstrings and the files of a package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steelyard

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "steelyard"
MODULES = sorted(SOURCE.rglob("*.py"))
PLANNER = ("cli", "cost", "engines", "hardware", "model", "plan", "profiles", "report", "schedules", "search")
TORCH_FREE = ("steelyard.installed", "steelyard.units", "steelyard.planning", "steelyard.tracer.cache")
COPIED = SOURCE / "engines" / "scripts"
"""Files that an export copies unchanged, and nobody imports."""
FILES_OF_ONE_MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|tmp)/")


def run_python(*arguments):
    """The finished process and all that it printed."""
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout + process.stderr


def module_name(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def planner_modules():
    imported = [path for path in MODULES if COPIED not in path.parents]
    inside = [module_name(path) for path in imported if path.relative_to(SOURCE).parts[0] in PLANNER]
    return ["steelyard", "steelyard.errors", "steelyard.files", *TORCH_FREE, *inside]


def imports_of(path, names):
    """The modules of the package that a file imports anywhere, also within functions and for type checking alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in names else node.module for each in inner.values()}
    return found & names


def circles_of(graph):
    """The sets of modules that import one another in a circle: the strongly connected components of several."""
    reached = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[start] = seen
    return {frozenset(other for other in reached[each] if each in reached[other]) for each in graph} - {frozenset()}


def texts_of(*folders):
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".json", ".yaml", ".toml", ".txt", ".sh"} and ".mypy_cache" not in path.parts
    ]


@pytest.mark.slow
def test_no_modules_import_one_another_in_a_circle():
    modules = {module_name(path): path for path in MODULES if COPIED not in path.parents}
    graph = {name: imports_of(path, set(modules)) for name, path in modules.items()}
    assert circles_of(graph) == set()


def test_a_circle_is_found_through_several_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}, "f": {"d"}}
    assert circles_of(graph) == {frozenset("abc"), frozenset("e")}


@pytest.mark.slow
def test_the_planner_imports_neither_torch_nor_transformers():
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    code, output = run_python("-c", script, *planner_modules())
    assert (code, output.strip()) == (0, "[]"), output


def test_every_planner_package_is_among_the_modules_that_are_imported():
    assert {f"steelyard.{package}" for package in PLANNER} <= set(planner_modules())


@pytest.mark.slow
def test_every_module_opens_with_a_docstring():
    assert [path.name for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_no_file_names_a_path_of_one_machine():
    texts = texts_of("src", "docs", "benchmarks")
    assert [path.name for path in texts if FILES_OF_ONE_MACHINE.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "name", ["LICENSE", "CHANGELOG.md", "README.md", "constraints.txt", "Makefile", "src/steelyard/py.typed"]
)
def test_the_package_has_its_files(name):
    assert (ROOT / name).is_file()


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.search(r"Apache License\s+Version 2\.0", text)


def test_the_constraints_pin_torch():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_the_constraints_pin_every_line_to_one_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = re.compile(r"[A-Za-z0-9._-]+==[0-9][\w.]*")
    assert [line for line in lines if line and not line.startswith("#") and not pinned.fullmatch(line)] == []


def test_the_changelog_names_the_version():
    assert steelyard.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["NothingFitsError", "find_plan", "read_plan", "write_plan"])
def test_every_public_name_of_the_planner_is_there(name):
    assert name in steelyard.__all__
    assert getattr(steelyard, name).__name__ == name


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'find_plann'"):
        steelyard.find_plann  # noqa: B018
