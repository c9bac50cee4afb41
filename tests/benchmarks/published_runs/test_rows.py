"""Tests of reading the table of published runs, and of the errors for a wrong table."""

import csv
import gzip
from pathlib import Path

import pytest
from published_runs.rows import InvalidRunsError, of_sources, read_runs

from tests.benchmarks.published_runs.examples import FOLDER, run_of, sample


def rows() -> tuple[list[str], list[dict[str, str]]]:
    with (FOLDER / "runs.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def write(path: Path, columns: list[str], lines: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return path


def test_a_folder_and_its_file_read_the_same() -> None:
    assert read_runs(FOLDER / "runs.csv") == sample()


def test_a_compressed_table_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "runs.csv.gz").write_bytes(gzip.compress((FOLDER / "runs.csv").read_bytes()))
    assert read_runs(tmp_path) == sample()


def test_the_runs_beside_the_package_show_what_was_measured_of_every_job_that_ran() -> None:
    runs = read_runs()
    assert all(run.is_open for run in runs)
    measures = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem", "peak_mem_gib")
    assert all(any(run.text(each) for each in measures) for run in runs if run.status == "ok")
    assert {run.source for run in runs} >= {"vtrain", "megatron_golden"}


def test_the_runs_of_a_source_are_kept_in_their_order() -> None:
    kept = of_sources(sample(), ["vtrain", "torchtitan"])
    assert list(kept) == [run for run in sample() if run.source in {"torchtitan", "vtrain"}]


def test_a_source_without_a_run_is_named() -> None:
    with pytest.raises(InvalidRunsError, match="sources: found vtrian"):
        of_sources(sample(), ["vtrain", "vtrian"])


def test_an_empty_cell_is_not_known() -> None:
    assert run_of("vtrain", vocab="").count("vocab") is None


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    columns, lines = rows()
    columns.remove("vocab")
    with pytest.raises(InvalidRunsError, match="no column vocab"):
        read_runs(write(tmp_path / "runs.csv", columns, lines))


def test_a_folder_without_the_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunsError, match="a folder that holds"):
        read_runs(tmp_path)


def test_an_id_stands_once(tmp_path: Path) -> None:
    columns, lines = rows()
    with pytest.raises(InvalidRunsError, match="twice"):
        read_runs(write(tmp_path / "runs.csv", columns, [*lines, lines[0]]))


def test_a_cell_that_is_no_number_is_named_with_its_row() -> None:
    run = run_of("vtrain", hidden="wide")
    with pytest.raises(InvalidRunsError, match=f"{run.id}: hidden: found 'wide'"):
        run.number("hidden")


def test_a_fraction_is_no_count() -> None:
    with pytest.raises(InvalidRunsError, match="a whole number"):
        run_of("vtrain", layers="2.5").count("layers")
