"""Tests of untrusted checkpoints: none runs code, and a wrong one gives one message."""

import io
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from steelyard.errors import InvalidCheckpointError
from steelyard.runtime.checkpoint import METADATA_FILE, CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Unpickled, it makes an empty folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    dcp.save({"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, checkpoint_id=folder, no_dist=True)
    return folder


def change(path: Path, edit: Callable[[Metadata], None]) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    edit(metadata)
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def load(path: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.zeros(6), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}
    dcp.load(tensors, storage_reader=CheckpointReader(path))
    return tensors


def test_what_torch_writes_is_read(path: Path) -> None:
    found = load(path)
    assert torch.equal(found["a"], torch.arange(6.0))
    assert torch.equal(found["b"], torch.ones(2, 3, dtype=torch.bfloat16))


def test_the_payload_of_these_tests_runs_where_pickles_are_read_as_they_are(path: Path, tmp_path: Path) -> None:
    change(path, lambda metadata: setattr(metadata, "planner_data", Payload(tmp_path / "ran")))
    dcp.FileSystemReader(path).read_metadata()
    assert (tmp_path / "ran").is_dir()


def test_code_in_the_description_does_not_run(path: Path, tmp_path: Path) -> None:
    change(path, lambda metadata: setattr(metadata, "planner_data", Payload(tmp_path / "ran")))
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata: it refers to posix\.mkdir, which no"):
        CheckpointReader(path)
    assert not (tmp_path / "ran").exists()


def test_a_description_of_one_ranks_own_is_never_read_in_its_place(path: Path, tmp_path: Path) -> None:
    (path / METADATA_FILE).unlink()
    (path / "__0.metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(InvalidCheckpointError, match=r"No such file"):
        load(path)
    assert not (tmp_path / "ran").exists()


def test_code_in_an_object_beside_the_tensors_does_not_run(path: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(Payload(tmp_path / "ran"), content)
    (path / "__0_0.distcp").write_bytes(content.getvalue())

    def replace(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        places["a"].offset, places["a"].length = 0, len(content.getvalue())
        index = dcp.metadata.MetadataIndex("a")
        metadata.storage_data = {index: places["a"]}

    change(path, replace)
    with pytest.raises(InvalidCheckpointError, match="BytesStorageMetadata, which no checkpoint needs"):
        load(path)
    assert not (tmp_path / "ran").exists()


def test_code_among_the_tensors_does_not_run(path: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(Payload(tmp_path / "ran"), content)
    (path / "__0_0.distcp").write_bytes(content.getvalue())

    def replace(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, len(content.getvalue())

    change(path, replace)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load(path)
    assert not (tmp_path / "ran").exists()


class OldPickler(pickle.Pickler):
    """Pickles enums as Python 3.11.2 does."""

    def reducer_override(self, found: Any) -> Any:
        return (getattr, (type(found), found.name)) if isinstance(found, Enum) else NotImplemented


def test_what_an_older_python_wrote_is_read_and_other_attributes_are_not(path: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    content = io.BytesIO()
    OldPickler(content).dump(metadata)
    assert b"getattr" in content.getvalue()
    (path / METADATA_FILE).write_bytes(content.getvalue())
    assert torch.equal(load(path)["a"], torch.arange(6.0))
    for name in ("__class__", "mro"):
        (path / METADATA_FILE).write_bytes(f"cbuiltins\ngetattr\n(ctorch\nSize\nV{name}\ntR.".encode())
        with pytest.raises(InvalidCheckpointError, match=f"an attribute {name} of .*, which no checkpoint needs"):
            CheckpointReader(path)


def test_a_file_outside_the_folder_is_not_read(path: Path) -> None:
    def lead_away(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../elsewhere.distcp"

    change(path, lead_away)
    with pytest.raises(InvalidCheckpointError, match=r"outside its folder, \.\./elsewhere"):
        CheckpointReader(path)


@pytest.mark.parametrize("damage", [b"", b"\0", b"\x80\x05.", pickle.dumps([1]), pickle.dumps(Metadata(None))])  # type: ignore[arg-type]
def test_a_damaged_description_is_one_message(path: Path, damage: bytes) -> None:
    (path / METADATA_FILE).write_bytes(damage)
    with pytest.raises(InvalidCheckpointError, match=r"--resume: found .*\.metadata: "):
        CheckpointReader(path)


def test_a_description_that_is_cut_anywhere_is_one_message(path: Path) -> None:
    whole = (path / METADATA_FILE).read_bytes()
    for length in range(len(whole)):
        (path / METADATA_FILE).write_bytes(whole[:length])
        with pytest.raises(InvalidCheckpointError, match=r"\.metadata: "):
            CheckpointReader(path)
