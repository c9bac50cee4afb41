"""Trains a model under a plan: the loop that every rank runs, and the record of what it measured."""

import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain as concatenated
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from steelyard.plan.plan import Plan
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from steelyard.runtime.applied import gather_strategies, observe_layers
from steelyard.runtime.data import TokenData, open_data
from steelyard.runtime.memory import measure_peak, memory_method
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from steelyard.units import format_bytes, format_count

BETAS = (0.9, 0.95)
LEAST_LR_SHARE = 0.1
"""The learning rate ends at this share of its peak."""
MAX_WARMUP_STEPS = 3
"""Steps at the start of a run that its median step time leaves out."""


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One step as this rank saw it."""

    loss: float
    grad_norm: float
    lr: float
    time_s: float


def train(plan: Plan, data_path: str | Path, options: TrainOptions) -> RunRecord:
    """Trains the plan's model from first weights; call it on every process of the plan, inside `process_group`.

    The first process prints one line per step and writes the metrics and the record that ``options`` ask for. Raises
    `InvalidDataError` for data that cannot be used, `InvalidPlanError` for another world size, and `DivergedError`
    when the loss is not finite.
    """
    chain = plan.chain()
    data = open_data(
        data_path,
        seq_len=plan.seq_len,
        vocab_size=chain.vocab_size,
        seed=options.seed,
        max_bytes=options.max_data_bytes,
    )
    trainer = _Trainer(parallelize_plan(plan, seed=options.seed), data, options)
    is_first = dist.get_rank() == 0
    steps = list(_report(trainer.run(), trainer, options) if is_first else trainer.run())
    record = _record(trainer, steps)
    if is_first and options.record is not None:
        options.record.write_text(record.model_dump_json(indent=2) + "\n")
    return record


def learning_rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step (from 0): rises linearly, then falls along a cosine to a tenth of the peak."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (LEAST_LR_SHARE + (1 - LEAST_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2)


class _Trainer:
    """The state of a run on this rank."""

    def __init__(self, model: ParallelModel, data: TokenData, options: TrainOptions) -> None:
        self.model = model
        self.peak_bytes = 0
        self.strategies: tuple[str, ...] = ()
        self._data = data
        self._options = options
        self._optimizers = model.make_optimizers(self._adamw)
        self._memory_step = min(1, options.steps - 1)
        """The first step that begins with optimizer states in place; it is no timed step unless the run is short."""

    def run(self) -> Iterator[_Step]:
        """Trains and yields step after step."""
        for step in range(self._options.steps):
            lr = self._set_learning_rate(step)
            started_s = time.perf_counter()
            if step == self._memory_step:
                loss, norm = self._measured_step(step)
            else:
                loss, norm = self._step(step)
            result = _Step(loss=loss.item(), grad_norm=norm.item(), lr=lr, time_s=time.perf_counter() - started_s)
            _check_finite(step, result, self._options)
            yield result

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        loss = self.model.train_step(self._data.reader(step, self.model.plan.global_batch))
        norm = self.model.clip_gradients(self._options.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return loss, norm

    def _measured_step(self, step: int) -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            shapes = stack.enter_context(observe_layers(self.model))
            meter = stack.enter_context(measure_peak(self._state_tensors(), self.model.device))
            result = self._step(step)
        self.peak_bytes = meter.peak_bytes
        self.strategies = gather_strategies(self.model, shapes)
        return result

    def _state_tensors(self) -> Iterator[Tensor]:
        states = (state.values() for optimizer in self._optimizers for state in optimizer.state.values())
        chunks = self.model.chunks
        tensors = (concatenated(chunk.parameters(), chunk.buffers()) for chunk in chunks)
        for tensor in concatenated(*tensors, *states):
            if isinstance(tensor, Tensor):
                yield tensor

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(step, self._options)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        return lr

    def _adamw(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        options = self._options
        return AdamW(parameters, lr=options.lr, betas=BETAS, weight_decay=options.weight_decay)


def _check_finite(step: int, result: _Step, options: TrainOptions) -> None:
    for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not math.isfinite(value):
            raise DivergedError(
                f"step {step + 1}: the {name} is {value}; the run has diverged. "
                f"Lower --lr (now {options.lr:g}) or raise --warmup-steps (now {options.warmup_steps})."
            )


def _report(steps: Iterator[_Step], trainer: _Trainer, options: TrainOptions) -> Iterator[_Step]:
    """Passes the steps on, with a line of progress and a line of metrics for each."""
    plan = trainer.model.plan
    tokens = plan.global_batch * plan.seq_len
    with ExitStack() as stack:
        metrics = stack.enter_context(options.metrics.open("w")) if options.metrics is not None else None
        for number, step in enumerate(steps, start=1):
            tokens_per_s = tokens / step.time_s
            line = f"step {number:>{len(str(options.steps))}}/{options.steps}  loss {step.loss:.4f}"
            line += f"  {format_count(tokens_per_s)} tokens/s  grad norm {step.grad_norm:.3f}"
            if trainer.peak_bytes:
                line += f"  memory {format_bytes(trainer.peak_bytes)}"
            _show(line, is_last=number == options.steps)
            if metrics is not None:
                _write_metrics(metrics, number, step, tokens_per_s)
            yield step


def _write_metrics(file: TextIO, number: int, step: _Step, tokens_per_s: float) -> None:
    values = {"step": number, "loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "time_s": step.time_s}
    file.write(json.dumps(values | {"tokens_per_s": tokens_per_s}) + "\n")
    file.flush()


def _show(line: str, *, is_last: bool) -> None:
    """Replaces the line of progress on a terminal; elsewhere every step is a line of its own."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{line}" + ("\n" if is_last else ""))
    else:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _record(trainer: _Trainer, steps: list[_Step]) -> RunRecord:
    """The record of a run, the same on every rank; a collective call."""
    plan = trainer.model.plan
    slowest_s = torch.tensor([step.time_s for step in steps], dtype=torch.float64, device=trainer.model.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    times_s = slowest_s.tolist()
    num_warmup = min(MAX_WARMUP_STEPS, len(steps) - 1)
    median_s = statistics.median(times_s[num_warmup:])
    chain = trainer.model.chain
    return RunRecord(
        model_name=plan.model.name,
        config_hash=chain.config_hash,
        device=_device_name(trainer.model.device),
        num_devices=plan.num_devices,
        strategies=trainer.strategies,
        num_warmup_steps=num_warmup,
        median_step_s=median_s,
        tokens_per_s=plan.global_batch * plan.seq_len / median_s,
        steps=tuple(
            StepRecord(step=index + 1, loss=step.loss, time_s=time_s, grad_norm=step.grad_norm)
            for index, (step, time_s) in enumerate(zip(steps, times_s, strict=True))
        ),
        ranks=_gather_ranks(trainer),
        predicted_step_s=plan.prediction.step_time_s if plan.prediction else None,
        predicted_peak_bytes=tuple(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else None,
    )


def _gather_ranks(trainer: _Trainer) -> tuple[RankRecord, ...]:
    model = trainer.model
    mine = RankRecord(
        rank=dist.get_rank(),
        stage=model.mesh.stage_index,
        peak_bytes=trainer.peak_bytes,
        memory_method=memory_method(model.device),
        num_params=model.num_local_params(),
    )
    ranks: list[RankRecord | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return tuple(rank for rank in ranks if rank is not None)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
