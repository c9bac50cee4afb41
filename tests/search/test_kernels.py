"""Test of the search kernels where nothing compiles them."""

import importlib.util
import inspect
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from steelyard.search import kernels


def test_without_library_and_numba_kernels_run_as_they_stand_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    spec = spec_from_file_location("kernels", Path(kernels.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(inspect.isfunction(getattr(module, name)) for name in module.SIGNATURES)
    assert caplog.text.count("pip install numba") == 1
