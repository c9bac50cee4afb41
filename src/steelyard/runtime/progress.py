"""What a run says while it goes: a line of progress, metrics as JSON lines, and TensorBoard's event files.

Model FLOP utilisation comes from the plan's prediction, which knows the model's FLOP and the devices' peak rate: a step
that takes twice as long as predicted has half of the predicted utilisation. Where the plan has none, for a device
whose peak is not known or in a plan that was written by hand, none is shown.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from steelyard.model.family import Task
from steelyard.output import explained, say
from steelyard.plan.plan import Plan
from steelyard.profiles.record import SlowRank
from steelyard.runtime.options import TrainOptions
from steelyard.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as this rank saw it."""

    loss: float
    grad_norm: float
    lr: float
    time_s: float
    busy_s: float
    """Seconds in which this rank worked and did not wait for another stage."""
    own_s: float
    """Those of them in which it did not wait for a rank of its own stage either."""
    slow: tuple[SlowRank, ...] = ()
    """The ranks of the run that were found slow in the last comparison."""
    peak_bytes: int
    """The most bytes that this rank's tensors held, in the step that was measured; 0 before it."""
    main_loss: float | None = None
    """Where routers are trained: the loss without theirs."""
    router_loss: float | None = None
    """Their auxiliary loss, before it is multiplied by its coefficient and added: as many as a token takes experts
    where all are used evenly."""
    imbalance: float | None = None
    """Where experts are divided over ranks: the most pairs of tokens and experts that a rank of this one's groups
    computed over their mean, averaged over the layers of this rank."""
    loss_scale: float | None = None
    """In fp16: what the loss was multiplied by in the backward pass."""
    skipped: bool | None = None
    """True where gradients were not finite, so that the step left all parameters as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is reported of a step. The names are those of the metrics file."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    time_s: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None
    memory_bytes: int | None
    main_loss: float | None = None
    router_loss: float | None = None
    imbalance: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    slow: str | None = None

    def line(self, num_steps: int, *, counts_tokens: bool, samples: str = "images") -> str:
        """The line of progress."""
        rate = (
            f"{format_count(self.tokens_per_s)} tokens/s" if counts_tokens else f"{self.samples_per_s:.3g} {samples}/s"
        )
        parts = [f"step {self.step:>{len(str(num_steps))}}/{num_steps}", f"loss {self.loss:.4f}", rate]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        parts.append(f"grad norm {self.grad_norm:.3f}")
        if self.router_loss is not None:
            parts.insert(2, f"main {self.main_loss:.4f}  routers {self.router_loss:.3f}")
        if self.imbalance is not None:
            parts.append(f"imbalance {self.imbalance:.2f}")
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale:,.0f}" + ", skipped: gradients overflow" * bool(self.skipped))
        if self.memory_bytes is not None:
            parts.append(f"memory {format_bytes(self.memory_bytes)}")
        if self.slow is not None:
            parts.append(f"slow: {self.slow}")
        return "  ".join(parts)

    def values(self) -> dict[str, float | str]:
        """What is known, by its name."""
        names = (name for name in self.__slots__)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_AS_SEEN = ("loss", "grad_norm", "lr", "time_s", "main_loss", "router_loss", "imbalance", "loss_scale", "skipped")


def step_metrics(number: int, step: Step, plan: Plan) -> StepMetrics:
    """What is reported of the ``number``-th step of a plan."""
    samples_per_s = plan.global_batch / step.time_s
    return StepMetrics(
        step=number,
        tokens_per_s=samples_per_s * plan.seq_len,
        samples_per_s=samples_per_s,
        mfu=model_flop_utilisation(plan, step.time_s),
        memory_bytes=step.peak_bytes or None,
        slow=", ".join(map(str, step.slow)) or None,
        **{name: getattr(step, name) for name in _AS_SEEN},
    )


def model_flop_utilisation(plan: Plan, step_s: float) -> float | None:
    """The share of the devices' peak rate that a step of ``step_s`` seconds makes use of."""
    prediction = plan.prediction
    if prediction is None or prediction.mfu is None:
        return None
    return prediction.mfu * prediction.step_time_s / step_s


def reported(steps: Iterator[Step], plan: Plan, options: TrainOptions, *, num_done: int) -> Iterator[Step]:
    """Passes the steps on and reports each; ``num_done`` steps were trained by an earlier run, which this continues."""
    task = plan.chain().family.task
    samples = "samples" if task is Task.OWN else "images"
    with ExitStack() as stack:
        sinks = []
        if options.metrics is not None:
            sinks.append(stack.enter_context(_json_lines(options.metrics, resumes=num_done > 0)))
        if options.tensorboard is not None:
            sinks.append(stack.enter_context(_tensorboard(options.tensorboard)))
        for number, step in enumerate(steps, start=num_done + 1):
            metrics = step_metrics(number, step, plan)
            _show(
                metrics.line(options.steps, counts_tokens=task.reads_text, samples=samples),
                is_last=number == options.steps,
            )
            for sink in sinks:
                sink(metrics)
            yield step


@contextmanager
def _json_lines(path: Path, *, resumes: bool) -> Iterator[Callable[[StepMetrics], None]]:
    def append(text: str) -> None:
        with explained(path, "--metrics"), path.open("a", encoding="utf-8") as file:
            file.write(text)

    with explained(path, "--metrics"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resumes:
            path.open("w").close()
    yield lambda metrics: append(json.dumps(metrics.values()) + "\n")


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Callable[[StepMetrics], None]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def write(metrics: StepMetrics) -> None:
            for name, value in metrics.values().items():
                if name != "step" and not isinstance(value, str):
                    writer.add_scalar(name, value, metrics.step)

        yield write


def _show(line: str, *, is_last: bool) -> None:
    """Replaces the line of progress on a terminal; elsewhere every step is a line of its own."""
    if sys.stdout.isatty():
        say(f"\r\x1b[K{line}" + ("\n" if is_last else ""))
    else:
        say(line + "\n")
