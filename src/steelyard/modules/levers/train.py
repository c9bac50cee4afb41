"""Implementation of adapters: peft puts them into a model; their first weights depend only on the seed and the layer.

Peft builds the adapters of the whole model once without values, for tracing, and those of a layer again around its
weights, for their first values. Every property of adapters is read from peft's classes, for all kinds of adapters.
"""

import copy
import dataclasses
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from steelyard.errors import AbsentTargetsError, InvalidModelError, nearest
from steelyard.levers.train import ALL_LINEAR, LORA, Train
from steelyard.model.chain import ModelChain
from steelyard.modules.experts import STACKED_DIMS
from steelyard.modules.levers.quantized_base import PARTS, Quantized
from steelyard.modules.prepared import store_together

_MOST_NAMED = 24
_STRIDE = 1_000_033
_NAME = "default"
"""Peft's name for the adapters of a model with one set of them, part of the name of each of their parameters."""
_ROOT = "base_model.model"
"""Path of the model in a `peft.PeftModel`."""
_BASES = ("base_layer", "original_module")
"""Attributes of peft's modules that hold the wrapped module."""
_TAKEN = "_adapters_taken"
"""Attribute of a module that holds its adapters, taken out until the module has first weights."""
_NOT_SAID = frozenset(
    ("peft_type", "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version")
)
"""Fields of a peft config that are not settings."""


def change_model(lever: Train, model: PreTrainedModel, chain: ModelChain) -> None:
    """Put adapters without values into a model, in place, and freeze all other parameters; idempotent.

    Raises `InvalidModelError` if a target names nothing that can have adapters, or if peft refuses a setting.
    """
    if hasattr(model, "peft_config"):
        _group_experts(model, model.peft_config[_NAME])
        return
    names = {name for name, _ in model.named_parameters()}
    root = _inject(lever, config_of(lever, model), "", model, model.config.model_type, empty=True)
    model.peft_config = root.peft_config
    _check(lever, model, chain, names)


