r"""Dynamic loss scaling: gradients that are too small for fp16 are made larger until they are fp32.

A step in its order, with $S$ the scale:

1. Every loss (of a microbatch on a rank, already divided by the targets of the global batch) is multiplied by $S$ in
   fp32, and goes backwards in fp16.
2. Gradients are converted to fp32 and added over microbatches and ranks. Nothing is divided on the way, so what fits in
   fp16 where it is made neither overflows nor vanishes in a sum.
3. Each rank divides its gradients by $S$ and looks for any that are not finite, in a kernel of torch's own.
4. All ranks of the job agree, in an all-reduce of one number.
5. If there is one anywhere, all gradients are dropped: optimizers leave parameters without gradients as they are.
   $S$ is halved. After `GROWTH_INTERVAL` steps in a row without one it is doubled.
6. Clipping and the optimizer see gradients as if there were no scale; powers of two change no digit of them.

$S$ begins at 65,536 for each sample of a step, or the power of two below: a sample's gradients are as large as under
`torch.amp.GradScaler`, whose rule and constants these are, however many samples the loss is a mean of. The scale is of
the global batch and no part of the plan, so a run goes on with it under any other plan.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.runtime.divergence import DivergedError

INITIAL_SCALE = 65536.0
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
PREFIX = "loss_scale."
"""Prefix of the loss scale's tensor names in a checkpoint."""


class LossScale:
    """The scale of a run, the same on every rank."""

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
        """Return the state by its names in a checkpoint; reading into these tensors resumes it."""
        return {f"{PREFIX}scale": self._scale, f"{PREFIX}num_finite": self._num_finite}

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale, in fp32."""
        return loss.float() * self._scale

    def unscaled(self, loss: Tensor) -> Tensor:
        """Return the detached loss divided by the scale: the inverse of `scaled`."""
        return loss.detach() / self._scale

    @torch.no_grad()
    def take_in(self, gradients: Sequence[Tensor]) -> None:
        """Scale the gradients of an earlier batch, to which those of a step are added."""
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
                "the loss scale has fallen below 1, and there still are gradients that are not finite: values of the "
                "model leave the range of fp16 (65504), or the run has diverged. Lower --lr or raise --warmup-steps, "
                "or plan with --precision bf16, or fp32 on devices without it."
            )


def any_rank_has(found: Tensor) -> bool:
    """Return whether ``found`` [1] is above 0 on any rank; reduces it to its maximum in place."""
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
