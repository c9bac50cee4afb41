"""Reads the table of published runs: one row is one run, with its model, hardware, software, plan and measurement.

`data/README.md` explains the columns. An empty cell is not known, and nothing is filled in here.
"""

import csv
import gzip
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from steelyard.errors import UserError

FILE_NAMES = ("runs.csv", "runs.csv.gz")
_DATA = Path(__file__).parent / "data"
OPEN_RUNS = (_DATA, _DATA / "second", _DATA / "third")
"""The folders of the rows whose measurements are shown."""


class InvalidRunsError(UserError):
    """The folder holds no table of runs, or one that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """One row of a table; ``cells`` holds every column as text."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell as it stands; empty where it is not known."""
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """A cell as a number, or None where it is not known. Raises `InvalidRunsError` for anything else."""
        text = self.cells[column]
        if not text:
            return None
        try:
            return float(text)
        except ValueError as error:
            raise InvalidRunsError(field=f"{self.id}: {column}", found=repr(text), expected="a number") from error

    def count(self, column: str) -> int | None:
        """A cell as a whole number, or None where it is not known. Raises `InvalidRunsError` for a fraction."""
        value = self.number(column)
        if value is None:
            return None
        if value != int(value):
            raise InvalidRunsError(field=f"{self.id}: {column}", found=str(value), expected="a whole number")
        return int(value)

    @property
    def id(self) -> str:
        """What names the row."""
        return self.cells["id"]

    @property
    def is_open(self) -> bool:
        """Whether the row shows its measurement."""
        return self.cells["split"] == "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun(Cells):
    """One run; what is asked most often has a property."""

    @property
    def job(self) -> str:
        """The runs of one job differ in their plans only."""
        return self.cells["job"]

    @property
    def source(self) -> str:
        """Who published it."""
        return self.cells["source_file"]

    @property
    def is_recommended(self) -> bool:
        """Whether whoever compiled the table found nothing odd about the row."""
        return self.cells["recommended"] == "True"

    @property
    def status(self) -> str:
        """``ok``, ``oom``, ``failed`` or ``error``; empty where it is sealed."""
        return self.cells["status"]

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step."""
        return self.number("step_time_s")

    @property
    def is_dense_half(self) -> bool:
        """Whether the model is dense and all of it computes in bf16 or fp16."""
        precision = self.cells["precision"].lower()
        return not self.cells["moe_experts"] and "fp8" not in precision and "fp4" not in precision


_NEEDED_TEXT = """
    id split job tier recommended status source_file layers hidden heads kv_heads head_dim ffn mlp_type vocab seq_len
    tied_emb pos_emb moe_experts gpu gpu_mem_gb gpus gpus_per_node inter_link framework precision attention compile
    dp_shard zero_stage tp sp pp vpp cp ep mbs gbs grad_accum act_ckpt act_ckpt_detail schedule overlap offload
    step_time_s peak_mem_gib peak_mem mem_kind
"""
_NEEDED = tuple(_NEEDED_TEXT.split())
_ADDED_TEXT = """
    measures etp moe_topk moe_ffn moe_shared_experts moe_dense_layers moe_dispatcher moe_balance moe_shared_ffn
    vocab_padded cp_method mla_q_lora mla_kv_lora mla_qk_nope mla_qk_rope mla_v_head mtp_layers decoder_layers lora
    optimizer options cuda_graph flags notes
"""
_ADDED = dict.fromkeys(_ADDED_TEXT.split(), "")
"""Columns that a table may lack: nothing is known there."""


def read_runs(*paths: Path) -> tuple[PublishedRun, ...]:
    """The runs of folders that hold ``runs.csv`` or ``runs.csv.gz``, or of such files, in their order.

    Those whose measurements are shown where no path is given. Raises `InvalidRunsError` where there is no such file, a
    column is missing or an id stands twice in a table.
    """
    return tuple(run for path in paths or OPEN_RUNS for run in _read_table(table_file(path)))


def _read_table(file: Path) -> tuple[PublishedRun, ...]:
    with opened(file) as lines:
        reader = csv.DictReader(lines)
        missing = [column for column in _NEEDED if column not in (reader.fieldnames or ())]
        if missing:
            raise InvalidRunsError(
                field=str(file),
                found="no column " + ", ".join(missing),
                expected="the columns of the table of published runs",
                hint="its README names them",
            )
        runs = tuple(PublishedRun(cells=_ADDED | row) for row in reader)
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise InvalidRunsError(field=f"{file}: id", found=f"{run.id!r} twice", expected="each id once")
        seen.add(run.id)
    return runs


def of_sources(runs: Iterable[PublishedRun], sources: Collection[str]) -> tuple[PublishedRun, ...]:
    """The runs of these sources, in their order. Raises `InvalidRunsError` for a source without a run."""
    kept = tuple(run for run in runs if run.source in sources)
    missing = set(sources) - {run.source for run in kept}
    if missing:
        raise InvalidRunsError(
            field="sources", found=", ".join(sorted(missing)), expected="names of the table's column source_file"
        )
    return kept


def table_file(path: Path) -> Path:
    """The table of a folder, or the file itself; raises `InvalidRunsError` where there is none."""
    files = [path / name for name in FILE_NAMES] if path.is_dir() else [path]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        names = " or ".join(FILE_NAMES)
        raise InvalidRunsError(field="path", found=str(path), expected=f"a folder that holds {names}, or such a file")
    return found


def opened(file: Path) -> TextIO:
    """A table as text, which may be compressed."""
    if file.suffix == ".gz":
        return gzip.open(file, "rt", newline="", encoding="utf-8")
    return file.open(newline="", encoding="utf-8")