def config_of(lever: Train, model: PreTrainedModel) -> Any:
    """Return the peft config of a lever."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # which takes longer than all that needs no adapters
    from peft.utils import PeftType

    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(lever.kind.upper())]
    fields = {each.name: str(each.type) for each in dataclasses.fields(config_class) if each.name not in _NOT_SAID}
    values: dict[str, Any] = {"target_modules": _targets(lever, model)} if lever.targets else {}
    for key, text in lever.settings:
        name = next((each for each in (key, f"{lever.kind}_{key}", f"use_{key}") if each in fields), None)
        if name is None:
            raise _refused(key, f"a setting of {config_class.__name__}: {', '.join(fields)}", nearest(key, fields))
        is_list = "list" in fields[name].lower() and text not in ("true", "false")
        values[name] = [_scalar(each) for each in text.split("+")] if is_list else _scalar(text)
    stacked = [name for name, each in model.named_parameters() if each.ndim == STACKED_DIMS]
    for target in values.get("target_parameters") or ():
        if not any(f".{name}".endswith(f".{target}") for name in stacked):
            names = sorted({".".join(name.split(".")[-3:]) for name in stacked})
            words = f"target_parameters={target}, which is not the end of the name of a stacked expert matrix"
            raise _refused(
                words,
                ", ".join(names) or "a model with stacked experts",
                nearest(str(target), names) if names else "leave it out",
            )
    values |= {"save_projection": False} if "save_projection" in fields else {}  # drawn again from a number in the file
    try:
        with _quiet():
            return config_class(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise _refused(f"{lever}: {_words(error)}", "settings that peft accepts", "follow peft's message") from error


def lever_of(config: Any) -> Train:
    """Return the lever of a peft config. Raises `UserError` if no lever can express it."""
    kind = str(config.peft_type.value).lower()
    usual = {each.name: each for each in dataclasses.fields(config) if each.name not in _NOT_SAID}
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str):
        raise _refused(f"target_modules={targets!r}", "a list of path endings", "name the modules in a list")
    values = [f"targets={'+'.join(sorted(targets))}"] if targets else []
    for name, field in usual.items():
        value = getattr(config, name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if name == "target_modules" or (value == default and not (kind == LORA and name in ("r", "lora_alpha"))):
            continue
        are_several = isinstance(value, list | tuple | set | frozenset)
        parts = sorted(value) if isinstance(value, set | frozenset) else value if are_several else [value]
        if not all(isinstance(each, str | int | float) for each in parts):
            raise _refused(f"{name}={value!r}", "a word, a number or a list of them", "leave the setting out")
        words = (str(each).lower() if isinstance(each, bool) else str(each) for each in parts)
        values.append(f"{name}={'+'.join(words)}")
    return Train.parse(f"{kind}:{','.join(values)}" if values else kind)


def changed_by_user(model: nn.Module) -> tuple[PreTrainedModel, Train] | None:
    """Return the model in a `peft.PeftModel` and its adapters; None for a module that peft has not changed.

    Raises `UserError` for adapters that the runtime cannot train.
    """
    peft = sys.modules.get("peft")  # whose models it has made
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    configs = model.peft_config
    if list(configs) != [_NAME]:
        raise _refused(
            f"adapters named {', '.join(configs)}",
            f"a single adapter named {_NAME}",
            "leave adapter_name out, and delete other adapters (delete_adapter)",
        )
    config = configs[_NAME]
    lever = lever_of(config)
    if getattr(config, "save_projection", False):
        raise _refused("save_projection=True", "projections that every rank generates", "set save_projection=False")
    if not any(each.requires_grad for each in model.parameters()):
        raise _refused("adapters without gradients", "trainable adapters", "load them with is_trainable=True")
    present = [each for each in lever.targets if _are_named(model.targeted_module_names, each)]
    return model.get_base_model(), dataclasses.replace(lever, targets=tuple(present))


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _targets(lever: Train, model: PreTrainedModel) -> list[str]:
    """Return the targets of adapters: for LoRA paths of linear layers, for other kinds ends of paths of any modules."""
    head, is_lora = model.get_output_embeddings(), lever.kind == LORA
    linear = [path for path, each in model.named_modules() if _is_linear(each) and each is not head]
    if lever.targets == (ALL_LINEAR,) and linear:
        return linear if is_lora else sorted({path.rpartition(".")[2] for path in linear})
    paths = linear if is_lora else [path for path, _ in model.named_modules()]
    absent = [target for target in lever.targets if not _are_named(paths, target)]
    if absent:
        names = sorted({path.rpartition(".")[2] for path in linear})
        raise AbsentTargetsError(
            absent=absent,
            present=[target for target in lever.targets if target not in absent],
            field="--train",
            found=f"targets={'+'.join(absent)}, which is not the end of the path of a "
            f"{('linear layer' if is_lora else 'module')}",
            expected=f"path endings joined by +, for example {', '.join(names[:_MOST_NAMED])}, or {ALL_LINEAR}"
            if names
            else "a model with linear layers before its head",
            hint=nearest(absent[0], names) if names else "use --train full",
        )
    if not is_lora:
        return list(lever.targets)
    return [path for path in linear if _are_named([path], *lever.targets)]


def _are_named(paths: Iterable[str], *targets: str) -> bool:
    """Return whether one of the paths ends in one of the targets."""
    return any(f".{path}".endswith(tuple(f".{target}" for target in targets)) for path in paths)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with one result; the router of llama4 is a subclass that has two."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return isinstance(module, nn.Linear | Conv1D)
    row = torch.empty((1, module.in_features), device="meta", dtype=module.weight.dtype)
    return isinstance(copy.deepcopy(module).to("meta")(row), Tensor)


def _inject(lever: Train, config: Any, path: str, module: nn.Module, model_type: str, *, empty: bool = False) -> Any:
    """Put adapters into a module, and return the root of a tree that holds only it, at its path in a `peft.PeftModel`.

    The model itself is not used, because peft would take names of its linear layers for those of experts that it knows.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    store_together(module)
    root = parent = nn.Module()
    *above, name = f"{_ROOT}.{path}".removesuffix(".").split(".")
    for each in above:
        parent.add_module(each, nn.Module())
        parent = parent.get_submodule(each)
    parent.add_module(name, module)
    root.config = {"model_type": model_type}  # by which peft knows usual targets
    try:
        with _quiet(), torch.device("meta") if empty else nullcontext():
            PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](root, config, adapter_name=_NAME, low_cpu_mem_usage=empty)
    except Exception as error:  # of many types
        raise _refused(
            f"{lever}: {_words(error)}", "adapters that peft supports for this model", "change the targets or settings"
        ) from error
    _group_experts(root, config)
    return root


