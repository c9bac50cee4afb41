"""Detection of diverged runs: non-finite values, steps that train nothing, a loss far above the first one.

| finding                                                    | the run ends after |
|------------------------------------------------------------|--------------------|
| the loss or the gradient norm is not finite                | 1 step             |
| the gradient norm is 0                                     | `MOST_STEPS`       |
| the loss, a cross-entropy, is above 2 max(first loss, 1)   | `MOST_STEPS`       |

A warning is printed at the first of consecutive steps with the same finding. With ``--keep-going`` the run does not
end, and a step with a non-finite gradient norm leaves all parameters unchanged.
"""

import math

import torch.distributed as dist

from steelyard.output import say
from steelyard.runtime.options import TrainOptions

MOST_STEPS = 10


class DivergedError(RuntimeError):
    """Divergence that ends a run, because further steps would train nothing."""

    is_final = True


class Divergence:
    """Detector of divergence; identical on every rank, as losses and gradient norms are."""

    def __init__(self, options: TrainOptions, *, is_cross_entropy: bool, in_fp16: bool = False) -> None:
        self._options, self._is_cross_entropy = options, is_cross_entropy
        self._limit = math.inf
        self._note = ". In fp16, forward passes overflow above 65504, regardless of the loss scale" * in_fp16
        self._found = ("", 0)
        """Name of the last step's finding, and the number of consecutive steps with it."""

    def check(self, number: int, loss: float, norm: float, *, is_skipped: bool) -> None:
        """Print a warning if a step shows divergence. Raises `DivergedError` if the run should end.

        With ``is_skipped`` the gradients were dropped, so a gradient norm of 0 is not a finding.
        """
        if self._is_cross_entropy and self._limit == math.inf and math.isfinite(loss):
            self._limit = 2 * max(loss, 1.0)
        name, what, most = "", "", MOST_STEPS
        for value_name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value) and not name:
                name, what, most = "finite", f"the {value_name} is {value}; the run has diverged", 1
        if not name and norm == 0 and not is_skipped:
            name, what = "norm", f"the gradient norm is 0, so nothing is trained (loss {loss:.4g})"
        if not name and loss > self._limit:
            name, what = "loss", f"the loss is {loss:.4g}, more than twice the loss of the first step"
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
                f"step {number}: {what}; this step is not saved.\n  to fix: {advice}, or continue with --keep-going"
            )
        if name and count == 1 and dist.get_rank() == 0:
            goes_on = "continues (--keep-going)" if options.keep_going else f"ends after {most} such steps"
            say(f"warning: step {number}: {what}; the run {goes_on}\n")
