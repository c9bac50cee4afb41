"""The twin of float8: the linear layers of a block, divided or not, as torchao's ``Float8Linear``."""

from functools import cache
from typing import Any

from torch import nn

from steelyard.errors import InvalidModelError
from steelyard.levers.float8 import Float8
from steelyard.modules.levers.optimizer import quietly_imported
from steelyard.modules.updates import local_part

_ALIGNED = 16
"""What divides the dims of operands: `torch._scaled_mm`."""


def change_layer(lever: Float8, layer: Any) -> None:
    """Converts the linear layers of a layer's block, in place; a layer without a block stays.

    They stay the same objects, which hooks of tensor parallelism hang on.
    """
    if not hasattr(layer, "block"):
        return
    linears = [each for each in layer.block.modules() if type(each) is nn.Linear and _fits(each, layer)]
    if not linears:
        raise InvalidModelError(
            field="--float8",
            found=f"no linear layer in {layer.layer_type.name} with dims that {_ALIGNED} divides",
            expected=f"inputs and outputs, on a rank, that are multiples of {_ALIGNED}",
            hint="leave --float8 out, or plan with less tp",
        )
    for each in linears:
        converted = _float8_linear().from_float(each, _config(lever.word))
        each.__dict__ |= {name: value for name, value in vars(converted).items() if name not in vars(each)}
        each.__class__ = type(converted)


def _fits(linear: nn.Linear, layer: Any) -> bool:
    """Whether its dims do; routers stay as they are."""
    is_router = linear.out_features == layer.layer_type.num_experts
    return not is_router and not any(size % _ALIGNED for size in local_part(linear.weight).shape)


@cache
def _float8_linear() -> Any:
    with quietly_imported():
        from torchao.float8.float8_linear import Float8Linear
    return Float8Linear


@cache
def _config(word: str) -> Any:
    with quietly_imported():
        from torchao.float8 import Float8LinearConfig
    return Float8LinearConfig.from_recipe_name(word)
