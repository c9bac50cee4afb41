"""Tests that the plain PyTorch script gives the runtime's losses for any plan, without the runtime or a plan's text."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.engines.pytorch import SCRIPT, STYLES
from steelyard.errors import UserError
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config, load_model, model_names
from steelyard.model.split import BlockCall, SplitStream
from steelyard.plan.plan import Plan
from tests.engines import script_cases
from tests.engines.examples import TINY, exported, mixed, read, text_of, uneven_pipeline, uniform
from tests.engines.script_cases import CASES, SAMPLE, content_of, num_steps
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.runtime.processes import one_process, run_module
from tests.sample import asked, sampled

pytestmark = pytest.mark.slow

TOLERANCES = {"fp32": 5e-5, "bf16": 2e-2}
"""Relative, of losses and of the norms of gradients: sums are taken in another order."""
ODD_TEXT = "a'b\"c''' + str(__import__('os')) + '''\n$(touch made)\n\"\"\"; import os #\\"


def script_of(plan: Plan) -> str:
    return text_of(plan, "pytorch", ".py")


# what is written


def test_every_plan_gets_the_same_script() -> None:
    assert script_of(mixed()) == script_of(uniform("fsdp8", devices=8)) == SCRIPT.read_text()


def test_the_script_imports_nothing_but_stock_packages() -> None:
    tree = ast.parse(SCRIPT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"PIL", "numpy", "torch", "transformers", *sys.stdlib_module_names}
    assert [name for name in names if "._" in name] == []


def test_the_script_knows_the_styles_that_are_exported() -> None:
    assert set(script_cases.script().STYLES) >= {*STYLES.values()}


def test_the_plan_is_there_as_it_is() -> None:
    content = content_of(mixed())["plan"]
    assert read(content) == mixed()


def test_a_packaged_model_comes_with_its_config() -> None:
    plan = uniform("fsdp8", devices=8)
    assert content_of(plan)["plan"]["model"]["config"] == plan.chain().config


def test_every_packaged_model_without_features_is_carried() -> None:
    chains, tasks = (
        {
            each.family.model_type: each
            for each in map(load_model, model_names())
            if not each.family.task.reads_features
        },
        script_cases.script().MODELS,
    )
    for model_type, chain in chains.items():
        content = content_of(unsharded(dict(chain.config)))["chain"]
        assert content["task"] in tasks, model_type


def test_a_pipeline_says_that_its_buffers_are_more_than_the_memory_that_was_predicted() -> None:
    said = "communication buffers for all 8 microbatches"
    assert any(said in line for line in exported(uneven_pipeline(), "pytorch").left_out)
    assert not any("buffers" in line for line in exported(uniform("fsdp8", devices=8), "pytorch").left_out)


def test_a_config_keeps_its_nulls() -> None:
    config = FAMILY_CONFIGS["mistral"] | {"sliding_window": None}
    content = content_of(make_plan(config, "dp8, dp8, dp8, dp8"))
    assert content["plan"]["model"]["config"]["sliding_window"] is None


@pytest.mark.parametrize("to", ["pytorch", "torchrun", "slurm", "kubeflow"])
def test_no_text_of_a_plan_becomes_code(to: str) -> None:
    odd = mixed(model={"name": ODD_TEXT, "config": TINY | {"note": ODD_TEXT, ODD_TEXT: [ODD_TEXT]}})
    plain = mixed(model={"name": "x", "config": TINY})
    for (name, found), (_, expected) in zip(exported(odd, to).files, exported(plain, to).files, strict=True):
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-")
        if not name.endswith((".json", ".yaml")):
            code = [line for line in found.splitlines() if not line.startswith(("# ", "#SBATCH --job-name"))]
            assert code == [line for line in expected.splitlines() if not line.startswith(("# ", "#SBATCH --job-name"))]


def test_what_a_config_holds_arrives_as_it_is() -> None:
    odd = mixed(model={"name": ODD_TEXT, "config": TINY | {"note": ODD_TEXT}})
    model = content_of(odd)["plan"]["model"]
    assert (model["name"], model["config"]["note"]) == (ODD_TEXT, ODD_TEXT)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": Task.SPEECH_SEQ2SEQ}, "samples are those of speech-seq2seq"),
        ({"call": BlockCall(argument=1)}, "hidden state is not the first input and result of blocks"),
        ({"call": BlockCall(result=1, num_results=2)}, "hidden state is not the first input and result of blocks"),
        ({"streams": (SplitStream(argument="x", readers=(1,), shape=(0,)),)}, "blocks read or return several states"),
        ({"sides_by_sample": True}, "blocks read something for each sample"),
        ({"typed_buffers": ("block.scale",)}, "blocks convert their buffers"),
        (
            {"shared": (((1, "model.layers.0.a.weight"), (2, "model.layers.1.a.weight")),)},
            "layers share more than embedding tables",
        ),
        ({"resting": ("model.tower",)}, "modules are not all trained"),
        ({"multiple": 64}, "length is rounded up"),
    ],
)
def test_a_model_that_the_script_cannot_run_is_refused_by_its_structure(change: dict[str, Any], said: str) -> None:
    chain = CASES["qwen2"]().chain()
    assert chain.split is not None
    split = chain.split.model_copy(update=change)
    plan = make_plan(dict(chain.config), "dp2, dp2, dp2, dp2", num_devices=2, seq_len=64, split=split)
    with pytest.raises(UserError, match=rf"pytorch for test \(qwen2\), whose {said}"):
        content_of(plan)


def test_a_decoder_whose_config_names_no_first_token_is_refused() -> None:
    chain = CASES["t5"]().chain()
    config = {key: value for key, value in chain.config.items() if key != "decoder_start_token_id"}
    plan = make_plan(config, ", ".join(["dp2"] * chain.num_layers), num_devices=2, split=chain.split)
    with pytest.raises(UserError, match=r"pytorch for test \(t5\), whose decoder begins with no token"):
        content_of(plan)


def test_blocks_that_split_what_one_matrix_gives_are_refused_under_tensor_parallelism() -> None:
    plan = make_plan(dict(CASES["gpt2"]().chain().config), "dp2, tp2, dp2, dp2", num_devices=2)
    with pytest.raises(UserError, match=r"with tp, whose style 'enter::num_heads,embed_dim,split_size' of block.attn"):
        content_of(plan)


def unsharded(config: dict[str, Any]) -> Plan:
    """A plan of one process, whatever the model."""
    chain = chain_from_config(config, name="test")
    seq_len = 32 if chain.family.task.reads_text else chain.max_seq_len
    return make_plan(config, ", ".join(["single"] * chain.num_layers), num_devices=1, seq_len=seq_len)


def test_fp16_is_refused_since_the_script_scales_no_loss() -> None:
    plan = make_plan(FAMILY_CONFIGS["llama"], "dp2, dp2, dp2, dp2", num_devices=2, precision="fp16")
    with pytest.raises(UserError, match=r"pytorch for a plan in fp16\n.*bf16 or fp32"):
        content_of(plan)


def test_stages_of_unlike_sizes_are_refused() -> None:
    plan = make_plan(FAMILY_CONFIGS["llama"], "fsdp2, fsdp2", "single, single", sizes=(2, 1))
    with pytest.raises(UserError, match="stages of 2, 1 devices"):
        content_of(plan)


def test_key_value_heads_that_ranks_would_share_are_refused() -> None:
    few = FAMILY_CONFIGS["llama"] | {"num_key_value_heads": 2}
    layers = ", ".join(["tp4"] * chain_from_config(few, name="few").num_layers)
    with pytest.raises(UserError, match=r"with tp 4 over 2 key-value heads\n(?s:.*)--max-tp 2"):
        content_of(make_plan(few, layers, num_devices=4))


def test_experts_under_tensor_parallelism_are_refused() -> None:
    plan = make_plan(FAMILY_CONFIGS["mixtral"], "tp2, tp2, tp2, tp2", num_devices=2)
    with pytest.raises(UserError, match=r"whose style 'own_experts' of block.mlp.experts has no stock call"):
        content_of(plan)


@pytest.mark.parametrize(
    ("config", "layers", "name"), [("llama", "cp2, cp2, cp2, cp2", "cp"), ("mixtral", "dp2, dp2 ep2, dp2, dp2", "ep")]
)
def test_a_dimension_that_the_script_does_not_know_is_refused_by_name(config: str, layers: str, name: str) -> None:
    plan = make_plan(FAMILY_CONFIGS[config], layers, num_devices=2)
    with pytest.raises(UserError, match=f"pytorch for a plan with {name}\n") as refused:
        content_of(plan)
    assert "a plan with only dp, fsdp, tp" in str(refused.value)


def test_the_script_refuses_a_parallelism_dimension_that_it_does_not_know(tmp_path: Path) -> None:
    content = json.dumps(content_of(mixed())).replace('"fsdp2"', '"cp2"')
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(SystemExit, match="does not support 'cp2'"):
        script_cases.script().Plan(tmp_path / "plan.json")


# what is read


def open_both(path: Path, *, vocab_size: int) -> tuple[list[int], list[int]]:
    """The token ids of a file as the script and as the runtime read them."""
    from steelyard.runtime.data.files import is_token_file, open_bytes, open_token_file

    read = open_token_file(path, vocab_size=vocab_size) if is_token_file(path) else open_bytes(path)
    return script_cases.script().open_tokens(path, vocab_size).tolist(), read.read(0, read.num_tokens).tolist()


@pytest.mark.parametrize("vocab_size", [200, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.npy", "<i8"),
        ("a.npy", ">u2"),
        ("a.uint8.bin", "u1"),
        ("a.uint16.bin", "<u2"),
        ("a.uint32.bin", "<u4"),
        ("a.bin", "<u4"),
        ("a.BIN", "u1"),
        ("a.txt", "u1"),
    ],
)
def test_the_script_reads_token_files_as_train_does(tmp_path: Path, name: str, dtype: str, vocab_size: int) -> None:
    tokens = np.arange(64, dtype=dtype)
    np.save(tmp_path / name, tokens) if name.endswith(".npy") else tokens.tofile(tmp_path / name)
    ours, theirs = open_both(tmp_path / name, vocab_size=vocab_size)
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "to be"}', "holds documents"),
        ("a.uint32.bin", b"12345", "multiple"),
        ("a.npy", b"no array", "pickle"),
        ("a.txt", b"short", "expected a row of at least 33 token ids"),
        ("gone.bin", None, "No such file"),
    ],
)
def test_data_that_the_script_cannot_read_is_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(content_of(mixed())))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    module = script_cases.script()
    with pytest.raises(SystemExit, match=said) as raised:
        module.Data(module.Plan(tmp_path / "plan.json"), tmp_path / name, 0)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("case", "name", "said"),
    [
        ("bert", "tokens.npy", "expected a --mask-token from 0 to 63"),
        ("bert", "a.txt", "expected a --mask-token from 0 to 63"),
        ("vit", "images/class 0", "holds 0 images in 0 folders, but the model has 10 classes"),
        ("vit", "tokens.npy", "Not a directory"),
    ],
)
def test_data_that_a_model_does_not_read_is_named(tmp_path: Path, case: str, name: str, said: str) -> None:
    script_cases.write_data(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be" * 9)
    (tmp_path / "plan.json").write_text(json.dumps(content_of(CASES[case]())))
    module = script_cases.script()
    with pytest.raises(SystemExit, match=said):
        module.Data(module.Plan(tmp_path / "plan.json"), tmp_path / name, 0)


# what is trained


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, the JSON file of every case, and the metrics that the script writes of it."""
    path = tmp_path_factory.mktemp("script")
    script_cases.write_data(path)
    script_cases.write_contents(path, asked(request, "trained_case"))
    run_module("tests.engines.script_cases", path, result=path / "result.json")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], list[float]]:
    """Runtime's results in one process, for the model and batch of a case."""
    from steelyard.integrations.run import train
    from steelyard.runtime.options import TrainOptions

    known: dict[str, list[float]] = {}

    def results_of(name: str) -> list[float]:
        plan = CASES[name]()
        key = f"{plan.chain().config_hash}-{plan.precision}"
        if key not in known:
            alone = unsharded(dict(plan.chain().config)).model_copy(
                update={"global_batch": plan.global_batch, "num_microbatches": 1, "precision": plan.precision}
            )
            chosen = script_cases.options(plan, folder, f"alone-{key}", num_steps(name))
            with one_process():
                train(alone, chosen.pop("data"), TrainOptions(**chosen))
            known[key] = trained(chosen["metrics"])
        return known[key]

    return results_of


