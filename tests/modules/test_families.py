"""Tests of every family: its chain computes what the unmodified model does, with the layer types of its structure."""

import pytest
import torch
import transformers
from transformers import AutoConfig

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.chain import LayerRole
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, build_model, layer_modules, prepare_model
from steelyard.modules.model_inputs import IGNORED, decoder_inputs, random_samples
from steelyard.modules.split_layer_types import _signature
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import parse_strategy
from tests.runtime.family_chain import chain_of, length_of, loss_of_chain, loss_of_model
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.sample import FAMILIES, sampled

pytestmark = pytest.mark.slow

families = pytest.mark.parametrize("name", sampled(FAMILY_CONFIGS, FAMILIES))


@families
def test_the_chain_computes_the_loss_of_the_unmodified_model(name):
    chain = chain_of(name)
    inputs, labels = random_samples(chain, 3, length_of(chain), torch.Generator().manual_seed(0))
    model = build_model(chain, seed=1)
    expected = loss_of_model(model, chain, inputs, labels)
    assert loss_of_chain(model, chain, inputs, labels).item() == pytest.approx(expected.item(), rel=1e-6)


@families
def test_the_layers_hold_every_parameter_once_and_shared_ones_once_more_for_each_copy(name):
    chain = chain_of(name)
    model = build_meta_model(chain)
    whole = sum(parameter.numel() for parameter in model.parameters())
    prepare_model(model, chain)
    layers = [layer_modules(model, chain, layer).values() for layer in range(chain.num_layers)]
    held = sum(p.numel() for modules in layers for module in modules for p in module.parameters())
    copies = 0
    for shared in chain.shared:
        layer, path = shared.copies[0]
        local, _, rest = path.partition(".")
        first = model.get_submodule(chain.family.modules(layer)[local]).get_parameter(rest)
        copies += (len(shared.copies) - 1) * first.numel()
    assert held == whole + copies


@pytest.mark.parametrize("name", sampled([name for name in FAMILY_CONFIGS if name != "swin"], FAMILIES))
def test_the_declared_layer_types_are_those_of_the_structure(name):
    """A forward pass decides which blocks of Swin shift their windows."""
    chain = chain_of(name)
    model = build_meta_model(chain)
    prepare_model(model, chain)
    blocks = [layer for layer in range(chain.num_layers) if chain.type_of(layer).role is LayerRole.BLOCK]
    found = [
        tuple(_signature(next(iter(layer_modules(model, chain, layer).values())), chain.split.place_of(layer)))
        for layer in blocks
    ]
    by_structure = list(zip(found, [chain.type_of(layer).attention for layer in blocks], strict=True))
    declared = [chain.layers[layer] for layer in blocks]
    assert [declared.index(each) for each in declared] == [by_structure.index(each) for each in by_structure]


@families
def test_copies_of_a_shared_parameter_start_equal(name):
    chain = chain_of(name)
    model = build_model(chain, seed=3)
    prepare_model(model, chain)
    for shared in chain.shared:
        values = []
        for layer, path in shared.copies:
            local, _, rest = path.partition(".")
            module = model.get_submodule(chain.family.modules(layer)[local])
            values.append(module.get_parameter(rest))
        assert all(torch.equal(value, values[0]) for value in values)
        assert len({id(value) for value in values}) == len(values)


@families
def test_the_whole_model_is_in_memory(name):
    model = build_model(chain_of(name), seed=0)
    assert not [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]


KEYS_WITH_DEFAULTS = {
    "mistral": ("num_key_value_heads", 8),
    "mixtral": ("num_key_value_heads", 8),
    "qwen2": ("num_key_value_heads", 32),
    "qwen3": ("num_key_value_heads", 32),
    "qwen3_moe": ("num_key_value_heads", 4),
    "gemma": ("num_key_value_heads", 16),
    "gemma2": ("num_key_value_heads", 4),
    "gemma3_text": ("num_key_value_heads", 4),
}


