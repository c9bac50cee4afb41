r"""Interleaved zero-bubble: interleaved 1F1B that fills the bubbles with the gradients of weights.

A backward pass computes the gradients of activations, which the part before waits for. Those of the weights of linear
layers have passes of their own: on stage $i$ of $P$ that of a backward pass is done $i$ backward passes later, so that
the last stages, which begin to work backwards first, have some left when they would wait. Stage $i$ does
$\min(mv, (v - 1)g + (P - 1 - i))$ forwards first, half as many for each stage behind it as interleaved 1F1B: a backward
pass comes back sooner. Rounds of $g$ microbatches are those of interleaved 1F1B.

Not written for other engines. torchtitan has it, with the split backward passes of torch, which keep all that was
saved until the weight pass, refuse compiled blocks, and would recompute a block once for each group of its weights.
Megatron-Core delays gradients of weights within its own schedules alone (``delay_wgrad_compute``).

Source: Qi et al. 2024 (arXiv 2401.10241), section 2.1 (ZB-H1), over the chunks of every stage; the order of
`ScheduleInterleavedZeroBubble` of `torch.distributed.pipelining` 2.13.
"""

from dataclasses import replace

import numpy as np

from steelyard.schedules.interleaved import Interleaved1F1B
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig


class InterleavedZeroBubble(Interleaved1F1B):
    """Interleaved 1F1B with weight passes in its bubbles."""

    name = "interleaved-zero-bubble"
    title = "interleaved zero-bubble"
    torch_name = "ScheduleInterleavedZeroBubble"
    torchtitan_name = megatron_name = None
    forwards_per_hop = 1
    splits_backward = True
    only_alone = True
    why_not_everywhere = "searched only where --schedule names it alone"

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """The passes of interleaved 1F1B, and behind every backward pass the weight pass of an earlier one."""
        order = super().passes(pipeline, stage)
        backward = np.flatnonzero(order.phase == Phase.BACKWARD)
        behind = np.append(backward[stage:], np.full(min(stage, len(backward)), len(order.phase) - 1)) + 1
        weight = replace(order, phase=np.full_like(order.phase, Phase.WEIGHT))
        return PassOrder(
            **{
                name: np.insert(getattr(order, name), behind, getattr(weight, name)[backward])
                for name in ("phase", "chunk", "microbatch")
            }
        )

    def waiting(self, pipeline: PipelineConfig, stage: int) -> int:
        """Return as many weight passes as there are stages before it."""
        return min(pipeline.num_passes - 1, stage)

    def received_ahead(self, pipeline: PipelineConfig, stage: int) -> tuple[int, int]:
        """Return one more than interleaved 1F1B of each: what a weight pass lets arrive.

        Read off torch's orders of up to 8 stages and 20 chunks.
        """
        activations, gradients = super().received_ahead(pipeline, stage)
        return activations + 1, gradients + 1


INTERLEAVED_ZERO_BUBBLE = InterleavedZeroBubble()
