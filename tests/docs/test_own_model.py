"""Tests of the guide to your own model: its code is the example's, which trains and resumes under another plan."""

import re
from pathlib import Path

import pytest

from tests.processes.warm import ROOT
from tests.runtime.processes import run_ranks

GUIDE = ROOT / "docs" / "how-to" / "your-own-model.md"
EXAMPLE = ROOT / "examples" / "diffusion.py"


def test_the_code_of_the_guide_is_that_of_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    example = EXAMPLE.read_text(encoding="utf-8")
    assert len(blocks) >= 3
    assert [block for block in blocks if block.strip() not in example] == []


@pytest.mark.processes
def test_the_example_trains_as_one_process_does_also_after_it_goes_on_under_another_plan(tmp_path: Path) -> None:
    facts = run_ranks("tests.runtime.guide_worker:everything", 2, tmp_path)
    assert facts["found"] == pytest.approx(facts["expected"], rel=1e-4)
    assert facts["found"][-1] < facts["found"][0]
