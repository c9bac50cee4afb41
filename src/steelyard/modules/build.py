"""Build a model from its config with the unmodified `transformers` classes, and initialize the weights of its layers.

Initial weights of a layer depend only on the seed and the layer's place in the chain. Every plan, and one process
without a plan, therefore start from the same numbers, and a rank can make its layers without the rest of the model. The
weights of a parameter that several layers hold (a tied embedding) depend on the first of these layers.
"""

import copy
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, activations, pytorch_utils
from transformers.configuration_utils import ALLOWED_LAYER_TYPES, remap_legacy_layer_types

from steelyard.errors import InvalidModelError, nearest
from steelyard.model.chain import ModelChain
from steelyard.model.family import LayerRole, Task
from steelyard.model.own import OwnSplit, Split
from steelyard.modules.context_attention import IMPLEMENTATION as ATTENTION
from steelyard.modules.experts import IMPLEMENTATION
from steelyard.modules.levers import begin_filling, change_model, fill_added
from steelyard.modules.levers.train import is_added
from steelyard.modules.not_split import failed_at
from steelyard.modules.prepared import prepare

_SEED_STRIDE = 1_000_003
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _keeps_no_tensors() -> bool:
    """Return whether transformers must not cache tensors that depend on sizes alone (BEiT's indices).

    A tensor that is made within a mode may have no values, and a later pass would compute with it.
    """
    return _is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


_is_compiling = pytorch_utils.is_torchdynamo_compiling
pytorch_utils.is_torchdynamo_compiling = _keeps_no_tensors


def hub_config(chain: ModelChain) -> PreTrainedConfig:
    """Return the `transformers` config object of a chain. Raises `InvalidModelError` if transformers rejects it."""
    return read_hub_config(chain.family.model_type, chain.config)


