"""The shape of the project: imports without torch, docstrings and the files of a package."""

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
PLANNER = ("cli", "cost", "export", "hardware", "model", "plan", "profiles", "report", "schedules", "search")
TORCH_FREE = ("steelyard.installed", "steelyard.units", "steelyard.planning", "steelyard.tracer.packaged")
COPIED = SOURCE / "export" / "scripts"
"""What an export copies as it is, and nobody imports."""
MOST_LINES_OF_AN_OVERRIDE = 30
FILES_OF_ONE_MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|tmp)/")


def run_python(*arguments):
    """The finished process and all that it printed."""
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout + process.stderr


def num_code_lines(path):
    """The lines of a module without imports, docstrings, comments and blank ones."""
    text = path.read_text()
    found = {number for number, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            found -= set(range(node.lineno, node.end_lineno + 1))
    return len(found)


def module_name(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def planner_modules():
    imported = [path for path in MODULES if COPIED not in path.parents]
    inside = [module_name(path) for path in imported if path.relative_to(SOURCE).parts[0] in PLANNER]
    return ["steelyard", "steelyard.errors", "steelyard.files", *TORCH_FREE, *inside]


def texts_of(*folders):
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".json", ".yaml", ".toml", ".txt", ".sh"} and ".mypy_cache" not in path.parts
    ]


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


@pytest.mark.parametrize("path", sorted((SOURCE / "modules" / "overrides").glob("*.py")), ids=lambda path: path.stem)
def test_what_structure_cannot_tell_of_a_type_is_a_few_lines(path):
    assert num_code_lines(path) <= MOST_LINES_OF_AN_OVERRIDE
