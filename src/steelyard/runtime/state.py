"""State of a training run as tensors whose names do not depend on the plan.

| name                       | content                                                                     |
|----------------------------|-----------------------------------------------------------------------------|
| ``model.NAME``             | a parameter of the unmodified model, or a buffer that it saves              |
| ``optimizer.NAME.SLOT``    | its optimizer state (AdamW: exp_avg, exp_avg_sq, step), in fp32             |
| ``rng.RANK.DEVICE``        | state of a rank's random generators                                         |
| ``loss_scale.PART``        | in fp16: the scale, and the steps since it changed                          |

NAME is the parameter's name in the unmodified `transformers` model. Sharded parameters are DTensors, which know their
part of the whole, so a state that is written under one plan can be read under any other.

Layers that share a matrix (tied embeddings) each keep a copy. The copy of the first such layer has the name; the
others are read from the same name and never written.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from steelyard.model.chain import ModelChain
from steelyard.model.own import OwnSplit
from steelyard.modules.build import build_meta_model
from steelyard.modules.layers import build_layer
from steelyard.modules.levers.optimizer import stored, take
from steelyard.modules.levers.train import own_name
from steelyard.plan.strategy import Remat
from steelyard.runtime.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """Names in the unmodified model of all parameters and saved buffers by their path in a `ParallelModel`."""

    by_path: dict[str, str]
    copy_of_path: dict[str, int]
    """Number of the copy by path: 0 for the first layer that has the matrix, 1 for the second, …"""

    @property
    def num_copies(self) -> int:
        """Maximum number of layers that share one matrix; 1 if none do."""
        return 1 + max(self.copy_of_path.values(), default=0)


def parameter_names(chain: ModelChain) -> ParameterNames:
    """Return the names of all parameters of a chain, found by identity in a model on the meta device."""
    model = build_meta_model(chain)
    names = {id(tensor): own_name(name) for name, tensor in saved_tensors(model)}
    by_path: dict[str, str] = {}
    copy_of_path: dict[str, int] = {}
    seen: dict[str, int] = {}
    for index in range(chain.num_layers):
        layer = build_layer(model, chain, index, Remat.NONE)
        for path, tensor in saved_tensors(layer):
            name = names[id(tensor)]
            by_path[f"{index}.{path}"] = name
            copy_of_path[f"{index}.{path}"] = seen.get(name, 0)
            seen[name] = seen.get(name, 0) + 1
    return ParameterNames(by_path=by_path, copy_of_path=copy_of_path)


def own_names(own: OwnSplit, layers: Mapping[str, nn.Module]) -> ParameterNames:
    """Return the names of all tensors that these layers of a user's own module save: their paths in the module.

    The embedding and the head both have the buffers outside blocks; those of the head are copies.
    """
    last = own.num_blocks + 1
    first_of = {copies[1]: copies[0] for copies in own.shared}
    by_path: dict[str, str] = {}
    copy_of_path = {f"{last}": 1}  # on every rank, so that all of them read as many copies
    for name, layer in layers.items():
        parameters = {path for path, _ in layer.named_parameters()}
        for path, _ in saved_tensors(layer):
            number, first = first_of.get((int(name), path), (int(name), path))
            by_path[f"{name}.{path}"] = own.model_path(number, first)
            repeats = int(name) == last and (path not in parameters or own.model_path(last, path) in own.embedding)
            is_copy = (int(name), path) in first_of or repeats
            copy_of_path[f"{name}.{path}"] = int(is_copy)
    return ParameterNames(by_path=by_path, copy_of_path=copy_of_path)


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module by their path, then the buffers that it saves."""
    yield from module.named_parameters()
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer


