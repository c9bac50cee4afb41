"""Tests of PyTorch's allocator settings: the user's, or ours against fragmentation on a full GPU."""

import os
import subprocess
import sys

import pytest

from steelyard.processes.allocator import SETTING, VARIABLE, VARIABLES, allocator_setting, set_allocator


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_segments_expand_where_the_user_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    assert allocator_setting() == ""
    set_allocator()
    assert allocator_setting() == SETTING == os.environ[VARIABLE]


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["max_split_size_mb:128", ""])
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    set_allocator()
    assert {each: os.environ[each] for each in VARIABLES if each in os.environ} == {name: value}
    assert allocator_setting() == value


@pytest.mark.parametrize("module", ["steelyard.train", "steelyard.profiler.__main__"])
def test_a_process_of_a_run_sets_it_before_torch(module: str) -> None:
    """Test in a separate process with torchrun's imports, which ends at the first import of torch."""
    code = f"""
import os, sys
from steelyard.processes import allocator
found = []
allocator.set_allocator = lambda: found.append("set")

class EndsAtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(found, flush=True)
            os._exit(0)

sys.meta_path.insert(0, EndsAtTorch())
import {module}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['set']"
