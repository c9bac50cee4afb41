"""Tests that the wheel's search kernels give bitwise the results of those that numba compiles."""

import importlib.util
import inspect
import shutil
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_job
from steelyard.search import kernels
from tests.cost.examples import cluster, job
from tests.planning.test_choose import tightening

ROOT = Path(__file__).parents[2]
FEW_CALLS = 20


def load(name: str, path: Path) -> ModuleType:
    """The module in a file."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Library that the build of a wheel makes of the kernels."""
    hatchling = "hatchling.builders.hooks.plugin.interface"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, hatchling, SimpleNamespace(BuildHookInterface=object))  # type: ignore[misc]
        hook = load("hatch_build", ROOT / "hatch_build.py")
    folder = tmp_path_factory.mktemp("built")
    hook.compile_kernels(Path(kernels.__file__), folder)
    (file,) = folder.iterdir()
    return load("compiled_kernels", file)


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


@pytest.mark.slow
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


def test_without_library_and_numba_kernels_run_as_they_stand_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    module = load("kernels", Path(kernels.__file__))
    assert all(inspect.isfunction(getattr(module, name)) for name in module.SIGNATURES)
    assert caplog.text.count("pip install numba") == 1
