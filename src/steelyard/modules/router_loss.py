r"""Auxiliary loss of routers, which keeps the experts of a model evenly used, as in models of transformers.

$$L_m = E \sum_{e=1}^{E} \frac{c_e}{R} \frac{p_e}{R}, \qquad \text{loss} = \text{main} + \frac{\alpha}{M} \sum_m L_m$$

| symbol   | meaning                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------|
| $E$      | experts of a layer                                                                                  |
| $c_e$    | how often expert e is among the k likeliest of a token, over all tokens and layers of a microbatch  |
| $p_e$    | the sum of its probabilities over the same tokens and layers                                        |
| $R$      | tokens of a microbatch times layers with a router: $\sum_e c_e / k$                                 |
| $\alpha$ | ``router_aux_loss_coef`` of the config                                                              |
| $M$      | microbatches of a global batch                                                                      |

Only $p$ has a gradient, which is the same for every token: $\alpha E c_e / (M R^2)$. Layers, ranks and stages therefore
exchange only $c$ and $p$, 2 E numbers. Each layer returns the statistics of its tokens in fp32 after its output, also
when it is recomputed. A part of the pipeline adds up the statistics of its layers, sums them over the ranks of its
stage in one all-reduce, adds those received from earlier parts with the hidden state, and sends the sum on. The last
part computes the loss; the gradient of $p$ comes back with that of the hidden state.

The tokens are those of a whole microbatch, on all ranks, because layers of one plan divide samples differently and a
loss per rank would depend on the plan. (The trainers of Megatron-LM and transformers take each data rank's samples
separately.) It equals the loss of one process that is given the same microbatches. Nothing is padded here, so the
function's attention mask would change nothing.

Source: Fedus et al. 2021, equations 4 to 6; ``load_balancing_loss_func`` of transformers, for every model that has
exactly Mixtral's function. Not modelled: router biases that DeepSeek-V3 updates instead of adding a loss, which
transformers leaves unchanged; z losses.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.modules.experts import routed_experts
from steelyard.plan.strategy import Strategy

_OUTPUT = "router_logits"
_READS = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
"""Attributes that transformers' models keep for the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """The auxiliary loss of a model."""

    coefficient: float
    num_experts: int
    top_k: int
    recorders: tuple[Any, ...]
    """Rules by which transformers finds the logits of routers: classes of modules, and indices into their results."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the statistics of tokens: the selection count of each expert, and the sum of its probabilities."""
        return 2, self.num_experts

    def has_routers(self, layer: nn.Module) -> bool:
        """Return whether the logits of any router in a layer count."""
        return any(True for _ in self._routers(layer))

    def beside(self, layer: nn.Module, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the results of ``run``, which computes with the layer, followed by the statistics of its tokens.

        Tensor-parallel ranks that route the same tokens each count a share of them, as of their gradients.
        """
        with self._recorded(layer) as logits:
            outputs = run()
        return *outputs, torch.stack([self.statistics(each) for each in logits]).sum(dim=0) / copies(layer)

    def _routers(self, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        for path, module in layer.named_modules():
            for each in self.recorders:
                if isinstance(module, each.target_class) and f".{each.layer_name or path}." in f".{path}.":
                    yield module, each.index

    @contextmanager
    def _recorded(self, layer: nn.Module) -> Iterator[list[Tensor]]:
        found: list[Tensor] = []

        def hook(index: int) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _inputs, output: found.append(output[index] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for router, index in self._routers(layer):
                hooks.enter_context(router.register_forward_hook(hook(index)))
            yield found

    def statistics(self, logits_TE: Tensor) -> Tensor:  # noqa: N803
        """Return the statistics of tokens with these logits of one router, in the precision that transformers uses."""
        probabilities_TE = nn.functional.softmax(logits_TE, dim=-1)  # noqa: N806
        chosen = probabilities_TE.topk(self.top_k, dim=-1).indices.flatten()
        counts = torch.zeros(self.num_experts, device=chosen.device)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        return torch.stack([counts, probabilities_TE.float().sum(dim=0)])

    def value(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a microbatch and its gradient, both without the coefficient."""
        counts, probabilities = statistics
        gradient = self.num_experts * counts / (counts.sum() / self.top_k) ** 2
        return (gradient * probabilities).sum(), torch.stack([torch.zeros_like(gradient), gradient])


def router_loss_of(model: PreTrainedModel) -> RouterLoss:
    """Return the auxiliary loss of a model's class. Raise `InvalidModelError` if it has none, or a different one."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # only few runs need it

    own = getattr(sys.modules[type(model).__module__], load_balancing_loss_func.__name__, None)
    recorders = (getattr(model, "_can_record_outputs", None) or {}).get(_OUTPUT)
    recorders = recorders if isinstance(recorders, list) else [recorders]
    is_known = own is not None and _code(own) == _code(load_balancing_loss_func)
    asks = f"output_{_OUTPUT}" in inspect.signature(type(model).forward).parameters
    if not (is_known and asks and all(hasattr(model, name) for name in _READS)):
        has = "a router loss that differs from Mixtral's" if own and asks else "no router loss"
        raise InvalidModelError(
            field=f"output_{_OUTPUT}",
            found=f"true for {model.config.model_type}, for which transformers has {has}",
            expected="false, or a model with Mixtral's router loss",
            hint="to train without it, set this to false in config.json",
        )
    coefficient, num_experts, top_k = (getattr(model, name) for name in _READS)
    return RouterLoss(coefficient=coefficient, num_experts=num_experts, top_k=top_k, recorders=tuple(recorders))


def _code(function: Any) -> tuple[bytes, tuple[str, ...]]:
    return function.__code__.co_code, function.__code__.co_names


def copies(layer: nn.Module) -> int:
    """Number of tensor-parallel ranks that route the same tokens, each to its own experts; 1 if experts are whole."""
    divided = [each for each in routed_experts(layer) if hasattr(each, "num_all_experts")]
    return max((each.num_all_experts // each.num_experts for each in divided), default=1)


def check_routers(layer: nn.Module, strategy: Strategy) -> None:
    """Raise `InvalidPlanError` if each rank of tp would count all tokens and the gradients of all experts."""
    if strategy.tensor_degree != copies(layer):
        raise InvalidPlanError(
            field="parallel",
            found=f"{strategy} for layers with a router loss, whose experts tp does not divide",
            expected="no tp there, or no router loss",
            hint="plan without tp (--max-tp 1), or set output_router_logits to false in config.json",
        )


@dataclass(slots=True, kw_only=True, eq=False)
class PartRouters:
    """Routers of one part of a pipeline, and the statistics that pass through it."""

    loss: RouterLoss
    group: dist.ProcessGroup
    """Ranks of the stage."""
    device: torch.device
    is_first: bool
    is_last: bool
    num_microbatches: int
    losses: list[Tensor] = field(default_factory=list)
    """Loss of every microbatch of a step, without the coefficient; in the last part only."""

    def arrived(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the inputs of the first layer, and the statistics of the parts before (None in the first part)."""
        return (inputs, None) if self.is_first else (inputs[:-1], inputs[-1])

    def own(self, of_layers: Sequence[Tensor]) -> Tensor:
        """Return the statistics of this rank's tokens in all layers of the part."""
        zeros = torch.zeros(self.loss.shape, device=self.device, requires_grad=not of_layers)
        return sum(of_layers, zeros)

    def passed_on(self, outputs: tuple[Tensor, ...], before: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of the part, given those of its layers followed by `own`.

        The last part returns the loss with its value unchanged and the gradients of p attached.
        """
        *flow, own = outputs
        summed = _Summed.apply(own, self.group)
        total = summed if before is None else before + summed
        if not self.is_last:
            return *flow, total
        value, gradient = self.loss.value(total.detach())
        self.losses.append(value)
        return (_Trained.apply(*flow, total, gradient * self.loss.coefficient / self.num_microbatches),)


class _Summed(torch.autograd.Function):
    """Sum over the ranks of a group; every rank gets the whole gradient."""

    @staticmethod
    def forward(_ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Trained(torch.autograd.Function):
    """Identity on the main loss; its backward pass gives the statistics the gradient passed in."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _statistics: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient * ctx.saved_tensors[0], None
