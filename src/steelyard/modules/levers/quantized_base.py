"""Implementation of a quantized base: modules with bitsandbytes' weights in buffers, so that none is trained.

A module stores weights in few bits and dequantizes them for each forward and backward pass instead of saving them.

Legend of shapes: O outputs, I inputs, of a matrix [O, I]; K pairs of token and expert, E experts, [E, A, B] matrices.
"""

import importlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.nn import functional
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.model.chain import ModelChain
from steelyard.modules.experts import MATRICES, STACKED_DIMS, grouped_product, routed_experts

BLOCK, SCALES_BLOCK, BYTE_BLOCK = 64, 256, 256
PARTS = ("codes", "scales", "scales_of_scales", "offset")
"""Saved tensors of a layer's weights."""


class Quantized(nn.Module):
    """Weights in few bits."""

    weight_name = ""
    """End of the name of the weights in an unmodified model, after that of this module."""

    def __init__(self, weight: Tensor, word: str) -> None:
        super().__init__()
        self.word, self.shape = word, tuple(weight.shape)
        importlib.import_module("bitsandbytes")  # which takes long, and registers the operations
        for name, buffer in _quantized(weight.detach(), word).items():
            self.register_buffer(name, buffer, persistent=name != "table")

    def put(self, part: str, buffer: Tensor) -> None:
        """Replace one of `PARTS` that has no values."""
        self.register_buffer(part, buffer)
        self.table = _table(buffer)

    def stand_in(self, owner: nn.Module, name: str) -> None:
        """Put into an owner what had this name before, for peft."""
        raise NotImplementedError

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantize weights into this module."""
        for name, buffer in _quantized(weight.to(self.codes.device), self.word).items():
            self.get_buffer(name).copy_(buffer)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights."""
        ops = torch.ops.bitsandbytes
        if self.word == "int8":
            return ops.dequantize_blockwise(self.codes, self.scales, self.table, BYTE_BLOCK, dtype)
        scales = ops.dequantize_blockwise(self.scales, self.scales_of_scales, self.table, SCALES_BLOCK, torch.float32)
        return ops.dequantize_4bit(self.codes, scales + self.offset, BLOCK, "nf4", self.shape, dtype)


