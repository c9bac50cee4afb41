"""Tests of the pre-training example: it learns a streamed mixture and saves a model for transformers."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from steelyard.plan.file import write_plan
from tests.integrations.test_lora_example import write_model
from tests.processes.warm import HANG_LIMIT_S, ROOT, run_warm
from tests.runtime.models import CONFIGS, make_plan

EXAMPLE = ROOT / "examples" / "pretrain.py"


def write_texts(path: Path, step: int, count: int) -> None:
    """Words that count on by a step."""
    texts = [" ".join(f"w{(row + step * n) % 64}" for n in range(30)) for row in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.processes
def test_the_example_learns_a_mixture_and_transformers_reads_its_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for name, step, count in (("a", 1, 60), ("b", 2, 60), ("held_out", 1, 8)):
        write_texts(tmp_path / f"{name}.jsonl", step, count)
    sizes = {"num_devices": 2, "global_batch": 8, "num_microbatches": 2, "seq_len": 16}
    write_plan(make_plan(CONFIGS["llama-tied"], "fsdp2, tp2+sp, dp2, fsdp2", **sizes), tmp_path / "plan.json")
    mixture = [f"{tmp_path}/a.jsonl:0.7", f"{tmp_path}/b.jsonl:0.3"]
    words = [EXAMPLE, tmp_path / "plan.json", tmp_path / "model", tmp_path / "out", tmp_path / "held_out.jsonl"]
    finished = run_warm(
        "tests.processes.forking_agent", "--standalone", "--nproc-per-node=2", *words, *mixture, timeout_s=HANG_LIMIT_S
    )
    assert finished.returncode == 0, finished.stderr[-40000:]
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '?([\d.]+)", finished.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert model.config.num_hidden_layers == 2
