r"""Interleaved zero-bubble: interleaved 1F1B that fills its bubbles with weight gradients.

A backward pass computes the gradients of activations, which the previous part waits for. Weight gradients of linear
layers are computed in separate weight passes: on stage $i$ of $P$ a weight pass runs $i$ backward passes after its own.
The last stages, which start their backward passes first, therefore have weight passes left when they would be idle.
Stage $i$ first runs $\min(mv, (v - 1)g + (P - 1 - i))$ forward passes, half as many per later stage as interleaved
1F1B because gradients arrive sooner. Rounds of $g$ microbatches are those of interleaved 1F1B.

torchtitan runs it with torch's split backward passes, which keep all saved tensors until the weight pass, reject
compiled blocks and recompute a block once for each group of its weights, so it runs without these there. Megatron-Core
delays weight gradients only within its own schedules (``delay_wgrad_compute``).

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
    torchtitan_name: str | None = "InterleavedZeroBubble"
    megatron_name = None
    forwards_per_hop = 1
    splits_backward = True
    only_alone = True
    why_not_everywhere = "searched only if --schedule names no other schedule"

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        """Return the passes of interleaved 1F1B, with the weight pass of an earlier pass after each backward pass."""
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
        """Return the number of stages before this one."""
        return min(pipeline.num_passes - 1, stage)

    def received_ahead(self, pipeline: PipelineConfig, stage: int) -> tuple[int, int]:
        """Return one more of each than interleaved 1F1B, which can arrive during a weight pass.

        Taken from torch's pass orders of up to 8 stages and 20 chunks.
        """
        activations, gradients = super().received_ahead(pipeline, stage)
        return activations + 1, gradients + 1


INTERLEAVED_ZERO_BUBBLE = InterleavedZeroBubble()