class QuantizedLinear(Quantized):
    """Linear layer with weights [O, I] in few bits."""

    weight_name = ".weight"

    def __init__(self, linear: nn.Linear, word: str) -> None:
        super().__init__(linear.weight, word)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:
        """Weights [O, I] in the precision before quantization, as adapters in peft read them."""
        return self.weight_in(torch.bfloat16)

    def stand_in(self, owner: nn.Module, name: str) -> None:
        """Put a linear layer with ``weight`` in fp32 in the place of this module."""
        with torch.device("meta"):
            made = nn.Linear(self.in_features, self.out_features, bias=False)
        made.weight = nn.Parameter(self.weight.float(), requires_grad=False)
        made.bias = self.bias
        setattr(owner, name, made)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the output of `torch.nn.Linear`."""
        return _Product.apply(inputs, self) if self.bias is None else _Product.apply(inputs, self) + self.bias


class QuantizedExperts(Quantized):
    """Matrices [E, A, B] of routed experts in few bits."""

    def stand_in(self, owner: nn.Module, name: str) -> None:
        """Put a parameter of this shape in the place of this module, with one value for all."""
        delattr(owner, name)
        value = torch.zeros((), device=self.codes.device).expand(self.shape)
        owner.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, inputs_KA: Tensor, ends_E: Tensor, share: float, is_transposed: bool) -> Tensor:  # noqa: N803
        """Multiply rows by the matrices of their experts, as `steelyard.modules.experts` does."""
        return _GroupedProduct.apply(inputs_KA, self, ends_E, share, is_transposed)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, experts: QuantizedExperts, ends: Tensor, share: float, is_transposed: bool
    ) -> Tensor:
        ctx.experts, ctx.share, ctx.is_transposed = experts, share, is_transposed
        ctx.save_for_backward(ends)
        weights = experts.weight_in(inputs.dtype)
        return grouped_product(inputs, weights if is_transposed else weights.transpose(1, 2), ends, share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ends,) = ctx.saved_tensors
        weights = ctx.experts.weight_in(gradient.dtype)
        weights = weights.transpose(1, 2) if ctx.is_transposed else weights
        return grouped_product(gradient.contiguous(), weights, ends, ctx.share), None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight_in(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight_in(gradient.dtype), None


def _quantized(weight: Tensor, word: str) -> dict[str, Tensor]:
    """Return the buffers of weights, which are first rounded to bf16, the usual precision of a base."""
    ops, weight = torch.ops.bitsandbytes, weight.to(torch.bfloat16)
    table = _table(weight)
    if word == "int8":
        codes, scales = ops.quantize_blockwise(weight, table, BYTE_BLOCK)
        return {"codes": codes, "scales": scales, "table": table}
    codes, scales = ops.quantize_4bit(weight, BLOCK, "nf4", torch.uint8)
    scales = scales.float()
    offset = scales.mean()
    short, scales_of_scales = ops.quantize_blockwise(scales - offset, table, SCALES_BLOCK)
    found = {"codes": codes, "scales": short, "scales_of_scales": scales_of_scales}
    return found | {"offset": offset, "table": table}


def _table(like: Tensor) -> Tensor:
    """Return the 256 values of 8-bit codes, on the device of a tensor."""
    from bitsandbytes.functional import create_dynamic_map

    if like.is_meta or is_fake(like):
        return like.new_empty(SCALES_BLOCK, dtype=torch.float32)
    table: Tensor = create_dynamic_map().to(like.device)  # type: ignore[no-untyped-call]
    return table


def change_model(lever: QuantizedBase, model: PreTrainedModel, _chain: ModelChain) -> None:
    """Quantize the linear layers of a model except its head and adapters, in place, and with the lever's word also
    stacked experts; idempotent.

    Raises `InvalidModelError` if the model has none.
    """
    head = model.get_output_embeddings()
    heads = {*head.modules()} if head is not None else set()
    for path, parent, name, linear in list(_children(model, nn.Linear)):
        if linear not in heads and "default" not in path.split("."):
            setattr(parent, name, QuantizedLinear(linear, lever.bits))
    if lever.has_experts:
        _quantize_experts(lever, model)
    if not any(isinstance(each, Quantized) for each in model.modules()):
        raise InvalidModelError(
            field="--base",
            found=f"{lever} for a model without torch.nn.Linear layers except its head",
            expected="torch.nn.Linear layers, the only ones that are quantized (GPT-2 has Conv1D)",
            hint="leave --base out",
        )


def _quantize_experts(lever: QuantizedBase, module: nn.Module) -> None:
    owners = [owner for experts in routed_experts(module) for owner in experts.modules()]  # also those in adapters
    for owner, name in product(owners, MATRICES):
        weight = owner._parameters.get(name)
        if weight is not None and weight.ndim == STACKED_DIMS:
            del owner._parameters[name]
            owner.register_module(name, QuantizedExperts(weight, lever.bits))


class _Unfilled(nn.Linear):
    """Placeholder for a quantized layer until it has first weights."""


def begin_filling(module: nn.Module) -> nn.Module:
    """Replace quantized layers by linear layers without values, in place, so that they get the same first weights."""
    for _, parent, name, layer in list(_children(module, QuantizedLinear)):
        rows, columns = layer.shape
        with unset_fake_temporarily():
            unfilled = _Unfilled(columns, rows, bias=layer.bias is not None, device="meta")
        setattr(parent, name, unfilled)
    for _, parent, name, stack in list(_children(module, QuantizedExperts)):
        delattr(parent, name)
        with unset_fake_temporarily():
            parent.register_parameter(name, nn.Parameter(torch.empty(stack.shape, device="meta"), requires_grad=False))
    return module


def fill_added(
    lever: QuantizedBase, _model: nn.Module, _path: str, module: nn.Module, *, is_new: bool, **_seeds: int
) -> nn.Module:
    """Quantize the first weights of a module of a layer, in place, if it ``is_new``."""
    for _, parent, name, linear in list(_children(module, _Unfilled)) if is_new else ():
        setattr(parent, name, QuantizedLinear(linear, lever.bits))
    if is_new and lever.has_experts:
        _quantize_experts(lever, module)
    return module


def _children(module: nn.Module, of: type[nn.Module]) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the modules of a type below a module: path, parent, name in the parent, and module."""
    for path, parent in module.named_modules():
        for name, child in parent.named_children():
            if isinstance(child, of):
                yield f"{path}.{name}", parent, name, child
