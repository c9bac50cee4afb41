"""Tests of ``--dataset``: rows of files, folders and mixtures, as documents and as prompts with completions."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from steelyard.errors import InvalidDataError, UserError
from steelyard.model.family import Task
from steelyard.runtime.data.completions import open_completions
from steelyard.runtime.data.prepare import TextOptions, check_rows, prepare_data, prepare_text
from steelyard.runtime.data.rows import Rows, Source
from steelyard.runtime.data.source import NO_SAMPLE, CompletionData
from steelyard.runtime.options import TrainOptions
from tests.integrations.test_lora_example import write_model
from tests.runtime.test_sft_runs import TEMPLATE

MARKED = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
FORGETFUL = "{{ messages[-1]['role'] }} {{ messages[-1]['content'] }} <eos>"
REFUSING = "{{ raise_exception('roles must alternate') }}"
TALK = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(name="write")
def _write(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, *rows: Any) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def with_template(folder: Path, model: Path, template: str | None) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def texts(*specs: str) -> list[str]:
    return list(Rows.parse(specs).documents("text"))


def test_a_source_is_read_as_written() -> None:
    assert Rows.parse(["a/b.jsonl@train[:10%]:0.5", "owner/name@test:2"]).sources == (
        Source("a/b.jsonl", "train[:10%]", 0.5),
        Source("owner/name", "test", 2.0),
    )
    assert str(Rows.parse(["a/b.jsonl@train[:10%]:0.5", "owner/name:2"])) == "b.jsonl@train[:10%]:0.5 name:2"


def test_slices_and_several_sources_follow_each_other(write: Callable[..., str]) -> None:
    first, second = (write(f"{name}.jsonl", *({"text": f"{name}{n}"} for n in range(4))) for name in "ab")
    assert texts(f"{first}@train[:50%]", second) == ["a0", "a1", "b0", "b1", "b2", "b3"]


def test_a_mixture_has_each_row_and_shares_in_proportion_to_weights(write: Callable[..., str]) -> None:
    first, second = (write(f"{name}.jsonl", *({"text": f"{name}{n}"} for n in range(300))) for name in "ab")
    found = texts(f"{first}:7", f"{second}:3")
    assert found == texts(f"{first}:7", f"{second}:3")
    assert len(set(found)) == 600
    counts = Counter(text[0] for text in found)
    assert counts["a"] / len(found) == pytest.approx(0.7, abs=0.05)


def test_documents_of_rows_are_tokens_made_once_and_again_when_rows_change(
    write: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nab,1\ncd,0\n")
    rows = Rows.parse([str(tmp_path / "rows.csv")])
    first = prepare_text(rows, TextOptions())
    assert first.read_bytes() == b"ab\0cd\0"
    assert prepare_text(rows, TextOptions()) == first
    (tmp_path / "rows.csv").write_text("text,label\nef,1\n")
    assert prepare_text(rows, TextOptions()).read_bytes() == b"ef\0"


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        (["a:0"], "found a:0"),
        (["a:-1", "b:2"], "found a:-1 b:2"),
        (["a:1", "b"], "a weight above 0 for every dataset"),
        (["a:1e999"], "found a:1e999"),
        (["a:1.2.3"], "found a:1.2.3"),
        (["a:1e400", "b:1"], "found a:1e400"),
    ],
)
def test_weights_that_make_no_mixture_are_refused(specs: Sequence[str], found: str) -> None:
    with pytest.raises(InvalidDataError, match=found):
        Rows.parse(specs)


@pytest.mark.parametrize(
    ("spec", "rows", "found"),
    [
        ("missing.jsonl", [], "nothing at"),
        ("rows.jsonl", [], "no rows in"),
        ("rows.jsonl@test", [{"text": "a"}], "Unknown split"),
        ("rows.jsonl@train[x", [{"text": "a"}], "Unrecognized instruction"),
        ("rows.jsonl", [{"body": "a"}], "found columns body in"),
        ("rows.jsonl", [{"text": "a"}, {"text": None}], "None under 'text' in row 2"),
    ],
)
def test_rows_that_are_no_documents_are_refused(
    tmp_path: Path, write: Callable[..., str], spec: str, rows: list[Any], found: str
) -> None:
    write("rows.jsonl", *rows)
    with pytest.raises(InvalidDataError, match=found):
        texts(f"{tmp_path}/{spec}")


def test_an_unknown_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidDataError, match="owner/name@train: Couldn't"):
        texts("owner/name")


def tokens_of(path: str, tokenizer: Path, *, seq_len: int = 16) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row, and those that are targets."""
    rows = open_completions(Rows.parse([path]), tokenizer, seq_len=seq_len)
    return [
        (
            row["input_ids"],
            [each for each, is_target in zip(row["input_ids"], row["is_target"], strict=True) if is_target],
        )
        for row in rows
    ]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_turns_of_assistants_are_targets_whether_or_not_the_template_marks_them(
    write: Callable[..., str], tmp_path: Path, model: Path, template: str
) -> None:
    tokenizer = with_template(tmp_path, model, template)
    words = AutoTokenizer.from_pretrained(model)
    talk = write("talk.jsonl", {"messages": TALK}, {"messages": TALK[:2]})
    first, second = tokens_of(talk, tokenizer)
    assert words.decode(first[1]) == "w3 <eos> w5 w6 <eos>"
    assert words.decode(second[1]) == "w3 <eos>"
    answered = write("answered.jsonl", {"prompt": TALK[:3], "completion": TALK[3:]})
    ((_, targets),) = tokens_of(answered, tokenizer)
    assert words.decode(targets) == "w5 w6 <eos>"


