"""Tests that an interruption at any instant leaves the last complete checkpoint intact and findable."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest

from steelyard.errors import InvalidCheckpointError, UserError
from steelyard.plan.file import write_plan
from steelyard.runtime import launch as launching
from steelyard.runtime.checkpoint_folder import (
    INFO_FILE,
    CheckpointInfo,
    changes,
    checkpoint_path,
    checkpoint_to_resume,
    commit,
    complete_checkpoints,
    content_fault,
    find_checkpoint,
    lock_folder,
    newest_intact,
    part_path,
    plan_hash,
    prepare_folder,
    read_info,
)
from steelyard.runtime.options import TrainOptions
from tests.runtime.models import make_plan

NUM_INSTANTS = 40
CONTENT = b"tensors"


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        num_samples=8 * step,
        seed=0,
        data_samples=100,
        model_name="test",
        config_hash="c",
        plan_hash="p",
        num_processes=2,
    )


def write(folder: Path, step: int, *, keep_last: int = 2) -> Path:
    part = part_path(folder, step)
    part.mkdir(parents=True)
    for rank in range(2):
        (part / f"__{rank}_0.distcp").write_bytes(CONTENT)
    checksums = {f"__{rank}_0.distcp": crc32(CONTENT) for rank in range(2)}
    return commit(folder, info(step), checksums, keep_last=keep_last)


class KilledError(BaseException):
    """Stands for SIGKILL."""


@contextmanager
def killed_before(number: int) -> Iterator[None]:
    """Kills before the ``number``-th change of the file system; undoes nothing."""
    changes = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes > number:
                raise KilledError
            return change(*arguments, **options)

        return run

    with mock.patch.multiple(
        os, rename=counted(os.rename), unlink=counted(os.unlink), rmdir=counted(os.rmdir), fsync=counted(os.fsync)
    ):
        try:
            yield
        except KilledError:
            return


@pytest.mark.parametrize("number", range(NUM_INSTANTS))
def test_a_kill_at_any_instant_of_a_commit_leaves_a_whole_checkpoint(tmp_path: Path, number: int) -> None:
    write(tmp_path, 3)
    write(tmp_path, 6)
    with killed_before(number):
        write(tmp_path, 9)
    newest, faults = newest_intact(tmp_path)
    assert newest in (checkpoint_path(tmp_path, 6), checkpoint_path(tmp_path, 9))
    assert faults == []
    assert all((newest / f"__{rank}_0.distcp").read_bytes() == CONTENT for rank in range(2))


def test_the_instants_above_reach_from_before_the_first_change_to_after_the_last(tmp_path: Path) -> None:
    found = set()
    for number in range(NUM_INSTANTS):
        shutil.rmtree(tmp_path)
        write(tmp_path, 3)
        write(tmp_path, 6)
        with killed_before(number):
            write(tmp_path, 9)
        found.add(tuple(path.name for path in sorted(tmp_path.iterdir())))
    assert (".step-00000009.part", "step-00000003", "step-00000006") in found
    assert ("step-00000003", "step-00000006", "step-00000009") in found
    assert (".step-00000003.old", "step-00000006", "step-00000009") in found
    assert ("step-00000006", "step-00000009") in found


@pytest.mark.parametrize("number", range(NUM_INSTANTS))
def test_what_a_killed_run_left_is_removed_when_the_next_begins(tmp_path: Path, number: int) -> None:
    write(tmp_path, 3)
    with killed_before(number):
        write(tmp_path, 6, keep_last=1)
    newest, _ = newest_intact(tmp_path)
    prepare_folder(tmp_path, resumed=newest)
    assert [path for path in tmp_path.iterdir() if path not in complete_checkpoints(tmp_path)] == []
    assert newest_intact(tmp_path)[0] == newest


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000009", "step-00000012"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step-00000003" / "__0_0.distcp").write_bytes(b"")
    assert read_info(write(tmp_path, 3)).step == 3


def test_checkpoints_are_ordered_by_step_beyond_eight_digits(tmp_path: Path) -> None:
    for step in (3, 123_456_789, 20):
        write(tmp_path, step, keep_last=3)
    assert newest_intact(tmp_path)[0] == tmp_path / "step-123456789"


def test_latest_passes_over_a_truncated_checkpoint_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 6)
    (tmp_path / "step-00000006" / "__1_0.distcp").write_bytes(CONTENT[:3])
    path, faults = find_checkpoint("latest", tmp_path)
    assert path == tmp_path / "step-00000003"
    assert faults == [f"{tmp_path}/step-00000006/__1_0.distcp with 3 bytes instead of 7"]


def test_a_truncated_checkpoint_that_is_named_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step-00000003" / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(InvalidCheckpointError, match="with 0 bytes instead of 7"):
        find_checkpoint(str(tmp_path / "step-00000003"), None)


def test_a_checkpoint_without_a_file_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step-00000003" / "__1_0.distcp").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"without its file __1_0\.distcp"):
        read_info(tmp_path / "step-00000003")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_found_by_the_share_that_reads_the_file_and_by_no_other(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert [content_fault(path, index=index, num_shares=3) for index in range(3)] == [None] * 3
    flip_a_bit(path / "__1_0.distcp")
    found = [content_fault(path, index=index, num_shares=3) for index in range(3)]
    assert sorted(map(str, found)) == [
        f"{path}/__1_0.distcp, whose content has changed since it was written",
        "None",
        "None",
    ]


def test_latest_passes_over_a_checkpoint_whose_content_is_damaged_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 3)
    known = {write(tmp_path, 6): "a file is damaged"}
    assert find_checkpoint("latest", tmp_path, known) == (tmp_path / "step-00000003", ["a file is damaged"])


def test_a_checkpoint_that_is_named_and_damaged_inside_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    with pytest.raises(InvalidCheckpointError, match="found a file is damaged"):
        find_checkpoint(str(path), None, {path: "a file is damaged"})


def test_a_checkpoint_from_before_there_were_checksums_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    found = json.loads((path / INFO_FILE).read_text())
    del found["checksums"]
    (path / INFO_FILE).write_text(json.dumps(found))
    flip_a_bit(path / "__1_0.distcp")
    assert content_fault(path, index=0, num_shares=1) is None


def test_a_damaged_checkpoint_that_was_passed_over_does_not_outlive_those_that_come_after_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    damaged = write(tmp_path, 6)
    prepare_folder(tmp_path, resumed=tmp_path / "step-00000003", known={damaged: "a file is damaged"})
    write(tmp_path, 4, keep_last=1)
    assert newest_intact(tmp_path) == (tmp_path / "step-00000004", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006.damaged"]


@pytest.mark.parametrize(
    ("entry", "value"), [("step", -1), ("num_samples", -1), ("num_samples", 10**30), ("step", "3"), ("step", 4)]
)
def test_a_position_that_no_run_has_is_refused(tmp_path: Path, entry: str, value: object) -> None:
    path = write(tmp_path, 3)
    found = json.loads((path / INFO_FILE).read_text())
    (path / INFO_FILE).write_text(json.dumps(found | {entry: value}))
    with pytest.raises(InvalidCheckpointError, match=rf"run\.json.*{entry}"):
        read_info(path)


LOCKS = """
import sys, time
from pathlib import Path
from steelyard.runtime.checkpoint_folder import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def test_a_second_run_into_one_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    with subprocess.Popen([sys.executable, "-c", LOCKS, str(folder)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(InvalidCheckpointError, match=rf"another run is writing \(process {first.pid} on "):
            lock_folder(folder)
        first.kill()
    lock_folder(folder).close()


def test_a_folder_whose_file_system_has_no_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_folder(tmp_path).close()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 2}', "\0"])
def test_a_damaged_description_is_an_error(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, 3)
    (path / INFO_FILE).write_text(content)
    with pytest.raises(InvalidCheckpointError, match=r"run\.json, which is damaged"):
        read_info(path)


def test_a_foreign_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InvalidCheckpointError, match="no checkpoint in"):
        find_checkpoint(str(tmp_path), None)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="no folder"):
        find_checkpoint(str(tmp_path / "missing"), None)


