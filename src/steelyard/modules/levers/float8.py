"""Implementation of float8: linear layers of blocks as torchao's ``Float8Linear``, with the same parameters."""

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.levers.float8 import Float8
from steelyard.model.chain import ModelChain
from steelyard.model.split import ModelSplit
from steelyard.modules.levers.optimizer import quietly_imported
from steelyard.modules.updates import local_part

_ALIGNED = 16
"""Number that must divide the dims of operands of `torch._scaled_mm`."""


def change_model(lever: Float8, model: PreTrainedModel, chain: ModelChain) -> None:
    """Convert linear layers of blocks except routers, in place; idempotent.

    Raises `InvalidModelError` if no layer has suitable dims.
    """
    with quietly_imported():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name(lever.word)
    convert_to_float8_training(model, module_filter_fn=partial(_is_converted, chain), config=config)
    if not any(hasattr(each, "linear_mm_config") for each in model.modules()):
        raise InvalidModelError(
            field="--float8",
            found=f"no linear layer in blocks of {chain.name} with dims divisible by {_ALIGNED}",
            expected=f"inputs and outputs that are multiples of {_ALIGNED}",
            hint="leave --float8 out",
        )


def _is_converted(chain: ModelChain, module: nn.Module, path: str) -> bool:
    assert isinstance(chain.split, ModelSplit), "of a model of transformers"
    routed = {each.num_experts for each in chain.layer_types}
    in_block = any(path.startswith(f"{each}.") for each in chain.split.lists)
    return in_block and type(module) is nn.Linear and module.out_features not in routed and _fits(module)


def _fits(linear: nn.Module) -> bool:
    return not any(size % _ALIGNED for size in local_part(linear.weight).shape)


def change_layer(_lever: Float8, layer: nn.Module) -> None:
    """Convert back, in place, linear layers whose part on a rank has dims that float8 does not support."""
    for each in layer.modules():
        if hasattr(each, "linear_mm_config") and not _fits(each):
            each.__class__ = nn.Linear
