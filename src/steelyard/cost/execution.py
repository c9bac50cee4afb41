"""How a framework carries a plan out, where that changes what a step costs; the default is `steelyard.runtime`.

Every field names something that a framework does. The default's values are those of our runtime, which plans made here
take. `benchmarks/published_runs/frameworks.py` has one value per framework that others published runs of, and says
which were read in code or papers and which were chosen on those runs.
"""

from dataclasses import dataclass
from typing import Literal

from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank keeps between steps, and from which ZeRO stage on each part is sharded.

    ``zero`` is 0 (nothing sharded), 1 (optimizer), 2 (and gradients) or 3 (and parameters).
    """

    parameters: int
    gradients: int
    optimizer: int
    zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a framework does otherwise than this project's runtime."""

    matmul_dtype: str | None = None
    """Type that matmuls compute in where it is not the job's precision (fp16, fp8)."""
    linear_speedup: float = 1.0
    """How much faster linear layers run than at ``matmul_dtype``'s reached rate (fp8 beside bf16 attention)."""
    states: StateBytes | None = None
    """States kept in buffers of the framework's own; None for FSDP2 as the runtime uses it."""
    reduce_bytes: int = 4
    """Bytes per parameter that gradients are reduced in."""
    accumulates_apart: bool = False
    """Whether each microbatch's gradients are made in compute precision and then added to fp32 ones."""
    accumulates_late: bool = False
    """Whether those of a whole backward pass are there at once, before any is added to the fp32 ones."""
    overlaps_data: bool = True
    """Whether data-parallel communication runs beside compute."""
    hidden_tp: float = 0.0
    """Part of tensor-parallel communication that runs beside compute."""
    overlaps_transfers: bool = True
    """Whether a stage computes on while it sends to another, or waits until the transfer is done."""
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
    eager_launch: bool = True
    """Whether the host launches every kernel (False under CUDA graphs or compiled regions)."""
    pipelined_collective_s: float = 0.0
    """What the host loses per tensor-parallel collective and rank of its group where stages exchange activations
    between nodes. Seen, not explained: in nanotron a block takes 3 ms per microbatch and rank, however small it is."""
    remat_fraction: float = 1.0
    """Part of what remat repeats in a layer that is really repeated: less than 1 where only every n-th layer is."""

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


def kept_state_bytes(num_params: int, strategy: Strategy, execution: Execution) -> dict[str, int]:
    """Bytes of a layer's states on one rank in a framework that has buffers of its own for each of them."""
    states = execution.states
    assert states is not None, "only frameworks with states of their own are asked"
    replicas = strategy.replicas
    shards = strategy.state_shards if strategy.state_shards > 1 else min(execution.shard_degree or replicas, replicas)
    parts = {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
    first_sharded = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {
        name: -(-num_params * each // (shards if states.zero >= first_sharded[name] else 1))
        for name, each in parts.items()
    }
