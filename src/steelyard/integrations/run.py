"""Training of a model under a plan, the loop of `steelyard train`: Trainer's, with the data and files of a run.

A batch is a step's number, by which every rank reads its own samples. A resumed run begins at the step of its
checkpoint (`Persistence`), which another plan may read.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain as concatenated
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from steelyard.integrations.planned_trainer import PlannedTrainer, ThisRank, Together
from steelyard.model.family import Task
from steelyard.modules.dimensions import take_imbalance
from steelyard.modules.own_pieces import OwnModel
from steelyard.modules.own_proof import build_planned
from steelyard.modules.updates import local_part
from steelyard.output import write_file
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import OWN_TERMS
from steelyard.processes.allocator import allocator_setting
from steelyard.profiles.record import OwnWork, RankRecord, RunRecord, SlowRank, StepRecord, slow_ranks
from steelyard.runtime.checks import check_builder, device_type_of, stage_pool
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.data.source import OwnData, SampleData
from steelyard.runtime.divergence import Divergence
from steelyard.runtime.evaluation import evaluate, open_eval_data, open_run_data, step_on
from steelyard.runtime.observed_strategies import gather_strategies, observe_layers
from steelyard.runtime.optimizer import learning_rate, make_optimizers, transformers_schedule
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel, parallelize_checked, parallelize_plan
from steelyard.runtime.peak_memory import MemoryLimit, measure_peak, memory_method
from steelyard.runtime.persistence import Persistence
from steelyard.runtime.progress import Metrics, Progress, model_flop_utilisation, step_metrics

MAX_WARMUP_STEPS = 3
"""Maximum number of steps at the start of a run that its median step time leaves out."""


def train(plan: Plan, data_path: str | Path | None, options: TrainOptions) -> RunRecord:
    """Train the plan's model; call it on every process of the plan, inside `process_group`.

    ``data_path`` is None if ``options`` name a data set. Training starts with fresh weights, those of ``--init``, or
    from a checkpoint. The first process prints one line per step and writes the metrics and the record.

    Raises `InvalidDataError` if the data cannot be used, `InvalidModelError` for another module of ``--builder``,
    `InvalidCheckpointError` if weights or checkpoints cannot be read or written, `InvalidPlanError` for another world
    size, `MemoryExceededError` if memory runs out, and `DivergedError` if the run diverges. With a folder for
    checkpoints, a stop signal saves the state after the running step and raises `StoppedError`.
    """
    check_builder(plan, options.builder)
    torch.manual_seed(options.seed)  # of the user's own module
    own = None if options.builder is None else build_planned(options.builder, plan)
    source = options.source(data_path)
    data = open_run_data(source, plan, own, options)
    memory_limit = MemoryLimit(plan, enforce=options.enforce_memory)
    with memory_limit.explained():
        seed = options.seed
        model = parallelize_plan(plan, seed=seed) if own is None else parallelize_checked(own, plan, seed)
        trainer = _RunTrainer(model, own, data, source, options, memory_limit)
        trainer.train()
    record = trainer.record()
    if dist.get_rank() == 0 and options.record is not None:
        write_file(options.record, record.model_dump_json(indent=2) + "\n", "--record")
    return record


class _RunTrainer(PlannedTrainer):
    """Trainer of a run with `TrainOptions`, which measures each step on this rank."""

    def __init__(
        self,
        model: ParallelModel,
        own: OwnModel | None,
        data: SampleData | OwnData,
        source: Path | Rows,
        options: TrainOptions,
        memory_limit: MemoryLimit,
    ) -> None:
        self.plan, self._options, self._data, self._memory_limit = model.plan, options, data, memory_limit
        self._optimizers = make_optimizers(model, options)
        self._persistence = Persistence(model, self._optimizers, options, data=source, data_samples=data.num_samples)
        is_cross_entropy, in_fp16 = model.chain.family.task is not Task.OWN, model.loss_scale is not None
        self._divergence = Divergence(options, is_cross_entropy=is_cross_entropy, in_fp16=in_fp16)
        self._steps: list[dict[str, Any]] = []
        self._num_updates = self._peak_bytes = 0
        self._strategies: tuple[str, ...] = ()
        self._slow: tuple[SlowRank, ...] = ()
        self._measuring = ExitStack()
        """Contexts of the step whose memory is measured."""
        super().__init__(
            ThisRank(model),
            run_arguments(self.plan, model.device, options),
            eval_dataset=open_eval_data(self.plan, own, options),
            optimizers=(Together(self._optimizers, lr=options.lr, clock=model.clock), None),
        )
        self.remove_callback(PrinterCallback)
        self.set_parallel(model, self.model, saves_at_signals=options.checkpoint_dir is not None)

    def train(self, *arguments: Any, **given: Any) -> Any:
        """Train the steps after those of the checkpoint."""
        self._persistence.begin()
        self.parallel.num_steps = self._persistence.num_steps
        for each in run_callbacks(self.plan, self._options, num_done=self._persistence.num_steps):
            self.add_callback(each)
        with self._persistence.rescuing(), self.parallel.clock.seeing_waits(), self._measuring:
            return super().train(*arguments, **given)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Load the number of each step that is left.

        With a generator of its own a resumed run has the random numbers of a run that was not interrupted.
        """
        steps = range(self._persistence.num_steps, self._options.steps)
        return DataLoader(steps, batch_size=None, collate_fn=lambda step: {"step": step}, generator=torch.Generator())

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Create the schedule of the options, which continues after the steps of the checkpoint."""
        assert self.optimizer is not None, "passed to the constructor"
        for group in self.optimizer.param_groups:
            group["initial_lr"] = 1.0
        rate = partial(learning_rate, options=self._options)
        self.lr_scheduler = LambdaLR(self.optimizer, rate, last_epoch=self._persistence.num_steps - 1)
        return self.lr_scheduler

    def _init_training_state(self, *given: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*given)
        self.state.global_step = self._persistence.num_steps
        return begun

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train on one global batch of the plan and return its mean loss."""
        self._begin_step(is_last=inputs["step"] + 1 == self._options.steps)
        first = self._persistence.first_sample(inputs["step"])
        self._loss = self.parallel.train_step(**step_on(self._data, range(first, first + self.plan.global_batch)))
        return self._loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        norm = super()._get_grad_norm(model, grad_norm)
        if self._options.keep_going and not norm.isfinite():
            model.zero_grad()
        return norm

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the loss on ``--eval-data``."""
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        return {"eval_loss": evaluate(self.parallel, self.eval_dataset)}

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Tensor, *given: Any, **more: Any) -> None:
        """Log a step with its evaluation, before Trainer saves it. At the end of the data there is none to log."""
        if self.control.should_log:
            number = self.state.global_step
            metrics = self._end_step(grad_norm, learning_rate(number - 1, self._options))
            is_skipped = "skipped" in metrics
            if is_skipped:
                self.lr_scheduler.step()  # the schedule follows the number of the step
            if self.control.should_evaluate:
                metrics = {**metrics, **self.evaluate()}
            self._divergence.check(number, metrics["loss"], metrics["grad_norm"], is_skipped=is_skipped)
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, metrics)
            self._persistence.after_step(number)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *given, **more)

    def _finalize_training(self, *given: Any) -> Any:
        output = super()._finalize_training(*given)
        if (number := self.state.global_step) < self._options.steps:
            self._persistence.stop(number, self.stop.number)
        self._persistence.end()
        return output

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._persistence.save(self.state.global_step)

    # measurements

    def _begin_step(self, *, is_last: bool) -> None:
        """Begin a step.

        The memory of the first step that begins with optimizer states in place, or of the last one, is measured. It is
        not timed unless the run is short.
        """
        self._started_s = time.perf_counter()
        self._scale = self.parallel.loss_scale and self.parallel.loss_scale.value
        self._is_measured = not self._peak_bytes and (self._num_updates == 1 or is_last)
        if self._is_measured:
            self._passed = self._measuring.enter_context(observe_layers(self.parallel))
            self._meter = self._measuring.enter_context(measure_peak(self._state_tensors(), self.parallel.device))

    def _end_step(self, norm: Tensor, lr: float) -> Metrics:
        """End a step with this gradient norm and learning rate, and return its metrics."""
        model, scale = self.parallel, self.parallel.loss_scale
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        if self._is_measured:
            self._measuring.close()
            self._peak_bytes = self._meter.peak_bytes
            self._memory_limit.check(self._peak_bytes)
            self._strategies = gather_strategies(model, self._passed)
        is_skipped = scale is not None and scale.is_skipped
        self._num_updates += not is_skipped
        values = {"loss": self._loss.item(), "grad_norm": norm.item(), "time_s": time.perf_counter() - self._started_s}
        busy_s, own_s = model.clock.take_s()
        uneven = take_imbalance(model.layers)  # collective over the ranks that divide experts
        imbalance = statistics.fmean(uneven.values()) if uneven else None
        self._steps.append({**values, "busy_s": busy_s, "own_s": own_s, "imbalance": imbalance})
        of_routers = None if model.router_loss is None else model.router_loss.item()
        self._find_slow()
        return step_metrics(
            model.plan,
            **values,
            lr=lr,
            memory_bytes=self._peak_bytes or None,
            main_loss=None if of_routers is None else values["loss"] - model.router_coefficient * of_routers,
            router_loss=of_routers,
            imbalance=imbalance,
            loss_scale=self._scale,
            skipped=is_skipped or None,
            slow=", ".join(map(str, self._slow)) or None,
        )

    def _find_slow(self) -> None:
        """Compare the compute times of all ranks every few steps after the warm-up."""
        count, every = len(self._steps) - MAX_WARMUP_STEPS, self._options.slow_steps
        if self._options.slow_share <= 0 or count <= 0 or count % every:
            return
        plan, stage = self.parallel.plan, self.parallel.mesh.stage_index
        mine = OwnWork(
            rank=dist.get_rank(),
            stage=stage,
            host=socket.gethostname(),
            own_s=statistics.median(step["own_s"] for step in self._steps[-every:]),
            pool=stage_pool(plan, stage),
        )
        self._slow = slow_ranks(_from_all(mine), predicted_own_s(plan, self.parallel.device), self._options.slow_share)

    def _state_tensors(self) -> Iterator[Tensor]:
        states = (state.values() for optimizer in self._optimizers for state in optimizer.state.values())
        tensors = (concatenated(chunk.parameters(), chunk.buffers()) for chunk in self.parallel.chunks)
        return (each for each in concatenated(*tensors, *states) if isinstance(each, Tensor))

    def record(self) -> RunRecord:
        """Return the record of the run, identical on every rank; a collective call."""
        model, steps, plan, predicted = self.parallel, self._steps, self.plan, self.plan.prediction
        stages, first = predicted.stages if predicted else (), self._persistence.num_steps + 1
        slowest_s = torch.tensor([step["time_s"] for step in steps], dtype=torch.float64, device=model.device)
        dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
        times_s = slowest_s.tolist()
        num_warmup = min(MAX_WARMUP_STEPS, len(steps) - 1)
        median_s = statistics.median(times_s[num_warmup:])
        timed = steps[num_warmup:]
        uneven = [step["imbalance"] for step in timed if step["imbalance"] is not None]
        mine = RankRecord(
            rank=dist.get_rank(),
            stage=model.mesh.stage_index,
            peak_bytes=self._peak_bytes,
            memory_method=memory_method(model.device),
            num_params=sum(local_part(parameter).numel() for parameter in model.parameters()),
            busy_s=statistics.median(step["busy_s"] for step in timed),
            own_s=statistics.median(step["own_s"] for step in timed),
            host=socket.gethostname(),
            imbalance=statistics.fmean(uneven) if uneven else None,
        )
        return RunRecord(
            model_name=plan.model.name,
            config_hash=model.chain.config_hash,
            device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
            num_devices=plan.num_devices,
            strategies=self._strategies,
            num_warmup_steps=num_warmup,
            median_step_s=median_s,
            tokens_per_s=plan.global_batch * plan.seq_len / median_s,
            steps=tuple(
                StepRecord(step=number, loss=step["loss"], time_s=time_s, grad_norm=step["grad_norm"])
                for number, (step, time_s) in enumerate(zip(steps, times_s, strict=True), start=first)
                if math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])  # else no update (--keep-going)
            ),
            ranks=tuple(_from_all(mine)),
            allocator=allocator_setting() if model.device.type == "cuda" else "",
            mfu=model_flop_utilisation(plan, median_s),
            predicted_step_s=predicted.step_time_s if predicted else None,
            predicted_time_factor=predicted.profile.time_factor if predicted else 1.0,
            predicted_imbalance=predicted.profile.imbalance if predicted else None,
            predicted_busy_s=tuple(each.total_time_s * plan.num_microbatches for each in stages) or None,
            predicted_own_s=predicted_own_s(plan, model.device),
            predicted_peak_bytes=tuple(each.total_bytes for each in stages) or None,
        )


def run_arguments(plan: Plan, device: torch.device, options: TrainOptions) -> TrainingArguments:
    """Return Trainer's arguments of a run. Those of the optimizer and the schedule are for trackers alone."""
    schedule, given = transformers_schedule(options)
    for name in ("CLEARML_PROJECT", "COMET_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME", "SWANLAB_PROJECT", "WANDB_PROJECT"):
        os.environ.setdefault(name, "steelyard")
    return TrainingArguments(
        output_dir=".",  # Trainer makes it, and writes nothing
        run_name=f"{plan.model.name} on {plan.cluster}",
        project="steelyard",
        report_to=options.trackers,
        max_steps=options.steps,
        per_device_train_batch_size=plan.global_batch,
        learning_rate=options.lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta_pair[0],
        adam_beta2=options.beta_pair[1],
        warmup_steps=options.warmup_steps,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=given,
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        use_cpu=device.type == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="no" if options.eval_source is None else "steps",
        eval_steps=options.eval_every,
        save_strategy="no" if options.checkpoint_dir is None else "steps",
        save_steps=options.checkpoint_every,
        disable_tqdm=True,
    )


def run_callbacks(plan: Plan, options: TrainOptions, *, num_done: int) -> list[TrainerCallback]:
    """Return the callbacks that report steps: some on the first process, none on the others."""
    if dist.get_rank() != 0:
        return []
    found: list[TrainerCallback] = [Progress(plan, options, num_done=num_done)]
    if options.tensorboard is not None:
        from torch.utils.tensorboard import SummaryWriter
        from transformers.integrations import TensorBoardCallback

        found.append(TensorBoardCallback(SummaryWriter(str(options.tensorboard))))
    return found


def _from_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def predicted_own_s(plan: Plan, device: torch.device) -> tuple[float, ...] | None:
    """Predicted seconds per step in which a rank of each stage computes, without waiting for others.

    None if the plan has no prediction, or is for another device type than ``device``.
    """
    if plan.prediction is None or device_type_of(plan) not in (None, "gpu" if device.type == "cuda" else "cpu"):
        return None
    return tuple(
        plan.num_microbatches * sum(stage.time_s.get(term, 0.0) for term in OWN_TERMS)
        for stage in plan.prediction.stages
    )