def test_rows_without_targets_in_a_sample_are_left_out_and_samples_have_one_length(
    write: Callable[..., str], model: Path
) -> None:
    pairs = write(
        "pairs.jsonl",
        {"prompt": "w1 w2 w3 w4 w5 w6", "completion": "w7"},
        {"prompt": "w1 w2", "completion": "w3 w4 w5 w6"},
        {"prompt": "w8", "completion": "w9"},
    )
    data = CompletionData(Rows.parse([pairs]), TextOptions(tokenizer=model), seq_len=5, seed=0)
    assert data.num_samples == 2
    samples = data.read([0, 1, NO_SAMPLE])
    assert samples.inputs.shape == samples.labels.shape == (3, 5)
    targets = (samples.labels != -100).sum(dim=1).tolist()
    assert sorted(targets) == [0, 2, 3]
    assert data.num_targets([0, 1, NO_SAMPLE]) == 5
    assert targets[2] == 0


@pytest.mark.parametrize(
    ("row", "template", "found"),
    [
        ({"text": "a"}, TEMPLATE, "found columns text in"),
        ({"prompt": "w1"}, TEMPLATE, "found columns prompt in"),
        ({"prompt": "w1", "completion": None}, TEMPLATE, "a str and a NoneType, not two texts, in row 1"),
        ({"messages": "w1"}, TEMPLATE, "not a list of messages, in row 1"),
        ({"messages": TALK}, None, "a tokenizer without a chat template"),
        ({"messages": TALK}, FORGETFUL, "turns that the chat template formats differently"),
        ({"messages": TALK}, REFUSING, "the chat template rejects: roles must alternate, in row 1"),
        ({"messages": TALK[:1]}, TEMPLATE, "no target in the first 16 tokens of any row of"),
    ],
)
def test_rows_that_teach_nothing_are_refused(
    write: Callable[..., str], tmp_path: Path, model: Path, row: Any, template: str | None, found: str
) -> None:
    with pytest.raises(InvalidDataError, match=found):
        tokens_of(write("rows.jsonl", row), with_template(tmp_path, model, template))


def test_without_a_tokenizer_that_ends_a_text_rows_are_refused(
    write: Callable[..., str], tmp_path: Path, model: Path
) -> None:
    rows = Rows.parse([write("rows.jsonl", {"prompt": "w1", "completion": "w2"})])
    with pytest.raises(UserError, match="add --tokenizer FOLDER"):
        prepare_data(rows, TrainOptions(sft=True, dataset=("rows.jsonl",), init=tmp_path).text, seq_len=4)
    with pytest.raises(InvalidDataError, match="the folder of a tokenizer"):
        open_completions(rows, tmp_path, seq_len=4)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(InvalidDataError, match="no end token"):
        open_completions(rows, tmp_path / "endless", seq_len=4)


@pytest.mark.parametrize(
    ("task", "sft", "found"),
    [
        (Task.IMAGE_CLASSIFICATION, False, "--dataset: found rows for image-classification"),
        (Task.SEQ2SEQ_LM, True, "--sft: found a plan for seq2seq-lm"),
    ],
)
def test_rows_are_refused_for_models_that_cannot_train_on_them(task: Task, sft: bool, found: str) -> None:
    with pytest.raises(UserError, match=found):
        check_rows(task, TextOptions(completions_alone=sft))


@pytest.mark.parametrize(
    ("options", "data", "found"),
    [
        ({}, None, "--data: found neither"),
        ({"dataset": ("a.jsonl",)}, "b.txt", "--data: found b.txt, and --dataset a.jsonl"),
        ({"sft": True}, "b.txt", "--sft: found no --dataset"),
        ({"sft": True, "dataset": ("a.jsonl",), "max_data_bytes": 9}, None, "--sft: found --max-data-bytes"),
        ({"betas": "0.9"}, "b.txt", "--betas: found '0.9'"),
        ({"betas": "0.9,1"}, "b.txt", "--betas: found '0.9,1'"),
    ],
)
def test_options_of_data_that_exclude_each_other_are_refused(
    options: dict[str, Any], data: str | None, found: str
) -> None:
    with pytest.raises(UserError, match=found):
        TrainOptions(**options).source(data)
