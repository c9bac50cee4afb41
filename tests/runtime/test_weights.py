"""Tests of weights from Hugging Face folders, and of errors for those that cannot be read."""

import errno
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import steelyard
from steelyard.errors import InvalidCheckpointError, InvalidDataError, InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config, load_model
from steelyard.modules.build import (
    build_meta_model,
    build_model,
    hub_config,
    materialize_layer,
    prepare_model,
    read_hub_config,
)
from steelyard.modules.layers import build_layer
from steelyard.modules.prepared import stored_apart
from steelyard.modules.split_proof import split_model
from steelyard.plan.strategy import Remat
from steelyard.runtime import weights
from steelyard.runtime.checks import check_export, tokenizer_files
from steelyard.runtime.state import ParameterNames, parameter_names, saved_tensors
from steelyard.runtime.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightFolder,
    check_weights,
    export_weights,
    load_weights,
    stored_parameters,
)
from tests.modules.split_configs import split_config
from tests.runtime.family_cases import SPLITS
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import one_process
from tests.sample import FAMILIES, sampled

SOME = "model.layers.0.mlp.up_proj.weight"


class WholeState:
    """State that a whole model saves, on one process: the counterpart of `RunState` for a plan."""

    def __init__(self, chain: ModelChain) -> None:
        self.names: ParameterNames = parameter_names(chain)
        self.model = build_model(chain, seed=5)

    def weights(self, *, copy: int = 0) -> dict[str, Tensor]:
        return dict(saved_tensors(self.model)) if copy == 0 else {}

    def takers(self) -> dict[str, Any]:
        return {}


class HeadState:
    """The head of a model, as a rank has it that holds no other layer."""

    def __init__(self, chain: ModelChain) -> None:
        model, last = build_meta_model(chain), chain.num_layers - 1
        prepare_model(model, chain)
        materialize_layer(model, chain, last, seed=5, device=torch.device("cpu"))
        self.names: ParameterNames = parameter_names(chain)
        self.head = build_layer(model, chain, last, Remat.NONE)
        self._last = last

    def weights(self, *, copy: int = 0) -> dict[str, Tensor]:
        saved = [(f"{self._last}.{path}", tensor) for path, tensor in saved_tensors(self.head)]
        return {self.names.by_path[path]: t for path, t in saved if self.names.copy_of_path[path] == copy}

    def takers(self) -> dict[str, Any]:
        return {}


def chain_of(name: str) -> ModelChain:
    return chain_from_config(CONFIGS[name], name=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    build_model(chain_of("llama"), seed=1).save_pretrained(path / "one")
    build_model(chain_of("llama"), seed=1).save_pretrained(path / "several", max_shard_size="200KB")
    build_model(chain_of("llama-tied"), seed=1).save_pretrained(path / "tied")
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "several", tmp_path / "weights")
    return tmp_path / "weights"


def load(path: Path, name: str = "llama") -> tuple[WholeState, list[str]]:
    state = WholeState(chain_of(name))
    return state, load_weights(path, state, chain_of(name))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), [("one", "llama"), ("several", "llama"), ("tied", "llama-tied")])
def test_every_parameter_is_read(saved: Path, path: str, name: str) -> None:
    state, notices = load(saved / path, name)
    expected = dict(build_model(chain_of(name), seed=1).named_parameters())
    assert all(torch.equal(value, expected[key]) for key, value in state.weights().items())
    assert notices == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(FAMILY_CONFIGS, FAMILIES))
def test_transformers_own_files_are_read_for_every_family(tmp_path: Path, name: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[name], name=name)
    saved = getattr(transformers, chain.family.task.auto_class).from_config(hub_config(chain))
    saved.save_pretrained(tmp_path)
    state = WholeState(chain)
    assert load_weights(tmp_path, state, chain) == []  # type: ignore[arg-type]
    expected = saved.state_dict()
    assert all(torch.equal(value.view_as(expected[key]), expected[key]) for key, value in state.weights().items())


