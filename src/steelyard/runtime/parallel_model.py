"""A model under a plan, in the user's own training loop: `parallelize`, then `train_step`, then any optimizer.

Legend of shape suffixes: N samples of the global batch, B samples of this rank over all microbatches, S sequence.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain as concatenated
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model
from steelyard.modules.layers import ChainLayer
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy
from steelyard.runtime.checks import check_same_model, check_world_size
from steelyard.runtime.mesh import PlanMesh, build_mesh, data_index, default_device_type
from steelyard.runtime.stage import StageModule, build_chunks, local_hidden_shape
from steelyard.runtime.tied import TiedEmbedding, find_tied_embedding

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}


class ParallelModel:
    """This rank's part of a model that is trained under a plan. Made by `parallelize`."""

    def __init__(
        self, plan: Plan, chain: ModelChain, mesh: PlanMesh, chunks: tuple[StageModule, ...], device: torch.device
    ) -> None:
        self.plan = plan
        self.chain = chain
        self.mesh = mesh
        self.chunks = chunks
        self.device = device
        self._tied: TiedEmbedding | None = find_tied_embedding(plan, chain, self.layers)
        self._step_microbatches = self._pipeline_step() if plan.num_stages > 1 else self._accumulate

    @property
    def layers(self) -> dict[str, ChainLayer]:
        """The layers of this rank, those of all its chunks, by their number in the chain."""
        return {name: layer for chunk in self.chunks for name, layer in chunk.layers.items()}

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank reads token ids."""
        return self.mesh.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank reads labels and computes a share of the loss."""
        return self.mesh.stage_index == self.plan.num_stages - 1

    def input_samples(self) -> list[int] | None:
        """The samples of the global batch whose tokens this rank reads, in order; None if it reads none."""
        return self._samples(self.plan.strategies[0]) if self.is_first_stage else None

    def label_samples(self) -> list[int] | None:
        """The samples of the global batch whose labels this rank reads, in order; None if it reads none."""
        return self._samples(self.plan.strategies[-1]) if self.is_last_stage else None

    def train_step(self, read: Callable[[list[int]], Tensor]) -> Tensor:
        """Forward and backward of one global batch; returns its mean loss, the same on every rank.

        ``read`` maps indices into the global batch to their token ids [len, S + 1]. Gradients are added to ``.grad``.
        """
        inputs, labels = self.input_samples(), self.label_samples()
        tokens_BS = read(inputs)[:, :-1].to(self.device) if inputs is not None else None  # noqa: N806
        labels_BS = read(labels)[:, 1:].to(self.device) if labels is not None else None  # noqa: N806
        for chunk in self.chunks:
            chunk.begin_step(self.plan.num_microbatches)
        with self._vocabulary_parallel_loss():
            losses = self._step_microbatches(tokens_BS, labels_BS)
        if self._tied is not None:
            self._tied.sum_gradients()
        return self._global_loss(losses)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's sharded parameters by their path below the chain's layers, ``3.block.mlp.up_proj.weight``."""
        return concatenated.from_iterable(chunk.layers.named_parameters() for chunk in self.chunks)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's sharded parameters."""
        return concatenated.from_iterable(chunk.layers.parameters() for chunk in self.chunks)

    def num_local_params(self) -> int:
        """Entries of this rank's shards of the parameters."""
        return sum(_local(parameter).numel() for parameter in self.parameters())

    def make_optimizers(self, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> list[Optimizer]:
        """One optimizer per mesh and placement among the parameters: fused updates do not mix meshes."""
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self.parameters():
            key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
        return [make(group) for group in groups.values()]

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm."""
        square = torch.zeros((), device=self.device)
        for layer_name, layer in self.layers.items():
            strategy = self.plan.strategies[int(layer_name)]
            for parameter in layer.parameters():
                if parameter.grad is None or (self._tied is not None and self._tied.is_copy(parameter)):
                    continue
                local = _local(parameter.grad)
                square += local.float().square().sum() / _copies(parameter, strategy)
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
        return norm

    def _samples(self, strategy: Strategy) -> list[int]:
        per_rank = self.plan.microbatch_samples // strategy.data_degree
        first = data_index(self.mesh, strategy) * per_rank
        return [
            microbatch * self.plan.microbatch_samples + first + index
            for microbatch in range(self.plan.num_microbatches)
            for index in range(per_rank)
        ]

    def _accumulate(self, tokens_BS: Tensor, labels_BS: Tensor) -> list[Tensor]:  # noqa: N803
        losses = []
        count = self.plan.num_microbatches
        for tokens, labels in zip(tokens_BS.chunk(count), labels_BS.chunk(count), strict=True):
            loss = self.chunks[0](tokens, labels_BS=labels)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipeline_step(self) -> Callable[[Tensor | None, Tensor | None], list[Tensor]]:
        plan = self.plan
        parts = [
            self._pipeline_part(chunk, number * plan.num_stages + self.mesh.stage_index)
            for number, chunk in enumerate(self.chunks)
        ]
        schedule = _SCHEDULES[plan.schedule](
            parts if plan.schedule == "interleaved-1f1b" else parts[0],
            plan.num_microbatches,
            loss_fn=lambda loss, _labels: loss,
            scale_grads=False,
        )

        def step(tokens_BS: Tensor | None, labels_BS: Tensor | None) -> list[Tensor]:  # noqa: N803
            inputs = () if tokens_BS is None else (tokens_BS,)
            losses: list[Tensor] = []
            if labels_BS is None:
                schedule.step(*inputs, return_outputs=False)
            else:
                schedule.step(*inputs, target=labels_BS, losses=losses, return_outputs=False, labels_BS=labels_BS)
            return [loss.detach() for loss in losses]

        return step

    def _pipeline_part(self, chunk: StageModule, index: int) -> PipelineStage:
        """Part ``index`` of the pipeline, which torch calls a stage, in the order of the layers."""
        return PipelineStage(
            chunk,
            index,
            len(self.plan.stages),
            self.device,
            input_args=self._example(index, is_input=True),
            output_args=self._example(index, is_input=False),
            group=self.mesh.pipeline.get_group(),
        )

    def _example(self, index: int, *, is_input: bool) -> Tensor:
        """A tensor of the shape and type that part ``index`` receives or sends for one microbatch."""
        part = self.plan.stages[index]
        if is_input and index == 0:
            samples = self.plan.microbatch_samples // self.plan.strategies[0].data_degree
            return torch.empty(samples, self.plan.seq_len, dtype=torch.long, device="meta")
        if not is_input and index == len(self.plan.stages) - 1:
            return torch.empty((), device="meta", requires_grad=True)
        sender = self.plan.strategies[part.first_layer - 1 if is_input else part.last_layer]
        shape = local_hidden_shape(self.plan, self.chain, sender)
        return torch.empty(shape, dtype=self.chunks[0].dtype, device="meta", requires_grad=True)

    @contextmanager
    def _vocabulary_parallel_loss(self) -> Iterator[None]:
        if self.plan.strategies[-1].tp == 1 or not self.is_last_stage:
            yield
            return
        with loss_parallel():
            yield

    def _global_loss(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=self.device)
        if losses:
            total += torch.stack(losses).sum() / self.plan.strategies[-1].tp
        dist.all_reduce(total)
        return total


def parallelize(model: PreTrainedModel, plan: Plan, *, seed: int = 0) -> ParallelModel:
    """This rank's part of ``model`` under ``plan``; call it on every process of the plan's world.

    ``model`` is an unmodified `transformers` causal language model of the plan's config. On the meta device it gets
    first weights that depend on ``seed`` alone, layer by layer; otherwise its weights are kept. Its modules are used in
    place. The process group must be initialised (under torchrun, by `steelyard.processes.group`).
    Raises `InvalidPlanError` if the world size or the model is not the plan's.
    """
    check_world_size(plan, dist.get_world_size())
    check_same_model(model.config, plan.chain())
    device_type = default_device_type()
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return parallelize_on(build_mesh(plan, device_type), device, model, plan, seed=seed)


def parallelize_on(
    mesh: PlanMesh, device: torch.device, model: PreTrainedModel, plan: Plan, *, seed: int
) -> ParallelModel:
    """This rank's part of ``model`` on a mesh of the plan that exists already; else as `parallelize`."""
    chain = plan.chain()
    chunks = build_chunks(model, plan, chain, mesh, seed=seed, device=device)
    return ParallelModel(plan, chain, mesh, chunks, device)


def parallelize_plan(plan: Plan, *, seed: int = 0) -> ParallelModel:
    """This rank's part of the plan's own model with first weights, as `parallelize` makes it."""
    return parallelize(build_meta_model(plan.chain()), plan, seed=seed)


def _copies(parameter: nn.Parameter, strategy: Strategy) -> int:
    """Ranks of a stage that hold the same part of the parameter."""
    if not isinstance(parameter, DTensor):
        return strategy.num_devices
    mesh = parameter.device_mesh
    shards = prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())
    return strategy.num_devices // shards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