@pytest.mark.parametrize("name", sampled(KEYS_WITH_DEFAULTS, ("mistral", "qwen3_moe", "gemma3_text")))
def test_a_config_without_key_value_heads_has_those_that_transformers_takes(name):
    key, expected = KEYS_WITH_DEFAULTS[name]
    config = {**FAMILY_CONFIGS[name], "num_attention_heads": 32, "hidden_size": 64}
    without = {k: value for k, value in config.items() if k not in (key, "model_type")}
    assert AutoConfig.for_model(config["model_type"], **without).num_key_value_heads == expected
    chain = chain_from_config({"model_type": config["model_type"], **without}, name=name)
    block = next(layer_type for layer_type in chain.layer_types if layer_type.role is LayerRole.BLOCK)
    assert ("key-value heads", expected) in block.tp_divides


def test_null_key_value_heads_are_as_many_as_query_heads():
    chain = chain_from_config({**FAMILY_CONFIGS["llama"], "num_key_value_heads": None}, name="tiny")
    assert ("key-value heads", 4) in chain.layer_types[1].tp_divides


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma", "gemma2", "gemma3_text", "t5"])
def test_embeddings_are_tied_without_being_told(name):
    assert chain_of(name).tied_embeddings
    assert build_meta_model(chain_of(name)).config.tie_word_embeddings


def test_names_of_layers_are_counted_anew_behind_each_embedding():
    chain = chain_of("t5")
    assert [chain.layer_name(layer) for layer in range(chain.num_layers)] == [
        "embedding",
        "encoder block 0",
        "encoder block 1",
        "decoder embedding",
        "decoder block 0",
        "decoder block 1",
        "head",
    ]


@pytest.mark.parametrize(
    ("name", "layer_type", "strategy", "reason"),
    [
        ("vit", "embedding", "tp4", "no way is known to divide its modules"),
        ("bert", "embedding", "tp4+sp", "not proved"),
        ("mixtral", "block", "tp8", "attention heads"),
    ],
)
def test_what_a_layer_type_cannot_do_has_a_reason(name, layer_type, strategy, reason):
    (found,) = (each for each in chain_of(name).layer_types if each.name == layer_type)
    text = illegal_reason(found, parse_strategy(strategy), Batch(microbatch_samples=8, seq_len=16))
    assert reason in str(text)


def test_a_plan_for_images_has_the_sequence_length_of_their_patches():
    with pytest.raises(InvalidModelError, match="17, the patches of an image"):
        make_plan(FAMILY_CONFIGS["vit"], "single, single, single, single", num_devices=1, seq_len=16)


def test_a_sequence_longer_than_the_learned_positions_is_an_error():
    with pytest.raises(InvalidModelError, match="at most 32"):
        make_plan(FAMILY_CONFIGS["gpt2"], "single, single, single, single", num_devices=1, seq_len=64)


def test_a_plan_that_divides_a_swin_block_is_refused():
    stages = "tp2, " * 6 + "dp2"
    with pytest.raises(InvalidPlanError, match="the embedding layers do not support tp"):
        make_plan(FAMILY_CONFIGS["swin"], stages, num_devices=2, seq_len=64)


def test_a_decoder_reads_the_labels_moved_on_with_padding_where_there_is_no_target():
    config = build_meta_model(chain_of("t5")).config
    labels = torch.tensor([[5, IGNORED, 7, 8]])
    assert decoder_inputs(labels, config).tolist() == [[0, 5, 0, 7]]


@pytest.mark.parametrize("model_type", ["bart", "fsmt", "marian", "mbart", "pegasus", "plbart", "t5"])
def test_a_decoder_reads_what_the_collators_of_transformers_give_it(model_type):
    sizes = {"vocab_size": 64, "d_model": 48, "decoder_start_token_id": 7, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    config.num_layers = config.encoder_layers = config.decoder_layers = 1
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    labels = torch.tensor([[5, 9, 7, 8], [5, 11, IGNORED, IGNORED]])
    expected = model.prepare_decoder_input_ids_from_labels(labels=labels.clone())
    assert torch.equal(decoder_inputs(labels, model.config), expected)


@pytest.mark.parametrize(
    ("entry", "hint"), [("linear_atention", "linear_attention"), ("linear_attention", "example full_attention")]
)
def test_an_entry_of_layer_types_that_is_not_known_is_an_error(entry, hint):
    with pytest.raises(InvalidModelError, match=rf"layer_types\.1: found '{entry}'(.|\n)*{hint}"):
        chain_from_config({**FAMILY_CONFIGS["qwen3"], "layer_types": ["full_attention", entry]}, name="tiny")
