r"""The optimizers of a run, as its plan says, and their learning rate.

The rate rises linearly over the warm-up and falls along a cosine to a tenth of its peak: with $w$ warm-up steps of $T$

$$\eta_t = \hat\eta \frac{t+1}{w} \;(t < w), \qquad
\eta_t = \hat\eta \Bigl(a + (1 - a) \tfrac12 \bigl(1 + \cos \pi \tfrac{t - w}{T - w}\bigr)\Bigr)$$

| symbol     | argument                                | meaning                                 |
|------------|-----------------------------------------|-----------------------------------------|
| $t$        | `step`                                  | step of the run, from 0                 |
| $\hat\eta$ | `options.lr`                            | peak learning rate                      |
| $w, T$     | `options.warmup_steps`, `options.steps` | steps of warm-up, of the run            |
| $a$        | `LEAST_LR_SHARE`                        | share of the peak where the cosine ends |

Weight decay is decoupled (Loshchilov and Hutter 2019) and acts on the weights of linear maps and convolutions alone.
Norms, biases and embeddings (of tokens, positions and classes, relative position biases, a head that is tied to the
embedding) do not decay: they set scales and offsets, and decay would pull rare tokens' rows to zero step after step.
"""

import math
from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer

from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import Optimizer as OptimizerLever
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.experts import routed_experts
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.modules.prepared import ApartConv1D
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel

BETAS = (0.9, 0.95)
LEAST_LR_SHARE = 0.1
_CONVOLUTION_DIMS = 4


def make_optimizers(model: ParallelModel, options: TrainOptions) -> list[Optimizer]:
    """The optimizers of this rank's parameters, as the plan and the options say."""
    decayed = {id(parameter) for path, parameter in model.named_parameters() if decays(model.chain, path, parameter)}
    return planned_optimizers(model, decayed, lr=options.lr, weight_decay=options.weight_decay, betas=BETAS)


def planned_optimizers(
    model: ParallelModel, decayed: Collection[int], *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> list[Optimizer]:
    """The optimizers of this rank's parameters, as the plan says, one for each kind of sharding.

    Weight decay acts on parameters whose id is ``decayed``.
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
    """The ids of parameters that multiply tokens within blocks, without those of routers and routed experts."""
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
    """Whether weight decay acts on the parameter at a path of a `ParallelModel`."""
    number, name = path.split(".", 1)
    layer = int(number)
    if parameter.ndim < 2 or "bias" in name:
        return False
    if chain.type_of(layer).role is LayerRole.EMBEDDING:
        return parameter.ndim == _CONVOLUTION_DIMS
    copies = next((shared.copies for shared in chain.shared if (layer, name) in shared.copies), ())
    return not any(chain.type_of(each).role is LayerRole.EMBEDDING for each, _ in copies)


def learning_rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (LEAST_LR_SHARE + (1 - LEAST_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2)
