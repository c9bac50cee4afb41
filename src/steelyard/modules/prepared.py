"""Prepares a model to be taken apart, in place, by what attributes of its modules show, whatever its type.

| models              | change                                                                                        |
|---------------------|-----------------------------------------------------------------------------------------------|
| T5                  | blocks that read tables of the first one hold them themselves                                 |
| BEiT, Swin          | a first block that is never left out may be, at a rate of 0                                   |
| Gemma 4             | what blocks read of others is not cut between two blocks                                      |
| NLLB-MoE            | routers do not cast their weights within a forward pass                                       |
| T5Gemma 2           | an embedding with a row of its own for one token chooses it place by place                    |
| GPT-2               | a Conv1D whose result is split in equal parts stores these apart                              |
| Qwen3-VL            | the first blocks of text add features of the image, which begins a sample, that the stack     |
|                     | adds between them                                                                             |
| Swin                | blocks of all stages, and what merges patches behind each, are one list                       |

`steelyard.modules.split_proof` proves the prepared model equal to the unmodified one.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Has a function of a module, and of what it is called with, be its forward pass, in place; twice does no harm.

    What it replaces the function calls as ``module.own_forward``.
    """
    own: Any = type(module)
    if own.forward is not forward:
        changed: Any = type(own.__name__, (own,), {"own_forward": own.forward, "__module__": __name__})
        changed.forward = forward  # not at its birth, when transformers wraps the forward pass of some classes
        module.__class__ = changed


def _give_features(
    stack: Any,
    *places: Any,
    visual_pos_masks: Tensor | None = None,
    deepstack_visual_embeds: Sequence[Tensor] | None = None,
    **names: Any,
) -> Any:
    """As before, with the features [places of an image, H] of all samples given to the blocks by their number."""
    if not deepstack_visual_embeds:
        return stack.own_forward(*places, **names)
    samples, numbered = len(names["inputs_embeds"]), enumerate(deepstack_visual_embeds)
    given = UserDict({str(number): (each.unflatten(0, (samples, -1)),) for number, each in numbered})
    return stack.own_forward(*places, features=given, **names)


def _add_features(
    block: Any,
    hidden_BSH: Tensor,  # noqa: N803
    *places: Any,
    features: UserDict[str, Any] | None = None,
    **names: Any,
) -> Tensor:
    """The next hidden state, with what this block is given added to its first places."""
    made = block.own_forward(hidden_BSH, *places, **names)
    own = features and features.get(str(block.self_attn.layer_idx))
    if not own:
        return made
    count = own[0].shape[1]
    return torch.cat([made[:, :count] + own[0].to(made.dtype), made[:, count:]], 1)


def add_features_in_blocks(stack: Any) -> None:
    """Has the blocks of a stack add what it adds between them, if it does; twice does no harm."""
    if hasattr(stack, "_deepstack_process"):
        replace_forward(stack, _give_features)
        for block in stack.layers:
            replace_forward(block, _add_features)


def _share_tables(blocks: Any) -> None:
    """Gives every block of a list the tables of relative positions that the first alone has."""
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        return
    for path, first in blocks[0].named_modules():
        tables = {name: each for name, each in first._modules.items() if name.endswith("relative_attention_bias")}
        for block in blocks[1:] if tables else ():
            attention: Any = dict(block.named_modules()).get(path)
            if type(attention) is type(first) and vars(attention).get("has_relative_attention_bias") is False:
                attention.has_relative_attention_bias = True
                attention._modules |= tables


def _leave_out_alike(blocks: Any) -> None:
    """Gives a block that is never left out, as the first, the class of module by which others of its list are."""
    ways = [getattr(block, "drop_path", None) for block in blocks] if isinstance(blocks, nn.ModuleList) else []
    classes = {type(way) for way in ways if way is not None} - {nn.Identity}
    for block, way in zip(blocks, ways, strict=True) if len(classes) == 1 else ():
        if type(way) is nn.Identity:
            block.drop_path = next(iter(classes))(0.0)


