"""Execution of a plan by an engine, as far as it changes what a step costs; the defaults are our runtime's.

`benchmarks/published_runs/frameworks.py` has one value per framework that others published runs of, and says which were
read in code or papers and which were chosen on those runs. `Kernels` are data that `steelyard.cost.decoder` prices.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, final

from steelyard.levers.lever import Effects
from steelyard.plan.strategy import Strategy

Dispatcher = Literal["all-to-all", "deep", "all-gather"]
"""How tokens reach their experts: a copy for each expert of a token; one for each rank, or over the network for each
node, that has experts of it, which hands it on (DeepEP; handing it on runs beside the network and is not priced); or
one for each rank."""

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act"]
"""Parts of a block that Megatron-Core computes again by themselves (``--recompute-modules``): attention's core; what
enters attention and the feed-forward part; queries, keys and values of a latent; the feed-forward part of a block
without experts; what enters an expert's last product. Of ``mlp`` the input stays, of the others what they make goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which parts of a block an engine computes in one kernel, and what it keeps for the backward pass.

    ``attention``: a flash kernel, matmuls around a fused softmax, or eager operations. ``selective``: what selective
    remat computes again: these modules (Megatron), all but attention and every second matmul (torchtitan), or all but
    attention and every matmul, grouped ones apart (graph_trainer, an experiment of torchtitan).
    ``full``: what full remat computes again: the whole block, or the block up to the last tensor that its backward
    pass needs, where torch's non-reentrant checkpoint stops early (the last matmul is then not run again).
    ``norm_bytes``: what two norms that are no kernel keep per entry of the hidden state, beside the results.
    ``mask_bytes`` per entry of the masks of dropout behind attention and behind the feed-forward part.
    ``copies``: kernels of a block that only copy or make masks. ``keeps_gathered``: whether sequence parallelism keeps
    what it gathered until the backward pass, not its own part of it. ``activation_bytes``: of each entry that a gated
    activation in one kernel keeps of its inputs; 1 where it keeps them in 8 bits. ``loss_bytes``: what the loss holds
    at its peak, and of that until the backward pass, per token and entry of the vocabulary on a rank, of all entries if
    ``gathers_logits``; ``loss_outlives``: whether the latter is still there while the next microbatch's loss is made.
    ``loss_pieces``: parts of a sequence whose logits, loss and gradients are made one part after another; with several
    only fp32 gradients of the hidden state stay until the backward pass.
    ``of_each_expert``: kernels of the forward pass that every local expert has of its own, beside those of all
    together. ``expert_copies``: tensors of a pair of a token and an expert, as wide as the hidden state, that are kept
    beside what enters the expert: what comes out and what putting tokens in order leaves. Seen in Megatron-Core's
    allocated bytes, of models whose routing is not forced; found on published runs. ``eager_routing``: whether tokens
    are put in order and back, and what experts make is weighed in fp32, by operations of torch one by one.
    """

    norm: bool
    rotary: bool
    activation: bool
    loss: bool
    attention: Literal["flash", "fused softmax", "eager"]
    dropout: bool = False
    mask_bytes: int = 1
    selective: tuple[Module, ...] | Literal["half of the matmuls", "no matmul"] = ("core_attn",)
    full: Literal["block", "until last needed"] = "block"
    norm_bytes: int = 14
    copies: int = 0
    keeps_gathered: bool = False
    activation_bytes: int = 2
    loss_bytes: tuple[int, int] = (12, 4)
    gathers_logits: bool = False
    loss_outlives: bool = False
    loss_pieces: int = 1
    of_each_expert: int = 0
    expert_copies: int = 4
    eager_routing: bool = False


FUSED = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="flash")
"""Every part of a block in one kernel, as Transformer Engine and Apex have them."""
EAGER = Kernels(norm=True, rotary=False, activation=False, loss=False, attention="flash", expert_copies=2)
"""Operations of torch one by one; its norms, its flash attention and its grouped products are a kernel each, the latter
with fewer copies (1.4 as traced from transformers' Qwen3)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """States in buffers of the framework's own: the bytes per parameter that a rank keeps of each between steps.

    ``zero`` says which are sharded: 0 (none), 1 (optimizer), 2 (and gradients) or 3 (and parameters).
    """

    parameters: int
    gradients: int
    optimizer: int
    zero: int
    frozen: int = 2
    """Bytes of a parameter that is not trained, which has no gradient and no optimizer state."""

    @property
    def of_frozen(self) -> "StateBytes":
        """States of parameters that are not trained."""
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
        """Bytes of a layer's states on one rank, ``expert_params`` of whose parameters are in routed experts.

        ``effects`` are of an optimizer other than AdamW, which keeps as much in every framework, beside master copies.
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
    """What a framework does otherwise than this project's runtime."""

    matmul_dtype: str | None = None
    """Type that matmuls compute in where it is not the job's precision (fp16, fp8)."""
    linear_speedup: float = 1.0
    """How much faster linear layers run than at ``matmul_dtype``'s reached rate (fp8 beside bf16 attention)."""
    tuned_linear_speedup: float = 1.0
    """How much faster they run on devices that compute in fp8, for which the engine's kernels are tuned."""
    fp8_share: float = 0.93
    """Rate of fp8 linear layers over that of bf16 ones, as a fraction of the ratio of their peaks, what scaling and
    casts leave of it. Of Transformer Engine found on published runs; between pairs of dgxc_benchmarking that differ in
    precision alone it is 0.80 to 1.05."""
    states: StateBytes | None = None
    """Parameters, gradients and optimizer states in buffers of the framework between steps; None where FSDP2 and
    optimizers of torch keep them in the allocator's memory, as their own order of work has it (`steelyard.cost.layer`
    and `steelyard.cost.memory`)."""
    reduce_bytes: int = 4
    """Bytes per parameter that gradients are reduced in."""
    whole_gradients: Literal["never", "without tp", "always"] = "never"
    """Where FSDP2 keeps a sharded layer's gradients whole, in compute precision, until the last backward pass of a step
    reduces them in that precision: everywhere, where the model is not divided by tp, or nowhere."""
    keeps_parameters: bool = False
    """Whether ranks that share states under ZeRO-2 keep all parameters from step to step, in the type that computes, so
    that once a step, after the optimizer, new values of those that are trained are gathered and nothing else."""
    accumulation_bytes: int = 0
    """What adding a microbatch's gradients to those of a step moves per parameter, beside what makes them: 10 where
    2-byte gradients are added to 4-byte ones in a kernel of its own (6 read, 4 written), 6 where the product that makes
    them reads and writes the 4-byte ones, 2 where it does so with 2-byte ones."""
    accumulates_late: bool = False
    """Whether those of a whole backward pass are there at once, before any is added to the fp32 ones."""
    low_copies: int = 0
    """Bytes per parameter of blocks that a framework with states of its own keeps from microbatch to microbatch beside
    them where products are in 8 bits: the matrices cast by rows and by columns."""
    frees_gradients: bool = False
    """Whether a framework with states of its own makes gradients in a backward pass and frees them after the step,
    instead of keeping them in a buffer: with one microbatch they are there as activations no longer are."""
    overlaps_data: bool = True
    """Whether data-parallel communication runs beside compute."""
    hidden_collectives: float = 0.0
    """Part of tensor-parallel communication that runs beside compute."""
    hidden_exchanges: float = 0.0
    """Part of the exchanges of tokens between ranks that divide experts that runs beside compute."""
    overlaps_transfers: Literal["never", "with chunks", "always"] = "always"
    """Where a stage computes on while it sends to another, instead of waiting until the transfer is done: nowhere, in
    interleaved schedules alone, or everywhere."""
    shard_pieces: int = 1
    """Into how many collectives a layer's gradients and parameters are cut where the optimizer is sharded: 1, or as
    many as the layer has tensors."""
    shard_degree: int | None = None
    """Ranks over which states are sharded where that is not all data ranks."""
    transfer: Literal["divided", "whole"] = "divided"
    """Whether tensor-parallel ranks without sp send each a part of the activation between stages, or all of it."""
    reserve: float = 0.08
    """Part of the memory that comes and goes in a step by which the allocator holds more when it is short of memory:
    reserved was 6 to 23 % above allocated on public torchtitan runs, less without remat."""
    bucket_bytes: int = 0
    """Buffers of a fixed size in which gradients are reduced and parameters gathered."""
    step_shard_bytes: int = 0
    """Bytes per parameter of a rank's optimizer shard that are there only while the optimizer steps: its gradients,
    copied together and converted to fp32, where the framework has states of its own."""
    gathered_bytes: int = 0
    """Bytes per parameter of a rank of the one tensor in which new parameters are gathered where the optimizer is
    sharded; the rank's own part is copied as well."""
    kept_transfers: int = 0
    """Copies of the activation at a stage's borders that it keeps for every microbatch in flight beside what is saved
    for the backward pass, where the framework has states of its own."""
    buffers_every_microbatch: bool = False
    """Whether a stage has a buffer for what arrives of every microbatch of a step, and what it sent stays until the
    schedule waits for it, as the stages of `torch.distributed.pipelining` have it."""
    adapters: Literal["computed", "autocast", "fp32"] = "computed"
    """How adapters compute: in the precision of their layer; under autocast with weights in fp32, where each keeps a
    copy of its input in 16 bits, but under fsdp, which gathers weights in the type that computes; or all in fp32, as
    they are traced then."""
    shares_frozen_head: bool = False
    """Whether a tied head that is not trained has the embedding's matrix, where all layers lie on one stage; our
    runtime gives each of them one."""
    eager_launch: bool = True
    """Whether the host launches every kernel (False under CUDA graphs or compiled regions)."""
    pipelined_collective_s: float = 0.0
    """What the host loses per tensor-parallel collective and rank of its group where stages exchange activations
    between nodes. Seen, not explained: in nanotron a block takes 3 ms per microbatch and rank, however small it is."""
    step_s: float = 0.0
    """Once a step, beside what every framework spends: what it does rank after rank."""
    kernels: Kernels | None = None
    """What computes decoders, where the engine has modules of its own; None where they are those of transformers, which
    are traced."""
    dispatcher: Dispatcher = "all-to-all"
    balances_experts: bool = False
    """Whether tokens are dealt out evenly, whatever the router says, as benchmarks do."""

    def keeps_whole_gradients(self, strategy: Strategy) -> bool:
        """Whether the gradients of a layer of this strategy are whole until the last backward pass of a step."""
        if strategy.state_shards == 1 or self.whole_gradients == "never":
            return False
        return self.whole_gradients == "always" or strategy.tensor_degree == 1

    @property
    def keeps_own_buffers(self) -> bool:
        """Whether states, and what stages exchange, lie in buffers of the framework instead of torch's."""
        return self.states is not None

    @property
    def kept_apart(self) -> tuple[str, ...]:
        """Terms of memory that no allocator holds more for than they are."""
        own = ("context", "parameters", "gradients", "optimizer", "optimizer step")
        return own if self.keeps_own_buffers else ()

    def optimizer_shards(self, data_degree: int) -> int:
        """Ranks over which the optimizer states of a replicated layer are divided."""
        if self.states is None or self.states.zero == 0:
            return 1
        return min(self.shard_degree or data_degree, data_degree)

    def step_bytes(self, parameter_bytes: int, data_degree: int) -> int:
        """Bytes that a rank takes while the optimizer steps, when no activations are left, and gives back after."""
        if self.states is None:
            return 0
        num_params, shards = parameter_bytes // self.states.parameters, self.optimizer_shards(data_degree)
        gathered = self.gathered_bytes * (num_params + num_params // shards) if shards > 1 else 0
        return self.step_shard_bytes * num_params // shards + gathered


OURS = Execution()
"""How `steelyard.runtime` runs a plan."""