def test_latest_needs_a_folder() -> None:
    with pytest.raises(InvalidCheckpointError, match="no --checkpoint-dir"):
        find_checkpoint("latest", None)


def test_a_new_run_does_not_take_the_folder_of_another(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with pytest.raises(InvalidCheckpointError, match="step-00000003 in"):
        prepare_folder(tmp_path, resumed=None)


def test_a_run_that_goes_back_does_not_mix_with_later_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 6)
    with pytest.raises(InvalidCheckpointError, match="step-00000006 in"):
        prepare_folder(tmp_path, resumed=tmp_path / "step-00000003")


def test_a_run_that_goes_on_from_another_folder_wants_an_empty_one(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    write(tmp_path / "b", 3)
    with pytest.raises(InvalidCheckpointError, match="--checkpoint-dir"):
        prepare_folder(tmp_path / "b", resumed=tmp_path / "a" / "step-00000003")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidCheckpointError, match="a writable folder"):
        lock_folder(tmp_path / "file" / "folder")


def test_a_foreign_or_other_models_checkpoint_is_found_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "run_processes", lambda *_arguments, **_options: pytest.fail("a process started"))
    plan = make_plan("llama-tied", "dp8, dp8, dp8, dp8")
    write_plan(plan, tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("to be or not to be " * 1000)
    for resume, message in ((write(tmp_path / "checkpoints", 3), "of test"), (tmp_path, "no checkpoint in")):
        options = TrainOptions(resume=str(resume))
        with pytest.raises(InvalidCheckpointError, match=message):
            launching.launch(tmp_path / "plan.json", tmp_path / "text.txt", options)


def test_changed_options_are_named_and_asked_for_before_any_process_starts(tmp_path: Path) -> None:
    before = TrainOptions(lr=1e-3, steps=10)
    info = read_info(write(tmp_path, 3)).model_copy(update={"options": before.of_run("a/tokens.npy")})
    assert changes(info, tmp_path, before, "b/tokens.npy", info.data_samples) == {}
    other = replace(before, lr=1e-4, steps=20)
    with pytest.raises(
        UserError, match=r"data is text of 7 samples, was tokens.npy of .*; lr is 0.0001, was 0.001"
    ) as raised:
        changes(info, tmp_path, other, "text", 7)
    assert "--allow-change data,lr,steps;" in raised.value.hint
    allowed = replace(other, allow_change="data,lr, steps")
    assert list(changes(info, tmp_path, allowed, "text", 7)) == ["data", "lr", "steps"]
    with pytest.raises(UserError, match="--steps: found 3, and a checkpoint after step 3"):
        changes(info, tmp_path, replace(allowed, steps=3), "text", 7)
    with pytest.raises(UserError, match=r"--allow-change: found 'lrr'"):
        replace(other, allow_change="lrr")


def test_a_run_goes_on_by_itself_unless_it_is_told_to_start_anew(tmp_path: Path) -> None:
    options = TrainOptions(checkpoint_dir=tmp_path)
    assert checkpoint_to_resume(TrainOptions()) is None
    assert checkpoint_to_resume(options) is None
    written = write(tmp_path, 3)
    assert checkpoint_to_resume(options) == (written, [])
    anew = replace(options, no_resume=True)
    assert checkpoint_to_resume(anew) is None
    assert checkpoint_to_resume(anew, is_restart=True) == (written, [])
    prepare_folder(tmp_path, resumed=None, sets_aside=True)
    (aside,) = tmp_path.glob("before-*")
    assert checkpoint_to_resume(options) is None
    assert checkpoint_to_resume(replace(options, resume=str(aside))) == (aside / written.name, [])


def test_the_hash_of_a_plan_leaves_out_what_it_predicts_and_its_name() -> None:
    plan = make_plan("llama", "fsdp8, dp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8")
    other = make_plan("llama", "fsdp8, dp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, dp8")
    assert plan_hash(plan) == plan_hash(plan.model_copy(update={"cluster": "another"}))
    assert plan_hash(plan) != plan_hash(other)
