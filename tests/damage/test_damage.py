"""Nothing that a user gives ends in a traceback, takes long, or much memory: generated damage and what it found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.damage.cases import make_case, whole_files
from tests.damage.corpus import kept
from tests.damage.documents import whole

CASES = 5000


def run_damage(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs cases in a process of their own, which may be limited, and in which nothing imports torch."""
    command = [sys.executable, "-m", "tests.damage", *map(str, arguments)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.slow
def test_no_generated_damage_ends_badly() -> None:
    finished = run_damage("--cases", CASES)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_what_once_ended_badly_does_no_more() -> None:
    finished = run_damage("--kept")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{len(kept())} cases" in finished.stdout


def test_a_case_is_the_same_for_the_same_seed() -> None:
    documents = whole()
    cases = [make_case(seed, documents) for seed in range(50)]
    assert cases == [make_case(seed, documents) for seed in range(50)]
    assert len({repr(case) for case in cases}) == 50


def test_a_case_damages_files_that_its_command_reads() -> None:
    documents = whole()
    names = set(whole_files(documents))
    assert all(set(make_case(seed, documents).files) <= names for seed in range(200))
