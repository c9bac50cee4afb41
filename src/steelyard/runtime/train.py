"""Training of a model under a plan: the loop that every rank runs, and the record of its measurements.

When memory runs out, the error names the predicted and the measured bytes. With ``--enforce-memory`` a rank is limited
to the plan's budget, so that a plan can be tried on devices with more memory: the CUDA allocator refuses to exceed it;
on the CPU the peak of the first full step is compared with it.
"""

import math
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain as concatenated
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.errors import InvalidPlanError
from steelyard.model.family import Task
from steelyard.modules.dimensions import take_imbalance
from steelyard.modules.own_pieces import OwnModel
from steelyard.modules.own_proof import build_planned
from steelyard.modules.updates import local_part
from steelyard.output import write_file
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import OWN_TERMS
from steelyard.processes.allocator import allocator_setting
from steelyard.processes.stop import STOP_SIGNALS, StopWatch, handling
from steelyard.profiles.record import OwnWork, RankRecord, RunRecord, SlowRank, StepRecord, slow_ranks
from steelyard.runtime.checks import check_builder, device_type_of, stage_pool
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.data.source import OwnData, SampleData
from steelyard.runtime.divergence import Divergence
from steelyard.runtime.evaluation import Evaluation, open_run_data, step_on
from steelyard.runtime.observed_strategies import gather_strategies, observe_layers
from steelyard.runtime.optimizer import learning_rate, make_optimizers
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel, parallelize_checked, parallelize_plan
from steelyard.runtime.peak_memory import measure_peak, memory_method
from steelyard.runtime.persistence import Persistence
from steelyard.runtime.progress import Step, model_flop_utilisation, reported
from steelyard.units import format_bytes

_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


class MemoryExceededError(RuntimeError):
    """Raised when a rank runs out of memory, or takes more than the enforced budget."""

    is_final = True


