"""The twin of adapters: peft puts them into a model; their first weights follow from the seed and the layer alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError, nearest
from steelyard.levers.train import ALL_LINEAR, Train

_MOST_NAMED = 24
_STRIDE = 1_000_033
_NAME = "default"
"""What peft calls the adapters of a model with one set of them."""


def change_model(lever: Train, model: PreTrainedModel) -> None:
    """Puts adapters without values into a model, in place; twice does no harm. All else is trained no more.

    Raises `InvalidModelError` where a target names no linear layer.
    """
    if any(True for _ in adapters(model)):
        return
    from peft import inject_adapter_in_model  # which takes longer than all that needs no adapters

    paths = [f"model.{path}" for path in _paths(lever, model)]
    # not the model itself, of which peft would take names of linear layers for those of experts that it knows as such
    inject_adapter_in_model(lora_config(lever, paths), nn.ModuleDict({"model": model}), low_cpu_mem_usage=True)


def lora_config(lever: Train, paths: list[str]) -> Any:
    """The config of peft that says the same, of layers at these paths."""
    from peft import LoraConfig

    return LoraConfig(
        r=lever.r,
        lora_alpha=lever.alpha,  # type: ignore[arg-type]
        target_modules=paths,
        lora_dropout=lever.dropout,
        use_rslora=lever.rslora,
    )


def _paths(lever: Train, model: PreTrainedModel) -> list[str]:
    """The paths of the linear layers that get adapters."""
    head = model.get_output_embeddings()
    linear = [path for path, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]
    if lever.targets == (ALL_LINEAR,) and linear:
        return linear
    for target in lever.targets:
        if not any(f".{path}".endswith(f".{target}") for path in linear):
            names = sorted({path.rpartition(".")[2] for path in linear})
            raise InvalidModelError(
                field="--train",
                found=f"targets={target}, which ends the path of no linear layer",
                expected=f"ends of such paths joined by +, as {', '.join(names[:_MOST_NAMED])}, or {ALL_LINEAR}"
                if names
                else "a model with linear layers beside its head",
                hint=nearest(target, names) if names else "train all of it",
            )
    return [path for path in linear if f".{path}".endswith(tuple(f".{target}" for target in lever.targets))]


def adapters(module: nn.Module) -> Iterator[Any]:
    """The linear layers in a module that have adapters beside them."""
    return (each for each in module.modules() if hasattr(each, "lora_A") and hasattr(each, "base_layer"))


def entered(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of adapters in a module that inputs of linear layers enter."""
    return (each.lora_A[name] for each in adapters(module) for name in each.active_adapters)


def fill_added(_lever: Train, module: nn.Module, *, seed: int, layer: int, is_new: bool) -> None:
    """Gives the adapters in a module of a layer first weights, in place; those that have some only where it
    ``is_new``."""
    device = next((each.device for each in module.parameters() if not each.is_meta), torch.device("meta"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * _STRIDE + layer)
        for each in adapters(module):
            for name in each.active_adapters:
                parts = (each.lora_A[name], each.lora_B[name])
                if is_new or parts[0].weight.is_meta:
                    for part in parts if parts[0].weight.is_meta else ():
                        part.to_empty(device=device)
                    each.reset_lora_parameters(name, init_lora_weights=True)


def is_added(name: str) -> bool:
    """Whether a parameter of this name is of an adapter."""
    return ".lora_" in name


def own_name(name: str) -> str:
    """The name of a parameter without what peft puts around linear layers."""
    return name.replace(".base_layer.", ".")


def added_beside(name: str) -> tuple[str, ...]:
    """The names of $A$ and $B$ beside the weight of a linear layer."""
    path = name.removesuffix(".weight")
    return (f"{path}.lora_A.{_NAME}.weight", f"{path}.lora_B.{_NAME}.weight") if path != name else ()


def with_added(lever: Train, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """$W + s B A$, of adapters in their order."""
    down, up = beside.values()
    return weight.float() + lever.scale * (up.float() @ down.float())


def write_added(lever: Train, folder: Path, files: Sequence[Path], model: PreTrainedModel, name: str) -> None:
    """Makes of files with adapters the folder that `peft.PeftModel.from_pretrained` reads."""
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
    named = {f"base_model.model.{key.replace(f'.{_NAME}.', '.')}": tensor for key, tensor in tensors.items()}
    for file in files:
        file.unlink()
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = lora_config(lever, _paths(lever, model))
    config.base_model_name_or_path, config.inference_mode = name, True
    config.save_pretrained(folder)
