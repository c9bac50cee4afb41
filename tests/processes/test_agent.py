"""Tests of torchrun as `steelyard.processes.agent` runs it."""

from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import Std, to_map

from steelyard.processes.agent import QuietLogs


def test_every_process_but_the_first_writes_its_errors_to_a_file_however_many_there_are(tmp_path: Path) -> None:
    found = to_map(QuietLogs(str(tmp_path))._redirects, 16)
    assert found == {0: Std.NONE} | dict.fromkeys(range(1, 16), Std.ERR)