def _group_experts(module: nn.Module, config: Any) -> None:
    """Let adapters of stacked experts in a module compute by groups, in place."""
    if getattr(config, "target_parameters", None):
        from steelyard.modules.levers.expert_adapters import put_in  # which imports peft

        put_in(module)


def added_that_read(module: nn.Module) -> Iterator[nn.Module]:
    """Return the parts of adapters in a module that read the inputs of linear layers."""
    return (each.lora_A[_NAME] for _, each in adapted(module) if _NAME in getattr(each, "lora_A", {}))


def _lever(chain: ModelChain) -> Train:
    return next(change for change in chain.changes if isinstance(change, Train))


def cast_added(layer: nn.Module, chain: ModelChain) -> None:
    """Cast adapters in a layer to fp32, in place, as peft does in a model (``autocast_adapter_dtype``)."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import PeftType

    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(_lever(chain).kind.upper())]
    tuner._cast_adapter_dtype(SimpleNamespace(model=layer), _NAME)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress peft's warnings of settings that were chosen here and of kernels that it lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(lever: Train, model: PreTrainedModel, chain: ModelChain, names: set[str]) -> None:
    """Raise `InvalidModelError` unless adapters are in layers, each layer with its own trained parameters."""
    own = {own_name(name) for name, _ in model.named_parameters() if not is_added(name)}
    trained = [name for name, each in model.named_parameters() if each.requires_grad and not is_added(name)]
    if own != names or trained:
        what = f"trains {trained[0]}" if trained else "changes the layers of the model"
        raise _refused(f"{lever}, which {what}", "adapters that leave the base unchanged", "leave the setting out")
    first: dict[int, int] = {}
    widths: dict[int, tuple[int, ...]] = {}
    for layer in range(chain.num_layers):
        for path in sorted({*chain.family.modules(layer).values()} - {*chain.split.holders}):
            module = model.get_submodule(path)
            shapes = [
                tuple(base_of(each).weight.shape) for _, each in adapted(module) if hasattr(base_of(each), "weight")
            ]
            widths |= {layer: tuple(map(max, zip(*shapes, strict=True)))} if shapes else {}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if is_added(name) and first.setdefault(id(tensor), layer) != layer:
                    if tensor.requires_grad:
                        raise _refused(
                            f"{lever}, whose {name} is shared by layers", "separate parameters per layer", _ANOTHER_KIND
                        )
                    if widths.get(layer) != widths[first[id(tensor)]]:
                        raise _refused(
                            f"{lever} in layers of different widths",
                            f"equal widths of all layers that share {name}",
                            _ANOTHER_KIND,
                        )
    for shared in chain.shared:
        for layer, path in shared.copies:
            owner = model.get_submodule(chain.split.model_path(layer, path).rpartition(".")[0])
            if any(True for _ in adapted(owner)):
                raise _refused(
                    f"{lever} at {path}, which several layers share",
                    "adapters only at matrices of a single layer",
                    "name other targets",
                )


def adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return peft's wrappers of the unmodified model's modules in a module (or itself), with their paths; of nested
    wrappers the outermost."""
    found = ((path, each) for path, each in module.named_modules() if _base_name(each))
    return ((path, each) for path, each in found if path.rpartition(".")[2] not in _BASES)


