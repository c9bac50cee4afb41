"""The twin of adapters: peft puts them into a model; their first weights follow from the seed and the layer alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.levers.train import ALL_LINEAR, Train

_MOST_NAMED = 24
_STRIDE = 1_000_033


def change_model(lever: Train, model: PreTrainedModel) -> None:
    """Puts adapters without values into a model, in place; twice does no harm. All else is trained no more.

    Raises `InvalidModelError` where the targets name no linear layer.
    """
    if any(True for _ in adapters(model)):
        return
    from peft import inject_adapter_in_model  # which takes longer than all that needs no adapters

    try:
        inject_adapter_in_model(lora_config(lever), model, low_cpu_mem_usage=True)
    except ValueError as error:
        linear = (path for path, each in model.named_modules() if isinstance(each, nn.Linear))
        names = sorted({path.rpartition(".")[2] for path in linear})
        raise InvalidModelError(
            field="--train",
            found=f"targets={'+'.join(lever.targets)}: {' '.join(str(error).split())}",
            expected=f"ends of the paths of linear layers, as {', '.join(names[:_MOST_NAMED])}, or {ALL_LINEAR}",
            hint="write for example lora:r=16,targets=" + "+".join(names[:2]),
        ) from error


def lora_config(lever: Train) -> Any:
    """The config of peft that says the same."""
    from peft import LoraConfig

    return LoraConfig(
        r=lever.r,
        lora_alpha=lever.alpha,  # type: ignore[arg-type]
        target_modules=ALL_LINEAR if lever.targets == (ALL_LINEAR,) else list(lever.targets),
        lora_dropout=lever.dropout,
        use_rslora=lever.rslora,
    )


def adapters(module: nn.Module) -> Iterator[Any]:
    """The linear layers in a module that have adapters beside them."""
    return (each for each in module.modules() if hasattr(each, "lora_A") and hasattr(each, "base_layer"))


def fill_added(module: nn.Module, *, seed: int, layer: int, is_new: bool) -> None:
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