def read_hub_config(model_type: str, config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the `transformers` config object of a config.json. Raises `InvalidModelError` if transformers rejects
    it."""
    entries = {key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"}  # it adds keys
    listed = entries.get("layer_types")
    for place, name in enumerate(remap_legacy_layer_types(listed) if isinstance(listed, list) else ()):
        if name not in ALLOWED_LAYER_TYPES:
            raise InvalidModelError(
                field=f"layer_types.{place}",
                found=repr(name),
                expected="a layer type of transformers",
                hint=nearest(str(name), ALLOWED_LAYER_TYPES),
            )
    with _as_the_configs(model_type):
        return AutoConfig.for_model(model_type, **PreTrainedConfig._decode_special_floats(entries))


def full_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config with all defaults of transformers filled in, also in its sub-configs."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@contextmanager
def _as_the_configs(model_type: str) -> Iterator[None]:
    """Turn any error that transformers raises on a config into `InvalidModelError` for the config."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        words = words if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {words}"
        raise InvalidModelError(
            field="config",
            found=words + failed_at(error),
            expected=f"a config that transformers accepts for {model_type}",
            hint="compare with the config.json that the model was published with",
        ) from error


def build_meta_model(chain: ModelChain) -> PreTrainedModel:
    """Build the model of a chain for its task on the meta device.

    Raises `InvalidModelError` for a user's own module, which only the user can build.
    """
    if chain.split.module:
        raise InvalidModelError(
            field="model",
            found=f"a plan for {chain.split.module}, your own module",
            expected="the function that builds it",
            hint="add --builder FILE.py:FUNCTION, the file that you planned with (it is executed)",
        )
    model = build_from_config(hub_config(chain), chain.family.task, fused_attention=chain.family.fused_attention)
    prepare(model, chain.family.model_type)
    change_model(model, chain)
    return model


def build_from_config(
    config: PreTrainedConfig, task: Task, *, fused_attention: bool, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build the model of a config for training on a task, on the meta device."""
    auto_class = auto_class_of(config, task)
    options = {"attn_implementation": ATTENTION if fused_attention else "eager"}
    if _has_experts(config):
        options["experts_implementation"] = IMPLEMENTATION
    with torch.device("meta"), warnings.catch_warnings(), _as_the_configs(config.model_type):
        warnings.simplefilter("ignore")
        try:
            model = auto_class.from_config(config, dtype=dtype, **options)
        except KeyError as error:  # a part of the model looks its attention up in a table of its own
            if error.args != (ATTENTION,):
                raise
            model = auto_class.from_config(config, dtype=dtype, **options | {"attn_implementation": "sdpa"})
            model.set_attn_implementation(ATTENTION)
    model.to("meta")  # what constructors of old make on the host
    model.train()
    return model


def auto_class_of(config: PreTrainedConfig, task: Task) -> Any:
    """Return the transformers class that builds the model of a config for a task; None if there is none.

    Models that transformers lists elsewhere count as causal, too: one without an encoder among encoder-decoder models
    (such as one that reads sound), and one among image-text models whose class is called causal (mistral4).
    """
    elsewhere = [Task.SEQ2SEQ_LM, Task.IMAGE_TEXT] if task is Task.CAUSAL_LM and not config.is_encoder_decoder else []
    for each in (task, *elsewhere):
        auto_class = getattr(transformers, each.auto_class)
        if type(config) in (classes := auto_class._model_mapping) and (
            task is each or each is Task.SEQ2SEQ_LM or classes[type(config)].__name__.endswith("ForCausalLM")
        ):
            return auto_class
    return None


def _has_experts(config: PreTrainedConfig) -> bool:
    configs = {id(each): each for each in (config, config.get_text_config(decoder=True))}.values()
    return any(getattr(each, key, None) is not None for each in configs for key in _NUM_EXPERTS)


def prepare_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Prepare a model for division into layers, in place, so that every layer holds all that it computes with."""
    if chain.split.module:
        return
    prepare(model, chain.family.model_type)
    change_model(model, chain)
    if _has_experts(model.config):
        model.set_experts_implementation(IMPLEMENTATION)
    attention = model.config._attn_implementation
    if attention == "sdpa" or (attention == "eager" and chain.family.fused_attention):
        model.set_attn_implementation(ATTENTION)
    for shared in chain.shared:
        first_path, *paths = (chain.split.model_path(*each) for each in shared.copies)
        first_owner, first = owner_of(model, first_path), model.get_parameter(first_path)
        for path in paths:
            if owner_of(model, path) is first_owner:  # a module that layers share: each but the first gets its own
                model.set_submodule(path.rpartition(".")[0], copy.deepcopy(first_owner))
            if model.get_parameter(path) is first:
                own = nn.Parameter(first.detach().clone())
                owner_of(model, path).register_parameter(path.rpartition(".")[2], own)


def owner_of(model: nn.Module, path: str) -> nn.Module:
    """Return the module that holds the parameter or buffer at a path of a model."""
    return model.get_submodule(path.rpartition(".")[0])


def named_layer_modules(model: PreTrainedModel, chain: ModelChain, layer: int) -> dict[str, nn.Module]:
    """Return the modules of one layer of the chain, by their names in the layer."""
    if chain.split.module:
        return model.layer(layer)
    paths = chain.family.modules(layer)
    return {name: _module_at(model, chain, path) for name, path in paths.items()}


def layer_modules(model: PreTrainedModel, chain: ModelChain, layer: int) -> dict[str, nn.Module]:
    """Return the modules of one layer of the chain, by their paths in the Hugging Face model."""
    return {path: _module_at(model, chain, path) for path in chain.family.modules(layer).values()}


def _module_at(model: PreTrainedModel, chain: ModelChain, path: str) -> nn.Module:
    """Return the module at a path; for one that holds blocks, return a module with only its own parameters."""
    module = model.get_submodule(path)
    if path not in chain.split.holders:
        return module
    own = nn.Module()
    own._parameters = module._parameters  # the same dictionary: who replaces a parameter replaces it in both
    return own


def outside_buffers(model: PreTrainedModel, split: Split, layer: int) -> dict[str, Tensor]:
    """Return the saved buffers outside the modules of all layers, such as a bias of logits, by path.

    They belong to the head; other layers have none. Integer buffers, such as positions, follow from the config.
    """
    if isinstance(split, OwnSplit) or layer < len(split.layers) - 1:
        return {}
    inside = tuple(f"{path}." for path in split.paths if path not in split.holders)
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, owner in model.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.is_floating_point()
        and name not in owner._non_persistent_buffers_set
        and not f"{path}.".startswith(inside)
    }


def materialize_layer(
    model: PreTrainedModel, chain: ModelChain, layer: int, *, seed: int, device: torch.device
) -> None:
    """Allocate the modules of one layer on ``device`` and initialize their weights, in place.

    Modules that already have memory (loaded weights) are moved and keep their values.
    """
    if chain.split.module:
        model.materialize(layer, device)
        return
    fresh: set[nn.Module] = set()
    for path, module in layer_modules(model, chain, layer).items():
        is_new = any(each.is_meta for name, each in module.named_parameters() if not is_added(name))
        unfilled = begin_filling(module, chain) if is_new else module
        if is_new:
            unfilled.to_empty(device=device)
            _initialize(model, unfilled, seed=seed, layer=layer)
            fresh.update(unfilled.modules())
        filled = fill_added(model, path, unfilled, chain, seed=seed, layer=layer, is_new=is_new)
        filled = filled if is_new else filled.to(device)
        if filled is not module:
            model.set_submodule(path, filled)
    for path, buffer in outside_buffers(model, chain.split, layer).items():
        owner = owner_of(model, path)
        if buffer.is_meta:
            fill_buffers(model, owner, device)
        else:
            owner._buffers[path.rpartition(".")[2]] = buffer.to(device)
    for shared in chain.shared:
        first_layer, first_path = shared.copies[0]
        for path in (path for place, path in shared.copies if place == layer):
            owner = owner_of(model, chain.split.model_path(layer, path))
            if owner not in fresh:
                continue
            first = owner_of(model, chain.split.model_path(first_layer, first_path))
            if chain.type_of(first_layer).role is LayerRole.BLOCK and not isinstance(first, nn.Embedding):
                name, first_name = (each.rpartition(".")[2] for each in (path, first_path))
                like = owner if type(owner) is type(first) else first  # which another layer may have divided by now
                filled = copy.deepcopy(like).to_empty(device=device)
                _initialize(model, filled, seed=seed, layer=zlib.crc32(f"{first_layer}.{first_path}".encode()))
                owner.register_parameter(name, filled.get_parameter(first_name))
            else:
                # fills the matrix of ``owner`` with the first weights of the table that several layers share
                table = nn.Embedding(*owner.weight.shape, device=owner.weight.device)
                table.padding_idx = getattr(first, "padding_idx", None)
                _initialize(model, table, seed=seed, layer=first_layer)
                owner.weight = table.weight


def materialize_module(model: PreTrainedModel, module: nn.Module, *, seed: int, device: torch.device) -> None:
    """Allocate a module of a model on ``device`` and initialize its weights from the seed, in place."""
    module.to_empty(device=device)
    _initialize(model, module, seed=seed, layer=0)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Fill the buffers of one module without parameters on ``device``, as the model makes them from its config.

    Parameters of its submodules stay unchanged, although some models initialize them from the parent.
    """
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    with _parameters_as_they_are(module):
        model._init_weights(module)


@contextmanager
def _parameters_as_they_are(module: nn.Module) -> Iterator[None]:
    """Keep transformers from initializing the parameters of a module."""
    with ExitStack() as stack:
        for parameter in module.parameters():
            stack.enter_context(mock.patch.object(parameter, "_is_hf_initialized", True, create=True))
        yield


def _initialize(model: PreTrainedModel, module: nn.Module, *, seed: int, layer: int) -> None:
    """Initialize the weights of a module from the seed and the layer, submodules first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * _SEED_STRIDE + layer)
        for tensor in (*module.buffers(), *module.parameters()):
            if tensor.is_floating_point():  # one that the model does not fill must not pass for numbers
                tensor.data.fill_(torch.nan)
        parts = _parts_of_their_own(model)
        own = list(module.modules())
        for submodule in reversed(own):
            parts.get(submodule, model)._init_weights(submodule)
            if type(submodule).__module__ == activations.__name__ and any(True for _ in submodule.buffers()):
                submodule.load_state_dict(type(submodule)().state_dict())  # which the model makes in its constructor
        for submodule in own:
            _fill_the_rest(submodule, model.config)
    if any(each.is_floating_point() and not is_fake(each) and each.isnan().any() for each in module.buffers()):
        with _parameters_as_they_are(model):
            for part in set(parts.values()):  # which fill buffers of their blocks, as Falcon-H1's multipliers
                part._init_weights(part)


