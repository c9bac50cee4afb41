"""Comparison of training under a plan with training in one process: losses, gradients, their norm, and weights.

One process trains the unmodified `transformers` model (`train_alone`); then the processes of the plan train the same
initial weights on the same samples and compare tensor by tensor (`compare`). The error of a gradient is the largest
difference of an entry relative to the largest entry of its tensor.

The optimizer is SGD with momentum. AdamW is unsuitable because it divides by the root of the second moment: rounding
noise in entries near zero grows to the size of a step, while a gradient that is wrong by a constant factor (averaged
instead of summed) changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS, Task
from steelyard.modules.build import build_model
from steelyard.modules.freezing import freeze_model
from steelyard.modules.levers.train import own_name
from steelyard.modules.model_inputs import (
    beside_features,
    decoder_inputs,
    forward_options,
    given_samples,
    random_samples,
)
from steelyard.modules.updates import LocalUpdates, local_part, local_slices
from steelyard.plan.plan import Plan
from steelyard.runtime.data.tokens import Samples
from steelyard.runtime.observed_strategies import gather_strategies, observe_layers
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from steelyard.runtime.state import ParameterNames, parameter_names

MAX_NORM = 0.5
_LEARNING_RATE, _MOMENTUM = 0.3, 0.9
SMALL = 1e-3
"""Minimum scale of a comparison, relative to the largest entry of all tensors. It is for tensors such as the gradient
of a key's bias, which is exactly zero in theory (softmax ignores a shift of all scores)."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """Results of one process step by step; tensors by their name in the unmodified model."""

    losses: list[float] = field(default_factory=list)
    router_losses: list[float] = field(default_factory=list)
    """Loss of routers by itself, if routers are trained."""
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the last step."""
    names: ParameterNames
    """Names of the parameters, the same for every plan."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Losses and norms of both runs, and the largest differences over all steps, tensors and ranks."""

    losses: list[float] = field(default_factory=list)
    expected_losses: list[float] = field(default_factory=list)
    router_losses: list[float] = field(default_factory=list)
    expected_router_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    expected_norms: list[float] = field(default_factory=list)
    gradient_error: float = 0.0
    gradient_tensor: str = ""
    """Name of the tensor whose gradients differ most."""
    weight_error: float | None = None
    """Largest difference of the weights; None if not all steps of the reference were run."""
    same_loss_on_all_ranks: bool = True
    strategies: tuple[str, ...] = ()
    """Strategy that the runtime applied to each layer, written as in plans."""

    @property
    def loss_error(self) -> float:
        """Largest relative difference of a loss."""
        pairs = zip(self.losses, self.expected_losses, strict=True)
        return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def samples_of_step(chain: ModelChain, *, num_samples: int, seq_len: int, step: int) -> Samples:
    """Return the global batch of a step. For next-token prediction, ids increase by 1, 2 or 3, which a model learns."""
    generator = torch.Generator().manual_seed(step)
    if chain.family.task is Task.CAUSAL_LM:
        first_N1 = torch.randint(0, chain.vocab_size, (num_samples, 1), generator=generator)  # noqa: N806
        stride_N1 = torch.randint(1, 4, (num_samples, 1), generator=generator)  # noqa: N806
        tokens = (first_N1 + stride_N1 * torch.arange(seq_len + 1)) % chain.vocab_size
        return Samples.of(_without_padding(tokens, chain))
    inputs, labels = random_samples(chain, num_samples, seq_len, generator)
    if not chain.family.task.reads_text or chain.family.task is Task.IMAGE_TEXT:
        return Samples(inputs=inputs, labels=labels)
    return Samples(inputs=_without_padding(inputs, chain), labels=_without_padding(labels, chain))


def _without_padding(tokens: Tensor, chain: ModelChain) -> Tensor:
    """Replace the padding token, which some models read as no token, by the next token id."""
    parts = (chain.config, *(each for each in chain.config.values() if isinstance(each, Mapping)))
    padding = next((token for each in parts if isinstance(token := each.get("pad_token_id"), int)), None)
    return tokens if padding is None else tokens.masked_fill(tokens == padding, (padding + 1) % chain.vocab_size)


class _LocalSGD(LocalUpdates, SGD):
    """SGD on each rank's part of the parameters, for which `SGD` itself would keep momenta that no later step finds."""

    def _init_group(self, group: dict[str, Any], *found: list[Any]) -> bool:
        for parameter in group["params"]:
            if parameter.grad is not None and "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return super()._init_group(group, *found)