@pytest.mark.processes
@pytest.mark.parametrize("trained_case", sampled(CASES, SAMPLE))
def test_a_plan_trains_with_the_results_of_one_process(
    trained_case: str, folder: Path, expected: Callable[[str], list[float]]
) -> None:
    found = trained(folder / f"{trained_case}.jsonl")
    assert len(found) == 2 * num_steps(trained_case)
    assert found == pytest.approx(expected(trained_case), rel=TOLERANCES[CASES[trained_case]().precision])


@pytest.mark.processes
def test_the_script_trains_under_torchrun_without_steelyard(tmp_path: Path) -> None:
    (np.arange(32 * 60 + 1, dtype="<u4") % 256).tofile(tmp_path / "odd $(x) 'tokens.uint32.bin")
    plan = make_plan(TINY | {"note": ODD_TEXT}, ", ".join(["single"] * 8), num_devices=1)
    odd = plan.model_copy(update={"cluster": "1x1xcpu", "model": plan.model.model_copy(update={"name": ODD_TEXT})})
    for name, content in exported(odd, "pytorch").files:
        (tmp_path / f"it's $(a) script{Path(name).suffix}").write_text(content)
    (tmp_path / "steelyard.py").write_text("raise ImportError('the script must not need this package')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    arguments = ["--data", "odd $(x) 'tokens.uint32.bin", "--steps", "2", "--metrics", "script.jsonl"]
    finished = subprocess.run(
        [*torchrun, "it's $(a) script.py", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert len(trained(tmp_path / "script.jsonl")) == 2 * 2


def trained(path: Path) -> list[float]:
    """The loss and the norm of the gradients of every step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm")]