class MemoryLimit:
    """Memory limit of this rank, with the errors that report that it was exceeded.

    Raises `InvalidPlanError` if a budget is to be enforced and the plan has none.
    """

    def __init__(self, plan: Plan, *, enforce: bool) -> None:
        self._plan = plan
        self._stage = plan.stage_of(dist.get_rank())
        self._budget_bytes = _budget_bytes(plan) if enforce else None
        if self._budget_bytes is not None and torch.cuda.is_available():
            total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget_bytes / total_bytes))

    def check(self, peak_bytes: int) -> None:
        """Raise `MemoryExceededError` if the peak of a step is above the enforced budget."""
        if self._budget_bytes is not None and peak_bytes > self._budget_bytes:
            raise MemoryExceededError(f"its tensors reached {format_bytes(peak_bytes)} in a step; {self._predicted()}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn PyTorch's out-of-memory errors in the context into a `MemoryExceededError`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryExceededError(self._message(str(error))) from error
        except RuntimeError as error:
            if _CPU_MESSAGE not in str(error):
                raise
            raise MemoryExceededError(self._message(str(error))) from error

    def _message(self, cause: str) -> str:
        held = ""
        if torch.cuda.is_available():
            held = f"its tensors reached {format_bytes(torch.cuda.max_memory_allocated())}; "
        return f"memory ran out; {held}{self._predicted()}\n{cause.splitlines()[0]}"

    def _predicted(self) -> str:
        prediction = self._plan.prediction
        if prediction is None:
            return "the plan has no prediction"
        predicted = format_bytes(prediction.stages[self._stage].total_bytes)
        return f"predicted for stage {self._stage}: {predicted}, of a budget of {format_bytes(prediction.device_bytes)}"


def _budget_bytes(plan: Plan) -> int:
    if plan.prediction is None:
        raise InvalidPlanError(
            field="prediction",
            found="nothing",
            expected="a plan with a budget, for --enforce-memory",
            hint="make the plan with `steelyard plan`, or leave the option out",
        )
    return plan.prediction.device_bytes


MAX_WARMUP_STEPS = 3
"""Maximum number of steps at the start of a run that its median step time leaves out."""


def train(plan: Plan, data_path: str | Path | None, options: TrainOptions) -> RunRecord:
    """Train the plan's model; call it on every process of the plan, inside `process_group`.

    ``data_path`` is None if ``options`` name a data set. Training starts with fresh weights, those of ``--init``, or
    from a checkpoint. The first process prints one line per step and writes the metrics and the record that ``options``
    ask for.

    Raises `InvalidDataError` if the data cannot be used, `InvalidCheckpointError` if weights or checkpoints cannot be
    read or written, `InvalidPlanError` for another world size, `MemoryExceededError` if memory runs out, and
    `DivergedError` if the run diverges or trains nothing. With a folder for checkpoints, a stop signal saves the state
    after the running step and raises `StoppedError`.
    """
    own = planned_own(plan, options)
    source = options.source(data_path)
    data = open_run_data(source, plan, own, options)
    is_first = dist.get_rank() == 0
    memory_limit = MemoryLimit(plan, enforce=options.enforce_memory)
    with memory_limit.explained():
        seed = options.seed
        model = parallelize_plan(plan, seed=seed) if own is None else parallelize_checked(own, plan, seed)
        evaluation = Evaluation(model, own, options)
        trainer = _Trainer(model, data, options, memory_limit, source, evaluation)
        trainer.persistence.begin()
        steps = trainer.run()
        if is_first:
            steps = reported(steps, plan, options, num_done=trainer.persistence.num_steps)
        signals = dict.fromkeys(STOP_SIGNALS if options.checkpoint_dir is not None else (), trainer.stop)
        with trainer.persistence.rescuing(), model.clock.seeing_waits(), handling(signals):
            finished = list(steps)
    record = _record(trainer, finished)
    if is_first and options.record is not None:
        write_file(options.record, record.model_dump_json(indent=2) + "\n", "--record")
    return record


class SlownessWatch:
    """Comparison of the ranks' compute times every few steps after the warm-up; its calls are collective."""

    def __init__(self, model: ParallelModel, options: TrainOptions) -> None:
        self._share, self._every = options.slow_share, options.slow_steps
        self._predicted_s = predicted_own_s(model.plan, model.device)
        stage, host = model.mesh.stage_index, socket.gethostname()
        pool = stage_pool(model.plan, stage)
        self._mine = OwnWork(rank=dist.get_rank(), stage=stage, host=host, own_s=0.0, pool=pool)
        self._seen_s: list[float] = []
        self._found: tuple[SlowRank, ...] = ()

    def after_step(self, number: int, own_s: float) -> tuple[SlowRank, ...]:
        """Return the slow ranks of the last comparison; ``number`` counts the steps of this run from 0."""
        if self._share <= 0 or number < MAX_WARMUP_STEPS:
            return ()
        self._seen_s.append(own_s)
        if len(self._seen_s) == self._every:
            mine = replace(self._mine, own_s=statistics.median(self._seen_s))
            self._seen_s.clear()
            work: list[OwnWork | None] = [None] * dist.get_world_size()
            dist.all_gather_object(work, mine)
            self._found = slow_ranks([each for each in work if each is not None], self._predicted_s, self._share)
        return self._found


def planned_own(plan: Plan, options: TrainOptions) -> OwnModel | None:
    """Build the user's own module of a plan with ``--builder`` from the run's seed; None for a model from a config.

    Raises `InvalidModelError` if either the module or the builder is missing, or if it builds another module.
    """
    check_builder(plan, options.builder)
    if options.builder is None:
        return None
    torch.manual_seed(options.seed)
    return build_planned(options.builder, plan)


class _Trainer:
    """State of a run on this rank."""

    def __init__(
        self,
        model: ParallelModel,
        data: SampleData | OwnData,
        options: TrainOptions,
        memory_limit: MemoryLimit,
        source: Path | Rows,
        evaluation: Evaluation,
    ) -> None:
        self.model, self._evaluation = model, evaluation
        self.peak_bytes = 0
        self.strategies: tuple[str, ...] = ()
        self._data, self._options = data, options
        self._optimizers = make_optimizers(model, options)
        self._memory_limit = memory_limit
        self.persistence = Persistence(model, self._optimizers, options, data=source, data_samples=data.num_samples)
        self.stop = StopWatch()
        if options.checkpoint_dir is not None:
            model.asked_to_stop = self.stop.is_asked

    def run(self) -> Iterator[Step]:
        """Train and yield step after step."""
        first_step = self.model.num_steps = self.persistence.num_steps
        num_updates = 0
        watch = SlownessWatch(self.model, self._options)
        divergence = Divergence(
            self._options,
            is_cross_entropy=self.model.chain.family.task is not Task.OWN,
            in_fp16=self.model.loss_scale is not None,
        )
        for step in range(first_step, self._options.steps):
            lr = learning_rate(step, self._options)
            for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
                group["lr"] = lr
            started_s = time.perf_counter()
            scale = self.model.loss_scale
            scale_value = None if scale is None else scale.value
            # measure the first step that begins with optimizer states in place; it is not timed unless the run is short
            if not self.peak_bytes and (num_updates == 1 or step == self._options.steps - 1):
                loss, norm = self._measured_step(step)
            else:
                loss, norm = self._step(step)
            is_skipped = scale is not None and scale.is_skipped
            num_updates += not is_skipped
            loss_value, norm_value = loss.item(), norm.item()
            step_s = time.perf_counter() - started_s
            busy_s, own_s = self.model.clock.take_s()
            uneven = take_imbalance(self.model.layers)  # collective over the ranks that divide experts
            result = Step(
                loss=loss_value,
                grad_norm=norm_value,
                lr=lr,
                time_s=step_s,
                busy_s=busy_s,
                own_s=own_s,
                slow=watch.after_step(step - first_step, own_s),
                peak_bytes=self.peak_bytes,
                imbalance=statistics.fmean(uneven.values()) if uneven else None,
                loss_scale=scale_value,
                skipped=is_skipped or None,
                eval_loss=self._evaluation.after_step(step + 1),
                **self._parts(loss_value),
            )
            divergence.check(step + 1, loss_value, norm_value, is_skipped=is_skipped)
            yield result
            is_stopping = self.model.is_stopping and step + 1 < self._options.steps
            self.persistence.after_step(step + 1, is_stopping=is_stopping)
            if is_stopping:
                self.persistence.stop(step + 1, self.stop.number)
        self.persistence.end()

    def _parts(self, loss: float) -> dict[str, float]:
        """Return the parts of the last step's loss if routers are trained, else nothing."""
        if self.model.router_loss is None:
            return {}
        coefficient, of_routers = self.model.router_coefficient, self.model.router_loss.item()
        return {"main_loss": loss - coefficient * of_routers, "router_loss": of_routers}

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        first = self.persistence.first_sample(step)
        loss = self.model.train_step(**step_on(self._data, range(first, first + self.model.plan.global_batch)))
        norm = self.model.clip_gradients(self._options.max_grad_norm)
        if self._options.keep_going and not norm.isfinite():
            for parameter in self.model.parameters():
                parameter.grad = None
        with self.model.clock.working():
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return loss, norm

    def _measured_step(self, step: int) -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            passed = stack.enter_context(observe_layers(self.model))
            meter = stack.enter_context(measure_peak(self._state_tensors(), self.model.device))
            result = self._step(step)
        self.peak_bytes = meter.peak_bytes
        self._memory_limit.check(self.peak_bytes)
        self.strategies = gather_strategies(self.model, passed)
        return result

    def _state_tensors(self) -> Iterator[Tensor]:
        states = (state.values() for optimizer in self._optimizers for state in optimizer.state.values())
        chunks = self.model.chunks
        tensors = (concatenated(chunk.parameters(), chunk.buffers()) for chunk in chunks)
        for tensor in concatenated(*tensors, *states):
            if isinstance(tensor, Tensor):
                yield tensor


def _record(trainer: _Trainer, steps: list[Step]) -> RunRecord:
    """Return the record of a run, identical on every rank; a collective call."""
    plan = trainer.model.plan
    slowest_s = torch.tensor([step.time_s for step in steps], dtype=torch.float64, device=trainer.model.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    times_s = slowest_s.tolist()
    num_warmup = min(MAX_WARMUP_STEPS, len(steps) - 1)
    median_s = statistics.median(times_s[num_warmup:])
    chain = trainer.model.chain
    timed = steps[num_warmup:]
    model = trainer.model
    uneven = [step.imbalance for step in timed if step.imbalance is not None]
    mine = RankRecord(
        rank=dist.get_rank(),
        stage=model.mesh.stage_index,
        peak_bytes=trainer.peak_bytes,
        memory_method=memory_method(model.device),
        num_params=sum(local_part(parameter).numel() for parameter in model.parameters()),
        busy_s=statistics.median(step.busy_s for step in timed),
        own_s=statistics.median(step.own_s for step in timed),
        host=socket.gethostname(),
        imbalance=statistics.fmean(uneven) if uneven else None,
    )
    ranks: list[RankRecord | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return RunRecord(
        model_name=plan.model.name,
        config_hash=chain.config_hash,
        device=torch.cuda.get_device_name(trainer.model.device) if trainer.model.device.type == "cuda" else "cpu",
        num_devices=plan.num_devices,
        strategies=trainer.strategies,
        num_warmup_steps=num_warmup,
        median_step_s=median_s,
        tokens_per_s=plan.global_batch * plan.seq_len / median_s,
        steps=tuple(
            StepRecord(step=number, loss=step.loss, time_s=time_s, grad_norm=step.grad_norm)
            for number, (step, time_s) in enumerate(
                zip(steps, times_s, strict=True), start=trainer.persistence.num_steps + 1
            )
            if math.isfinite(step.loss) and math.isfinite(step.grad_norm)  # else no update (--keep-going)
        ),
        ranks=tuple(rank for rank in ranks if rank is not None),
        allocator=allocator_setting() if trainer.model.device.type == "cuda" else "",
        mfu=model_flop_utilisation(plan, median_s),
        predicted_step_s=plan.prediction.step_time_s if plan.prediction else None,
        predicted_time_factor=plan.prediction.profile.time_factor if plan.prediction else 1.0,
        predicted_imbalance=plan.prediction.profile.imbalance if plan.prediction else None,
        predicted_busy_s=predicted_busy_s(plan),
        predicted_own_s=predicted_own_s(plan, trainer.model.device),
        predicted_peak_bytes=tuple(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else None,
    )


def predicted_busy_s(plan: Plan) -> tuple[float, ...] | None:
    """Predicted seconds of work per step of each stage; None without a prediction."""
    if plan.prediction is None:
        return None
    return tuple(stage.total_time_s * plan.num_microbatches for stage in plan.prediction.stages)


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
