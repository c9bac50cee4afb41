"""`transformers.Trainer` under a plan: Trainer's loop with steelyard's runtime for steps, checkpoints and saves.

>>> trainer = PlanTrainer(model, args, plan=plan, train_dataset=…, data_collator=…)   # in each torchrun process
>>> trainer.train()

Subclasses work the same way: ``class PlanSFTTrainer(PlanTrainer, SFTTrainer): …`` of TRL.

| part                                                     | implementation                                            |
|----------------------------------------------------------|-----------------------------------------------------------|
| loop, schedules, callbacks, reporters, data, metrics     | Trainer                                                   |
| training step                                            | one global batch of the plan (`ParallelModel.train_step`) |
| loss of an evaluation batch, logits                      | the plan's forward passes (`eval_step`, `predict_step`)   |
| parameters of the optimizer, clipping                    | the plan                                                  |
| ``checkpoint-N/``                                        | Trainer: trainer_state.json and the scheduler;            |
|                                                          | ``step-…``: a sharded checkpoint, read under any plan     |
| ``save_model``                                           | weights for ``from_pretrained``, or peft's adapters       |

Every rank builds every global batch, from the same data in the same order, and reads its own samples of it. So ranks of
tp and pp read the same samples under every plan.

``self.model`` stays the user's model, whose modules hold this rank's parameters.
``self.model_wrapped`` is the module that runs.

Logits for ``compute_metrics`` and ``predict`` are whole on every rank, as in one process.

Not modelled: the loss of routers in evaluations with logits; metrics that TRL computes in its own forward pass
(entropy, token accuracy); ``hyperparameter_search``.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from steelyard.errors import InvalidPlanError, UserError
from steelyard.integrations.batches import check_task, planned_batch
from steelyard.integrations.planned_trainer import PlannedTrainer, ThisRank, Together
from steelyard.integrations.training_arguments import planned_arguments
from steelyard.model.family import ROUTER_LOSS
from steelyard.modules.build import build_meta_model
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.runtime.checkpoint import Checkpointer, on_first_rank, read_checkpoint, whole_checkpoint
from steelyard.runtime.checkpoint_folder import CheckpointInfo, find_checkpoint, plan_hash
from steelyard.runtime.checks import check_world_size
from steelyard.runtime.optimizer import planned_optimizers
from steelyard.runtime.parallel_model import parallelize
from steelyard.runtime.state import RunState
from steelyard.runtime.weights import export_weights, load_weights

_REFUSED: Mapping[str, str] = {
    "model_init": "a model, because a plan is for one model",
    "compute_loss_func": "the loss of the model, which the last layer of the plan computes",
    "optimizers": "the optimizer of the plan (steelyard plan --optimizer) with the learning rates of the arguments",
    "optimizer_cls_and_kwargs": "the optimizer of the plan (steelyard plan --optimizer)",
    "quantization_config": "the base of the plan (steelyard plan --base)",
}
"""Arguments of trainers that are refused under a plan, with the expected alternative."""


class PlanTrainer(PlannedTrainer):
    """`transformers.Trainer` under a plan. With a subclass of Trainer, put it first among the bases.

    ``plan`` is a plan or the path of one. ``model`` is a model as for `steelyard.parallelize`, the path of a Hugging
    Face folder, whose weights are read directly into this rank's shards, or None for initial weights by ``args.seed``.
    """

    def __init__(
        self,
        model: nn.Module | str | Path | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        plan: Plan | str | Path,
        **given: Any,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else read_plan(plan)
        for name, expected in _REFUSED.items():
            if given.get(name) not in (None, (None, None)):
                raise UserError(field=name, found=type(given[name]).__name__, expected=expected, hint="leave it out")
        if args is None:
            raise UserError(field="args", found="None", expected="training arguments", hint="pass TrainingArguments(…)")
        if not dist.is_initialized():
            raise InvalidPlanError(
                field="plan",
                found=f"a plan for {self.plan.num_devices} processes, but no process group",
                expected="a process started by torchrun",
                hint=f"start the script with torchrun --nproc-per-node {self.plan.num_devices}",
            )
        check_task(self.plan)
        check_world_size(self.plan, dist.get_world_size())
        weights = model if isinstance(model, str | Path) else None
        whole = build_meta_model(self.plan.chain()) if weights or model is None else model
        super().__init__(whole, planned_arguments(args, self.plan), *others, **given)
        _check_routers(self.model, self.plan)
        for module in self.model.modules():  # TRL replaces the model's forward pass, with the loss of its head
            vars(module).pop("forward", None)
        parallel = parallelize(self.model, self.plan, seed=self.args.seed)
        self.set_parallel(parallel, ThisRank(parallel, self.model), saves_at_signals=args.enable_jit_checkpoint)
        self._checkpointer: Checkpointer | None = None
        self._saves_all = False
        if weights:
            load_weights(Path(weights), self._state(), self.parallel.chain, seed=self.args.seed)
        _free_others(self.model, self.model_wrapped)

    # a step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train on one global batch of the plan and return its mean loss."""
        model.train()
        batch = planned_batch(inputs, self.plan)
        self.parallel.num_steps = self.state.global_step
        loss = self.parallel.train_step(batch.read, num_targets=batch.num_targets, model_kwargs=batch.model_kwargs)
        self.parallel.clock.clear()  # not reported here; it would grow with every step
        return loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Evaluate one global batch under the plan and return its mean loss, with logits and labels if requested."""
        batch = planned_batch(inputs, self.plan)
        if prediction_loss_only:
            loss = self.parallel.eval_step(batch.read, num_targets=batch.num_targets, model_kwargs=batch.model_kwargs)
            return loss, None, None
        logits = self.parallel.predict_step(batch.read, model_kwargs=batch.model_kwargs)
        targets = batch.samples.labels.to(logits.device)
        total = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        labels = inputs["labels"].to(logits.device)
        return total / batch.num_targets, logits[tuple(map(slice, labels.shape))], labels

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the plan's optimizer, with Trainer's choice of parameters with weight decay."""
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model_wrapped))
            ids = {id(each) for name, each in self.model_wrapped.named_parameters() if name in decayed}
            args = self.args
            self.optimizer = Together(
                planned_optimizers(
                    self.parallel,
                    ids,
                    lr=args.learning_rate,
                    weight_decay=args.weight_decay,
                    betas=(args.adam_beta1, args.adam_beta2),
                ),
                lr=args.learning_rate,
                clock=self.parallel.clock,
            )
        return self.optimizer

    # reports

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """FLOP of a batch divided by the number of ranks, because Trainer sums over ranks."""
        return float(super().floating_point_ops(inputs)) / dist.get_world_size()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with evaluation steps per second in global batches, while Trainer counts batches of every process."""
        for name in [each for each in logs if each.endswith("_steps_per_second") and not each.startswith("train")]:
            samples = logs[name.replace("_steps_", "_samples_")]
            logs[name] = round(samples / self.plan.global_batch, 3)
        super().log(logs, start_time)

    # checkpoints

    def _state(self) -> RunState:
        optimizers = self.optimizer.optimizers if isinstance(self.optimizer, Together) else []
        return RunState(self.parallel, optimizers)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._saves_all = not self.args.save_only_model
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_all = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights for ``from_pretrained``, or only the adapters of a model that has any. All ranks must call it.

        Within a checkpoint, write sharded parameters and optimizer states.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self._saves_all:
            self._write(folder)
            return
        written = folder / ".export"
        on_first_rank(lambda: shutil.rmtree(written, ignore_errors=True))
        export_weights(written, self._state(), self.plan, tokenizer={})
        if dist.get_rank() == 0:
            for file in sorted(written.iterdir()):
                file.replace(folder / file.name)
            written.rmdir()
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write(self, folder: Path) -> None:
        plan, step = self.plan, self.state.global_step
        on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                folder, keep_last=1, resumed=None, known={}, timeout_s=float(self.args.ddp_timeout), sets_aside=True
            )
        info = CheckpointInfo(
            step=step,
            num_samples=step * plan.global_batch,
            seed=self.args.seed,
            data_samples=len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else 0,
            model_name=self.parallel.chain.name,
            config_hash=self.parallel.chain.config_hash,
            plan_hash=plan_hash(plan),
            num_processes=dist.get_world_size(),
        )
        self._checkpointer.save(self._state(), info, self.parallel.device, folder=folder)
        self._checkpointer.wait()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if dist.get_rank() == 0:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave reading to `_load_optimizer_and_scheduler`, because Trainer calls this before there is an optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._read(Path(checkpoint))
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, map_location="cpu", weights_only=True)
        _resume_scheduler(self.lr_scheduler, state, self.optimizer)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if self.args.save_only_model:
            load_weights(best, self._state(), self.parallel.chain, seed=self.args.seed)
        else:
            self._read(best)

    def _read(self, checkpoint: Path) -> None:
        found, _ = whole_checkpoint(lambda known: find_checkpoint(str(checkpoint), None, known))
        assert found is not None, "else it raises"
        read_checkpoint(found[0], self._state(), self.plan, self.parallel.device)


def _check_routers(model: nn.Module, plan: Plan) -> None:
    """Raise `InvalidPlanError` unless the model (by its config, where TRL sets it too) and the plan agree on a router
    loss."""
    given = bool(getattr(model.config.get_text_config(), ROUTER_LOSS, False))
    if given != plan.chain().trains_routers:
        raise InvalidPlanError(
            field=f"model.config.{ROUTER_LOSS}",
            found=f"{given} in the model",
            expected=f"{not given}, the value of the plan's model",
            hint=f"plan for a config with {ROUTER_LOSS}: {str(given).lower()}, or set it in the model (TRL: "
            "router_aux_loss_coef, 0.0 for none)",
        )


def _free_others(model: nn.Module, mine: nn.Module) -> None:
    """Free the parameters of other ranks' layers, which the user's model still holds."""
    kept = {id(module) for module in mine.modules()}
    for module in model.modules():
        if id(module) in kept:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _resume_scheduler(scheduler: Any, state: dict[str, Any], optimizer: Optimizer) -> None:
    """Restore a scheduler's state, also from a plan with another number of groups if all have one learning rate."""
    count = len(optimizer.param_groups)
    fitted = {
        name: (value * count)[:count] if isinstance(value, list) and len(set(map(str, value))) == 1 else value
        for name, value in state.items()
    }
    scheduler.load_state_dict(fitted)
    with suppress(AttributeError):
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
