"""Test of every night: figures that pages quote from a command are those that it prints."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app

ROOT = Path(__file__).parents[2]
QUOTED = {
    ("README.md", "plan llama3-70b --cluster 8x8xh100-80gb --seq-len 8192 --global-batch 64"): (
        "10.1 s per step, 813 tokens/s and 365 TFLOP/s per device, MFU 36.9%",
        "3.9% faster than the baseline",
        "75.1 GiB of 75.1 GiB on the fullest device",
        "9 in 10 such runs: 8.45 s to 13.1 s",
        "blocks 60–79: selective remat; full remat would take 10.5 s per step (4.1% slower)",
    ),
    ("README.md", "advise llama2-7b --cluster 1x1xrtx-4090 --seq-len 2048 --global-batch 1"): (
        "16.0 GiB 93.6 GiB 752 ms -28 %",
        "6.37 GiB 103 GiB 813 ms -22 %",
        "3.61 GiB 106 GiB 6.74 s +544 %",
    ),
    (
        "docs/how-to/does-it-fit.md",
        "plan llama2-7b --cluster 1x1xrtx-4090 --seq-len 2048 --global-batch 1 --offload auto",
    ): ("offload parameters: 6.74 s a step, nothing fits without it; without it on 1x8xrtx-4090 968 ms a step",),
    (
        "docs/how-to/fine-tune.md",
        "plan llama3-70b --cluster 1x8xa100-80gb --seq-len 4096 --global-batch 64 --train lora:r=16",
    ): ("63.5 s per step", "75.1 GiB of 75.2 GiB"),
    (
        "docs/how-to/fine-tune.md",
        "plan llama3-405b --cluster 1x8xh100-80gb --seq-len 2048 --global-batch 16 --train qlora:r=16",
    ): ("38.3 s per step", "74.8"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "command"), QUOTED, ids=[command for _, command in QUOTED])
def test_quoted_figures_are_those_that_the_command_prints(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.planning.advise.TOTAL_S", 300.0)
    monkeypatch.setenv("COLUMNS", "140")
    written = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    result = CliRunner().invoke(app, shlex.split(command))
    printed = " ".join(result.stdout.split())
    for quoted in QUOTED[page, command]:
        assert quoted in written
        assert quoted in printed
