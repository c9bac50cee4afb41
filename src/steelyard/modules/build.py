"""Builds a model from its config with the unmodified `transformers` classes, and fills its layers with first weights.

The first weights of a layer depend on the seed and the layer's place in the chain alone: every plan, and one process
without a plan, start from the same numbers, and a rank can make its own layers without the rest of the model.
"""

import warnings

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole, ModelChain

_SEED_STRIDE = 1_000_003


def hub_config(chain: ModelChain) -> PreTrainedConfig:
    """The `transformers` config object of a chain; raises `InvalidModelError` where transformers refuses it."""
    entries = {key: value for key, value in chain.config.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(chain.family.model_type, **entries)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidModelError(
            field="config",
            found=str(error).splitlines()[0],
            expected=f"a config that transformers accepts for {chain.family.model_type}",
            hint="compare with the config.json that the model was published with",
        ) from error


def build_meta_model(chain: ModelChain) -> PreTrainedModel:
    """The causal language model on the meta device: its structure, no memory."""
    return _from_config(hub_config(chain), "meta", torch.float32)


def build_one_block_model(chain: ModelChain, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its first block alone, on the CPU; call it in a `FakeTensorMode`, where it takes no memory."""
    config = hub_config(chain)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return _from_config(config, "cpu", dtype)


def _from_config(config: PreTrainedConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    return model


def layer_modules(model: PreTrainedModel, chain: ModelChain, layer: int) -> dict[str, nn.Module]:
    """The modules of the Hugging Face model that make up one layer of the chain, by their path in the model."""
    family = chain.family
    role = chain.kind_of(layer).role
    if role is LayerRole.EMBEDDING:
        paths = [f"{family.body}.{family.embedding}"]
    elif role is LayerRole.BLOCK:
        paths = [f"{family.body}.{family.blocks}.{layer - 1}"]
    else:
        paths = [f"{family.body}.{family.final_norm}", family.output]
    return {path: model.get_submodule(path) for path in paths}


def materialize_layer(
    model: PreTrainedModel, modules: dict[str, nn.Module], layer: int, *, seed: int, device: torch.device
) -> None:
    """Gives the modules of one layer memory on ``device`` and their first weights, in place.

    Modules that already have memory (loaded weights) are moved and keep their values. A head that is tied to the
    embedding gets a matrix of its own with the embedding's first weights.
    """
    output = model.get_output_embeddings()
    for module in modules.values():
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(device)
            continue
        module.to_empty(device=device)
        _initialize(model, module, seed=seed, layer=layer)
        if module is output and model.config.tie_word_embeddings:
            fresh = nn.Embedding(*module.weight.shape, device=device)
            fresh.padding_idx = model.get_input_embeddings().padding_idx
            _initialize(model, fresh, seed=seed, layer=0)
            module.weight = fresh.weight


def untie_embedding(model: PreTrainedModel) -> None:
    """Gives a head that is tied to the embedding a matrix of its own with the same values, in place."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output.weight is embedding.weight:
        output.weight = nn.Parameter(embedding.weight.detach().clone())


def _initialize(model: PreTrainedModel, module: nn.Module, *, seed: int, layer: int) -> None:
    """Fills a module with first weights that depend on the seed and the layer alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * _SEED_STRIDE + layer)
        for submodule in module.modules():
            model._init_weights(submodule)


def build_model(chain: ModelChain, *, seed: int, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The whole model with the first weights that every plan starts from, on one device."""
    model = build_meta_model(chain)
    for layer in range(chain.num_layers):
        materialize_layer(model, layer_modules(model, chain, layer), layer, seed=seed, device=torch.device(device))
    body = model.get_submodule(chain.family.body)
    body.rotary_emb = build_rotary(model, chain, torch.device(device))
    if chain.tied_embeddings:
        model.tie_weights()
    return model


def build_rotary(model: PreTrainedModel, chain: ModelChain, device: torch.device) -> nn.Module:
    """The model's rotary position embedding on ``device``: it has buffers computed from the config, no parameters."""
    rotary = model.get_submodule(f"{chain.family.body}.rotary_emb")
    with torch.device(device):
        return type(rotary)(model.config)