def base_of(module: nn.Module) -> Any:
    """Return the module of the unmodified model that a module of peft wraps."""
    innermost = _innermost(module)
    return innermost.get_submodule(_base_name(innermost))


def _innermost(module: nn.Module) -> nn.Module:
    inner = module.get_submodule(_base_name(module))
    return _innermost(inner) if _base_name(inner) else module


def _base_name(module: nn.Module) -> str:
    """Return the attribute name of the module that a module of peft wraps; empty for any other module."""
    return next((name for name in _BASES if name in module._modules), "")


def begin_filling(module: nn.Module) -> nn.Module:
    """Return the module of a layer with its adapters taken out in place, so that it gets the same first weights."""
    found = list(adapted(module))
    for path, each in found:
        if path:
            module.set_submodule(path, base_of(each))
    bare: nn.Module = base_of(module) if found and not found[0][0] else module
    if found:
        bare.__dict__[_TAKEN] = dict(found)
    return bare


def fill_added(
    lever: Train, model: PreTrainedModel, path: str, module: nn.Module, *, seed: int, layer: int, is_new: bool
) -> nn.Module:
    """Return the module of a layer at a path with adapters put in, in place. Adapters get first weights unless they
    have some."""
    if any(each.is_meta for name, each in module.named_parameters() if is_added(name)):
        module = begin_filling(module)
    taken: dict[str, nn.Module] = module.__dict__.pop(_TAKEN, {})
    if not taken:
        return module
    if any(map(is_fake, module.parameters())):  # which have no values, and peft cannot move
        return _put_back(module, taken)
    config = copy.deepcopy(model.peft_config[_NAME])
    if not any(_BASES[0] in each._modules for each in taken.values()):
        config.target_modules = "dummy-target-modules"  # copies of modules alone, for which peft has this word
    quantized = {name: each for name, each in module.named_modules() if isinstance(each, Quantized)}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in quantized}
    for name, each in quantized.items():
        each.stand_in(owners[name], name.rpartition(".")[2])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * _STRIDE + layer)
        root = _inject(lever, config, path, module, model.config.model_type)
    found: nn.Module = root.get_submodule(f"{_ROOT}.{path}")
    for name, each in quantized.items():
        last = name.rpartition(".")[2]
        if name in taken:
            found.set_submodule(f"{name}.{_BASES[0]}", each)
        else:
            owners[name]._parameters.pop(last, None)
            owners[name].register_module(last, each)
    return found


