"""Tests of runs on prompts with completions and on conversations, against plain PyTorch on the same rows.

The reference tokenizes by itself, fills samples up as collators of transformers do, with a mask, and takes the loss
that transformers' model has for labels.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard.plan.plan import Plan
from steelyard.runtime.data.order import SampleOrder
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.options import TrainOptions
from tests.integrations.test_lora_example import write_model
from tests.runtime.adapter_runs import run_all
from tests.runtime.models import CONFIGS, make_plan

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
STEPS, BATCH, SEQ_LEN, LR = 6, 8, 16, 1e-2
RUN = TrainOptions(
    steps=STEPS, lr=LR, warmup_steps=0, schedule="constant", weight_decay=0.0, betas="0.8,0.9", eval_every=3
)


def _plan(*stages: str, num_microbatches: int = 2) -> Plan:
    sizes = {"num_devices": 4, "global_batch": BATCH, "num_microbatches": num_microbatches, "seq_len": SEQ_LEN}
    return make_plan(CONFIGS["llama-tied"], *stages, **sizes)


def _pairs(count: int) -> list[dict[str, Any]]:
    """Prompts and completions of many lengths; one prompt fills a sample, so that nothing of its answer is left."""
    return [
        {
            "prompt": " ".join(f"w{(row + n) % 64}" for n in range(20 if row == 3 else 1 + row % 5)),
            "completion": " ".join(f"w{(row + n) % 64}" for n in range(1 + row % 4)),
        }
        for row in range(count)
    ]


def _conversations(count: int) -> list[dict[str, Any]]:
    """A question, an answer, another question and its answer."""
    return [
        {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": f"w{row % 64} w{(row + turn) % 64}"}
                for turn in range(2 + 2 * (row % 2))
            ]
        }
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    write_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _pairs(37)))
    parquet.write_table(pyarrow.Table.from_pylist(_conversations(30)), folder / "talks.parquet")
    init = replace(RUN, sft=True, init=folder / "model", dataset=(f"{folder}/talks.parquet",))
    pairs = replace(init, dataset=(f"{folder}/pairs.jsonl@train[:32]",), metrics=folder / "pairs.metrics")
    pairs = replace(pairs, eval_data=Path(f"{folder}/pairs.jsonl@train[32:]"))
    saved = replace(pairs, checkpoint_dir=folder / "saved", checkpoint_every=3, metrics=None)
    mixture = (f"{folder}/pairs.jsonl:3", f"{folder}/talks.parquet:1")
    sharded = _plan("fsdp4, fsdp2-tp2+sp, dp2-tp2, fsdp4")
    pipeline = _plan("dp2, fsdp2", "tp2, dp2", num_microbatches=4)
    mixed = replace(init, dataset=mixture, steps=2)
    for options in (pairs, init, mixed):  # as the launcher does
        for rows in (options.source(None), options.eval_source):
            prepare_data(rows, options.text, seq_len=SEQ_LEN)
    run_all(
        folder,
        [
            ("pairs", sharded, pairs),
            ("begun", sharded, replace(saved, steps=3)),
            ("gone on", pipeline, replace(saved, allow_change="steps")),
            ("talks", pipeline, init),
            ("mixture", sharded, mixed),
        ],
    )
    return folder


Row = tuple[list[int], list[int]]
"""Tokens and labels."""


def _pair(tokenizer: Any, row: dict[str, str]) -> Row:
    prompt, answer = tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id]
    return prompt + answer, [-100] * len(prompt) + answer


def _talk(tokenizer: Any, row: dict[str, Any]) -> Row:
    tokens: list[int] = []
    labels: list[int] = []
    for message in row["messages"]:
        role, said = tokenizer.encode(message["role"]), tokenizer.encode(f"{message['content']} <eos>")
        tokens += role + said
        labels += [-100] * len(role) + (said if message["role"] == "assistant" else [-100] * len(said))
    return tokens, labels


def _loss(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    """The mean over targets of some rows of many lengths."""
    batch = {"input_ids": 2, "labels": -100, "attention_mask": 0}
    parts = [
        {"input_ids": tokens, "labels": labels, "attention_mask": [1] * len(tokens)}
        for tokens, labels in ((tokens[:SEQ_LEN], labels[:SEQ_LEN]) for tokens, labels in rows)
    ]
    length = max(len(part["labels"]) for part in parts)
    tensors = {
        name: torch.tensor([part[name] + [empty] * (length - len(part[name])) for part in parts])
        for name, empty in batch.items()
    }
    loss: torch.Tensor = model(**tensors).loss
    return loss


def _reference(folder: Path, rows: list[Row], held_out: list[Row], steps: int = STEPS) -> tuple[list[float], float]:
    """Losses of steps, and that of other rows after the last."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.8, 0.9), weight_decay=0.0)
    rows = [(tokens, labels) for tokens, labels in rows if any(each != -100 for each in labels[1:SEQ_LEN])]
    order = SampleOrder(num_samples=len(rows), seed=0)
    losses = []
    for step in range(steps):
        loss = _loss(model, [rows[order.data_sample(step * BATCH + place)] for place in range(BATCH)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, _loss(model, held_out).item() if held_out else 0.0


def _losses(folder: Path, name: str) -> list[float]:
    return [loss for _, loss in json.loads((folder / "losses.json").read_text())[name]]


@pytest.fixture(scope="module")
def pairs(folder: Path) -> tuple[list[float], float]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [_pair(tokenizer, row) for row in _pairs(37)]
    return _reference(folder, rows[:32], rows[32:])


def test_losses_of_prompts_with_completions_are_those_of_plain_pytorch(
    folder: Path, pairs: tuple[list[float], float]
) -> None:
    assert _losses(folder, "pairs") == pytest.approx(pairs[0], rel=2e-5)
    assert pairs[0][-1] < pairs[0][0] - 0.1


def test_rows_that_are_held_out_are_all_evaluated(folder: Path, pairs: tuple[list[float], float]) -> None:
    lines = [json.loads(line) for line in (folder / "pairs.metrics").read_text().splitlines()]
    evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evaluated) == [3, 6]
    assert evaluated[6] == pytest.approx(pairs[1], rel=2e-5)


def test_a_run_on_rows_goes_on_by_itself_under_another_plan(folder: Path, pairs: tuple[list[float], float]) -> None:
    assert [*_losses(folder, "begun"), *_losses(folder, "gone on")] == pytest.approx(pairs[0], rel=2e-5)


def test_losses_of_conversations_are_those_of_plain_pytorch(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    expected, _ = _reference(folder, [_talk(tokenizer, row) for row in _conversations(30)], [])
    assert _losses(folder, "talks") == pytest.approx(expected, rel=2e-5)


def test_a_mixture_of_both_trains(folder: Path) -> None:
    assert len(_losses(folder, "mixture")) == 2