@pytest.mark.slow
def test_a_buffer_that_decides_which_experts_are_chosen_is_read(tmp_path: Path) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["deepseek_v3"], name="deepseek_v3")
    model, name = build_model(chain, seed=1), "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.arange(8.0))
    model.save_pretrained(tmp_path)
    state = WholeState(chain)
    load_weights(tmp_path, state, chain)  # type: ignore[arg-type]
    assert torch.equal(state.model.get_buffer(name), torch.arange(8.0))


@pytest.mark.slow
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_bias_of_the_logits_that_the_model_itself_holds_is_read(tmp_path: Path, is_stored: bool) -> None:
    chain = chain_from_config(split_config("bart"), name="bart", split=SPLITS["bart"])
    given = build_model(chain, seed=1)
    given.final_logits_bias.copy_(torch.arange(128.0))
    saved = given.state_dict()
    kept = {name: value for name, value in saved.items() if is_stored or name != "final_logits_bias"}
    given.save_pretrained(tmp_path, state_dict=kept)
    state = HeadState(chain)
    load_weights(tmp_path, state, chain)  # type: ignore[arg-type]
    bias = torch.arange(128.0) if is_stored else torch.zeros(128)
    logits = state.head.run_alone(state.head, torch.zeros((2, 4, 64)), None)
    assert torch.equal(logits, bias.expand(2, 4, 128))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(FAMILY_CONFIGS, FAMILIES))
def test_transformers_reads_every_family_under_the_names_that_are_exported(tmp_path: Path, name: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[name], name=name)
    model = build_model(chain, seed=1)
    apart = stored_apart(model)
    expected = {
        key: value.flatten(-2) if key.rpartition(".")[0] in apart else value for key, value in model.named_parameters()
    }
    save_file(expected, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    loaded = getattr(transformers, chain.family.task.auto_class).from_pretrained(tmp_path)
    assert all(torch.equal(value, expected[key]) for key, value in loaded.named_parameters())


_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 1, "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    **{"laurel_rank": 4, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2, "altup_num_inputs": 3},
    "activation_sparsity_pattern": [0.0, 0.0],
}