@torch.no_grad()
def _fill_the_rest(module: nn.Module, config: PreTrainedConfig) -> None:
    """Initialize parameters that otherwise only a constructor initializes (`Conv1D` of OpenAI's GPT)."""
    own = module.named_parameters(recurse=False)
    missing = {name: each for name, each in own if not is_fake(each) and each.isnan().any()}
    if not missing:
        return
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        return
    for name, parameter in missing.items():
        if parameter.dim() > 1 and name != "bias":
            nn.init.normal_(parameter, std=getattr(config, "initializer_range", 0.02))
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def _parts_of_their_own(model: PreTrainedModel) -> dict[nn.Module, PreTrainedModel]:
    """Return the innermost transformers model around each module, which defines how the module is initialized."""
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return {each: part for part in models for each in part.modules()}


def build_model(chain: ModelChain, *, seed: int, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Build the whole unmodified model on one device, with the initial weights of every plan."""
    model = build_meta_model(chain)
    for layer in range(chain.num_layers):
        materialize_layer(model, chain, layer, seed=seed, device=torch.device(device))
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fill_buffers(_parts_of_their_own(model).get(module, model), module, torch.device(device))
    for target, source in _tied_names(model):
        if model.get_parameter(source).is_meta:
            parent, _, name = source.rpartition(".")
            model.get_submodule(parent).register_parameter(name, model.get_parameter(target))
    if chain.tied_embeddings:
        model.tie_weights()
    return model


def _tied_names(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Return pairs of parameters that transformers ties: the replaced one, and the one that replaces it.

    Models composed of models (an encoder and a decoder) contribute the pairs of each.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path, part in model.named_modules():
        keys = getattr(part, "_tied_weights_keys", None)
        for pair in keys.items() if isinstance(keys, dict) else ():
            target, source = (f"{path}.{name}".removeprefix(".").removesuffix("$") for name in pair)
            if {target, source} <= known:
                yield target, source
