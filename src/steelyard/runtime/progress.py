"""Progress reports of a run: a progress line, and metrics as JSON lines. Trainer's callbacks report to trackers.

Model FLOP utilisation comes from the plan's prediction, which knows the model's FLOP and the devices' peak rate: a step
that takes twice as long as predicted has half of the predicted utilisation. It is not shown if the plan has none
(unknown peak of the device, or a plan that was written by hand).
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState

from steelyard.model.family import Task
from steelyard.output import explained, say
from steelyard.plan.plan import Plan
from steelyard.runtime.options import TrainOptions
from steelyard.units import format_bytes, format_count

Metrics = Mapping[str, Any]
"""Metrics of a step by their name in the metrics file."""


def step_metrics(plan: Plan, *, time_s: float, **measured: Any) -> Metrics:
    """Return the metrics of a step of a plan that took ``time_s`` seconds, those that are not None.

    ``memory_bytes`` is the peak of this rank's tensors in the measured step; ``router_loss`` the auxiliary loss
    of routers without its coefficient (the number of experts per token if all are used evenly) and ``main_loss`` the
    rest; ``imbalance`` the load (pairs of tokens and experts) of the busiest rank of this rank's expert groups relative
    to the mean; ``skipped`` true if gradients were not finite in fp16 and the step changed no parameter.
    """
    samples_per_s = plan.global_batch / time_s
    rates = {"tokens_per_s": samples_per_s * plan.seq_len, "samples_per_s": samples_per_s}
    found = {**measured, "time_s": time_s, **rates, "mfu": model_flop_utilisation(plan, time_s)}
    return {name: value for name, value in found.items() if value is not None}


def progress_line(of: Metrics, num_steps: int, *, counts_tokens: bool, samples: str = "images") -> str:
    """Return the progress line of a step."""
    parts = [f"step {of['step']:>{len(str(num_steps))}}/{num_steps}", f"loss {of['loss']:.4f}"]
    if "router_loss" in of:
        parts.append(f"main {of['main_loss']:.4f}  routers {of['router_loss']:.3f}")
    tokens, rate = f"{format_count(of['tokens_per_s'])} tokens/s", f"{of['samples_per_s']:.3g} {samples}/s"
    parts.append(tokens if counts_tokens else rate)
    if "mfu" in of:
        parts.append(f"MFU {of['mfu']:.1%}")
    parts.append(f"grad norm {of['grad_norm']:.3f}")
    if "imbalance" in of:
        parts.append(f"imbalance {of['imbalance']:.2f}")
    if "loss_scale" in of:
        parts.append(f"loss scale {of['loss_scale']:,.0f}" + ", skipped: gradients overflow" * ("skipped" in of))
    if "memory_bytes" in of:
        parts.append(f"memory {format_bytes(of['memory_bytes'])}")
    if "eval_loss" in of:
        parts.append(f"eval loss {of['eval_loss']:.4f}")
    if "slow" in of:
        parts.append(f"slow: {of['slow']}")
    return "  ".join(parts)


def model_flop_utilisation(plan: Plan, step_s: float) -> float | None:
    """Fraction of the devices' peak FLOP rate that a step of ``step_s`` seconds uses; None if it is not known."""
    prediction = plan.prediction
    if prediction is None or prediction.mfu is None:
        return None
    return prediction.mfu * prediction.step_time_s / step_s


class Progress(TrainerCallback):
    """Report of each step: a progress line, and a line of ``--metrics``, which a run without earlier steps empties."""

    def __init__(self, plan: Plan, options: TrainOptions, *, num_done: int) -> None:
        self._options = options
        task = plan.chain().family.task
        self._counts_tokens, self._samples = task.reads_text, "samples" if task is Task.OWN else "images"
        if (path := options.metrics) is not None:
            with explained(path, "--metrics"):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not num_done:
                    path.open("w").close()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Metrics | None = None, **_: Any) -> None:
        """Report the metrics of a step."""
        if logs is None or "time_s" not in logs:  # Trainer's summary of the run
            return
        steps, path = self._options.steps, self._options.metrics
        metrics = {"step": state.global_step, **logs}
        line = progress_line(metrics, steps, counts_tokens=self._counts_tokens, samples=self._samples)
        if sys.stdout.isatty():  # replace the previous line; otherwise every step has its own line
            say(f"\r\x1b[K{line}" + "\n" * (state.global_step == steps))
        else:
            say(line + "\n")
        if path is not None:
            with explained(path, "--metrics"), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
