"""Optimizers of a run, as chosen by its plan, and their learning rate.

The rate rises linearly over the warm-up and is above zero in the first step. Then it follows a schedule of
`transformers.get_scheduler`: `cosine_with_min_lr`; `polynomial` of power 1 for linear; `constant`; or
`warmup_stable_decay` for wsd, which decays over the last `DECAY_SHARE` of the steps.

Weight decay is decoupled (Loshchilov and Hutter 2019) and acts only on the weights of linear layers and convolutions.
Norms, biases and embeddings (of tokens, positions and classes, relative position biases, a head that is tied to the
embedding) do not decay: norms and biases set scales and offsets, and decay would pull the rows of rare tokens to zero.
"""

import math
from collections.abc import Callable, Collection, Iterable
from functools import cache

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from transformers import get_scheduler

from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import Optimizer as OptimizerLever
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.experts import routed_experts
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.modules.prepared import ApartConv1D
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel

DECAY_SHARE = 0.2
"""Fraction of the steps in which the learning rate of wsd decays."""
_CONVOLUTION_DIMS = 4


def make_optimizers(model: ParallelModel, options: TrainOptions) -> list[Optimizer]:
    """Create the optimizers of this rank's parameters from the plan and the options."""
    decayed = {id(parameter) for path, parameter in model.named_parameters() if decays(model.chain, path, parameter)}
    return planned_optimizers(model, decayed, lr=options.lr, weight_decay=options.weight_decay, betas=options.beta_pair)


def planned_optimizers(
    model: ParallelModel, decayed: Collection[int], *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> list[Optimizer]:
    """Create the optimizers of this rank's parameters from the plan, one for each kind of sharding.

    Weight decay acts on parameters whose id is in ``decayed``.
    """
    levers = model.plan.chosen_levers
    lever, offload = levers.value(OptimizerLever), levers.value(Offload)
    matrices = hidden_matrices(model)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(id(parameter) in decayed, []).append(parameter)
        decayed_groups = [
            {"params": group, "weight_decay": weight_decay if is_decayed else 0.0}
            for is_decayed, group in groups.items()
        ]
        return make_optimizer(lever, decayed_groups, offload=offload, matrices=matrices, lr=lr, betas=betas)

    return model.make_optimizers(make)


def hidden_matrices(model: ParallelModel) -> set[int]:
    """Return the ids of weight matrices applied to tokens within blocks, except those of routers and routed experts."""
    found: set[int] = set()
    for name, layer in model.layers.items():
        layer_type = model.chain.type_of(int(name))
        left_out = {id(each) for experts in routed_experts(layer) for each in experts.parameters()}
        for module in (each for each in layer.modules() if not isinstance(each, nn.Embedding)):
            for own, parameter in module.named_parameters(recurse=False):
                sizes = tuple(parameter.shape)
                shape = (sizes[0], math.prod(sizes[1:])) if isinstance(module, ApartConv1D) else sizes
                if own.endswith("weight") and layer_type.has_matrix(shape) and id(parameter) not in left_out:
                    found.add(id(parameter))
    return found


def decays(chain: ModelChain, path: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay acts on the parameter at a path of a `ParallelModel`."""
    number, name = path.split(".", 1)
    layer = int(number)
    if parameter.ndim < 2 or "bias" in name:
        return False
    if chain.type_of(layer).role is LayerRole.EMBEDDING:
        return parameter.ndim == _CONVOLUTION_DIMS
    copies = next((shared.copies for shared in chain.shared if (layer, name) in shared.copies), ())
    return not any(chain.type_of(each).role is LayerRole.EMBEDDING for each, _ in copies)


def transformers_schedule(options: TrainOptions) -> tuple[str, dict[str, float]]:
    """Return the name and the arguments of a run's schedule in `transformers.get_scheduler`."""
    least = options.least_lr / options.lr if options.lr else 1.0
    decay_steps = max(1, min(round(DECAY_SHARE * options.steps), options.steps - options.warmup_steps))
    schedules: dict[str, tuple[str, dict[str, float]]] = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": least}),
        "linear": ("polynomial", {"lr_end": least, "power": 1.0}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": decay_steps, "min_lr_ratio": least}),
    }
    return ("constant", {}) if least == 1.0 else schedules[options.schedule]


def learning_rate(step: int, options: TrainOptions) -> float:
    """Return the learning rate of a step; steps count from 0."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    return options.lr * _rate_of(options)(step)


@cache
def _rate_of(options: TrainOptions) -> Callable[[int], float]:
    """Return the learning rate as a function of the step after the warm-up, as a fraction of the peak."""
    name, given = transformers_schedule(options)
    optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, options.warmup_steps, options.steps, scheduler_specific_kwargs=given)
    rate: Callable[[int], float] = scheduler.lr_lambdas[0]
    return rate
