"""Tests of ``--dataset``: rows of files, folders and mixtures, as documents and as prompts with completions."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from steelyard.errors import InvalidDataError, UserError
from steelyard.model.read import chain_from_config
from steelyard.plan.plan import Plan
from steelyard.runtime.data.completions import RowOptions, open_completions
from steelyard.runtime.data.packing import BFD, STRATEGIES, pack
from steelyard.runtime.data.prepare import TextOptions, check_rows, prepare_data, prepare_text
from steelyard.runtime.data.rows import Rows, Source
from steelyard.runtime.data.source import NO_SAMPLE, CompletionData
from steelyard.runtime.options import TrainOptions
from tests.integrations.test_lora_example import write_model
from tests.modules.split_configs import split_config
from tests.runtime.family_cases import SPLITS
from tests.runtime.models import FAMILY_CONFIGS, make_plan
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
    rows = open_completions(Rows.parse([path]), RowOptions(tokenizer=tokenizer, seq_len=seq_len))
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
    data = CompletionData(Rows.parse([pairs]), RowOptions(tokenizer=model, seq_len=5), seed=0)
    assert data.model_kwargs([0]) == {}
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
        ({"prompt": "w1", "completion": None}, TEMPLATE, "a str and a NoneType, not text, in row 1"),
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
        prepare_data(rows, TrainOptions(sft=True, dataset=("rows.jsonl",), init=tmp_path).text, _plan("llama"))
    with pytest.raises(InvalidDataError, match="the folder of a tokenizer"):
        open_completions(rows, RowOptions(tokenizer=tmp_path, seq_len=4))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(InvalidDataError, match="no end token"):
        open_completions(rows, RowOptions(tokenizer=tmp_path / "endless", seq_len=4))


def _plan(config: str) -> Plan:
    """A plan of a small model, with cp for llama."""
    content, split = FAMILY_CONFIGS.get(config) or split_config(config), SPLITS.get(config)
    layers = chain_from_config(content, name=config, split=split).num_layers
    strategy, seq_len = "cp2" if config == "llama" else "dp2", 17 if config == "vit" else 16
    return make_plan(content, ", ".join([strategy] * layers), num_devices=2, seq_len=seq_len, split=split)


@pytest.mark.parametrize(
    ("config", "options", "found"),
    [
        ("vit", {}, "--dataset: found rows for image-classification"),
        ("bert", {"sft": True}, "--sft: found a plan for masked-lm"),
        ("t5", {"packing": "wrapped"}, "--packing: found a plan for seq2seq-lm"),
        ("llama", {"packing": "bfd"}, "strategies: found cp, and samples with several sequences"),
        ("zamba2", {"packing": "bfd_split"}, "model_type: found zamba2: with position_ids its logits differ by"),
    ],
)
def test_rows_are_refused_for_plans_that_cannot_train_on_them(config: str, options: Any, found: str) -> None:
    with pytest.raises(UserError, match=found):
        check_rows(_plan(config), TrainOptions(dataset=("a",), **options).text)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("bart", {"sft": True}),
        ("t5", {"sft": True}),
        ("gpt2", {"packing": "bfd"}),
        ("cohere2", {"packing": "bfd"}),
        ("gemma4_text", {"packing": "bfd"}),
        ("llama", {"packing": "wrapped"}),
    ],
)
def test_samples_of_several_sequences_or_with_padding_are_proved_right(config: str, options: Any) -> None:
    check_rows(_plan(config), TrainOptions(dataset=("a",), **options).text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_rows_are_packed_whole_each_once_as_if_tried_one_by_one(lengths: list[int]) -> None:
    found = [list(map(int, rows)) for rows in pack(np.array(lengths), 9)]
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else 9) - length)
    assert sorted(9 - sum(lengths[row] for row in rows) for rows in found) == sorted(free)


def test_packed_rows_have_positions_and_nothing_predicts_their_first_tokens(
    write: Callable[..., str], model: Path
) -> None:
    long = {"text": " ".join(f"w{n}" for n in range(11))}
    rows = Rows.parse([write("rows.jsonl", long, {"text": "w20 w21"}, {"text": "w30"})])
    found = {}
    for packing in STRATEGIES:
        data = CompletionData(rows, RowOptions(tokenizer=model, seq_len=8, packing=packing, text_key="text"), seed=0)
        samples = [*range(data.num_samples)]
        read, told = data.read(samples), data.model_kwargs(samples)
        assert data.num_targets(samples) == int((read.labels != -100).sum())
        is_target = read.labels[:, :-1] != -100
        assert (read.inputs[:, 1:][is_target] == read.labels[:, :-1][is_target]).all()
        found[packing] = (data.num_samples, data.num_targets(samples))
        if told:
            begins = (told["position_ids"][:, 1:] == 0) & (read.labels[:, :-1] != -100)
            assert not begins.any()
    # of 12, 3 and 2 tokens the first is cut to 8, or into 8 and 4, which goes with 3; wrapped, 17 are 8, 8 and 1
    assert found == {"bfd": (2, 7 + 2 + 1), "bfd_split": (3, 7 + 3 + 2 + 1), "wrapped": (2, 7 + 7)}
    (sample,) = CompletionData(
        Rows.parse([write("few.jsonl", {"text": "w1 w2"}, {"text": "w3"})]),
        RowOptions(tokenizer=model, seq_len=8, packing=BFD, text_key="text"),
        seed=0,
    ).model_kwargs([0])["position_ids"]
    assert sample.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("names", [("prompt", "completion"), ("source", "target"), ("document", "summary")])
def test_an_encoder_reads_the_one_text_and_a_decoder_predicts_the_other(
    write: Callable[..., str], model: Path, names: tuple[str, str]
) -> None:
    pairs = write("pairs.jsonl", dict(zip(names, ("w1 w2 w3", "w4"), strict=True)))
    data = CompletionData(Rows.parse([pairs]), RowOptions(tokenizer=model, seq_len=5, is_seq2seq=True), seed=0)
    read, words = data.read([0, NO_SAMPLE]), AutoTokenizer.from_pretrained(model)
    assert words.decode(read.inputs[0, :3]) == "w1 w2 w3"
    assert (words.decode(read.labels[0, :1]), read.labels[0, 1:].tolist()) == ("w4", [-100] * 4)
    assert data.model_kwargs([0, NO_SAMPLE])["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert data.num_targets([0, NO_SAMPLE]) == 1


def test_conversations_are_no_pairs(write: Callable[..., str], model: Path) -> None:
    talk = write("talk.jsonl", {"messages": TALK})
    with pytest.raises(InvalidDataError, match="expected: prompt and completion, or source and target, document"):
        open_completions(Rows.parse([talk]), RowOptions(tokenizer=model, seq_len=5, is_seq2seq=True))


@pytest.mark.parametrize(
    ("options", "data", "found"),
    [
        ({}, None, "--data: found neither"),
        ({"dataset": ("a.jsonl",)}, "b.txt", "--data: found b.txt, and --dataset a.jsonl"),
        ({"sft": True}, "b.txt", "--sft: found no --dataset"),
        ({"packing": "bfd"}, "b.txt", "--packing: found no --dataset"),
        ({"packing": "bdf", "dataset": ("a.jsonl",)}, None, "--packing: found 'bdf'"),
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
