"""Changes in place that prepare a model for its split, chosen by the attributes of its modules, not by its type.

| models              | change                                                                                        |
|---------------------|-----------------------------------------------------------------------------------------------|
| T5                  | every block holds the tables of relative positions that only the first one has                |
| BEiT, Swin          | a first block that is never dropped gets a drop path, at a rate of 0                          |
| Gemma 4             | keys and values that blocks read from others are not cut between two blocks                   |
| NLLB-MoE            | routers do not cast their weights within a forward pass                                       |
| T5Gemma 2           | an embedding with a separate row for one token selects it place by place                      |
| GPT-2               | a Conv1D whose result is split into equal parts stores its matrices separately                |
| Qwen3-VL            | the first text blocks add the image features that the stack adds between blocks; the image    |
|                     | comes first in a sample                                                                       |
| Swin                | the blocks of all stages and the patch merging after each stage are one list                  |

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
    """Make a function of a module and its arguments the forward pass of the module, in place; twice does no harm.

    The function calls the replaced forward pass as ``module.own_forward``.
    """
    own: Any = type(module)
    if own.forward is not forward:
        changed: Any = type(own.__name__, (own,), {"own_forward": own.forward, "__module__": __name__})
        changed.forward = forward  # after creation, when transformers wraps the forward pass of some classes
        module.__class__ = changed


def _give_features(
    stack: Any,
    *places: Any,
    visual_pos_masks: Tensor | None = None,
    deepstack_visual_embeds: Sequence[Tensor] | None = None,
    **names: Any,
) -> Any:
    """Run a stack, with the features [places of an image, H] of all samples given to its blocks by their number."""
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
    """Return the next hidden state, with the features of this block added to its first places."""
    made = block.own_forward(hidden_BSH, *places, **names)
    own = features and features.get(str(block.self_attn.layer_idx))
    if not own:
        return made
    count = own[0].shape[1]
    return torch.cat([made[:, :count] + own[0].to(made.dtype), made[:, count:]], 1)


def add_features_in_blocks(stack: Any) -> None:
    """Let the blocks of a stack add the features that the stack adds between them, if any; idempotent."""
    if hasattr(stack, "_deepstack_process"):
        replace_forward(stack, _give_features)
        for block in stack.layers:
            replace_forward(block, _add_features)


def _share_tables(blocks: Any) -> None:
    """Give every block of a list the tables of relative positions that only the first one has."""
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
    """Give a block that is never dropped, such as the first, the drop path class of the other blocks of its list."""
    ways = [getattr(block, "drop_path", None) for block in blocks] if isinstance(blocks, nn.ModuleList) else []
    classes = {type(way) for way in ways if way is not None} - {nn.Identity}
    for block, way in zip(blocks, ways, strict=True) if len(classes) == 1 else ():
        if type(way) is nn.Identity:
            block.drop_path = next(iter(classes))(0.0)


def _keep_all_tokens(stack: Any) -> None:
    """Make blocks that read keys and values of others compute all tokens, not only those whose logits are requested.

    The cut between two blocks keeps all tokens if the logits of all are requested.
    """
    if hasattr(stack, "_maybe_slice_kv_shared_inputs"):
        stack._maybe_slice_kv_shared_inputs = lambda *given, **_: given[:4]


class RouterLinear(nn.Linear):
    """A router's matrix that computes in the type of its input."""

    def to(self, *_places: Any, **_names: Any) -> "RouterLinear":
        """Return this matrix unchanged."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product in the type of the input."""
        bias = self.bias if self.bias is None else self.bias.to(inputs.dtype)
        return functional.linear(inputs, self.weight.to(inputs.dtype), bias)


def _keep_router_type(router: Any) -> None:
    """Make a router keep the type of its weights."""
    if isinstance(vars(router).get("dtype"), torch.dtype) and type(router._modules.get("classifier")) is nn.Linear:
        router.classifier.__class__ = RouterLinear


def _rows(embedding: Any, ids: Tensor) -> Tensor:
    """Return the rows [B, S, H] of token ids [B, S], without the masked write of the model, which needs values."""
    rows = nn.Embedding.forward(embedding, ids) * embedding.embed_scale.to(embedding.weight.dtype)
    return torch.where((ids == embedding.eoi_token_index)[..., None], embedding.eoi_embedding.to(rows.dtype), rows)


def _choose_own_row(embedding: Any) -> None:
    """Make an embedding with a separate row for one token select it place by place."""
    if hasattr(embedding, "eoi_embedding"):
        replace_forward(embedding, _rows)


class ApartConv1D(Conv1D):
    """A Conv1D of several matrices stored apart: weight [inputs, parts, outputs of a part], bias [parts, outputs].

    A tensor-parallel rank's part of each matrix is thus a slice of the last dim.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the results of the matrices, concatenated."""
        product = torch.addmm(self.bias.flatten(), inputs.flatten(0, -2), self.weight.flatten(1))
        return product.view(*inputs.shape[:-1], -1)


@torch.no_grad()
def _store_apart(owner: Any) -> None:
    """Store separately the matrices whose joint result a module splits, such as query, key and value of GPT-2."""
    width = vars(owner).get("split_size")
    for module in owner.children() if isinstance(width, int) else ():
        if type(module) is Conv1D and module.nf > width and module.nf % width == 0:
            module.__class__ = ApartConv1D
            for name, each in list(module.named_parameters()):
                apart = nn.Parameter(each.unflatten(-1, (-1, width)), requires_grad=each.requires_grad)
                module.register_parameter(name, apart)


def store_together(model: nn.Module) -> None:
    """Store the matrices of a model together again, in place, as `transformers` does."""
    for module in model.modules():
        if isinstance(module, ApartConv1D):
            module.__class__ = Conv1D
            for name, each in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(each.flatten(-2), requires_grad=each.requires_grad))


def stored_apart(model: nn.Module) -> dict[str, int]:
    """Return the number of separately stored matrices of each module that has them, by its path in the model."""
    found = ((path, each) for path, each in model.named_modules() if isinstance(each, ApartConv1D))
    return {path: each.weight.shape[-2] for path, each in found}


_OF_STAGES = ("donut-swin", "swin", "swinv2")
"""Model types whose blocks are in a list of stages."""
CHANGES: tuple[Callable[[Any], None], ...] = (
    *(_share_tables, _leave_out_alike, _keep_all_tokens, _keep_router_type, _choose_own_row),
    *(_store_apart, add_features_in_blocks),
)
"""Changes to every module that has the attributes for them; twice does no harm."""


def prepare(model: Any, model_type: str) -> None:
    """Prepare a model of a type for its split, in place; twice does no harm."""
    for module in list(model.modules()):
        for change in CHANGES:
            change(module)
    if model_type in _OF_STAGES:
        stack = getattr(model, model.base_model_prefix).encoder
        parts = [each for stage in stack.layers for each in (*stage.blocks, stage.downsample) if each is not None]
        stack.parts = nn.ModuleList(parts)
