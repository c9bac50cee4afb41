"""Tests of every ``steelyard`` command in README.md and docs/: it runs, or is listed here with a reason why not.

Commands of other pages, and those inside sentences, exist with the options that they show.

The commands of a document run one after another in a folder of their own, where ``plan.json`` and the other files that
documents speak of are there from the start; a document may write over them. A command that several documents show, with
its options in any order, is run for the first of them. Those that search for long search for less here (`with_less`).
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from steelyard.cli.app import app
from tests.cli.conftest import _searched_once  # noqa: F401  what several commands show is searched once
from tests.modules.split_configs import split_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [*sorted((ROOT / "benchmarks").glob("*.md")), *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
SHOWS_ENGINES = True
KNOWN = get_command(app).commands  # type: ignore[attr-defined]
LANGUAGES = {"", "console", "sh", "bash", "shell"}
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_SHELL_WORDS = {"|", ">", ">>", "&&", ";", "<"}

COVERED_ELSEWHERE = {
    "train": "starts processes and trains: tests/runtime/test_launch.py, tests/cli/test_demo.py",
    "profile": "measures for minutes: tests/profiler, tests/cli/test_demo.py",
    "demo": "profiles and trains: tests/cli/test_demo.py",
    "measure": "starts processes and trains: tests/cli/test_measure.py",
    "check": "runs the runtime for every distinct rank: tests/cli/test_check.py, tests/runtime/test_dry_run.py",
    "parity": "trains twice: tests/runtime/test_parity.py",
}
NEEDS = {
    "--profile": "needs a profile measured on the reader's machine: tests/cli/test_demo.py",
    "--from-run": "needs the record of a run: tests/profiles",
    "--record": "needs the record of a run: tests/cli/test_elastic.py",
    "--calibrate": "needs the record of a run: tests/cli/test_plan.py",
}
FEWER = {"frontier": ["--points", "3"], "report": ["--time-limit", "0"]}
"""Options after those that are shown, so that less is searched: tests/cli/test_frontier.py and test_report.py do."""
SMALLER = {
    "llama3-70b": "llama3.2-1b",
    "llama3-405b": "llama3.2-1b",
    "1x8xa100-80gb": "1x4xa100-80gb",
    "1x8xh100-80gb": "1x4xh100-80gb",
    "fsdp8": "fsdp4",
    "8x8xh100-80gb": "2x2xh100-80gb",
    "4x8xa100-80gb": "2x2xa100-80gb",
    "2x8xa100-80gb": "2x2xa100-80gb",
    "2x8xh100-80gb+4x8xa100-40gb": "1x2xh100-80gb+1x2xa100-40gb",
}
"""Smaller models and clusters than those that are shown, which tests/model/test_read.py reads, in place of all that is
searched."""


def commands(document: Path) -> list[list[str]]:
    """The words behind ``steelyard`` of every command that the document shows, in order."""
    found = []
    for language, body in _FENCE.findall(document.read_text(encoding="utf-8")):
        if language not in LANGUAGES:
            continue
        for line in re.sub(r"\\\n\s*", " ", body).splitlines():
            text = line.strip().removeprefix("$ ")
            if text.startswith("steelyard ") and not re.match(r"steelyard \S*[^\w\s-]", text):
                found.append(_words(text))
    return found


def inside_sentences(document: Path) -> list[list[str]]:
    """The words of every command in a sentence; places of what a reader chooses stand in capitals."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    return [_words(each) for each in re.findall(r"`(steelyard\s[a-z][^`]*)`", text)]


def _words(text: str) -> list[str]:
    words = shlex.split(text, comments=True)[1:]
    end = next((index for index, word in enumerate(words) if word in _SHELL_WORDS), len(words))
    return [word for word in words[:end] if word not in ("...", "…")]


def reason_not_to_run(words: list[str]) -> str | None:
    """Reason why a command is not run here; None if it is."""
    if words[0] in COVERED_ELSEWHERE:
        return COVERED_ELSEWHERE[words[0]]
    return next((reason for option, reason in NEEDS.items() if option in words), None)


def with_less(words: list[str]) -> list[str]:
    """The words of a command, all that are shown, for a smaller model or cluster or with less to search."""
    smaller = words if words[0] == "price" else [SMALLER.get(word, word) for word in words]
    if {"--train", "--freeze"} & {*words}:  # which is traced, for every number of devices that a node's is divided by
        smaller = [re.sub(r"^1x4x", "1x1x", word) for word in smaller]
    return smaller + FEWER.get(words[0], [])


def problem_shown() -> str:
    """The problem file that docs/how-to/problem-files.md shows."""
    blocks = _FENCE.findall((ROOT / "docs" / "how-to" / "problem-files.md").read_text(encoding="utf-8"))
    return next(body for language, body in blocks if language == "json" and '"settings"' in body)


@pytest.fixture(scope="module")
def have_run() -> set[tuple[str, ...]]:
    """The commands that ran, each as its sorted words."""
    return set()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, have_run: set[tuple[str, ...]]) -> Iterator[Path]:
    """The files that documents speak of."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        job = ["llama3-8b", "--cluster", "1x8xa100-80gb", "--seq-len", "4096", "--global-batch", "64"]
        plan = ["plan", *job, "-o", "plan.json"]
        made = CliRunner().invoke(app, with_less(plan))
        assert made.exit_code == 0, made.output
        have_run.add(tuple(sorted(plan)))
        Path("problem.json").write_text(problem_shown())
        for name in ("a.json", "b.json", "mine.json"):
            shutil.copy("plan.json", name)
        config = resources.files("steelyard.model") / "configs" / "llama3-8b.json"
        Path("config.json").write_text(config.read_text())
        Path("llava").mkdir()
        Path("llava", "config.json").write_text(json.dumps(split_config("llava")))
        shutil.copytree(ROOT / "examples", "examples")
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_shown_runs(
    document: Path, files: Path, have_run: set[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("steelyard.planning.advise.TOTAL_S", 2.0)
    monkeypatch.setattr("steelyard.planning.complete.ENGINE_LIMIT_S", 0.1)
    monkeypatch.setattr("steelyard.planning.complete.ENGINE_SHARE", 0.0)
    if document != DOCUMENTS[0]:  # other engines are searched for the commands of README.md alone
        monkeypatch.setattr("steelyard.cli.plan.engine_answers", lambda *_, **__: ())
    for words in commands(document):
        if reason_not_to_run(words) is None and tuple(sorted(words)) not in have_run:
            result = CliRunner().invoke(app, with_less(words))
            have_run.add(tuple(sorted(words)))
            shown = f"steelyard {shlex.join(words)}\n{result.output[-2000:]}"
            assert result.exit_code == 0, f"{shown}\n{result.exception or ''}"


@pytest.mark.parametrize("document", DOCUMENTS + OTHERS, ids=lambda path: path.name)
def test_every_command_shown_exists_with_its_options(document: Path) -> None:
    for words in commands(document) + inside_sentences(document):
        assert words[0] in KNOWN, f"steelyard {words[0]} in {document.name}"
        options = {option for parameter in KNOWN[words[0]].params for option in parameter.opts}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options | {"--help"}, f"steelyard {shlex.join(words)} in {document.name}"


def test_documents_show_commands_that_are_run() -> None:
    run = {words[0] for document in DOCUMENTS for words in commands(document) if reason_not_to_run(words) is None}
    assert {"plan", "explain", "export"} <= run


def test_a_command_is_read_with_its_continuation_and_without_its_comment(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "```console\n$ steelyard plan x \\\n    --memory 1GiB   # a comment\nsteelyard x.y\nmore\n```\n"
        "```python\nsteelyard plan y\n```\n```\nsteelyard models | head\n```\n"
    )
    assert commands(document) == [["plan", "x", "--memory", "1GiB"], ["models"]]


def test_every_json_block_that_is_a_plan_is_valid() -> None:
    from steelyard.errors import InvalidPlanError
    from steelyard.plan.file import parse_value
    from steelyard.plan.plan import Plan

    for document in DOCUMENTS:
        for language, body in _FENCE.findall(document.read_text(encoding="utf-8")):
            if language == "json" and '"stages"' in body and '"cluster"' in body:
                assert parse_value(json.loads(body), Plan, InvalidPlanError, what="plan").num_devices
