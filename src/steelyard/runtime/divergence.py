"""Notices a run that goes wrong: values that are not finite, steps that train nothing, a loss far above the first one.

| found                                                      | the run ends after |
|------------------------------------------------------------|--------------------|
| the loss or the gradient norm is not finite                | 1 step             |
| the gradient norm is 0                                     | `MOST_STEPS`       |
| the loss, a cross-entropy, is above 2 max(first loss, 1)   | `MOST_STEPS`       |

Each is said at the first of its steps in a row. With ``--keep-going`` no run ends, and a step whose gradient norm is
not finite leaves all parameters as they were.
"""

import math

import torch.distributed as dist

from steelyard.output import say
from steelyard.runtime.options import TrainOptions

MOST_STEPS = 10


class DivergedError(RuntimeError):
    """A run that goes on would train nothing."""

    is_final = True


class Divergence:
    """Findings in the steps of a run; the same on every rank, as losses and gradient norms are."""

    def __init__(self, options: TrainOptions, *, is_cross_entropy: bool, in_fp16: bool = False) -> None:
        self._options, self._is_cross_entropy = options, is_cross_entropy
        self._limit = math.inf
        self._note = ". In fp16 a forward pass has no values above 65504, whatever the loss scale" * in_fp16
        self._found = ("", 0)
        """The name of what was found in the last step, and in how many steps in a row."""

    def check(self, number: int, loss: float, norm: float, *, is_skipped: bool) -> None:
        """Say what is wrong with a step. Raises `DivergedError` if the run should end.

        ``is_skipped`` tells that its gradients were dropped, so that there is no norm.
        """
        if self._is_cross_entropy and self._limit == math.inf and math.isfinite(loss):
            self._limit = 2 * max(loss, 1.0)
        name, what, most = "", "", MOST_STEPS
        for value_name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value) and not name:
                name, what, most = "finite", f"the {value_name} is {value}; the run has diverged", 1
        if not name and norm == 0 and not is_skipped:
            name, what = "norm", f"the gradient norm is 0, so that nothing is trained (loss {loss:.4g})"
        if not name and loss > self._limit:
            name, what = "loss", f"the loss is {loss:.4g}, above twice that of the first step"
        before, count = self._found
        count = count + 1 if name == before else 1
        self._found = name, count
        options = self._options
        ends = bool(name) and count >= most and not options.keep_going
        advice = (
            "check that parameters are trained and labels are not all masked"
            if name == "norm"
            else f"lower --lr (now {options.lr:g}) or raise --warmup-steps (now {options.warmup_steps}){self._note}"
        )
        if ends:
            raise DivergedError(
                f"step {number}: {what}, and nothing of this step is saved.\n  to fix: {advice}; --keep-going goes on"
            )
        if name and count == 1 and dist.get_rank() == 0:
            goes_on = "goes on (--keep-going)" if options.keep_going else f"ends after {most} such steps"
            say(f"warning: step {number}: {what}; the run {goes_on}\n")
