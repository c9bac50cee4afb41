"""README.md: its commands and figures are true, and the Python that docs/how-to/run-a-plan.md shows runs.

tests/docs/test_commands.py runs the commands of README.md and docs/.
"""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from tests.processes.warm import HANG_LIMIT_S, run_warm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ACCURACY = (ROOT / "docs" / "explanation" / "accuracy.md").read_text(encoding="utf-8")
CLASSES = ("dense 16-bit", "experts", "long context", "8-bit", "adapters")


def rows(text: str, heading: str = "") -> list[list[str]]:
    """Cells of the rows of tables, from a heading on to the next one."""
    part = re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]


def test_it_is_one_page_and_a_half() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_make_targets_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("name", CLASSES)
def test_errors_are_those_of_the_page_on_accuracy(name: str) -> None:
    shown = next(row for row in rows(README, "How accurate it is") if row[0] == name)
    time = next(row for row in rows(ACCURACY, "Time of a step") if row[0] == name)
    assert shown[1:4] == [time[1], time[4], time[5]]
    memory = [row for row in rows(ACCURACY, "Memory of a GPU") if row[0] == name and row[2] != "0"]
    biases = sorted((row[3] for row in memory), key=lambda bias: float(bias.rstrip("%")))
    too_low, runs = (sum(int(row[7].split(" of ")[part]) for row in memory) for part in (0, 1))
    expected = [str(runs), f"{biases[0]} to {biases[-1]}", f"{too_low} of {runs}"] if memory else ["0", "–", "–"]
    assert shown[4:] == expected


@pytest.mark.processes
def test_the_python_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resources.files("steelyard.model") / "configs" / "llama-demo.json"
    config = json.loads(source.read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = (ROOT / "docs" / "how-to" / "run-a-plan.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    assert len(shown.strip().splitlines()) <= 14
    script = shown.replace(
        '"1x8xa100-80gb", global_batch=64, seq_len=4096', '"1x2xa100-80gb", global_batch=4, seq_len=32'
    )
    script = script.replace("loss = ", "tokens = torch.arange(4 * 33).reshape(4, 33) % 256\nloss = ")
    script += "assert 5 < loss.item() < 6, loss\nfor optimizer in optimizers:\n    optimizer.step()\n"
    script += "dist.destroy_process_group()\n"
    (tmp_path / "example.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    words = ("--standalone", "--nproc-per-node=2", "example.py")
    finished = run_warm("tests.processes.forking_agent", *words, timeout_s=HANG_LIMIT_S)
    assert finished.returncode == 0, finished.stderr[-4000:]
