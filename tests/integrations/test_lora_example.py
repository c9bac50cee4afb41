"""Tests of the fine-tuning example: it learns completions on two processes and saves adapters for peft."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from steelyard.plan.file import write_plan
from tests.processes.warm import HANG_LIMIT_S, ROOT, run_warm
from tests.runtime.lora_cases import lora_plan
from tests.runtime.models import CONFIGS

EXAMPLE = ROOT / "examples" / "lora_sft.py"
CONFIG = {key: value for key, value in CONFIGS["llama-tied"].items() if key != "model_type"} | {"eos_token_id": 1}


def write_model(folder: Path) -> None:
    """A model of first weights, with a tokenizer of 64 words and two roles."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    words = {
        word: number
        for number, word in enumerate(["<pad>", "<eos>", "<unk>", "user", "assistant", *(f"w{n}" for n in range(64))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_rows(path: Path) -> None:
    """Four prompts of words that count on, as their completions do, again and again."""
    rows = [
        {"prompt": " ".join(f"w{(first + n) % 64}" for n in range(3)), "completion": f"w{(first + 3) % 64}"}
        for first in [*range(4)] * 16
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_example_learns_completions_and_peft_reads_its_adapters(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = {"num_devices": 2, "global_batch": 16, "num_microbatches": 2, "seq_len": 8}
    plan = lora_plan("lora:r=8", config, "fsdp2, dp2, tp2, fsdp2", **sizes)
    write_plan(plan, tmp_path / "plan.json")
    words = [EXAMPLE, tmp_path / "plan.json", tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out"]
    finished = run_warm(
        "tests.processes.forking_agent", "--standalone", "--nproc-per-node=2", *words, timeout_s=HANG_LIMIT_S
    )
    assert finished.returncode == 0, finished.stderr[-40000:]
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '?([\d.]+)", finished.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "out" / "adapters"))
    assert any(each.abs().sum() > 0 for name, each in adapted.named_parameters() if "lora_B" in name)
