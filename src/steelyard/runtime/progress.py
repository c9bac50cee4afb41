"""Progress reports of a run: a progress line, metrics as JSON lines, TensorBoard event files, trackers.

Model FLOP utilisation comes from the plan's prediction, which knows the model's FLOP and the devices' peak rate: a step
that takes twice as long as predicted has half of the predicted utilisation. It is not shown if the plan has none
(unknown peak of the device, or a plan that was written by hand).
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.model.family import Task
from steelyard.output import explained, say
from steelyard.plan.plan import Plan
from steelyard.profiles.record import SlowRank
from steelyard.runtime.options import TrainOptions
from steelyard.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Measurements of one step on this rank."""

    loss: float
    grad_norm: float
    lr: float
    time_s: float
    busy_s: float
    """Seconds in which this rank worked and did not wait for another stage."""
    own_s: float
    """Seconds of ``busy_s`` in which this rank did not wait for a rank of its own stage either."""
    slow: tuple[SlowRank, ...] = ()
    """Ranks of the run that were found slow in the last comparison."""
    peak_bytes: int
    """Peak bytes of this rank's tensors in the step that was measured; 0 before that step."""
    main_loss: float | None = None
    """Loss without that of routers, if routers are trained."""
    router_loss: float | None = None
    """Auxiliary loss of routers without its coefficient: the number of experts per token if all experts are used
    evenly."""
    imbalance: float | None = None
    """Load (pairs of tokens and experts) of the busiest rank of this rank's expert groups relative to the mean,
    averaged over the layers of this rank; None if experts are not divided over ranks."""
    loss_scale: float | None = None
    """Loss scale of the backward pass in fp16."""
    skipped: bool | None = None
    """True if gradients were not finite, in which case the step changed no parameter."""
    eval_loss: float | None = None
    """Loss on `--eval-data` after the step, if an evaluation was due."""


Metrics = Mapping[str, Any]
"""Metrics of a step by their name in the metrics file."""
_AS_SEEN = ("main_loss", "router_loss", "imbalance", "loss_scale", "skipped", "eval_loss")


def step_metrics(number: int, step: Step, plan: Plan) -> Metrics:
    """Return the metrics of the ``number``-th step of a plan."""
    samples_per_s = plan.global_batch / step.time_s
    found = {
        "step": number,
        **{name: getattr(step, name) for name in ("loss", "grad_norm", "lr", "time_s")},
        "tokens_per_s": samples_per_s * plan.seq_len,
        "samples_per_s": samples_per_s,
        "mfu": model_flop_utilisation(plan, step.time_s),
        "memory_bytes": step.peak_bytes or None,
        **{name: getattr(step, name) for name in _AS_SEEN},
        "slow": ", ".join(map(str, step.slow)) or None,
    }
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


def reported(steps: Iterator[Step], plan: Plan, options: TrainOptions, *, num_done: int) -> Iterator[Step]:
    """Pass the steps on and report each; ``num_done`` steps were trained by the earlier run that this one continues."""
    task = plan.chain().family.task
    samples = "samples" if task is Task.OWN else "images"
    with ExitStack() as stack:
        sinks = []
        if options.metrics is not None:
            sinks.append(stack.enter_context(_json_lines(options.metrics, resumes=num_done > 0)))
        if options.tensorboard is not None:
            sinks.append(stack.enter_context(_tensorboard(options.tensorboard)))
        sinks += [stack.enter_context(_tracker(name, plan, options)) for name in options.trackers]
        for number, step in enumerate(steps, start=num_done + 1):
            metrics = step_metrics(number, step, plan)
            line = progress_line(metrics, options.steps, counts_tokens=task.reads_text, samples=samples)
            if sys.stdout.isatty():  # replace the previous line; otherwise every step has its own line
                say(f"\r\x1b[K{line}" + "\n" * (number == options.steps))
            else:
                say(line + "\n")
            for sink in sinks:
                sink(metrics)
            yield step


@contextmanager
def _json_lines(path: Path, *, resumes: bool) -> Iterator[Callable[[Metrics], None]]:
    def append(text: str) -> None:
        with explained(path, "--metrics"), path.open("a", encoding="utf-8") as file:
            file.write(text)

    with explained(path, "--metrics"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resumes:
            path.open("w").close()
    yield lambda metrics: append(json.dumps(metrics) + "\n")


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Callable[[Metrics], None]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def write(metrics: Metrics) -> None:
            for name, value in metrics.items():
                if name != "step" and not isinstance(value, str):
                    writer.add_scalar(name, value, metrics["step"])

        yield write


@contextmanager
def _tracker(name: str, plan: Plan, options: TrainOptions) -> Iterator[Callable[[Metrics], None]]:
    """Report to an experiment tracker of accelerate, with the run's options and the plan's model name and cluster."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # the trackers read it
    tracker = LOGGER_TYPE_TO_CLASS[name]("steelyard")
    tracker.start()
    tracker.store_init_configuration(options.of_run("") | {"model": plan.model.name, "cluster": plan.cluster})
    try:
        yield lambda metrics: tracker.log({k: v for k, v in metrics.items() if k != "step"}, step=metrics["step"])
    finally:
        tracker.finish()
