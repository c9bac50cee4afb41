"""Tests that first weights are equal for every plan and for both copies of a tied matrix."""

import pytest
import torch
import transformers

from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.modules.build import (
    build_from_config,
    build_meta_model,
    build_model,
    fill_buffers,
    layer_modules,
    materialize_layer,
    materialize_module,
    prepare_model,
    read_hub_config,
)
from tests.runtime.models import CONFIGS

pytestmark = pytest.mark.slow


def tiny(name: str) -> ModelChain:
    return chain_from_config({**CONFIGS[name], "num_hidden_layers": 1}, name=name)


def test_a_layer_made_alone_has_the_weights_that_it_has_in_the_whole_model() -> None:
    chain = tiny("llama")
    whole = build_model(chain, seed=3)
    alone = build_meta_model(chain)
    materialize_layer(alone, chain, 1, seed=3, device=torch.device("cpu"))
    for path, module in layer_modules(alone, chain, 1).items():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, whole.get_submodule(path).get_parameter(name))


def test_weights_differ_between_seeds_and_layers() -> None:
    chain = chain_from_config({**CONFIGS["llama"], "num_hidden_layers": 2}, name="llama")
    first, second = build_model(chain, seed=0), build_model(chain, seed=1)
    weights = [model.model.layers[layer].mlp.up_proj.weight for model in (first, second) for layer in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_tied_head_made_alone_starts_as_the_embedding() -> None:
    chain = tiny("llama-tied")
    whole = build_model(chain, seed=3)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    alone = build_meta_model(chain)
    prepare_model(alone, chain)
    last = chain.num_layers - 1
    materialize_layer(alone, chain, last, seed=3, device=torch.device("cpu"))
    assert torch.equal(alone.lm_head.weight, whole.lm_head.weight)
    assert alone.model.embed_tokens.weight.is_meta


def test_untying_keeps_loaded_weights_in_a_copy_of_their_own() -> None:
    chain = tiny("llama-tied")
    model = build_model(chain, seed=3)
    prepare_model(model, chain)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_weights_that_are_loaded_stay() -> None:
    chain = tiny("llama")
    model = build_model(chain, seed=3)
    before = model.model.embed_tokens.weight.clone()
    materialize_layer(model, chain, 0, seed=4, device=torch.device("cpu"))
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_buffers_are_filled_beside_weights_that_stay() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"vision_config": {**sizes, "image_size": 32, "patch_size": 8}}
    model = build_from_config(read_hub_config("siglip", vision), Task.IMAGE_CLASSIFICATION, fused_attention=False)
    materialize_module(model, model, seed=0, device=torch.device("cpu"))
    embeddings = model.vision_model.embeddings  # which the model fills together with the table below it
    before = embeddings.position_embedding.weight.clone()
    embeddings.position_ids.fill_(-1)
    fill_buffers(model, embeddings, torch.device("cpu"))
    assert torch.equal(embeddings.position_ids, torch.arange(16).expand((1, -1)))
    assert torch.equal(embeddings.position_embedding.weight, before)


def test_what_a_model_fills_in_its_blocks_is_filled_in_a_layer_made_alone() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    config = {"model_type": "falcon_h1", **sizes, **heads, "mamba_d_head": 16, "mamba_d_state": 16}
    config |= {"ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0]}
    chain = chain_from_config(config, name="falcon")
    expected = transformers.AutoModelForCausalLM.from_config(read_hub_config("falcon_h1", config))
    model = build_meta_model(chain)
    materialize_layer(model, chain, 1, seed=0, device=torch.device("cpu"))
    mixers = (each.model.layers[0].mamba for each in (model, expected))
    found, wanted = (each.mup_vector for each in mixers)
    assert torch.equal(found, wanted)