def train_alone(plan: Plan, *, seed: int, num_steps: int) -> Reference:
    """Train the unmodified model of a plan in this process, in fp32, on the whole global batch at once.

    If routers are trained, it takes one microbatch after another, because their loss is per microbatch.
    """
    chain = plan.chain()
    model = build_model(chain, seed=seed)
    freeze_model(model, chain)
    optimizer = SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    named = model.named_parameters(remove_duplicate=False)  # layers may use another name of a tied parameter
    parameters = [(own_name(name), parameter) for name, parameter in named]
    found = Reference(names=parameter_names(chain))
    for step in range(num_steps):
        samples = samples_of_step(chain, num_samples=plan.global_batch, seq_len=plan.seq_len, step=step)
        count = plan.num_microbatches if chain.trains_routers else 1
        microbatches = zip(samples.inputs.chunk(count), samples.labels.chunk(count), strict=True)
        losses = [_backward(model, chain, Samples(inputs=one, labels=two), count) for one, two in microbatches]
        found.losses.append(sum(loss for loss, _ in losses))
        found.router_losses += [sum(routers for _, routers in losses)] if chain.trains_routers else []
        found.gradients.append({name: _gradient(p).clone() for name, p in parameters if p.requires_grad})
        found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: p.detach().clone() for name, p in parameters}
    return found


def _backward(model: PreTrainedModel, chain: ModelChain, samples: Samples, count: int) -> tuple[float, float]:
    """Add the gradients of one of ``count`` microbatches; return its share of the loss and of the routers' loss.

    The loss is the one that `transformers` computes, except for next-token prediction, where `transformers` would shift
    the labels a second time.
    """
    routers = torch.zeros(())
    options = {key: value for key, value in forward_options(model).items() if key != ROUTER_LOSS}
    if chain.family.task is Task.CAUSAL_LM:
        outputs = model(samples.inputs, **options)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), samples.labels.flatten())
        if chain.trains_routers:
            routers = outputs.aux_loss
            loss = loss + model.router_aux_loss_coef * routers
    elif chain.family.task is Task.IMAGE_TEXT:
        ids = decoder_inputs(samples.labels, model.config, chain.features)
        given = given_samples(chain.features, samples.inputs) | beside_features(model, chain.features, ids)
        outputs = model(input_ids=ids, **given)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), samples.labels.flatten())
    else:
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):  # as a collator of transformers gives them
            options["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=samples.labels)
        loss = model(**{model.main_input_name: samples.inputs}, labels=samples.labels, **options).loss
    (loss / count).backward()
    return loss.item() / count, routers.item() / count


def compare(plan: Plan, reference: Reference, *, seed: int, num_steps: int) -> Comparison:
    """Train under the plan and compare with one process; call it on every process of the plan.

    Every rank returns the differences of the rank whose gradients differ most.
    """
    model = parallelize_plan(plan, seed=seed)
    optimizer = _LocalSGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    found, names = Comparison(), reference.names.by_path
    for step in range(num_steps):
        with observe_layers(model) as passed:
            loss = model.train_step(_reader(model, step))
            while model.loss_scale is not None and model.loss_scale.is_skipped:  # repeat with half the scale
                loss = model.train_step(_reader(model, step))
            found.losses.append(loss.item())
        if model.router_loss is not None:
            found.router_losses.append(model.router_loss.item())
        error, tensor = _largest_difference(model, names, reference.gradients[step], _gradient)
        if error >= found.gradient_error:
            found.gradient_error, found.gradient_tensor = error, tensor
        found.norms.append(model.clip_gradients(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    if num_steps == len(reference.losses):
        found.weight_error, _ = _largest_difference(model, names, reference.weights, lambda p: p)
    found.strategies = gather_strategies(model, passed)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, found)
    worst: Comparison = max(reports, key=lambda report: report.gradient_error)
    if worst.weight_error is not None:
        worst.weight_error = max(report.weight_error for report in reports)
    worst.same_loss_on_all_ranks = len({tuple(report.losses) for report in reports}) == 1
    worst.expected_losses = reference.losses[:num_steps]
    worst.expected_router_losses = reference.router_losses[:num_steps]
    worst.expected_norms = reference.norms[:num_steps]
    return worst


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, zeros if the loss does not depend on it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _reader(model: ParallelModel, step: int) -> Callable[[list[int]], Samples]:
    plan = model.plan
    samples = samples_of_step(model.chain, num_samples=plan.global_batch, seq_len=plan.seq_len, step=step)
    return lambda indices: Samples(inputs=samples.inputs[indices], labels=samples.labels[indices])


def _largest_difference(
    model: ParallelModel,
    names: Mapping[str, str],
    expected: Mapping[str, Tensor],
    value: Callable[[nn.Parameter], Tensor],
) -> tuple[float, str]:
    """Return the largest difference of an entry relative to the largest entry of its tensor, and the tensor's name.

    ``names`` are the names of parameters in the unmodified model by their path.
    """
    worst, where = 0.0, ""
    least = SMALL * max(float(each.abs().max()) for each in expected.values() if each.numel())
    for path, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = names[path]
        scale = max(expected[name].abs().max().item(), least, 1e-12)
        mine = local_part(value(parameter)).detach()
        if not mine.numel():
            continue
        part = expected[name].reshape(parameter.shape)[local_slices(parameter)].to(mine.device)
        error = (mine - part).abs().max().item() / scale
        if not error <= worst:
            worst, where = error, name
    return worst, where
