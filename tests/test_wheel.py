"""Test of the wheel as uploaded: built from sources, installed alone with dependencies, and planning."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]


def run(*command: object, folder: Path = ROOT) -> str:
    """Output of a successful command that sees no sources of steelyard."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    finished = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout


def needed(name: str, found: set[str]) -> set[str]:
    """A distribution and all that it depends on, extras left out."""
    if name not in found:
        found.add(name)
        for each in distribution(name).requires or ():
            if "extra ==" not in each and "sys_platform" not in each and "python_version" not in each:
                needed(re.split(r"[^\w.-]", each)[0], found)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and links to its dependencies."""
    folder = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = next(folder.glob("lib/python*/site-packages"))
    metadata = (packages / next(packages.glob("steelyard-*.dist-info")).name / "METADATA").read_text(encoding="utf-8")
    asked = [
        re.split(r"[^\w.-]", each)[0] for each in re.findall(r"^Requires-Dist: (?!.*extra ==)(.+)$", metadata, re.M)
    ]
    assert len(asked) >= 5
    for name in {each for first in asked for each in needed(first, set())}:
        parts = {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "__pycache__")}
        for part in parts:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(str(distribution(name).locate_file(part))))
    return python


def test_the_wheel_has_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert version is not None
    assert wheel.name.startswith(f"steelyard-{version[1]}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"steelyard", f"steelyard-{version[1]}.dist-info"}
    for name in ("py.typed", "model/configs/llama3-8b.json", "hardware/devices.yaml", "cli/mcp.py"):
        assert f"steelyard/{name}" in names
    assert f"steelyard-{version[1]}.dist-info/licenses/LICENSE" in names


def test_the_installed_wheel_plans_without_torch(python: Path, tmp_path: Path) -> None:
    steelyard = python.parent / "steelyard"
    assert run(steelyard, "--version").split()[1] in run(python, "-c", "import steelyard; print(steelyard.__version__)")
    missing = run(python, "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numba'))")
    assert missing.split() == ["None", "None"]
    job = ("llama3-8b", "--cluster", "1x8xa100-80gb", "--seq-len", 4096, "--global-batch", 64)
    run(steelyard, "plan", *job, "-o", "plan.json", folder=tmp_path)
    assert str(python.parents[1]) in run(python, "-c", "import steelyard; print(steelyard.__file__)", folder=tmp_path)
    run(steelyard, "export", "plan.json", "--to", "torchtitan", "-o", "titan", folder=tmp_path)
    run(steelyard, "schema", "plan", folder=tmp_path)
