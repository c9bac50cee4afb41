"""Reading the table of published runs, and what is said of a wrong one."""

import csv
from pathlib import Path

import pytest

from steelyard.validation.rows import InvalidRunsError, read_runs
from tests.validation.examples import FOLDER, run_of, sample


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
