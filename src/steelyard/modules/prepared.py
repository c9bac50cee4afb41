"""What makes models ready to be taken apart, in place: of some types, what their structure cannot tell.

Blocks of T5 that read the table of the first one hold it themselves, and so do ALBERT's layers the weights of their
group; what activations collect for quantization, and a cut of what is read between two blocks (Gemma 4), is left out.
Swin's stages of blocks, and what merges patches behind each, become one list. XLM and FlauBERT keep the parts of their
blocks in lists of their own, and their forward pass takes from each list in turn. Here a block holds the parts of one
place, which stay in their lists too, where their weights have their names; the forward pass is that of samples without
padding, of one language. Reformer's stack has a backward pass over all of
its blocks; here autograd goes through them one by one. Routers that cast their own weights within a forward pass leave
them as they are, and an embedding with a row of its own for one token (T5Gemma 2) chooses it place by place. What
Qwen3-VL adds of an image between its first blocks of text is given to these blocks, which add it to their own result,
where the image is: at the beginning of a sample. Two stacks that are run in turn (HRM) become a block for each call of
a layer, and experts behind which stand some that compute nothing (LongCat) work without a loop over all of them. In
models of any type a Conv1D whose result is split in equal parts stores these apart.
`steelyard.modules.split_proof` proves all this equal to the unmodified model.

Legend of shapes: B samples, S tokens, H hidden width.
"""

import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from steelyard.modules.experts import run_experts


def _share_bias(model: Any) -> None:
    """Gives every block the table of the first block of its stack."""
    for stack in (model.encoder, model.decoder):
        first = {
            path: each for path, each in stack.block[0].named_modules() if hasattr(each, "relative_attention_bias")
        }
        for (path, module), block in product(first.items(), stack.block[1:]):
            attention = block.get_submodule(path)
            if not attention.has_relative_attention_bias:
                attention.has_relative_attention_bias = True
                attention.relative_attention_bias = module.relative_attention_bias


def _keep_all_tokens(model: Any) -> None:
    """Has blocks that read keys and values of others compute all tokens, and not only those of which logits are asked.

    The cut, which keeps all of them where all are asked for, lies between two blocks.
    """
    for module in model.modules():
        if hasattr(module, "_maybe_slice_kv_shared_inputs"):
            module._maybe_slice_kv_shared_inputs = lambda *given, **_: given[:4]


