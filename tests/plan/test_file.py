"""Tests of plan files: a written plan reads back, and every damaged file is one user error."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.examples import CONFIG, CONTENT, changed, one_stage, read
from steelyard.errors import InvalidPlanError, UserError
from steelyard.model.read import config_hash, load_model
from steelyard.plan.file import dump_json, read_plan, write_plan
from steelyard.plan.plan import Plan, PlanModel


def write(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        CONTENT,
        changed((["prediction"], ...)),
        changed((["model", "config_hash"], config_hash(CONFIG))),
        changed((["model", "name"], "größe 模型")),
        changed((["prediction", "mfu"], ...), (["prediction", "alternatives"], [])),
        one_stage("fsdp4", devices=4),
    ],
    ids=["full", "by hand", "with a hash", "not ASCII", "without mfu", "one stage"],
)
def test_a_plan_written_and_read_is_the_same(content, tmp_path):
    plan = read(content)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_null_in_the_config_survives_writing(tmp_path):
    chain = load_model("mistral-7b")
    model = PlanModel(name=chain.name, config=dict(chain.config), config_hash=chain.config_hash)
    stage = {"ranks": [0, 0], "runs": [{"layers": [0, 33], "parallel": "single"}]}
    plan = read({**CONTENT, "model": model.model_dump(mode="json"), "stages": [stage], "prediction": None})
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").chain() == chain


@pytest.mark.slow
def test_writing_twice_gives_the_same_bytes(tmp_path):
    write_plan(read(CONTENT), tmp_path / "one.json")
    write_plan(read_plan(tmp_path / "one.json"), tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.slow
def test_a_written_plan_is_plain_json_of_short_lines():
    text = dump_json(read(CONTENT))
    assert json.loads(text)["stages"][1]["runs"][0]["remat"] == "full"
    assert max(len(line) for line in text.splitlines()) <= 160


def test_what_is_absent_is_not_written():
    assert "null" not in dump_json(read(changed((["model", "config", "sliding_window"], ...), (["prediction"], ...))))


def test_a_plan_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        read(CONTENT).seq_len = 8


def test_a_plan_that_cannot_be_written_names_the_path(tmp_path):
    with pytest.raises(UserError, match=r"^plan: found .*absent.*No such file"):
        write_plan(read(CONTENT), tmp_path / "absent" / "plan.json")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"   \n",
        b"not json",
        b"{",
        b"\xff\xfe\x00\x01",
        b'{"version": 1} trailing',
        b"{'version': 1}",
        b"9" * 5000,
        b"[" * 100_000,
    ],
    ids=["empty", "blank", "words", "brace", "binary", "trailing", "quotes", "endless number", "endless nesting"],
)
def test_a_file_that_is_not_json_is_named(text, tmp_path):
    with pytest.raises(InvalidPlanError, match=r"(?s)^plan: found .*plan\.json: .*expected: a complete JSON file"):
        read_plan(write(tmp_path, text))


def test_a_plan_cut_short_anywhere_is_an_error(tmp_path):
    text = dump_json(read(CONTENT))
    for length in range(0, len(text), 7):
        with pytest.raises(InvalidPlanError, match="a complete JSON file"):
            read_plan(write(tmp_path, text[:length]))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidPlanError, match=r"^plan: found no file .*absent\.json(.|\n)*steelyard plan MODEL"):
        read_plan(tmp_path / "absent.json")


def test_a_folder_is_no_plan(tmp_path):
    with pytest.raises(InvalidPlanError, match=r"^plan: found .*Is a directory"):
        read_plan(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"plan"', "true"])
def test_json_that_is_no_object_is_named(text, tmp_path):
    with pytest.raises(InvalidPlanError, match=r"^file: found .*\n.*an object"):
        read_plan(write(tmp_path, text))


def test_a_key_that_is_there_twice_is_named(tmp_path):
    text = json.dumps(CONTENT).replace('"seq_len": 64', '"seq_len": 64, "seq_len": 32')
    with pytest.raises(InvalidPlanError, match="the key 'seq_len' twice"):
        read_plan(write(tmp_path, text))


@pytest.mark.parametrize("depth", [100, 300, 600, 900, 980])
def test_values_nested_too_deep_are_an_error(depth, tmp_path):
    text = '{"model": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(InvalidPlanError):
        read_plan(write(tmp_path, text))


def test_half_a_character_is_an_error(tmp_path):
    with pytest.raises(InvalidPlanError, match=r"(?i)json"):
        read_plan(write(tmp_path, json.dumps(changed((["model", "name"], "\ud800")))))


@pytest.mark.parametrize("version", [0, 2, -1, "1", 1.5, [1], {}])
def test_an_unknown_version_names_the_one_that_is_read(version):
    with pytest.raises(InvalidPlanError, match=r"^version: found .*\n.*1, the plan version that this steelyard reads"):
        read({**CONTENT, "version": version})


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ([], "schedul", "schedule"),
        ([], "global_bath", "global_batch"),
        (["model"], "nam", "name"),
        (["stages", 0], "rank", "ranks"),
        (["stages", 1, "runs", 0], "paralel", "parallel"),
        (["stages", 1, "runs", 1], "zero_stage", "zero"),
        (["prediction"], "step_time", "step_time_s"),
        (["prediction", "stages", 1], "memory", "memory_bytes"),
        (["prediction", "alternatives", 0], "reasons", "reason"),
    ],
)
def test_a_wrong_key_names_its_place_and_the_nearest_key(path, wrong, right):
    content = changed(([*path, wrong], 1))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*path, wrong]).lstrip(".")
    with pytest.raises(InvalidPlanError) as caught:
        read(content)
    assert caught.value.field == place
    assert caught.value.found == f"the unknown key {wrong!r}"
    assert right in caught.value.expected.removeprefix("one of ").split(", ")
    assert right in caught.value.hint.removeprefix("did you mean ").removesuffix("?").split(" or ")


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [([], "global_bath", "global_batch"), (["stages", 0], "rank", "ranks"), (["model"], "nam", "name")],
)
def test_a_misspelt_required_key_is_named_rather_than_the_missing_one(path, wrong, right):
    with pytest.raises(InvalidPlanError, match=rf"(?s)the unknown key '{wrong}'.*did you mean {right}\b"):
        read(changed(([*path, wrong], 1), ([*path, right], ...)))


def test_a_key_of_a_removed_feature_is_said_to_be_removed():
    with pytest.raises(InvalidPlanError, match=r"(?s)^spares: found the unknown key 'spares'.*remove the key: "):
        read(changed((["spares"], [])))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (["model"], "model"),
        (["model", "name"], r"model\.name"),
        (["cluster"], "cluster"),
        (["seq_len"], "seq_len"),
        (["global_batch"], "global_batch"),
        (["num_microbatches"], "num_microbatches"),
        (["precision"], "precision"),
        (["stages"], "stages"),
        (["stages", 1, "ranks"], r"stages\[1\]\.ranks"),
        (["stages", 0, "runs", 1, "layers"], r"stages\[0\]\.runs\[1\]\.layers"),
        (["stages", 0, "runs", 1, "parallel"], r"stages\[0\]\.runs\[1\]\.parallel"),
        (["prediction", "step_time_s"], r"prediction\.step_time_s"),
    ],
)
def test_a_missing_key_is_named(path, place):
    with pytest.raises(InvalidPlanError, match=rf"^{place}: found nothing\n.*this key is required"):
        read(changed((path, ...)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["seq_len"], "64", r"seq_len: found '64'\n.*a valid integer"),
        (["seq_len"], 64.0, r"seq_len: found 64.0\n.*a valid integer"),
        (["seq_len"], True, r"seq_len: found True\n.*a valid integer"),
        (["seq_len"], None, r"seq_len: found None\n.*a valid integer"),
        (["seq_len"], 0, r"seq_len: found 0\n.*greater than or equal to 1"),
        (["global_batch"], -16, r"global_batch: found -16\n.*greater than or equal to 1"),
        (["num_microbatches"], -1, r"num_microbatches: found -1\n.*greater than or equal to 1"),
        (["num_microbatches"], [4], r"num_microbatches: found \[4\]\n.*a valid integer"),
        (["precision"], "fp4", r"precision: found 'fp4'\n.*'bf16', 'fp16', 'fp32', 'fp8', .* or 'nvfp4'"),
        (
            ["schedule"],
            "1f2b",
            r"schedule: found '1f2b'\n.*'zb-v' or 'dualpipe-v'\n.*mean 1f1b",
        ),
        (["schedule"], 1, r"schedule: found 1\n.*'zb-v' or 'dualpipe-v'"),
        (["cluster"], 4, r"cluster: found 4\n.*a valid string"),
        (["model"], "tiny", r"model: found 'tiny'\n.*an object"),
        (["model", "name"], 3, r"model\.name: found 3\n.*a valid string"),
        (["model", "config"], [], r"model\.config: found \[\]\n.*an object"),
        (["stages"], {}, r"stages: found {}\n.*a valid array"),
        (["stages"], [], r"stages: found \[\]\n.*at least 1 in the list"),
        (["stages", 0], 7, r"stages\[0\]: found 7\n.*an object"),
        (["stages", 0, "ranks"], "0-1", r"stages\[0\]\.ranks: found '0-1'\n.*a valid array"),
        (["stages", 0, "ranks"], [0], r"stages\[0\]\.ranks\[1\]: found nothing"),
        (["stages", 0, "ranks"], [0, 1, 2], r"stages\[0\]\.ranks: found \[0, 1, 2\]\n.*at most 2 in the list"),
        (["stages", 0, "ranks"], ["0", 1], r"stages\[0\]\.ranks\[0\]: found '0'\n.*a valid integer"),
        (["stages", 0, "runs"], [], r"stages\[0\]\.runs: found \[\]\n.*at least 1 in the list"),
        (["prediction"], 3, r"prediction: found 3\n.*an object"),
        (["prediction", "step_time_s"], "1.5", r"prediction\.step_time_s: found '1.5'\n.*a valid number"),
        (["prediction", "step_time_s"], float("nan"), r"prediction\.step_time_s: found nan\n.*a finite number"),
        (["prediction", "step_time_s"], -1.5, r"prediction\.step_time_s: found -1.5\n.*greater than or equal to 0"),
        (["prediction", "budget_bytes"], -1, r"prediction\.budget_bytes: found -1\n.*greater than or equal to 0"),
        (["prediction", "budget_bytes"], 1.5, r"prediction\.budget_bytes: found 1.5\n"),
        (
            ["prediction", "stages", 0, "time_s", "compute"],
            "x",
            r"prediction\.stages\[0\]\.time_s\.compute: found 'x'\n",
        ),
    ],
)
def test_a_wrong_value_names_its_place_what_was_found_and_expected(path, value, message):
    with pytest.raises(InvalidPlanError, match=f"^{message}"):
        read(changed((path, value)))


def test_a_long_value_is_shown_in_part():
    with pytest.raises(InvalidPlanError) as caught:
        read(changed((["seq_len"], "6" * 10_000)))
    assert len(str(caught.value)) < 300


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


PATHS = [path for path in _paths(CONTENT) if path]
small = st.integers(-3, 40)
values = st.one_of(
    small,
    st.sampled_from(
        [None, True, False, "", "x", "64", "dp2", "tp2", "fsdp2", "dp4", "single", "full", "1f1b", "gpipe"]
    ),
    st.sampled_from([1.5, 1e308, float("nan"), float("inf"), 10**30, -(10**30), 2**63]),
    st.sampled_from([[], {}, [0, 1], [2, 3], [[]], {"a": 1}, [None, None]]),
)


@st.composite
def mutated_contents(draw):
    """The valid content after one to three changes: a key removed or added, a value of another type, another number."""
    content = copy.deepcopy(CONTENT)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PATHS))
        inner = content
        try:
            for part in parents:
                inner = inner[part]
            inner[last]
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(inner, dict | list):
            continue
        change = draw(st.sampled_from(["remove", "replace", "nudge", "add"]))
        if change == "remove":
            del inner[last]
        elif change == "nudge" and isinstance(inner[last], int):
            inner[last] += draw(st.integers(-2, 2))
        elif change == "add" and isinstance(inner, dict):
            inner[draw(st.sampled_from(["layers", "zero", "remat", "sp", "schedule", "bogus", "", "config_hash"]))] = (
                draw(values)
            )
        elif last != "num_hidden_layers":
            inner[last] = draw(values)
    return content


def _read_or_none(content):
    try:
        return read(content)
    except UserError as error:
        assert error.field  # noqa: PT017
        assert error.expected  # noqa: PT017
        return None


@pytest.mark.slow
@settings(max_examples=400)
@given(mutated_contents())
def test_a_mutated_plan_is_valid_or_one_error_of_the_users(content):
    plan = _read_or_none(content)
    if plan is not None:
        assert isinstance(plan, Plan)
        assert read(json.loads(dump_json(plan))) == plan
