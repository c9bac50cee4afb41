"""Base of the trainers that run a plan: Trainer's loop over the step of a `ParallelModel`.

Trainer passes the model and batches to Accelerate, which would wrap the model and divide the batches over processes.
Its object (``Trainer.accelerator``, created in ``create_accelerator_and_postprocess``, which names the class) gets a
class that leaves both unchanged.
"""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainingArguments

from steelyard.errors import UserError
from steelyard.plan.plan import Plan
from steelyard.processes.stop import STOP_SIGNALS, StopWatch, handling
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.stage_clock import StageClock


class PlannedTrainer(Trainer):
    """Trainer of this rank's part of a parallelized model. Subclasses compute the step and save checkpoints."""

    plan: Plan
    parallel: ParallelModel
    optimizer: Optimizer | None
    control: TrainerControl

    def set_parallel(self, parallel: ParallelModel, model_wrapped: nn.Module, *, saves_at_signals: bool) -> None:
        """Set the model after Trainer's constructor, and whether all ranks save and end after a signal to any rank."""
        self.parallel = self.accelerator.parallel = parallel
        self.model_wrapped = model_wrapped
        self._saves_at_signals = saves_at_signals
        self.stop = StopWatch()

    # preparation by Accelerate

    def create_accelerator_and_postprocess(self) -> None:
        """Replace Trainer's accelerator by one that leaves model, optimizer and batches unchanged."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _PlanAccelerator
        self.accelerator.data_seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.gather_function = self.accelerator.gather_for_metrics
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise UserError(
                field="accelerate",
                found="FSDP" if self.is_fsdp_enabled else "DeepSpeed",
                expected="nothing, because the plan divides the model",
                hint="start the script with torchrun, without an accelerate configuration",
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is, because each layer is moved when it is sharded."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.model_wrapped

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples per step."""
        return self.plan.global_batch

    # a run

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as Trainer does, and save and end after a stop signal if the run saves at signals."""
        if self._saves_at_signals:
            self.parallel.asked_to_stop = self.stop.is_asked
        with handling(dict.fromkeys(STOP_SIGNALS if self._saves_at_signals else (), self.stop)):
            return super().train(*arguments, **options)

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        if self._saves_at_signals and self.parallel.is_stopping and not self.control.should_training_stop:
            self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(*arguments, **options)

    # a step

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.parallel.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.parallel.clip_gradients(0.0) if grad_norm is None else grad_norm


class _PlanAccelerator(Accelerator):
    """Accelerator that leaves model and optimizer unchanged and gives every rank every batch and all its results."""

    parallel: ParallelModel
    data_seed: int

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare only data loaders."""
        found = [self.prepare_data_loader(each) if isinstance(each, DataLoader) else each for each in objects]
        return found[0] if len(found) == 1 else tuple(found)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged."""
        return model

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged; Accelerate would import DeepSpeed."""
        return model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
        """Seed and register the loader, whose batches stay whole and on the host."""
        found: DataLoader[Any] = prepare_data_loader(
            data_loader,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.data_seed,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(found)
        return found

    def gather(self, tensor: Any) -> Any:
        """Return the tensor, which every rank has whole."""
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the tensor, which has the same shape on every rank."""
        return tensor

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients were not finite (fp16)."""
        scale = self.parallel.loss_scale
        return scale is not None and scale.is_skipped


class ThisRank(nn.Module):
    """This rank's layers as a module, for code that inspects a model's parameters."""

    def __init__(self, parallel: ParallelModel, *whole: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in parallel.layers.values())
        self._whole = whole  # in a tuple, so that it is no child: it has the same modules

    def train(self, mode: bool = True) -> "ThisRank":
        """Set the mode of the user's model too, by which subclasses of Trainer distinguish training and evaluation."""
        for each in self._whole:
            each.train(mode)
        return super().train(mode)

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise `UserError`, because no rank has the whole model."""
        raise UserError(
            field="model",
            found="a forward pass of the model",
            expected="the trainer's own steps, because a rank has only a part of the model",
            hint="override training_step, or save the model and load it elsewhere",
        )


class Together(Optimizer):
    """Several optimizers as one for schedulers, with all their parameter groups."""

    def __init__(self, optimizers: list[Optimizer], *, lr: float, clock: StageClock) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__(groups or [{"params": [nn.Parameter(torch.empty(0))]}], {"lr": lr})
        self.optimizers, self._clock = optimizers, clock

    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        with self._clock.working():
            for each in self.optimizers:
                each.step()
