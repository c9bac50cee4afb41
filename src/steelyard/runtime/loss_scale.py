r"""Dynamic loss scaling: multiplies gradients that are too small for fp16 until they are converted to fp32.

A step, in order, with the scale $S$:

1. Every loss (of a microbatch on a rank, already divided by the targets of the global batch) is multiplied by $S$ in
   fp32; its backward pass runs in fp16.
2. Gradients are converted to fp32 and summed over microbatches and ranks. Nothing is divided in between, so a value
   that fits in fp16 neither overflows nor vanishes in a sum.
3. Each rank divides its gradients by $S$ and looks for non-finite values, in a torch kernel.
4. All ranks of the job agree through an all-reduce of one number.
5. If any rank found a non-finite value, all gradients are dropped (optimizers do not change parameters without
   gradients) and $S$ is halved. After `GROWTH_INTERVAL` consecutive steps without one, $S$ is doubled.
6. Clipping and the optimizer see gradients as if there were no scale, because scaling by powers of two is exact.

$S$ begins at 65,536 times the samples of a step, rounded down to a power of two. A sample's gradients are then as large
as under `torch.amp.GradScaler`, whose rule and constants are used here, regardless of how many samples the loss
averages over. The scale depends on the global batch and not on the plan, so a run keeps it under any other plan.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.runtime.divergence import DivergedError

INITIAL_SCALE = 65536.0
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
PREFIX = "loss_scale."
"""Prefix of the tensors' names in a checkpoint."""


class LossScale:
    """Loss scale of a run, identical on every rank."""

    def __init__(self, global_batch: int, device: torch.device, *, growth_interval: int = GROWTH_INTERVAL) -> None:
        self._scale = torch.tensor(INITIAL_SCALE * 2 ** (global_batch.bit_length() - 1), device=device)
        self._num_finite = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval
        self.is_skipped = False
        """Whether the last step's gradients were dropped because some were not finite."""

    @property
    def value(self) -> float:
        """Scale of the next step."""
        return self._scale.item()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by its names in a checkpoint; reading into these tensors restores it."""
        return {f"{PREFIX}scale": self._scale, f"{PREFIX}num_finite": self._num_finite}

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale, in fp32."""
        return loss.float() * self._scale

    def unscaled(self, loss: Tensor) -> Tensor:
        """Return the loss before `scaled`, detached from the graph."""
        return loss.detach() / self._scale

    @torch.no_grad()
    def take_in(self, gradients: Sequence[Tensor]) -> None:
        """Scale gradients left by an earlier batch, to which the gradients of a step are added."""
        if gradients:
            torch._foreach_mul_(gradients, self._scale.to(gradients[0].device))

    @torch.no_grad()
    def finish_step(self, gradients: Sequence[Tensor]) -> None:
        """Divide this rank's fp32 gradients by the scale in place, and update the scale; a collective call.

        Raises `DivergedError` if the scale falls below 1.
        """
        found = torch.zeros(1, device=self._scale.device)
        if gradients:
            there = gradients[0].device  # the device, or its host
            seen = torch.zeros(1, device=there)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, seen, self._scale.reciprocal().to(there))
            found += seen.to(found.device)
        self.is_skipped = any_rank_has(found)
        torch._amp_update_scale_(self._scale, self._num_finite, found, GROWTH, BACKOFF, self._growth_interval)
        if self.is_skipped and self.value < 1:
            raise DivergedError(
                "the loss scale fell below 1 and gradients are still not finite: values exceed the fp16 "
                "range (65504), or the run has diverged. Lower --lr or raise --warmup-steps, or plan with "
                "--precision bf16 (fp32 on devices without bf16)."
            )


def any_rank_has(found: Tensor) -> bool:
    """Return whether ``found`` [1] is above 0 on any rank, and set it to the maximum over ranks; a collective call."""
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
