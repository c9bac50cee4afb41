"""Tests of the trace cache: no torch on the second call, and a damaged file only costs time."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.profiles.profile import Profile
from steelyard.tracer import cache, trace
from steelyard.tracer.cache import cached_trace
from tests.runtime.models import FAMILY_CONFIGS
from tests.tracer.examples import SEQ_LEN, llama

_whole_trace = trace.trace
_kept: dict[str, Profile] = {}


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions to the tracer; equal questions get the trace of the first, under a later time."""
    asked: list[str] = []

    def counted(chain: ModelChain, **arguments: Any) -> Profile:
        question = f"{chain.config_hash} {sorted(arguments.items())}"
        asked.append(question)
        if question not in _kept:
            _kept[question] = _whole_trace(chain, **arguments)
        identity = _kept[question].identity.model_copy(update={"created": f"call {len(asked)}"})
        return _kept[question].model_copy(update={"identity": identity})

    monkeypatch.setattr(trace, "trace", counted)
    return asked


def _trace(folder: Path, **changes):
    arguments = {"seq_len": SEQ_LEN, "precision": "bf16", "degrees": (1,)} | changes
    return cached_trace(llama(), folder=folder, **arguments)


@pytest.mark.slow
def test_a_second_call_reads_the_file_without_importing_torch(tmp_path: Path) -> None:
    first = _trace(tmp_path)
    code = (
        "import sys; from pathlib import Path; from steelyard.tracer.cache import cached_trace;"
        "import steelyard.modules; from tests.tracer.examples import SEQ_LEN, llama;"
        f"folder = Path({str(tmp_path)!r});"
        "found = cached_trace(llama(), seq_len=SEQ_LEN, precision='bf16', degrees=(1,), folder=folder);"
        "assert 'torch' not in sys.modules; print(found.identity.created)"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert fresh.stderr == ""
    assert fresh.stdout.strip() == first.identity.created


def test_a_cached_trace_equals_the_first(tmp_path: Path, asked: list[str]) -> None:
    assert _trace(tmp_path) == _trace(tmp_path)
    assert len(asked) == 1


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1}', '{"version": 99}'])
def test_a_damaged_file_is_traced_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, asked: list[str]
) -> None:
    first = _trace(tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        again = _trace(tmp_path)
    assert again.layers == first.layers
    assert "traced again" in caplog.text
    assert _trace(tmp_path) == again
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"seq_len": 16}, {"precision": "fp32"}, {"degrees": (1, 2)}])
def test_whatever_enters_a_trace_is_part_of_its_key(tmp_path: Path, change: dict) -> None:
    _trace(tmp_path)
    _trace(tmp_path, **change)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_model_that_splits_otherwise_is_traced_again(tmp_path: Path, asked: list[str]) -> None:
    chain = llama()
    assert chain.split is not None
    for split in (chain.split, chain.split.model_copy(update={"head_calls": ()})):
        cached_trace(replace(chain, split=split), folder=tmp_path, seq_len=SEQ_LEN, precision="bf16", degrees=(1,))
    assert len(asked) == 2


def test_a_new_version_of_the_tracer_traces_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    _trace(tmp_path)
    monkeypatch.setattr(cache, "TRACER_VERSION", cache.TRACER_VERSION + 1)
    _trace(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(asked) == 2


def test_a_folder_that_cannot_be_written_costs_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert _trace(blocked / "below").layers
    assert "not cached" in caplog.text


def test_layers_that_fail_in_16_bits_are_refused_and_leave_tracebacks_as_they_are(tmp_path: Path) -> None:
    hook = sys.excepthook
    chain = chain_from_config(FAMILY_CONFIGS["swin"] | {"model_type": "swinv2"}, name="test")
    sizes: dict[str, Any] = {"seq_len": chain.max_seq_len, "degrees": (1, 2), "folder": tmp_path}
    with pytest.raises(UserError, match="--precision: found bf16 for test, whose layers fail in it: expected scalar"):
        cached_trace(chain, precision="bf16", **sizes)
    assert cached_trace(chain, precision="fp32", **sizes).layers
    assert sys.excepthook is hook
