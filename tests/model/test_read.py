"""Tests of reading models: every packaged config is the named model, and a wrong config is one clear error."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole
from steelyard.model.read import chain_from_config, chain_with_images, config_hash, load_model, model_names

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}

BLOCK_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
SIZE_KEYS = {*BLOCK_KEYS, "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "n_embd", "d_model"}

# What the publishers state (model cards and papers), in parameters.
PUBLISHED_PARAMS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
}


def changed(**changes):
    """The valid config with some keys replaced; ``...`` leaves a key out."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


def num_params(config):
    """Parameters of a model in closed form, read from nothing but its config."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    embeddings = vocab * hidden * (1 if config["tie_word_embeddings"] else 2)
    if config["model_type"] == "gpt_neox":
        attention = 4 * hidden * hidden + 4 * hidden
        mlp = 2 * hidden * width + width + hidden
        return embeddings + config["num_hidden_layers"] * (attention + mlp + 4 * hidden) + 2 * hidden
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
    if config["model_type"] == "qwen2":
        attention += q_size + 2 * kv_size
    return embeddings + config["num_hidden_layers"] * (attention + 3 * hidden * width + 2 * hidden) + hidden


@pytest.mark.parametrize("name", model_names())
def test_a_packaged_model_is_an_embedding_its_blocks_and_a_head(name):
    chain = load_model(name)
    roles = [chain.type_of(layer).role for layer in range(chain.num_layers)]
    blocks = [LayerRole.BLOCK] * next(chain.text_config[key] for key in BLOCK_KEYS if key in chain.text_config)
    decoder = [LayerRole.EMBEDDING, *blocks] if chain.family.task.has_decoder else []
    assert roles == [LayerRole.EMBEDDING, *blocks, *decoder, LayerRole.HEAD]


@pytest.mark.parametrize("name", model_names())
def test_a_packaged_model_carries_its_sizes(name):
    chain = load_model(name)
    sizes = {
        "hidden_size": chain.hidden_size,
        "vocab_size": chain.vocab_size,
        "max_position_embeddings": chain.max_seq_len + 2 * (chain.family.model_type == "xlm-roberta"),  # for padding
    }
    assert chain.name == name
    assert {key: chain.text_config.get(key, size) for key, size in sizes.items()} == sizes


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_a_packaged_model_has_the_published_number_of_parameters(name):
    assert num_params(load_model(name).config) == PUBLISHED_PARAMS[name]


def test_llama3_8b_has_8_03_billion_parameters():
    assert round(num_params(load_model("llama3-8b").config) / 1e9, 2) == 8.03


@pytest.mark.parametrize("name", model_names())
def test_transformers_reads_a_packaged_config_as_the_same_family_and_sizes(name, tmp_path):
    from transformers import AutoConfig

    chain = load_model(name)
    (tmp_path / "config.json").write_text(json.dumps(dict(chain.config)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == chain.family.model_type
    assert {key: getattr(config, key) for key in chain.config if key in SIZE_KEYS} == {
        key: value for key, value in chain.config.items() if key in SIZE_KEYS
    }


def test_layers_are_named_by_what_they_are():
    chain = chain_from_config(CONFIG, name="tiny")
    assert [chain.layer_name(layer) for layer in range(5)] == ["embedding", "block 0", "block 1", "block 2", "head"]


def test_tensor_parallelism_must_divide_heads_width_and_vocabulary():
    embedding, block, head = chain_from_config(CONFIG, name="tiny").layer_types
    sizes = {
        "attention heads": 8,
        "key-value heads": 4,
        "inputs of self_attn.o_proj": 64,
        "inputs of mlp.down_proj": 96,
    }
    assert dict(block.tp_divides) == sizes
    assert embedding.tp_divides == head.tp_divides == (("vocabulary", 100),)


def test_a_model_without_grouped_heads_has_as_many_for_keys_and_values():
    sizes = dict(load_model("pythia-1.4b").layer_types[1].tp_divides)
    assert sizes["key-value heads"] == sizes["attention heads"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(("value", "tied"), [(True, True), (False, False), (..., False)])
def test_embeddings_are_tied_only_where_the_config_says_so(value, tied):
    assert chain_from_config(changed(tie_word_embeddings=value), name="tiny").tied_embeddings is tied


@pytest.mark.slow
def test_a_head_size_frees_the_hidden_size_from_the_heads():
    config = changed(model_type="qwen3", hidden_size=60, head_dim=16)
    assert chain_from_config(config, name="tiny").hidden_size == 60


def test_a_config_file_is_the_model_that_it_describes(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CONFIG))
    assert load_model(path) == chain_from_config(CONFIG, name="mine")


def test_a_folder_with_a_config_is_named_after_the_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert load_model(folder) == load_model(folder / "config.json") == chain_from_config(CONFIG, name="my-model")


@given(st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_of_keys(rng: random.Random):
    keys = list(CONFIG)
    rng.shuffle(keys)
    assert config_hash({key: CONFIG[key] for key in keys}) == config_hash(CONFIG)


@given(st.sampled_from([key for key, value in CONFIG.items() if isinstance(value, int)]), st.integers(-100, 1000))
def test_the_hash_changes_with_every_value(key, value):
    assert (config_hash({**CONFIG, key: value}) == config_hash(CONFIG)) == (value == CONFIG[key])


def test_packaged_models_have_hashes_of_their_own():
    names = set(model_names()) - {"llama3.3-70b"}  # which is Llama 3.1, trained on
    assert len({load_model(name).config_hash for name in names}) == len(names)


def test_an_unknown_family_names_the_nearest_one():
    with pytest.raises(InvalidModelError, match=r"(?s)^model_type: found 'qwen4'.*did you mean .*qwen3"):
        chain_from_config(changed(model_type="qwen4"), name="tiny")


def test_an_unknown_family_whose_class_transformers_has_names_the_type_of_the_class():
    with pytest.raises(InvalidModelError, match=r'(?s)^model_type: found \'kimi_k2\'.*"model_type": "deepseek_v3"'):
        chain_from_config(changed(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"]), name="tiny")


@pytest.mark.parametrize("model_type", [..., None, 7, [], "", "lama"])
def test_a_model_type_that_is_no_family_lists_the_known_ones(model_type):
    with pytest.raises(
        InvalidModelError, match=r"expected: a model type of .*, for example bert, cohere, .*gpt_neox, .*mistral"
    ):
        chain_from_config(changed(model_type=model_type), name="tiny")


SIZES = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(key):
    with pytest.raises(InvalidModelError, match=f"^{key}: found nothing"):
        chain_from_config(changed(**{key: ...}), name="tiny")


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", ["64", 64.5, True, 0, -8, {}])
def test_a_size_that_is_no_whole_number_above_zero_is_named(key, value):
    with pytest.raises(InvalidModelError, match=f"^{key}: found .*\n.*whole number of 1 or more"):
        chain_from_config(changed(**{key: value}), name="tiny")


def test_heads_that_do_not_divide_the_hidden_size_are_named():
    with pytest.raises(InvalidModelError, match=r"^config: found .*hidden size \(64\) is not a multiple"):
        chain_from_config(changed(num_attention_heads=7, num_key_value_heads=7), name="tiny")


def test_key_value_heads_that_do_not_divide_the_heads_are_named():
    with pytest.raises(InvalidModelError, match=r"^num_key_value_heads: found 3\n.*divisor of num_attention_heads 8"):
        chain_from_config(changed(num_key_value_heads=3), name="tiny")


@pytest.mark.parametrize("value", ["false", 0, 1])
def test_a_switch_that_is_neither_true_nor_false_is_named(value):
    with pytest.raises(InvalidModelError, match=r"^tie_word_embeddings: .*\n.*true or false"):
        chain_from_config(changed(tie_word_embeddings=value), name="tiny")


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), float("inf"), object()])
def test_a_value_that_json_cannot_hold_is_an_error(value):
    with pytest.raises(InvalidModelError, match=r"^config: found .*\n.*values that JSON supports"):
        chain_from_config(changed(extra=value), name="tiny")


@pytest.mark.parametrize("content", ["[]", "3", "null", '"llama"'])
def test_a_config_that_is_no_object_is_an_error(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InvalidModelError, match=r"^config: found .*\n.*a JSON object"):
        load_model(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"model_type": "llama",', b"\xff\xfe\x00", b"9" * 5000, b"[" * 100_000],
    ids=["empty", "truncated", "cut in a list", "not text", "endless number", "endless nesting"],
)
def test_a_broken_config_file_is_an_error_that_names_it(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InvalidModelError, match=r"^model: found .*config\.json"):
        load_model(path)


def test_an_unknown_name_names_the_nearest_models():
    with pytest.raises(InvalidModelError, match=r"(?s)^model: found 'llama3-9b'.*did you mean .*llama3-8b"):
        load_model("llama3-9b")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "absent/config.json"])
def test_a_path_without_a_file_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModelError, match=r"a packaged model, .* or the path of a config\.json"):
        load_model(name)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "llama"}, "448x672 for llama"),
        ({"model_type": "llava", "vision_config": {"image_size": 336}}, "448x672 for llava, whose images are 336"),
        ({"model_type": "llava", "vision_config": {}}, "448x672 for llava"),
        (
            {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2, "image_size": 224}},
            "448x672 for qwen2_vl, whose images are 224",
        ),
    ],
)
def test_a_size_of_images_is_for_models_that_read_them_in_any_size(config, found, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidModelError) as raised:
        load_model(path, image_size=(448, 672))
    assert (raised.value.field, raised.value.found) == ("--image-size", found)


def test_text_alone_is_of_a_model_that_has_a_text_part():
    with pytest.raises(InvalidModelError, match="none for llama, whose config has no text_config"):
        chain_with_images(load_model("llama3-8b").config, name="llama3-8b", image_size="none")