def _repeat_groups(model: Any) -> None:
    """Gives every layer a place of its own in the list of groups, with the weights of the group that it shares.

    The model calls each group for several layers one after another.
    """
    stack = model.albert.encoder
    groups, number = stack.albert_layer_groups, stack.config.num_hidden_layers
    if len(groups) == number:
        return
    own = {id(each): each for each in groups.modules() if not [*each.children()]}  # which all copies hold
    of_layers = [groups[layer * len(groups) // number] for layer in range(number)]
    stack.albert_layer_groups = type(groups)(deepcopy(group, dict(own)) for group in of_layers)
    stack.config = copy(stack.config)
    stack.config.num_hidden_groups = number


def _collect_no_ranges(model: Any) -> None:
    """Has activations that are not quantized collect no ranges for it, which they do by values that steer the flow."""
    for module in model.modules():
        if hasattr(module, "act_range_momentum"):
            module.training = False
            module.train = lambda _mode=True: None


class BlockOfParts(nn.Module):
    """One block: the parts of one place of every list."""

    def __init__(self, stack: nn.Module, place: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = stack.attentions[place], stack.ffns[place]
        self.norm1, self.norm2 = stack.layer_norm1[place], stack.layer_norm2[place]
        self.dropout, self.norms_first = stack.dropout, getattr(stack, "pre_norm", False)

    def forward(self, hidden_BSH: Tensor, mask: Tensor) -> Tensor:  # noqa: N803
        """The next hidden state [B, S, H]."""
        first, second = (self.norm1, self.norm2) if self.norms_first else (_same, _same)
        last, end = (_same, _same) if self.norms_first else (self.norm1, self.norm2)
        attended = functional.dropout(
            self.attention(first(hidden_BSH), mask)[0], p=self.dropout, training=self.training
        )
        hidden_BSH = last(hidden_BSH + attended)  # noqa: N806
        return end(hidden_BSH + self.feed_forward(second(hidden_BSH)))


def _same(hidden: Tensor) -> Tensor:
    return hidden


class _InBlocks:
    """What replaces the forward pass of the stack."""

    def forward(self: Any, input_ids: Tensor, **_options: Any) -> BaseModelOutput:
        """The last hidden state of token ids [B, S]."""
        samples, tokens = input_ids.shape
        lengths = input_ids.new_full((samples,), tokens)
        _, mask = sys.modules[type(self.attentions[0]).__module__].get_masks(tokens, lengths, self.causal)
        hidden = self.embeddings(input_ids) + self.position_embeddings(self.position_ids[:, :tokens])
        hidden = functional.dropout(self.layer_norm_emb(hidden), p=self.dropout, training=self.training)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return BaseModelOutput(last_hidden_state=hidden)


def _join_parts(model: Any) -> None:
    """Gives the stack of a model its list of blocks, in place; twice does no harm."""
    stack = model.transformer
    if not isinstance(stack, _InBlocks):
        stack.blocks = nn.ModuleList(BlockOfParts(stack, place) for place in range(stack.n_layers))
        stack.__class__ = type(type(stack).__name__, (_InBlocks, type(stack)), {"__module__": __name__})


class PlainBlock(nn.Module):
    """A block of a reversible stack, whose two states lie side by side; its activations are kept, or computed again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = layer.attention, layer.feed_forward

    def forward(self, states: Tensor, mask: Tensor | None, num_hashes: int | None, tokens: int | None) -> Tensor:
        """The next two states [B, S, 2 H]."""
        attended, hidden = states.chunk(2, -1)
        options = {"attention_mask": mask, "num_hashes": num_hashes, "orig_sequence_length": tokens}
        attended = attended + self.attention(hidden_states=hidden, **options).hidden_states
        return torch.cat([attended, hidden + self.feed_forward(attended)], -1)


class _InPlainBlocks:
    """What replaces the forward pass of a reversible stack, which has a backward pass of its own over all blocks."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        num_hashes: int | None = None,
        orig_sequence_length: int | None = None,
        **_options: Any,
    ) -> Any:
        """The last hidden state, and nothing of what else the stack may return."""
        states = torch.cat([hidden_states, hidden_states], -1)
        for block in self.blocks:
            states = block(states, attention_mask, num_hashes, orig_sequence_length)
        states = functional.dropout(self.layer_norm(states), p=self.dropout, training=self.training)
        return SimpleNamespace(
            hidden_states=states, all_hidden_states=None, all_attentions=None, past_buckets_states=None
        )


def _leave_reversibility(model: Any) -> None:
    """Gives the stack of a model blocks that autograd goes through one by one, in place; twice does no harm."""
    stack = model.reformer.encoder
    if not isinstance(stack, _InPlainBlocks):
        stack.blocks = nn.ModuleList(PlainBlock(layer) for layer in stack.layers)
        stack.__class__ = type(type(stack).__name__, (_InPlainBlocks, type(stack)), {"__module__": __name__})


class CycleBlock(nn.Module):
    """One call of a layer of a stack that is run again and again, on two states that lie side by side.

    These are what the stack is making, or the last one made, and what the other kind of stack has made.
    """

    def __init__(
        self, layer: nn.Module, *, end: nn.Module | None, is_first: bool, keeps_last: bool, learns: bool
    ) -> None:
        super().__init__()
        self.layer, self.end, self.is_first = layer, end or nn.Identity(), is_first
        self.keeps_last, self.learns = keeps_last, learns

    def forward(self, states: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The next two states [B, S, 2 H]."""
        made, other = states.chunk(2, -1)
        kept = made if self.keeps_last else other
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            made = made + other if self.is_first else made
            made = self.end(self.layer(made, attention_mask=mask, position_embeddings=rotary))
        return torch.cat([made, kept], -1)


class _InCycles:
    """What replaces the forward pass of a model of two stacks that are run in turn."""

    def forward(self: Any, input_ids: Tensor, **_options: Any) -> BaseModelOutputWithPast:
        """The last hidden state of token ids [B, S]."""
        hidden = self.embed_tokens(input_ids) * self.embedding_scale
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        none = {"attention_mask": None, "past_key_values": None}
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, position_ids=positions, **none)
        rotary = self.rotary_emb(hidden, positions)
        states = torch.cat([hidden, self.z_L_init.to(hidden.dtype).expand_as(hidden)], -1)
        for block in self.blocks:
            states = block(states, mask, rotary)
        return BaseModelOutputWithPast(last_hidden_state=states.chunk(2, -1)[0])


def _unroll_cycles(model: Any) -> None:
    """Gives a model of two stacks that are run in turn a block for each call of a layer; twice does no harm."""
    stacks = model.model
    if isinstance(stacks, _InCycles):
        return
    own = {id(each): each for each in stacks.modules() if not [*each.children()]}  # which all copies hold
    config, blocks = stacks.config, []
    for high in range(config.H_cycles):
        learning = stacks.L_bp_cycles_padded[high] if high < len(stacks.L_bp_cycles_padded) else 1
        for low in range(config.L_cycles + 1):
            is_high = low == config.L_cycles
            stack = stacks.H_module if is_high else stacks.L_module
            learns = is_high or low >= config.L_cycles - learning
            for place, layer in enumerate(stack.layers):
                end = stack.final_norm if place == len(stack.layers) - 1 else None
                starts = {"is_first": not place, "keeps_last": not place and low in (0, config.L_cycles)}
                called = deepcopy(layer, dict(own))
                called.self_attn.layer_idx = len(blocks)
                blocks.append(CycleBlock(called, end=end, learns=learns, **starts))
    stacks.blocks = nn.ModuleList(blocks)
    stacks.__class__ = type(type(stacks).__name__, (_InCycles, type(stacks)), {"__module__": __name__})


class _HiddenAlone:
    """What replaces the forward pass of a block that returns more than the next hidden state."""

    def forward(self: Any, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
        """The next hidden state [B, S, H] of patches in so many rows and columns."""
        made = super().forward(hidden, grid)  # type: ignore[misc]
        return made[0] if isinstance(made, tuple) else made


class _InStages:
    """What replaces the forward pass of a stack of stages: one list of their blocks and of what merges patches."""

    def forward(
        self: Any, hidden_states: Tensor, input_dimensions: tuple[int, int], *_places: Any, **_options: Any
    ) -> Any:
        """The last hidden state, and nothing of what else the stack may return."""
        from transformers.models.swin.modeling_swin import SwinEncoderOutput

        grid = input_dimensions
        for place, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, grid)
            if place in self.merges:
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        return SwinEncoderOutput(last_hidden_state=hidden_states)


def _join_stages(model: Any) -> None:
    """Gives a stack of stages one list of blocks, in place; twice does no harm.

    A block that is never left out, as the first, is of the class of those that are.
    """
    stack = getattr(model, model.base_model_prefix).encoder
    if isinstance(stack, _InStages):
        return
    parts = [[*stage.blocks, *([stage.downsample] if stage.downsample is not None else [])] for stage in stack.layers]
    dropped = {type(block.drop_path) for stage in stack.layers for block in stage.blocks} - {nn.Identity}
    blocks = [each for stage in parts for each in stage]
    for block in blocks:
        if type(getattr(block, "drop_path", None)) is nn.Identity and dropped:
            block.drop_path = next(iter(dropped))(0.0)
        block.__class__ = type(type(block).__name__, (_HiddenAlone, type(block)), {"__module__": __name__})
    stack.blocks = nn.ModuleList(blocks)
    stack.merges = frozenset(place for place, each in enumerate(blocks) if not hasattr(each, "attention"))
    stack.__class__ = type(type(stack).__name__, (_InStages, type(stack)), {"__module__": __name__})


class RouterLinear(nn.Linear):
    """A router's matrix that computes in the type of what it reads."""

    def to(self, *_places: Any, **_names: Any) -> "RouterLinear":
        """This matrix as it is."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """The product in the type of the inputs."""
        bias = self.bias if self.bias is None else self.bias.to(inputs.dtype)
        return functional.linear(inputs, self.weight.to(inputs.dtype), bias)


def _keep_router_types(model: Any) -> None:
    """Has routers leave their weights of the type that they have, in place; twice does no harm."""
    for router in model.modules():
        if (
            isinstance(vars(router).get("dtype"), torch.dtype)
            and type(getattr(router, "classifier", None)) is nn.Linear
        ):
            router.classifier.__class__ = RouterLinear


class _OwnRow:
    """What replaces the forward pass of an embedding that writes a row of its own where one token stands."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        """The rows [B, S, H] of token ids [B, S]; by a mask they are written at places that only values tell."""
        rows = nn.Embedding.forward(self, ids) * self.embed_scale.to(self.weight.dtype)
        return torch.where((ids == self.eoi_token_index)[..., None], self.eoi_embedding.to(rows.dtype), rows)


def _choose_own_rows(model: Any) -> None:
    """Has embeddings with a row of their own for one token choose it place by place; twice does no harm."""
    for module in model.modules():
        if hasattr(module, "eoi_embedding") and not isinstance(module, _OwnRow):
            module.__class__ = type(type(module).__name__, (_OwnRow, type(module)), {"__module__": __name__})


class _GivesFeatures:
    """What replaces the forward pass of a stack that adds features of an image to what its first blocks return."""

    def forward(
        self: Any,
        *places: Any,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **names: Any,
    ) -> Any:
        """As before, with the features [places of an image, H] of all samples given to the blocks by their number."""
        samples = len(names["inputs_embeds"])
        numbered = enumerate(deepstack_visual_embeds or ())
        given = UserDict({str(number): (each.unflatten(0, (samples, -1)),) for number, each in numbered})
        return super().forward(*places, features=given, **names)  # type: ignore[misc]


class _AddsFeatures:
    """What replaces the forward pass of a block of such a stack."""

    def forward(self: Any, hidden_BSH: Tensor, *places: Any, features: UserDict[str, Any], **names: Any) -> Tensor:  # noqa: N803
        """The next hidden state, with what this block is given added to its first places."""
        made = super().forward(hidden_BSH, *places, **names)  # type: ignore[misc]
        own = features.get(str(self.self_attn.layer_idx))
        if own is None:
            return made
        count = own[0].shape[1]
        return torch.cat([made[:, :count] + own[0].to(made.dtype), made[:, count:]], 1)


def _add_features_in_blocks(model: Any) -> None:
    """Has blocks add what their stack adds between them; twice does no harm."""
    for stack in [each for each in model.modules() if hasattr(each, "_deepstack_process")]:
        if not isinstance(stack, _GivesFeatures):
            for module, by in ((stack, _GivesFeatures), *((block, _AddsFeatures) for block in stack.layers)):
                module.__class__ = type(type(module).__name__, (by, type(module)), {"__module__": __name__})


class _Grouped:
    """What replaces the forward pass of experts behind which stand some that give back what they read."""

    def forward(self: Any, hidden_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:  # noqa: N803
        """The weighted sum [T, H] of each token's experts, without a loop over all of them."""
        number = self.num_routed_experts
        own = torch.where(experts_Tk < number, 0.0, weights_Tk).sum(-1, keepdim=True)
        matrices = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj, "_apply_gate": self._apply_gate}
        form = {"has_gate": True, "has_bias": False, "is_transposed": False}
        experts = SimpleNamespace(num_experts=number, num_all_experts=self.total_experts, **matrices, **form)
        return run_experts(experts, hidden_TH, experts_Tk, weights_Tk) + (hidden_TH * own).to(hidden_TH.dtype)

    def _apply_gate(self: Any, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def _group_experts(model: Any) -> None:
    """Has experts with some behind them that compute nothing work group by group; twice does no harm."""
    for module in model.modules():
        if getattr(module, "identity_expert", None) is not None and not isinstance(module, _Grouped):
            module.__class__ = type(type(module).__name__, (_Grouped, type(module)), {"__module__": __name__})


def _share_bias_and_keep_types(model: Any) -> None:
    _share_bias(model)
    _keep_router_types(model)


PREPARES: Mapping[str, Callable[[Any], None]] = {
    "albert": _repeat_groups,
    "hrm_text": _unroll_cycles,
    "ibert": _collect_no_ranges,
    "longcat_flash": _group_experts,
    **dict.fromkeys(("flaubert", "xlm"), _join_parts),
    "reformer": _leave_reversibility,
    **dict.fromkeys(("longt5", "mt5", "t5"), _share_bias),
    **dict.fromkeys(("donut-swin", "swin", "swinv2"), _join_stages),
    **dict.fromkeys(("cosmos3_omni", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"), _add_features_in_blocks),
    "nllb-moe": _keep_router_types,
    "t5gemma2": _choose_own_rows,
    "switch_transformers": _share_bias_and_keep_types,
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _keep_all_tokens),
}


class ApartConv1D(Conv1D):
    """A Conv1D of several matrices, stored apart: weight [inputs, parts, outputs of a part], bias [parts, outputs].

    So a tensor-parallel rank's part of each is a slice of the last dim.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """What the matrices give, side by side."""
        product = torch.addmm(self.bias.flatten(), inputs.flatten(0, -2), self.weight.flatten(1))
        return product.view(*inputs.shape[:-1], -1)


@torch.no_grad()
def _store_apart(model: nn.Module) -> None:
    """Stores the matrices apart whose results a module splits, as query, key and value of GPT-2; twice does no harm."""
    for owner in list(model.modules()):
        width = vars(owner).get("split_size")
        for module in owner.children() if isinstance(width, int) else ():
            if type(module) is Conv1D and module.nf > width and module.nf % width == 0:
                module.__class__ = ApartConv1D
                for name, each in list(module.named_parameters()):
                    apart = nn.Parameter(each.unflatten(-1, (-1, width)), requires_grad=each.requires_grad)
                    module.register_parameter(name, apart)


def _give_dims(model: nn.Module) -> None:
    """Gives scalars among the parameters of the model itself the one dim that FSDP asks for; twice does no harm."""
    for name, each in model.named_parameters(recurse=False):
        if not each.ndim:
            model.register_parameter(name, nn.Parameter(each.detach().view(1), requires_grad=each.requires_grad))
            model._scalars = scalars_of(model) | {name}


def scalars_of(model: nn.Module) -> frozenset[str]:
    """The parameters of a model itself that are scalars in files."""
    return getattr(model, "_scalars", frozenset())


def stored_apart(model: nn.Module) -> dict[str, int]:
    """The modules whose matrices are stored apart, by their path in the model, and how many each has."""
    found = ((path, each) for path, each in model.named_modules() if isinstance(each, ApartConv1D))
    return {path: each.weight.shape[-2] for path, each in found}


def prepare(model: Any, model_type: str) -> None:
    """Makes a model of a type ready to be taken apart, in place; twice does no harm."""
    _store_apart(model)
    _give_dims(model)
    if model_type in PREPARES:
        PREPARES[model_type](model)