class RunState:
    """Tensors of a run on this rank by their plan-independent names.

    The tensors are the trained ones, not copies of them, except for quantized states: reading into the tensors and
    passing them to `take` resumes the run.
    """

    def __init__(self, model: ParallelModel, optimizers: Iterable[Optimizer]) -> None:
        self._model = model
        self._optimizers = list(optimizers)

    @cached_property
    def names(self) -> ParameterNames:
        """Parameter names, computed on first use because a run that reads and writes nothing does not need them."""
        chain, split = self._model.chain, self._model.chain.split
        return own_names(split, self._model.layers) if isinstance(split, OwnSplit) else parameter_names(chain)

    def weights(self, *, copy: int = 0) -> dict[str, Tensor]:
        """Return this rank's saved tensors by their names in the unmodified model, one copy of shared matrices."""
        return {self.names.by_path[path]: tensor for path, tensor in self._saved(copy)}

    def tensors(self, *, copy: int = 0) -> dict[str, Tensor]:
        """Return this rank's `weights`, their optimizer states, and in fp16 the loss scale."""
        states = {id(parameter): state for each in self._optimizers for parameter, state in each.state.items()}
        found = self._model.loss_scale.tensors() if self._model.loss_scale else {}
        for path, parameter in self._saved(copy):
            name = self.names.by_path[path]
            found[f"model.{name}"] = parameter.detach()
            for slot, value in states.get(id(parameter), {}).items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"the optimizer keeps a {type(value).__name__} as {slot}, which is not a tensor")
                found[f"optimizer.{name}.{slot}"] = stored(value)
        return found

    def unread(self, stored: Iterable[str]) -> list[str]:
        """Return the names among ``stored`` that this run would drop in silence.

        These are tensors of another model, and states of this rank's trained parameters by another optimizer. A run
        without optimizers needs no states, and the layers of a user's own module on other ranks are not known here.
        """
        trained = {
            f"optimizer.{self.names.by_path[path]}"
            for copy in range(self.names.num_copies if self._optimizers else 0)
            for path, tensor in self._saved(copy)
            if tensor.requires_grad
        }
        slots = {name for copy in range(self.names.num_copies) for name in self.tensors(copy=copy)}
        known = None if self._model.chain.split.module else {f"model.{name}" for name in self.names.by_path.values()}
        return sorted(
            name
            for name in stored
            if (known is not None and name.startswith("model.") and name not in known)
            or (name.rpartition(".")[0] in trained and name not in slots)
        )

    def takers(self) -> dict[str, Any]:
        """Return the modules that convert weights to their own format (`take`), by the name of the weights."""
        return {
            f"{self.names.by_path[f'{path}.codes'].removesuffix('.codes')}{module.weight_name}": module
            for chunk in self._model.chunks
            for path, module in chunk.layers.named_modules()
            if hasattr(module, "take")
        }

    def take(self, tensors: Mapping[str, Tensor], *, copy: int = 0) -> None:
        """Quantize the values that were read into the `tensors` of quantized states."""
        states = {id(parameter): state for each in self._optimizers for parameter, state in each.state.items()}
        for path, parameter in self._saved(copy):
            for slot, value in states.get(id(parameter), {}).items():
                take(value, tensors[f"optimizer.{self.names.by_path[path]}.{slot}"])

    def round(self) -> None:
        """Quantize quantized states again, as reading a checkpoint does, so that a resumed run is bitwise identical.

        Their scales change by rounding errors of fp32.
        """
        for state in (values for each in self._optimizers for values in each.state.values()):
            for value in state.values():
                take(value, stored(value))

    def fill_optimizers(self) -> None:
        """Make the optimizers allocate their states without changing a parameter, so that states can be read into them.

        An optimizer allocates the state of a parameter in the first step in which that has a gradient. It therefore
        takes a step with zero gradients of the parameters without a state and zero learning rate, which does not count
        as a step. Gradients do not change.
        """
        for optimizer in self._optimizers:
            gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
            missing = [parameter for parameter, _ in gradients if not optimizer.state.get(parameter)]
            if not missing:
                continue
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for parameter, _ in gradients:
                parameter.grad = None
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in (optimizer.state.get(parameter, {}) for parameter in missing):
                if isinstance(state.get("step"), Tensor):
                    state["step"].zero_()

    def _saved(self, copy: int) -> Iterator[tuple[str, Tensor]]:
        for chunk in self._model.chunks:
            for path, tensor in saved_tensors(chunk.layers):
                if self.names.copy_of_path[path] == copy:
                    yield path, tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this rank's random generators, by names that contain the rank."""
    rank = dist.get_rank()
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Set this rank's random generators to states from `random_states`."""
    rank = dist.get_rank()
    torch.set_rng_state(states[f"rng.{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng.{rank}.cuda"], device)
