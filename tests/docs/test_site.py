"""Tests of the site: a strict build, no external resources, every page; lines and links of all Markdown files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for part in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", ".github/**/*.md", "tests/**/*.md")
    for path in sorted(ROOT.glob(part))
]
_FENCE = re.compile(r"^ *```.*?^ *```", flags=re.MULTILINE | re.DOTALL)


def paths_of(nav: object) -> list[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [path for each in (nav.values() if isinstance(nav, dict) else nav) for path in paths_of(each)]


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_have_at_most_120_columns_outside_of_tables_and_code(page: Path) -> None:
    lines = _FENCE.sub("", text_of(page)).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.lstrip().startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", _FENCE.sub("", text_of(page))):
        path, _, anchor = target.partition("#")
        goal = page if not path else page.parent / path
        if "/blob/" in path or (page.parts[-2] == ".github" and not goal.exists()):
            continue  # of the site that holds the repository
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            dead.append(target)
    assert dead == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_the_navigation_has_four_parts_and_every_page(config: dict[str, object]) -> None:
    assert [name for part in config["nav"] for name in part] == ["Get started", "How-to", "Explanation", "Reference"]
    made = {"reference/command-line.md", "reference/schemas.md", "reference/python.md", "reference/devices.md"}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")}
    assert sorted(paths_of(config["nav"])) == sorted(pages | made)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*stylesheet[^>]*https?:")
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    line = (tmp_path / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "--why-not" in line
    assert "find_plan" in (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    assert "h100-80gb" in (tmp_path / "reference" / "devices.html").read_text(encoding="utf-8")