@pytest.mark.slow
def test_text_alone_of_a_model_whose_tower_is_of_a_package_that_is_missing_is_planned_and_read(tmp_path: Path) -> None:
    config = {"model_type": "gemma3n", "text_config": _TEXT}
    split = split_model("gemma3n", config)
    chain = chain_from_config(config, name="gemma3n", split=split)
    assert chain.config == {**_TEXT, "model_type": "gemma3n_text"}
    assert "text_config only, without images or sound: TimmW" in chain.left_out()
    assert chain_from_config(chain.config, name="gemma3n", split=split) == chain
    with pytest.raises(InvalidModelError, match="the gemma3n_text text model"):
        chain_from_config({"model_type": "gemma3n"}, name="gemma3n", split=split)
    given = dict(build_model(chain, seed=1).named_parameters())
    stored = {name.replace("model.", "model.language_model.", 1): each.detach() for name, each in given.items()}
    save_file({**stored, "model.vision_tower.norm.weight": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    read_hub_config("gemma3n", config).save_pretrained(tmp_path)
    state = WholeState(chain)
    (notice,) = load_weights(tmp_path, state, chain)  # type: ignore[arg-type]
    assert notice.endswith("that are not in the model: model.vision_tower.norm.weight")
    assert all(torch.equal(each, given[name]) for name, each in state.weights().items())


_PLAIN_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 1, "vocab_size": 64},
}
_PIXTRAL: dict[str, Any] = {
    **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "head_dim": 16, "image_size": 56, "patch_size": 14},
}
_WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", **_PLAIN_TEXT},
        _PIXTRAL,
    ),
    "mistral3 of mistral4": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral4", **_PLAIN_TEXT, "moe_intermediate_size": 16, "n_routed_experts": 4, "q_lora_rank": 8}
        | {"num_experts_per_tok": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        _PIXTRAL,
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"model_type": "qwen3_5_text", **_PLAIN_TEXT, "layer_types": ["full_attention"] * 2},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
        | {"num_position_embeddings": 16},
    ),
}
"""Class, text and tower of models of images of any size."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "image_size"), [("mistral3", None), ("mistral3 of mistral4", None), ("qwen3_5", "none")]
)
def test_text_alone_of_a_model_of_images_of_any_size_is_planned_and_read(
    tmp_path: Path, name: str, image_size: Any
) -> None:
    kind, (class_name, text, tower) = name.split(maxsplit=1)[0], _WHOLE[name]
    config = {"model_type": kind, "architectures": [class_name], "text_config": text, "vision_config": tower}
    torch.manual_seed(1)
    whole = getattr(transformers, class_name)(read_hub_config(kind, {**config, "tie_word_embeddings": False}))
    whole.save_pretrained(tmp_path)
    chain = load_model(tmp_path, image_size=image_size)
    assert "of text_config only, without images or sound" in chain.left_out()
    state = WholeState(chain)
    (notice,) = load_weights(tmp_path, state, chain)  # type: ignore[arg-type]
    assert "that are not in the model" in notice
    expected = {name.replace("model.language_model.", "model."): each for name, each in whole.named_parameters()}
    assert all(torch.equal(each, expected[name]) for name, each in state.weights().items())


def test_any_part_of_matrices_that_are_stored_apart_is_read(tmp_path: Path) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["gpt2"], name="gpt2")
    whole = torch.arange(32.0 * 96).view(32, 96)
    name = "transformer.h.0.attn.c_attn.weight"
    save_file({name: whole}, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with ExitStack() as stack:
        folder = WeightFolder(tmp_path, stack)
        model = build_meta_model(chain)
        stored = stored_parameters(model, folder.names, stored_apart(model))[name]
        assert stored.shape(folder.tensor) == (32, 3, 32)
        part = (slice(4, 8), slice(1, 3), slice(16, 32))
        assert torch.equal(stored.read(folder.tensor, part), whole.unflatten(-1, (3, 32))[part])


def test_any_part_of_the_joined_matrices_of_experts_is_read(tmp_path: Path) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["mixtral"], name="mixtral")
    model = build_model(chain, seed=1)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = model.get_parameter(name)
    with ExitStack() as stack:
        folder = WeightFolder(tmp_path, stack)
        model = build_meta_model(chain)
        stored = stored_parameters(model, folder.names, stored_apart(model))[name]
        assert stored.shape(folder.tensor) == tuple(whole.shape)
        num_experts, rows, columns = whole.shape
        for experts in ((0, num_experts), (1, 3)):
            for cut in ((0, rows), (0, rows // 2), (rows // 2, rows), (rows // 4, rows // 2 + 1), (3, 4)):
                part = (slice(*experts), slice(*cut), slice(1, columns))
                assert torch.equal(stored.read(folder.tensor, part), whole[part])


def test_half_precision_becomes_the_type_of_the_parameters(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "half")
    tensors = load_file(saved / "one" / SINGLE_FILE)
    save_file({key: value.bfloat16() for key, value in tensors.items()}, tmp_path / "half" / SINGLE_FILE)
    state, _ = load(tmp_path / "half")
    assert torch.equal(state.weights()[SOME], tensors[SOME].bfloat16().float())


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_index(folder, lambda files: files.pop(SOME))
    with pytest.raises(InvalidCheckpointError, match=rf"without {SOME}\n"):
        load(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(InvalidCheckpointError, match=r"no model-00002-of-.*safetensors in"):
        load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InvalidCheckpointError, match=file.name):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    file = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][SOME]
    tensors = load_file(file)
    save_file(tensors | {SOME: tensors[SOME][:-1].contiguous()}, file)
    with pytest.raises(InvalidCheckpointError, match=rf"{SOME} of shape \[127, 64\]"):
        load(folder)


def test_a_damaged_index_is_an_error(folder: Path) -> None:
    (folder / INDEX_FILE).write_text("{")
    with pytest.raises(InvalidCheckpointError, match="which is damaged"):
        load(folder)


def test_tensors_that_are_not_of_the_model_are_mentioned(folder: Path) -> None:
    save_file({"adapter.weight": torch.ones(1)}, folder / "extra.safetensors")
    change_index(folder, lambda files: files.update({"adapter.weight": "extra.safetensors"}))
    _, notices = load(folder)
    assert notices == [f"ignored 1 tensors of {folder} that are not in the model: adapter.weight"]


def test_other_formats_are_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(InvalidCheckpointError, match=r"no model\.safetensors .* but pytorch_model\.bin"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "value"), [("rope_theta", 5.0), ("rms_norm_eps", 1e-6), ("hidden_act", "gelu"), ("hidden_size", 32)]
)
def test_a_config_that_is_not_the_plans_is_named_even_where_shapes_agree(
    folder: Path, entry: str, value: float | str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | {entry: value}))
    with pytest.raises(InvalidCheckpointError, match=r"the value of the plan's model llama"):
        load(folder)


def test_another_architecture_is_an_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    with pytest.raises(InvalidCheckpointError, match="model_type = 'mistral'"):
        load(folder)


def test_an_unknown_architecture_is_an_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    with pytest.raises(InvalidModelError, match="nonesuch"):
        load(folder)


@pytest.mark.parametrize("content", [None, "{", "\0"])
def test_no_config_is_an_error(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(InvalidCheckpointError, match=r"no readable config\.json"):
        load(folder)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="--init"):
        load(tmp_path / "missing")


def test_an_export_never_writes_over_something(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="which already exists"):
        check_export(tmp_path)


def test_an_export_onto_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(tensors: dict[str, Tensor], file: Path, **_options: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", fill)
    plan = make_plan("llama", ", ".join(["single"] * chain_of("llama").num_layers), num_devices=1)
    with one_process(), pytest.raises(InvalidCheckpointError, match=r"--export-hf: found .*No space left"):
        export_weights(tmp_path / "out", WholeState(chain_of("llama")), plan, tokenizer={})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_export_takes_what_transformers_reads_beside_a_tokenizer(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    expected = {"tokenizer.json": b"tokenizer.json", "tokenizer_config.json": b"tokenizer_config.json"}
    assert tokenizer_files(tmp_path) == tokenizer_files(tmp_path / "tokenizer.json") == expected


def test_a_tokenizer_of_another_name_gets_the_one_that_transformers_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    assert tokenizer_files(tmp_path / "mine.json") == {"tokenizer.json": b"{}"}


def test_text_as_bytes_has_no_tokenizer_to_export() -> None:
    assert tokenizer_files(None) == {}


def test_a_tokenizer_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"tokenizer: found .*No such file"):
        tokenizer_files(tmp_path)


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_a_hub_id_instead_of_a_folder_is_told_to_be_downloaded() -> None:
    download = r"hf download org/some-model --local-dir org/some-model"
    with pytest.raises(InvalidCheckpointError, match=download):
        check_weights(Path("org/some-model"), chain_from_config(FAMILY_CONFIGS["llama"], name="llama"))
    with pytest.raises(InvalidDataError, match=download):
        tokenizer_files(Path("org/some-model"))


def test_a_loop_saves_weights_for_transformers_once(tmp_path: Path) -> None:
    plan = make_plan("llama", ", ".join(["single"] * 8), num_devices=1, global_batch=2, num_microbatches=1, seq_len=16)
    model = build_model(plan.chain(), seed=1)
    expected = {name: each.detach().clone() for name, each in model.state_dict().items()}
    with one_process():
        trainer = steelyard.parallelize(model, plan)
        steelyard.save_weights(trainer, tmp_path / "out")
        with pytest.raises(InvalidCheckpointError, match="which already exists"):
            steelyard.save_weights(trainer, tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], each) for name, each in expected.items())