def _keep_all_tokens(stack: Any) -> None:
    """Has blocks that read keys and values of others compute all tokens, and not only those of which logits are asked.

    The cut, which keeps all of them where all are asked for, lies between two blocks.
    """
    if hasattr(stack, "_maybe_slice_kv_shared_inputs"):
        stack._maybe_slice_kv_shared_inputs = lambda *given, **_: given[:4]


class RouterLinear(nn.Linear):
    """A router's matrix that computes in the type of what it reads."""

    def to(self, *_places: Any, **_names: Any) -> "RouterLinear":
        """This matrix as it is."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """The product in the type of the inputs."""
        bias = self.bias if self.bias is None else self.bias.to(inputs.dtype)
        return functional.linear(inputs, self.weight.to(inputs.dtype), bias)


def _keep_router_type(router: Any) -> None:
    """Has a router leave its weights of the type that they have."""
    if isinstance(vars(router).get("dtype"), torch.dtype) and type(router._modules.get("classifier")) is nn.Linear:
        router.classifier.__class__ = RouterLinear


def _rows(embedding: Any, ids: Tensor) -> Tensor:
    """The rows [B, S, H] of token ids [B, S]; by a mask they are written at places that only values tell."""
    rows = nn.Embedding.forward(embedding, ids) * embedding.embed_scale.to(embedding.weight.dtype)
    return torch.where((ids == embedding.eoi_token_index)[..., None], embedding.eoi_embedding.to(rows.dtype), rows)


def _choose_own_row(embedding: Any) -> None:
    """Has an embedding with a row of its own for one token choose it place by place."""
    if hasattr(embedding, "eoi_embedding"):
        replace_forward(embedding, _rows)


class ApartConv1D(Conv1D):
    """A Conv1D of several matrices, stored apart: weight [inputs, parts, outputs of a part], bias [parts, outputs].

    So a tensor-parallel rank's part of each is a slice of the last dim.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """What the matrices give, side by side."""
        product = torch.addmm(self.bias.flatten(), inputs.flatten(0, -2), self.weight.flatten(1))
        return product.view(*inputs.shape[:-1], -1)


@torch.no_grad()
def _store_apart(owner: Any) -> None:
    """Stores the matrices apart whose results a module splits, as query, key and value of GPT-2."""
    width = vars(owner).get("split_size")
    for module in owner.children() if isinstance(width, int) else ():
        if type(module) is Conv1D and module.nf > width and module.nf % width == 0:
            module.__class__ = ApartConv1D
            for name, each in list(module.named_parameters()):
                apart = nn.Parameter(each.unflatten(-1, (-1, width)), requires_grad=each.requires_grad)
                module.register_parameter(name, apart)


def store_together(model: nn.Module) -> None:
    """Stores the matrices of a model together again, in place, as `transformers` has them."""
    for module in model.modules():
        if isinstance(module, ApartConv1D):
            module.__class__ = Conv1D
            for name, each in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(each.flatten(-2), requires_grad=each.requires_grad))


def stored_apart(model: nn.Module) -> dict[str, int]:
    """The modules whose matrices are stored apart, by their path in the model, and how many each has."""
    found = ((path, each) for path, each in model.named_modules() if isinstance(each, ApartConv1D))
    return {path: each.weight.shape[-2] for path, each in found}


_OF_STAGES = ("donut-swin", "swin", "swinv2")
"""Types whose blocks lie in a list of stages."""
CHANGES: tuple[Callable[[Any], None], ...] = (
    *(_share_tables, _leave_out_alike, _keep_all_tokens, _keep_router_type, _choose_own_row),
    *(_store_apart, add_features_in_blocks),
)
"""What is done with every module that has the attributes for it; twice does no harm."""


def prepare(model: Any, model_type: str) -> None:
    """Makes a model of a type ready to be taken apart, in place; twice does no harm."""
    for module in list(model.modules()):
        for change in CHANGES:
            change(module)
    if model_type in _OF_STAGES:
        stack = getattr(model, model.base_model_prefix).encoder
        parts = [each for stage in stack.layers for each in (*stage.blocks, stage.downsample) if each is not None]
        stack.parts = nn.ModuleList(parts)
