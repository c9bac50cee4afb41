"""Execution of a plan by an engine, as far as it changes the cost of a step; the defaults are our runtime's.

`benchmarks/published_runs/frameworks.py` has one value per framework with published runs, and distinguishes values read
in code or papers from values fitted to those runs. `Kernels` are data that `steelyard.cost.decoder` prices.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, final

from steelyard.levers.lever import Effects
from steelyard.plan.strategy import Strategy

Dispatcher = Literal["all-to-all", "deep", "all-gather"]
"""Copies of a token that reach its experts: one for each of its experts; one for each rank, or between nodes for each
node, with experts of it, which forwards the copy (DeepEP; forwarding overlaps with the network and is not priced); or
one for each rank."""

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act"]
"""Parts of a block that Megatron-Core recomputes separately (``--recompute-modules``): attention's core; the inputs of
attention and of the feed-forward part; queries, keys and values of a latent; the feed-forward part of a block without
experts; the input of an expert's last product. ``mlp`` keeps its input; the outputs of the others are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Fused kernels of an engine's blocks, and the tensors that they keep for the backward pass.

    ``attention``: a flash kernel, matmuls around a fused softmax, or eager operations. ``selective``: scope of
    selective remat: these modules (Megatron), all except attention and every second matmul (torchtitan), or all except
    attention and every matmul that is not grouped (graph_trainer, an experiment of torchtitan).
    ``dropout``: whether there is dropout, whose masks after attention and the feed-forward part take 2 bytes an entry.
    ``full``: scope of full remat: the whole block, or the block up to the last tensor that its backward pass needs, if
    torch's non-reentrant checkpoint stops early (the last matmul is then not recomputed).
    ``norm_bytes``: bytes that two norms without a kernel keep per entry of the hidden state, besides the results.
    ``copies``: kernels of a block that only copy or make masks. ``keeps_gathered``: whether sequence parallelism keeps
    the gathered tensor until the backward pass instead of its own part. ``activation_bytes``: bytes per entry of the
    inputs that a gated activation in one kernel keeps; 1 if it keeps them in 8 bits. ``loss_bytes``: bytes of the loss
    at its peak, and of these until the backward pass, per token and entry of the vocabulary on a rank, or of all
    entries if ``gathers_logits``. ``loss_pieces``: parts of a sequence whose logits, loss and gradients are computed
    one after another; with several parts only fp32 gradients of the hidden state stay until the backward pass.
    ``of_each_expert``: kernels of the forward pass per local expert, in addition to those of all experts together.
    ``expert_copies``: tensors per pair of a token and an expert, as wide as the hidden state, that are kept besides the
    expert's input: its output and the copies left by permuting tokens. Seen in Megatron-Core's allocated bytes, for
    models whose routing is not forced; fitted to published runs. ``eager_routing``: whether separate torch operations
    permute tokens and weigh the outputs of experts in fp32.
    """

    norm: bool
    rotary: bool
    activation: bool
    loss: bool
    attention: Literal["flash", "fused softmax", "eager"]
    dropout: bool = False
    selective: tuple[Module, ...] | Literal["half of the matmuls", "no matmul"] = ("core_attn",)
    full: Literal["block", "until last needed"] = "block"
    norm_bytes: int = 14
    copies: int = 0
    keeps_gathered: bool = False
    activation_bytes: int = 2
    loss_bytes: tuple[int, int] = (12, 4)
    gathers_logits: bool = False
    loss_pieces: int = 1
    of_each_expert: int = 0
    expert_copies: int = 4
    eager_routing: bool = False


FUSED = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="flash")
"""Every part of a block in one kernel, as in Transformer Engine and Apex."""
EAGER = Kernels(norm=True, rotary=False, activation=False, loss=False, attention="flash", expert_copies=2)
"""Separate operations of torch; norms, flash attention and grouped products are one kernel each, the latter with fewer
copies (1.4 as traced from transformers' Qwen3)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """States in the framework's own buffers: bytes per parameter that a rank keeps of each between steps.

    ``zero``: sharded states: 0 (none), 1 (optimizer), 2 (and gradients) or 3 (and parameters).
    """

    parameters: int
    gradients: int
    optimizer: int
    zero: int
    frozen: int = 2
    """Bytes of a parameter that is not trained, which has no gradient and no optimizer state."""

    @property
    def of_frozen(self) -> "StateBytes":
        """States of frozen parameters."""
        return replace(self, parameters=self.frozen, gradients=0, optimizer=0)

    def kept_bytes(
        self,
        num_params: int,
        strategy: Strategy,
        shard_degree: int | None,
        *,
        expert_params: int = 0,
        effects: Effects | None = None,
    ) -> dict[str, int]:
        """Bytes of a layer's states on one rank, with ``expert_params`` of its parameters in routed experts.

        ``effects`` are those of an optimizer other than AdamW; its states are the same in every framework, in addition
        to master copies.
        """
        experts = expert_params if strategy.expert_degree > 1 else 0
        optimizer: float = self.optimizer
        if effects is not None and effects.state_bytes != Effects().state_bytes:
            optimizer = max(0, self.optimizer - Effects().state_bytes) + effects.state_bytes
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": optimizer}
        first_sharded = {"parameters": 3, "gradients": 2, "optimizer": 1}
        divided = (
            (num_params - experts, strategy.state_shards, strategy.replicas),
            (experts // strategy.expert_degree, strategy.expert_state_shards, strategy.expert_replicas),
        )

        def kept(name: str, count: int, shards: int, replicas: int) -> int:
            if strategy.state_shards == 1:
                of_all = replicas / strategy.replicas
                shards = max(1, min(replicas, int(of_all * (shard_degree or strategy.replicas))))
            return math.ceil(count * parts[name] / (shards if self.zero >= first_sharded[name] else 1))

        return {name: sum(kept(name, *part) for part in divided) for name in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Differences of a framework from this project's runtime."""

    tuned_linear_speedup: float = 1.0
    """Speedup of linear layers on devices that compute in fp8, for which the engine's kernels are tuned."""
    fp8_share: float = 0.93
    """Rate of fp8 linear layers over that of bf16 ones, as a fraction of the ratio of their peaks; scaling and casts
    cost the rest. Fitted to published runs of Transformer Engine; between pairs of dgxc_benchmarking that differ in
    precision alone it is 0.80 to 1.05."""
    states: StateBytes | None = None
    """Parameters, gradients and optimizer states in the framework's own buffers between steps; None if FSDP2 and
    optimizers of torch keep them in the allocator's memory, in their own order of work (`steelyard.cost.layer` and
    `steelyard.cost.memory`)."""
    reduce_bytes: int = 4
    """Bytes per parameter in the reduction of gradients."""
    whole_gradients: Literal["never", "without tp", "always"] = "never"
    """Sharded layers whose gradients FSDP2 keeps whole, in compute precision, until the last backward pass of a step
    reduces them in that precision: none, those not divided by tp, or all."""
    keeps_parameters: bool = False
    """Whether ranks that share states under ZeRO-2 keep all parameters between steps in compute precision, so that only
    new values of trained parameters are gathered, once per step after the optimizer."""
    accumulation_bytes: int = 0
    """Bytes per parameter moved to add a microbatch's gradients to those of a step, besides computing them: 10 if
    2-byte gradients are added to 4-byte ones in a separate kernel (6 read, 4 written), 6 if the product that computes
    them reads and writes the 4-byte ones, 2 if it does so with 2-byte ones."""
    accumulates_late: bool = False
    """Whether all gradients of a backward pass exist at once, before any is added to the fp32 ones."""
    low_copies: int = 0
    """Bytes per parameter of blocks that a framework with its own state buffers keeps between microbatches if products
    are in 8 bits: the matrices cast by rows and by columns."""
    frees_gradients: bool = False
    """Whether a framework with its own state buffers allocates gradients in a backward pass and frees them after the
    step, instead of keeping them in a buffer: with one microbatch they replace activations that are already freed."""
    overlaps_data: bool = True
    """Whether data-parallel communication overlaps with compute."""
    hidden_collectives: float = 0.0
    """Fraction of tensor-parallel communication that overlaps with compute."""
    hidden_exchanges: float = 0.0
    """Fraction of the token exchanges between expert-parallel ranks that overlaps with compute."""
    overlaps_transfers: Literal["never", "with chunks", "always"] = "always"
    """Schedules in which a stage computes during its transfer to another stage, instead of waiting for it: none,
    interleaved ones, or all."""
    shard_pieces: int = 1
    """Number of collectives per layer for gradients and parameters if the optimizer is sharded: 1, or the number of the
    layer's tensors."""
    shard_degree: int | None = None
    """Ranks over which states are sharded; None for all data ranks."""
    transfer: Literal["divided", "whole"] = "divided"
    """Whether each tensor-parallel rank without sp sends a part of the activation between stages, or all of it."""
    reserve: float = 0.08
    """Additional memory that the allocator reserves when it is short of memory, as a fraction of the memory allocated
    and freed within a step: reserved was 6 to 23 % above allocated on public torchtitan runs, less without remat."""
    bucket_bytes: int = 0
    """Bytes of fixed-size buffers in which gradients are reduced and parameters gathered."""
    step_shard_bytes: int = 0
    """Bytes per parameter of a rank's optimizer shard that exist only during the optimizer step: its gradients, copied
    together and converted to fp32, if the framework has its own state buffers."""
    gathered_bytes: int = 0
    """Bytes per parameter of a rank of the single tensor in which new parameters are gathered if the optimizer is
    sharded; the rank's own part is copied as well."""
    kept_transfers: int = 0
    """Copies of the activation at a stage's boundaries that it keeps for every microbatch in flight, in addition to the
    tensors saved for the backward pass, if the framework has its own state buffers."""
    buffers_every_microbatch: bool = False
    """Whether a stage has a receive buffer for every microbatch of a step, and keeps sent tensors until the schedule
    waits for them, as the stages of `torch.distributed.pipelining` do."""
    splits_whole: bool = False
    """Whether a pending weight pass keeps all tensors saved for its backward pass, as torch's split backward passes do,
    and not only the operands of linear layers."""
    adapters: Literal["computed", "autocast", "fp32"] = "computed"
    """Precision of adapters: that of their layer; autocast with fp32 weights, where each keeps a copy of its input in
    16 bits, except under fsdp, which gathers weights in compute precision; or all in fp32, as they are then traced."""
    shares_head: bool = False
    """Whether embedding and head share a tied matrix, also on several devices; those with their own buffers all do."""
    eager_launch: bool = True
    """Whether the host launches every kernel (False under CUDA graphs or compiled regions)."""
    pipelined_collective_s: float = 0.0
    """Seconds that the host loses per tensor-parallel collective and rank of its group if stages exchange activations
    between nodes. Observed, not explained: a block of nanotron takes 3 ms per microbatch and rank, however small it
    is."""
    step_s: float = 0.0
    """Seconds per step of work done rank after rank, in addition to the overhead of every framework."""
    kernels: Kernels | None = None
    """Kernels of decoders if the engine has its own modules; None for the modules of transformers, which are traced."""
    dispatcher: Dispatcher = "all-to-all"
    balances_experts: bool = False
    """Whether tokens are distributed evenly regardless of the router, as benchmarks do."""

    def keeps_whole_gradients(self, strategy: Strategy) -> bool:
        """Return whether the gradients of a layer with this strategy stay whole until a step's last backward pass."""
        if strategy.state_shards == 1 or self.whole_gradients == "never":
            return False
        return self.whole_gradients == "always" or strategy.tensor_degree == 1

    @property
    def keeps_own_buffers(self) -> bool:
        """Whether states and exchanged activations lie in the framework's own buffers instead of torch's."""
        return self.states is not None

    @property
    def kept_apart(self) -> tuple[str, ...]:
        """Memory terms for which the allocator reserves exactly their size."""
        own = ("context", "parameters", "gradients", "optimizer", "optimizer step")
        return own if self.keeps_own_buffers else ()

    def has_always(self, mode: str, values: Collection[object]) -> bool:
        """Return whether all plans have one of these values of a mode, which then needs no dimension."""
        return self.states is not None and mode == "zero" and self.states.zero in values

    def optimizer_shards(self, data_degree: int) -> int:
        """Number of ranks over which the optimizer states of a replicated layer are divided."""
        if self.states is None or self.states.zero == 0:
            return 1
        return min(self.shard_degree or data_degree, data_degree)

    def step_bytes(self, parameter_bytes: int, data_degree: int) -> int:
        """Bytes that a rank allocates during the optimizer step, after all activations are freed, and then frees."""
        if self.states is None:
            return 0
        num_params, shards = parameter_bytes // self.states.parameters, self.optimizer_shards(data_degree)
        gathered = self.gathered_bytes * (num_params + num_params // shards) if shards > 1 else 0
        return self.step_shard_bytes * num_params // shards + gathered


OURS = Execution()
"""Execution by `steelyard.runtime`."""
