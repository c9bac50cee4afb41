"""Settings of all tests: a busy machine may take its time, two runs try the same, and every model is traced once.

Files with tests of several processes come first, then those with slow ones, so that at the end no worker waits for one
that began a long file last.
"""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import steelyard.modules  # noqa: F401  which splits the models that tests make up

if "PYTEST_XDIST_WORKER" not in os.environ:  # modules with plans of such models are imported before any test runs
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="steelyard-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile(
    "steelyard", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
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
    """Sorts files by the slowest marker of their tests."""
    ranks = {item.path: 2 for item in items}
    for item in items:
        for rank, marker in enumerate(("processes", "slow")):
            if item.get_closest_marker(marker) is not None:
                ranks[item.path] = min(rank, ranks[item.path])
    items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish() -> None:
    """What is imported and collected by now is no garbage: looking at it again and again took 2 to 5 % of the CPU."""
    gc.freeze()
