"""Tests of runs on prompts with completions, conversations and pairs, against plain PyTorch on the same rows.

The reference tokenizes by itself, fills samples up as collators of transformers do, with a mask, and takes the loss
that transformers' model has for labels. Its rows are never packed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from steelyard.plan.plan import Plan
from steelyard.runtime.data.order import SampleOrder
from steelyard.runtime.data.packing import pack
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.options import TrainOptions
from tests.integrations.test_lora_example import write_model
from tests.modules.split_configs import split_config
from tests.runtime.adapter_runs import run_all
from tests.runtime.family_cases import SPLITS
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
STEPS, BATCH, SEQ_LEN, LR = 4, 8, 16, 1e-2
STAGES = ("fsdp2, dp2, tp2", "dp2, tp2, tp2 remat=full, fsdp2")
"""Stages of a model with two blocks in its encoder and two in its decoder, cut before the decoder."""
RUN = TrainOptions(
    steps=STEPS, lr=LR, warmup_steps=0, schedule="constant", weight_decay=0.0, betas="0.8,0.9", eval_every=2
)


ENCODER_DECODERS = {"t5": FAMILY_CONFIGS["t5"] | {"vocab_size": 128}, "bart": split_config("bart")}


def _plan(*stages: str, num_devices: int = 2, num_microbatches: int = 2) -> Plan:
    sizes = {
        "num_devices": num_devices,
        "global_batch": BATCH,
        "num_microbatches": num_microbatches,
        "seq_len": SEQ_LEN,
    }
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


def _write_encoder_decoder(folder: Path, config: dict[str, Any]) -> None:
    """A model whose tokenizer ends sources and targets."""
    write_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = end
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)


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
    saved = replace(pairs, checkpoint_dir=folder / "saved", checkpoint_every=2, metrics=None)
    mixture = (f"{folder}/pairs.jsonl:3", f"{folder}/talks.parquet:1")
    for name, config in ENCODER_DECODERS.items():
        _write_encoder_decoder(folder / name, config)
    sharded = _plan("fsdp2, tp2+sp, dp2, fsdp2")
    pipeline = _plan("single, single", "single, single", num_microbatches=4)
    of_four = _plan("dp2, fsdp2", "tp2, dp2", num_devices=4, num_microbatches=4)
    mixed = replace(init, dataset=mixture, steps=2)
    packed = replace(pairs, packing="bfd", dataset=(f"{folder}/pairs.jsonl",), metrics=folder / "packed.metrics")
    texts = replace(init, sft=False, packing="bfd_split", text_key="prompt", dataset=packed.dataset)
    sizes = {"global_batch": BATCH, "num_microbatches": 2, "seq_len": SEQ_LEN}
    encoder_decoders = {
        f"{name}, {stages[0]}": (
            make_plan(config, *stages, num_devices=num_devices, **sizes, split=SPLITS.get(name)),
            replace(pairs, init=folder / name, metrics=folder / f"{name}.metrics", eval_data=None),
        )
        for name, config, num_devices, stages in (
            ("t5", ENCODER_DECODERS["t5"], 2, ("fsdp2, tp2, dp2 remat=full, tp2, tp2, fsdp2, dp2",)),
            ("bart", ENCODER_DECODERS["bart"], 4, STAGES),
        )
    }
    for plan, options in (
        *((of_four, each) for each in (pairs, init, mixed, packed, texts)),
        *encoder_decoders.values(),
    ):  # as the launcher does
        for rows in (options.source(None), options.eval_source):
            prepare_data(rows, options.text, plan)
    run_all(
        folder,
        [
            ("pairs", sharded, pairs),
            ("begun", sharded, replace(saved, steps=2)),
            ("gone on", of_four, replace(saved, allow_change="steps")),
            ("talks", pipeline, init),
            ("mixture", sharded, mixed),
            ("packed", sharded, packed),
            ("packed, in stages", of_four, replace(packed, eval_data=None, metrics=None)),
            ("texts", pipeline, texts),
            *((name, *run) for name, run in encoder_decoders.items()),
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
    length = {name: max(len(part[name]) for part in parts) for name in batch}
    tensors = {
        name: torch.tensor([part[name] + [empty] * (length[name] - len(part[name])) for part in parts])
        for name, empty in batch.items()
    }
    loss: torch.Tensor = model(**tensors).loss
    return loss


def _reference(folder: Path, rows: list[Row], held_out: list[Row], steps: int = STEPS) -> tuple[list[float], float]:
    """Losses of steps, and that of other rows after the last."""
    rows = [(tokens, labels) for tokens, labels in rows if any(each != -100 for each in labels[1:SEQ_LEN])]
    losses, _, loss = _trained(folder / "model", [[row] for row in rows], held_out, steps)
    return losses, loss


def _trained(
    model_folder: Path, samples: list[list[Row]], held_out: list[Row] | None = None, steps: int = STEPS
) -> tuple[list[float], list[float], float]:
    """Losses and gradient norms of steps on samples of one row or more, and the loss of other rows after the last."""
    config = AutoConfig.from_pretrained(model_folder)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.8, 0.9), weight_decay=0.0)
    order = SampleOrder(num_samples=len(samples), seed=0)
    losses, norms = [], []
    for step in range(steps):
        taken = [samples[order.data_sample(step * BATCH + place)] for place in range(BATCH)]
        loss = _loss(model, [row for rows in taken for row in rows])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, norms, _loss(model, held_out).item() if held_out else 0.0


def _norms(path: Path) -> list[float]:
    return [json.loads(line)["grad_norm"] for line in path.read_text().splitlines()]


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
    assert list(evaluated) == [2, 4]
    assert evaluated[4] == pytest.approx(pairs[1], rel=2e-5)


def test_a_run_on_rows_goes_on_by_itself_under_another_plan(folder: Path, pairs: tuple[list[float], float]) -> None:
    assert [*_losses(folder, "begun"), *_losses(folder, "gone on")] == pytest.approx(pairs[0], rel=2e-5)


def test_losses_of_conversations_are_those_of_plain_pytorch(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    expected, _ = _reference(folder, [_talk(tokenizer, row) for row in _conversations(30)], [])
    assert _losses(folder, "talks") == pytest.approx(expected, rel=2e-5)


def test_a_mixture_of_both_trains(folder: Path) -> None:
    assert len(_losses(folder, "mixture")) == 2


def test_packed_rows_train_as_if_each_had_a_sample_of_its_own(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    made = [(tokens[:SEQ_LEN], labels[:SEQ_LEN]) for tokens, labels in (_pair(tokenizer, row) for row in _pairs(37))]
    rows = [(tokens, labels) for tokens, labels in made if set(labels) != {-100}]
    packed = pack(np.array([len(tokens) for tokens, _ in rows]), SEQ_LEN)
    losses, norms, held_out = _trained(folder / "model", [[rows[row] for row in of] for of in packed], rows[-5:])
    assert max(map(len, packed)) > 2
    for name in ("packed", "packed, in stages"):
        assert _losses(folder, name) == pytest.approx(losses, rel=2e-6)
    assert _norms(folder / "packed.metrics") == pytest.approx(norms, rel=2e-5)
    last = json.loads((folder / "packed.metrics").read_text().splitlines()[-1])
    assert last["eval_loss"] == pytest.approx(held_out, rel=2e-5)


def test_texts_longer_than_a_sample_are_cut_and_packed(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [[*tokenizer.encode(row["prompt"]), tokenizer.eos_token_id] for row in _pairs(37)]
    cut = [text[begin : begin + SEQ_LEN] for text in texts for begin in range(0, len(text), SEQ_LEN)]
    packed = pack(np.array([len(text) for text in cut]), SEQ_LEN)
    losses, _, _ = _trained(folder / "model", [[(cut[row], cut[row]) for row in of] for of in packed])
    assert len(cut) == 38
    assert _losses(folder, "texts") == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_pairs_of_an_encoder_decoder_model_train_as_in_one_process(folder: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    sources, targets = (tokenizer([row[key] for row in _pairs(32)]).input_ids for key in ("prompt", "completion"))
    sources = [[*source[: SEQ_LEN - 1], 1] if len(source) > SEQ_LEN else source for source in sources]
    losses, norms, _ = _trained(folder / name, [[row] for row in zip(sources, targets, strict=True)])
    runs = [run for run in json.loads((folder / "losses.json").read_text()) if run.startswith(f"{name},")]
    runs = [run for run in runs if not run.endswith("imbalance")]
    assert len(runs) == 1
    for run in runs:
        assert _losses(folder, run) == pytest.approx(losses, rel=2e-5)
    assert _norms(folder / f"{name}.metrics") == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
