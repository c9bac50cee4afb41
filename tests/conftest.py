"""Settings of all tests: no deadlines on busy machines, the same examples in every run, one trace per model.

Files with tests of several processes, which wait for each other, alternate with files of slow tests, which compute. All
others come last, so that at the end no worker waits for one that started a long file last.
"""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import steelyard.modules  # noqa: F401  which splits the models that tests make up

if "PYTEST_XDIST_WORKER" not in os.environ:  # modules with plans of such models are imported before any test runs
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="steelyard-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first test imports the hub
torch.set_num_threads(1)
"""One thread, as on ranks: waiting threads spin, at several times the CPU of the work if cores are shared."""

settings.register_profile(
    "steelyard",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=50,
    derandomize=True,
    database=None,
)
"""The same examples in every run, which find nothing a second time."""
settings.register_profile(
    "nightly",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=1000,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis"),
)
"""Chosen by ``make nightly``: other examples each time, and those that once failed first."""
settings.load_profile("steelyard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by the slowest marker of their tests, alternating between the two."""
    slowest = {item.path: 2 for item in items}
    for item in items:
        for rank, marker in enumerate(("processes", "slow")):
            if item.get_closest_marker(marker) is not None:
                slowest[item.path] = min(rank, slowest[item.path])
    places: dict[Path, tuple[bool, int, int]] = {}
    seen: Counter[int] = Counter()
    for path, rank in slowest.items():
        places[path] = (rank == 2, seen[rank], rank)
        seen[rank] += 1
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Exclude what is imported and collected from garbage collection, whose scans took 2 to 5 % of the tests' CPU, and
    an eighth of that of collecting.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
