"""Tests of the wheel as uploaded: built from sources, installed alone with dependencies, and planning.

Its compiled search kernels give bitwise the results of those that numba compiles.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.search import kernels
from tests.cost.examples import cluster, job
from tests.planning.test_choose import tightening

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FEW_CALLS = 20
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


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Library of the kernels in the wheel."""
    folder = tmp_path_factory.mktemp("library")
    (name,) = (each for each in zipfile.ZipFile(wheel).namelist() if "/compiled_kernels" in each)
    spec = spec_from_file_location("compiled_kernels", zipfile.ZipFile(wheel).extract(name, folder))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calls() -> dict[str, list[tuple[Any, ...]]]:
    """Return the arguments of the first calls of each kernel in a search, also with memory as the bottleneck."""
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in kernels.SIGNATURES}

    def recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if len(found[name]) < FEW_CALLS:
                found[name].append(copied(arguments))
            return kernel(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in kernels.SIGNATURES:
            patch.setattr(kernels, name, recorded(name, getattr(kernels, name)))
        plan_job(job(), Decisions())
        for batch, num_blocks in ((64, 8), (16, 6)):  # of the second the gap stays open until all plans are told apart
            of = job(cluster(1, 8), global_batch=batch, num_hidden_layers=num_blocks)
            plan_job(tightening(of, 10)[-1], Decisions())
    return found


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.copy() if isinstance(each, np.ndarray) else each for each in arguments)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to link them")
@pytest.mark.parametrize("name", kernels.SIGNATURES)
def test_a_kernel_of_the_wheel_gives_the_same_bits(
    library: ModuleType, calls: dict[str, list[tuple[Any, ...]]], name: str
) -> None:
    assert calls[name]
    for arguments in calls[name]:
        mine, theirs = copied(arguments), copied(arguments)
        assert getattr(library, name)(*mine) == getattr(kernels, name)(*theirs)
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