def _put_back(module: nn.Module, taken: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module with its adapters put back in place, as fake tensors."""
    device = next(module.parameters()).device
    for path, each in taken.items():
        innermost = _innermost(each)
        innermost.set_submodule(_base_name(innermost), module.get_submodule(path))
        if path:
            module.set_submodule(path, each)
    found = taken.get("", module)
    for path, owner in found.named_modules():
        for name, each in (*owner._parameters.items(), *owner._buffers.items()):
            if each is not None and (each.is_meta or is_added(f"{path}.{name}")):
                fake = torch.empty(each.shape, dtype=each.dtype, device=device)
                if isinstance(each, nn.Parameter):
                    owner._parameters[name] = nn.Parameter(fake, requires_grad=each.requires_grad)
                else:
                    owner._buffers[name] = fake
    return found


def is_added(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return _NAME in name.split(".")


def own_name(name: str) -> str:
    """Return the name of a parameter without the names of peft's wrappers."""
    return name if is_added(name) else ".".join(part for part in name.split(".") if part not in _BASES)


def with_added(model: PreTrainedModel, chain: ModelChain, layer: int) -> dict[str, tuple[str, ...]]:
    """Return, for each module path of a layer with adapters, the paths of the saved tensors of peft's modules in it."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted({*chain.family.modules(layer).values()} - {*chain.split.holders}) if chain.has_adapters else ():
        parts = adapted(model.get_submodule(path))
        inside = tuple(f"{at}.{name}".removeprefix(".") for at, each in parts for name in each.state_dict())
        found |= {path: inside} if inside else {}
    return found


def reads_base(chain: ModelChain) -> bool:
    """Return whether first values of adapters depend on the base weights."""
    return chain.has_adapters and not _lever(chain).is_plain


def first_values(
    model: PreTrainedModel, chain: ModelChain, path: str, tensors: Mapping[str, Tensor], *, seed: int, layer: int
) -> dict[str, Tensor]:
    """Return the first values of adapters in a module of a layer, given the base among these tensors.

    Names are those of `with_added`.
    """
    module = _around(_lever(chain), model, path, tensors, seed=seed, layer=layer)
    return {name: tensor for name, tensor in module.state_dict().items() if name in tensors and is_added(name)}


def merged(model: PreTrainedModel, chain: ModelChain, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base of a module with its adapters merged, from tensors of `with_added`, by names in the unmodified
    module."""
    module = _around(_lever(chain), model, path, tensors, seed=0, layer=0)
    module.load_state_dict({name: tensor for name, tensor in tensors.items() if is_added(name)}, strict=False)
    found: dict[str, Tensor] = {}
    for inside, each in list(adapted(module)):
        around = [one for one in each.modules() if hasattr(one, "merge")] if hasattr(each, "merge") else []
        for one in around:
            one.merge()
        plain = base_of(each) if around else each.unload_and_optionally_merge_module(True, False, None)
        found |= {f"{inside}.{name}".removeprefix("."): tensor.detach() for name, tensor in plain.named_parameters()}
    return found


def _around(
    lever: Train, model: PreTrainedModel, path: str, tensors: Mapping[str, Tensor], *, seed: int, layer: int
) -> nn.Module:
    """Return a copy of a module with new adapters around the base among these tensors."""
    module = begin_filling(copy.deepcopy(model.get_submodule(path)))
    for name, tensor in tensors.items():
        if not is_added(name):
            path_inside, _, own = own_name(name).rpartition(".")
            owner = module.get_submodule(path_inside)
            if isinstance(owner, Quantized) and own in PARTS:
                owner.put(own, tensor)
            else:
                owner.register_parameter(own, nn.Parameter(tensor.float(), requires_grad=False))
    return fill_added(lever, model, path, module, seed=seed, layer=layer, is_new=True)


def write_added(folder: Path, files: Sequence[Path], model: PreTrainedModel, chain: ModelChain) -> None:
    """Convert files with adapters of an unmodified model to the folder that `peft.PeftModel.from_pretrained` reads."""
    from peft import get_peft_model_state_dict

    lever = _lever(chain)

    tensors = {f"{_ROOT}.{key}": tensor for file in files for key, tensor in load_file(file).items()}
    for file in files:
        file.unlink()
    config, used = (config_of(lever, model) for _ in range(2))
    root = _inject(lever, used, "", model, model.config.model_type, empty=True)
    if hasattr(config, "fan_in_fan_out"):
        config.fan_in_fan_out = used.fan_in_fan_out  # as peft found the layers
    named = get_peft_model_state_dict(root, tensors, adapter_name=_NAME, save_embedding_layers=False)
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.base_model_name_or_path, config.inference_mode = chain.name, True
    config.save_pretrained(folder)


_ANOTHER_KIND = "choose targets of one width, or use lora"


def _refused(found: str, expected: str, hint: str) -> InvalidModelError:
    return InvalidModelError(field="--train", found=found, expected=expected, hint=hint)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
