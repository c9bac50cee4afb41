"""What checksums cost a checkpoint: saving with them over saving without, and verifying over loading, by one rank.

One process writes a rank's file of fp32 tensors as `steelyard train` does, with and without the CRC-32 that is taken of
it, and reads it back, step about; the CPU seconds of each are less disturbed by other work than the wall clock.

Run: python benchmarks/checkpoint_checksums.py [--mebibytes N] [--repeats N]
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from steelyard.runtime.checkpoint import CheckpointReader, SummedFiles
from steelyard.runtime.checkpoint_folder import file_checksum

TENSOR_MEBIBYTES = 16
PAIRS = (("save with checksums", "save"), ("verify", "load"))


def main() -> None:
    """Prints the medians of all repeats and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the rank's file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tensors = {
        f"t{index}": torch.randn(TENSOR_MEBIBYTES << 18) for index in range(options.mebibytes // TENSOR_MEBIBYTES)
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        works: dict[str, Callable[[], object]] = {
            "save": lambda: _save(tensors, dcp.FileSystemWriter(folder)),
            "save with checksums": lambda: _save(tensors, _summing_writer(folder)),
            "load": lambda: dcp.load(tensors, storage_reader=CheckpointReader(folder), no_dist=True),
            "verify": lambda: [file_checksum(file) for file in folder.iterdir()],
        }
        seconds: dict[str, list[tuple[float, float]]] = {each: [] for each in works}
        for _ in range(options.repeats):
            for each, work in works.items():
                seconds[each].append(_timed(work))
    medians = {
        each: [statistics.median(values) for values in zip(*found, strict=True)] for each, found in seconds.items()
    }
    for each, (wall_s, cpu_s) in medians.items():
        print(f"{each:20} {wall_s:7.2f} s  CPU {cpu_s:6.2f} s  {options.mebibytes / 1024 / wall_s:5.2f} GiB/s")
    for one, other in PAIRS:
        wall, cpu = (a / b for a, b in zip(medians[one], medians[other], strict=True))
        print(f"{one} over {other}: {wall:.2f} of the time, {cpu:.2f} of the CPU seconds")


def _save(tensors: dict[str, torch.Tensor], writer: dcp.FileSystemWriter) -> None:
    dcp.save(tensors, storage_writer=writer, no_dist=True)


def _summing_writer(folder: Path) -> dcp.FileSystemWriter:
    writer = dcp.FileSystemWriter(folder)
    writer.fs = SummedFiles()
    return writer


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


if __name__ == "__main__":
    main()
