"""Which kernels an engine computes a decoder with, and what they keep: data that `steelyard.cost.decoder` prices."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which parts of a block an engine computes in one kernel, and what it keeps for the backward pass.

    ``attention``: a flash kernel, matmuls around a fused softmax, or eager operations. ``selective``: what selective
    remat computes again: the core of attention (Megatron), or all but attention and every second matmul (torchtitan).
    ``full``: what full remat computes again: the whole block, or the block up to the last tensor that its backward
    pass needs, where torch's non-reentrant checkpoint stops early (the last matmul is then not run again).
    ``norm_bytes``: what two norms that are no kernel keep per entry of the hidden state, beside the results.
    ``mask_bytes`` per entry of the masks of dropout behind attention and behind the feed-forward part.
    ``copies``: kernels of a block that only copy or make masks. ``keeps_gathered``: whether sequence parallelism keeps
    what it gathered until the backward pass, not its own part of it. ``loss_bytes``: what the loss holds at its peak,
    and of that until the backward pass, per token and entry of the vocabulary on a rank, of all entries if
    ``gathers_logits``; ``loss_outlives``: whether the latter is still there while the next microbatch's loss is made.
    ``loss_pieces``: parts of a sequence whose logits, loss and gradients are made one part after another; with several
    only fp32 gradients of the hidden state stay until the backward pass.
    ``of_each_expert``: kernels of the forward pass that every local expert has of its own, beside those of all
    together. ``expert_copies``: tensors of a pair of a token and an expert, as wide as the hidden state, that are kept
    beside what enters the expert: what comes out and what putting tokens in order leaves. Seen in Megatron-Core's
    allocated bytes, of models whose routing is not forced; found on published runs.
    """

    norm: bool
    rotary: bool
    activation: bool
    loss: bool
    attention: Literal["flash", "fused softmax", "eager"]
    dropout: bool = False
    mask_bytes: int = 1
    selective: Literal["attention core", "half of the matmuls"] = "attention core"
    full: Literal["block", "until last needed"] = "block"
    norm_bytes: int = 14
    copies: int = 0
    keeps_gathered: bool = False
    loss_bytes: tuple[int, int] = (12, 4)
    gathers_logits: bool = False
    loss_outlives: bool = False
    loss_pieces: int = 1
    of_each_expert: int = 0
    expert_copies: int = 4


FUSED = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="flash")
"""Every part of a block in one kernel, as Transformer Engine and Apex have them."""
EAGER = Kernels(norm=True, rotary=False, activation=False, loss=False, attention="flash", expert_copies=2)
"""Operations of torch one by one; its norms, its flash attention and its grouped products are a kernel each, the latter
with fewer copies (1.4 as traced from transformers' Qwen3)."""
