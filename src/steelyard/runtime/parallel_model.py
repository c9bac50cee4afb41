"""A model under a plan for the user's own loop: `parallelize`, then `train_step` and any optimizer, or `eval_step`.

Legend of shape suffixes: N samples of the global batch, B samples of this rank over all microbatches, S sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain as concatenated
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.backends import mha
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from steelyard.arguments import checked
from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.own import OwnSplit
from steelyard.modules.build import build_meta_model, hub_config
from steelyard.modules.layers import ChainLayer, EmbeddingLayer, OwnSharedInputs, as_flow
from steelyard.modules.levers import changed_by_user
from steelyard.modules.model_inputs import IGNORED, blank_samples, decoder_inputs
from steelyard.modules.own_pieces import Loss, OwnBatch, OwnModel, parts_of
from steelyard.modules.own_proof import check_read, planned_module
from steelyard.modules.own_split import refuse_compiled
from steelyard.modules.sample_proof import check_per_sample
from steelyard.modules.updates import add_square_norms, clip_to_norm, local_part
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy
from steelyard.precision import SCALES_LOSS
from steelyard.processes.group import current_device
from steelyard.runtime.checks import check_engine, check_world_size
from steelyard.runtime.data.order import rank_samples
from steelyard.runtime.data.tokens import Samples, checked_samples
from steelyard.runtime.loss_scale import LossScale
from steelyard.runtime.mesh import PlanMesh, build_mesh, data_index
from steelyard.runtime.pipeline_part import (
    ActivationLayout,
    Exchange,
    PipelinePart,
    border,
    received_pieces,
    sent_pieces,
)
from steelyard.runtime.stage import StageModule, build_chunks
from steelyard.runtime.stage_clock import StageClock
from steelyard.runtime.tied import find_shared_gradients
from steelyard.schedules.pass_rows import with_transfers

ModelKwargs: TypeAlias = Callable[[list[int]], Mapping[str, Tensor]]
"""Arguments of the model's forward pass that differ between samples (`PER_SAMPLE`), for some of a global batch."""


class ParallelModel:
    """This rank's part of a model that is trained under a plan, made by `parallelize`."""

    def __init__(
        self,
        plan: Plan,
        chain: ModelChain,
        mesh: PlanMesh,
        chunks: tuple[StageModule, ...],
        device: torch.device,
        *,
        seed: int = 0,
    ) -> None:
        self.plan, self.chain, self.mesh, self.chunks = plan, chain, mesh, chunks
        self.device = device
        self.clock = StageClock(device)
        self.num_steps = 0
        """Number of steps trained; set it when resuming a run, because dropout depends on it."""
        self.router_loss: Tensor | None = None
        """Auxiliary loss of routers in the last step, without its coefficient; None if routers are not trained."""
        self.loss_scale = LossScale(plan.global_batch, device) if plan.precision == SCALES_LOSS else None
        """Loss scale of the backward pass in fp16; None in other precisions."""
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Callback at the end of each step: whether this rank should stop. All ranks then know it by `is_stopping`."""
        self._votes = torch.zeros(())
        self._seed = seed
        self._proved = False
        """Whether arguments that differ between samples were proved to be right for this model."""
        self._has_dropout = any(chunk.loop.has_dropout for chunk in chunks)
        self._shared = find_shared_gradients(plan, chain, self.layers)
        self._step_microbatches = self._pipeline_step() if plan.num_stages > 1 else self._accumulate

    @property
    def layers(self) -> dict[str, ChainLayer]:
        """Layers of all chunks of this rank by their number in the chain."""
        return {name: layer for chunk in self.chunks for name, layer in chunk.layers.items()}

    @property
    def has_last_part(self) -> bool:
        """Whether this rank reads labels and computes a share of the loss."""
        return self.mesh.stage_index == self.plan.pipeline.stage_of_last

    def input_samples(self) -> list[int] | None:
        """Return the samples of the global batch whose tokens this rank reads, in order; None if it reads none."""
        return self._samples(self.plan.strategies[0]) if self.mesh.stage_index == 0 else None

    def label_samples(self) -> list[int] | None:
        """Return the samples of the global batch whose labels this rank reads, in order; None if it reads none."""
        return self._samples(self.plan.strategies[-1]) if self.has_last_part else None

    @property
    def router_coefficient(self) -> float:
        """Coefficient of the routers' auxiliary loss; 0 if routers are not trained."""
        routers = self.chunks[0].routers
        return routers.loss.coefficient if routers else 0.0

    @checked
    def train_step(
        self,
        read: Callable[[list[int]], Tensor | Samples],
        *,
        num_targets: int | Tensor | None = None,
        model_kwargs: ModelKwargs | None = None,
    ) -> Tensor:
        """Run forward and backward of one global batch; return its mean loss, identical on every rank.

        If routers are trained, the loss includes their loss (which is in `router_loss` by itself). ``read`` maps
        indices into the global batch to their token ids [len, S + 1], or to their `Samples`. For a user's own module
        ``read`` returns, for these samples, what the ``sample`` of `find_plan` was; it is called on every process, and
        must return the same for a sample wherever it is called.

        ``num_targets`` is the number of targets in the whole batch, over which the loss is averaged. Give it if some
        labels of next-token prediction are `IGNORED` (prompts, padding); by default every token is a target.

        ``model_kwargs`` maps indices to arguments [len, S] of the model's forward pass, on every process: an
        ``attention_mask`` of padding, or ``position_ids`` that begin anew with each of several packed sequences.

        Gradients are added to ``.grad``. In fp16 they are dropped if those of any rank are not finite
        (`LossScale.is_skipped`), and the optimizer's step with them. Raises `DivergedError` if that does not end.
        """
        if self.loss_scale is not None:
            self.loss_scale.take_in(self._local_gradients())
        for shared in self._shared:
            shared.begin_step()
        losses = self._run_passes(read, num_targets, model_kwargs)
        with self.clock.working():
            for chunk in self.chunks:
                chunk.end_step()
        self.num_steps += 1
        for shared in self._shared:
            shared.sum_gradients()
        if self.loss_scale is not None:
            self.loss_scale.finish_step(self._local_gradients())
            if self.loss_scale.is_skipped:
                for parameter in self.parameters():
                    parameter.grad = None
        mean, self.router_loss = self._mean_loss(losses)
        return mean

    @checked
    def eval_step(
        self,
        read: Callable[[list[int]], Tensor | Samples],
        *,
        num_targets: int | Tensor | None = None,
        model_kwargs: ModelKwargs | None = None,
    ) -> Tensor:
        """Run the forward pass of one global batch in evaluation mode; return its mean loss, identical on every rank.

        Takes the arguments of `train_step`. Parameters, gradients, the number of steps and random generators do not
        change.
        """
        with torch.no_grad(), _evaluating(self.chunks):
            losses = self._run_passes(read, num_targets, model_kwargs)
            for chunk in self.chunks:
                chunk.end_evaluation()
            return self._mean_loss(losses)[0]

    @checked
    def predict_step(
        self, read: Callable[[list[int]], Tensor | Samples], *, model_kwargs: ModelKwargs | None = None
    ) -> Tensor:
        """Return the logits [N, S, V] of a global batch in fp32, or [N, V] of images, on every rank.

        Otherwise the same as `eval_step`. Every rank needs memory for all logits. Raises `InvalidModelError` for a
        user's own module, which returns a loss.
        """
        if self.chain.split.module:
            raise InvalidModelError(
                field="predict",
                found=f"{self.chain.split.module}, whose last layer returns a loss",
                expected="a transformers model, whose head returns logits",
                hint="evaluate its loss (eval_step), or predict with the module itself",
            )
        found: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), _evaluating(self.chunks):
            for chunk in self.chunks:
                chunk.logits = found
            try:
                self._run_passes(read, 1, model_kwargs, predicts=True)
            finally:
                for chunk in self.chunks:
                    chunk.end_evaluation()
                    chunk.logits = None
        width = torch.tensor(max((logits.shape[-1] for _, logits in found), default=0), device=self.device)
        dist.all_reduce(width, dist.ReduceOp.MAX)
        count = self.chunks[0].num_tokens
        logits = torch.full((count, int(width)), -torch.inf, device=self.device)
        for places, part in found:
            logits[places.flatten()] = part.flatten(0, -2)
        dist.all_reduce(logits, dist.ReduceOp.MAX)  # over copies, and ranks that have other logits
        return logits.unflatten(0, (self.plan.global_batch, -1)) if self.chain.family.task.reads_text else logits

    def _run_passes(
        self,
        read: Callable[[list[int]], Tensor | Samples],
        num_targets: int | Tensor | None,
        model_kwargs: ModelKwargs | None,
        *,
        predicts: bool = False,
    ) -> list[Tensor]:
        """Run the passes of one global batch; return this rank's shares of the loss, one for each microbatch."""
        if self.chain.split.module:
            self._deal_out(read)
            read = _numbers
        for chunk in self.chunks:
            chunk.model_kwargs = [] if model_kwargs is None else self._kwargs_of(chunk, model_kwargs)
        inputs, labels = self.input_samples(), self.label_samples()
        tokens_BS = self._read(read, inputs).inputs.to(self.device) if inputs is not None else None  # noqa: N806
        labels_BS = self._read(read, labels).labels.to(self.device) if labels is not None else None  # noqa: N806
        if predicts and labels is not None:  # instead of labels, their places in the global batch
            labels_BS = torch.tensor(labels, device=self.device)  # noqa: N806
            if self.chain.family.task.reads_text:
                places_S = torch.arange(self.plan.seq_len, device=self.device)  # noqa: N806
                labels_BS = labels_BS[:, None] * self.plan.seq_len + places_S  # noqa: N806
        targets = {"labels_BS": labels_BS, "decoder_ids": self._decoder_ids(read)}
        self._count_targets(labels_BS, num_targets)
        for chunk in self.chunks:
            chunk.begin_step(self.plan.num_microbatches, (self._seed, self.num_steps))
        # do not change the random generators of the user's own loop
        devices = [self.device] if self.device.type == "cuda" else []
        is_divided = self.has_last_part and self.plan.strategies[-1].tensor_degree > 1  # the vocabulary
        forked = torch.random.fork_rng(devices) if self._has_dropout else nullcontext()
        with loss_parallel() if is_divided else nullcontext(), forked:
            return self._step_microbatches(tokens_BS, {k: each for k, each in targets.items() if each is not None})

    def _mean_loss(self, losses: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a global batch, and the routers' loss if routers are trained."""
        sums = torch.zeros(2, device=self.device)
        if losses:
            sums[0] = torch.stack(losses).sum() / self.plan.strategies[-1].tensor_degree
        if self.asked_to_stop():
            sums[1] = 1
        dist.all_reduce(sums)
        total, self._votes = sums.unbind()
        if (routers := self.chunks[-1].routers) is None:
            return total, None
        of_routers = torch.zeros((), device=self.device)  # mean over microbatches, on every rank of the last stage
        if routers.losses:
            of_routers += torch.stack(routers.losses).sum() / (self.plan.num_microbatches * self.plan.stage_sizes[-1])
            routers.losses.clear()
        dist.all_reduce(of_routers)
        return total + self.router_coefficient * of_routers, of_routers

    @property
    def is_stopping(self) -> bool:
        """Whether any rank was asked to stop (`asked_to_stop`) by the end of the last step; identical on every rank."""
        return bool(self._votes.item())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's sharded parameters by their path in the chain's layers, ``3.block.mlp.up_proj.weight``."""
        return concatenated.from_iterable(chunk.layers.named_parameters() for chunk in self.chunks)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's sharded parameters."""
        return concatenated.from_iterable(chunk.layers.parameters() for chunk in self.chunks)

    @checked
    def make_optimizers(self, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> list[Optimizer]:
        """Make one optimizer per mesh and placement of trained parameters, because fused updates do not mix meshes."""
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in (each for each in self.parameters() if each.requires_grad):
            key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
        return [make(group) for group in groups.values()]

    @torch.no_grad()
    @checked
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``, if that is not 0.

        Returns the norm before scaling.
        """
        counted, copies, gradients, seen = [], [], [], set[nn.Parameter]()
        for layer_name, layer in self.layers.items():
            strategy = self.plan.strategies[int(layer_name)]
            for parameter in layer.parameters():
                if parameter.grad is None or parameter in seen:
                    continue
                seen.add(parameter)
                gradients.append(local_part(parameter.grad))
                if not any(shared.is_copy(parameter) for shared in self._shared):
                    counted.append(gradients[-1])
                    copies.append(_copies(parameter, strategy))
        square = torch.zeros((), device=self.device)
        add_square_norms(square, counted, copies)
        dist.all_reduce(square)
        norm = square.sqrt()
        if max_norm:
            clip_to_norm(gradients, norm, max_norm)
        return norm

    def _local_gradients(self) -> list[Tensor]:
        return [local_part(each.grad) for each in self.parameters() if each.grad is not None]

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def _samples(self, strategy: Strategy) -> list[int]:
        return rank_samples(
            global_batch=self.plan.global_batch,
            num_microbatches=self.plan.num_microbatches,
            degree=strategy.sample_degree,
            index=data_index(self.mesh, strategy),
        )

    def _read(self, read: Callable[[list[int]], Tensor | Samples], samples: list[int]) -> Samples:
        found = read(samples)
        if self.chain.split.module:  # checked with all tensors of its samples
            return Samples.of(found)
        return checked_samples(found, self.chain, len(samples), self.plan.seq_len)

    def _decoder_ids(self, read: Callable[[list[int]], Tensor | Samples]) -> Tensor | None:
        embeddings = [int(name) for name, layer in self.layers.items() if isinstance(layer, EmbeddingLayer)]
        decoders = [layer for layer in embeddings if layer > 0]
        samples = self._samples(self.plan.strategies[decoders[0]]) if decoders else None
        if samples is None:
            return None
        labels = self._read(read, samples).labels.to(self.device)
        return decoder_inputs(labels, self.chunks[0].side.model_config, self.chain.features)

    def _deal_out(self, read: Callable[[list[int]], Any]) -> None:
        """Give every layer of a user's own module this rank's samples of it, microbatch by microbatch."""
        split, count = self.chain.split, self.plan.num_microbatches
        assert isinstance(split, OwnSplit), "only for a user's own module"
        found: dict[tuple[int, ...], Any] = {}
        for chunk in self.chunks:
            assert isinstance(chunk.side, OwnSharedInputs), "likewise"
            chunk.batches = [{} for _ in range(count)]
            dealt: dict[tuple[int, ...], list[OwnBatch]] = {}
            for name in chunk.layers:
                samples = tuple(self._samples(self.plan.strategies[int(name)]))
                if samples not in found:
                    found[samples] = read(list(samples))
                    check_read(found[samples], split, len(samples))
                if samples not in dealt:
                    parts = parts_of(found[samples], count)
                    options = {"dtype": chunk.dtype, "device": self.device}
                    dealt[samples] = [OwnBatch(part, split, chunk.side.arguments, **options) for part in parts]
                for batches, batch in zip(chunk.batches, dealt[samples], strict=True):
                    batches[int(name)] = batch

    def _kwargs_of(
        self, chunk: StageModule, model_kwargs: ModelKwargs
    ) -> list[list[tuple[list[str], dict[str, Tensor]]]]:
        """Return the arguments that differ between samples for the layers of a chunk, microbatch by microbatch."""
        if not self._proved:
            check_per_sample(self.plan)
            self._proved = True
        names_of: dict[tuple[int, ...], list[str]] = {}
        for name in chunk.layers:
            names_of.setdefault(tuple(self._samples(self.plan.strategies[int(name)])), []).append(name)
        count = self.plan.num_microbatches
        found: list[list[tuple[list[str], dict[str, Tensor]]]] = [[] for _ in range(count)]
        for samples, names in names_of.items():
            whole = model_kwargs(list(samples)).items()
            parts = [(name, each.to(self.device).chunk(count)) for name, each in whole]
            for index, of_microbatch in enumerate(found):
                of_microbatch.append((names, {name: each[index] for name, each in parts}))
        return found

    def _count_targets(self, labels_BS: Tensor | None, num_targets: int | Tensor | None) -> None:  # noqa: N803
        """Set the number of targets of the global batch in all parts; count them if it differs between batches."""
        task = self.chain.family.task
        if num_targets is None and task is not Task.CAUSAL_LM and task.reads_text:
            num_targets = torch.zeros((), device=self.device)
            if labels_BS is not None:
                num_targets += (labels_BS != IGNORED).sum() / self.plan.strategies[-1].tensor_degree
            dist.all_reduce(num_targets)
        for chunk in self.chunks:
            chunk.num_targets = chunk.num_tokens if num_targets is None else num_targets

    def _accumulate(self, tokens_BS: Tensor, targets: dict[str, Tensor]) -> list[Tensor]:  # noqa: N803
        losses = []
        count = self.plan.num_microbatches
        parts = {name: each.chunk(count) for name, each in targets.items()}
        for index, tokens in enumerate(tokens_BS.chunk(count)):
            with self.clock.working():
                loss = self.chunks[0](tokens, **{name: each[index] for name, each in parts.items()})
                if torch.is_grad_enabled():
                    self._scaled(loss).backward()
            losses.append(loss.detach())
        return losses

    def _pipeline_step(self) -> Callable[[Tensor | None, dict[str, Tensor]], list[Tensor]]:
        plan = self.plan
        parts = [
            self._pipeline_part(chunk, index)
            for chunk, index in zip(self.chunks, plan.pipeline.parts_of(self.mesh.stage_index), strict=True)
        ]
        chosen = plan.pipeline.schedule
        schedule = getattr(schedules, chosen.torch_name)(
            parts if chosen.takes_chunks else parts[0],
            plan.num_microbatches,
            loss_fn=lambda loss, _labels: self._scaled(loss),
            scale_grads=False,
        )
        if chosen.runs_as_rows:
            rows = with_transfers(plan.pipeline)
            with NamedTemporaryFile("w", suffix=".csv") as file:
                file.writelines(",".join(row) + "\n" for row in rows)
                file.flush()
                schedule._load_csv(file.name, format="compute_comms")

        def step(tokens_BS: Tensor | None, targets: dict[str, Tensor]) -> list[Tensor]:  # noqa: N803
            inputs = () if tokens_BS is None else (tokens_BS,)
            losses: list[Tensor] = []
            run = schedule.step if torch.is_grad_enabled() else schedule.eval
            if "labels_BS" not in targets:
                run(*inputs, return_outputs=False, **targets)
            else:
                run(*inputs, target=targets["labels_BS"], losses=losses, return_outputs=False, **targets)
            for part in parts:
                part.end_step()
            return [loss.detach() if self.loss_scale is None else self.loss_scale.unscaled(loss) for loss in losses]

        return step

    def _pipeline_part(self, chunk: StageModule, index: int) -> PipelinePart:
        """Build part ``index`` of the pipeline; parts are in the order of the layers."""
        part = PipelinePart(
            chunk,
            index,
            len(self.plan.parts),
            self.device,
            examples=(self._example(index, is_input=True), self._example(index, is_input=False)),
            group=self.mesh.pipeline,
            alone=self.mesh.runs[()].get_group(),
            exchange=self._exchange(index),
            sends_itself=self.plan.pipeline.schedule.keeps_sends,
            weight_pass=chunk.weight_pass if self.plan.pipeline.schedule.splits_backward else None,
        )
        self.clock.watch(part)
        return part

    def _example(self, index: int, *, is_input: bool) -> Tensor | tuple[Tensor, ...]:
        """Return meta tensors of the shape and type that part ``index`` receives or sends for one microbatch."""
        if is_input and index == 0:
            samples = self.plan.microbatch_samples // self.plan.strategies[0].sample_degree
            return blank_samples(self.chain, samples, self.plan.seq_len)[0].to("meta")
        if not is_input and index == len(self.plan.parts) - 1:
            return torch.empty((), device="meta", requires_grad=True)
        streams = (
            torch.empty((after if is_input else before).local_shape(shape), **options, device="meta")
            for before, after, shape, options in self._crossing(index if is_input else index + 1)
        )
        return as_flow(tuple(streams))

    def _crossing(self, index: int) -> Iterator[tuple[ActivationLayout, ActivationLayout, tuple[int, ...], Any]]:
        """Yield the layouts before and after the border, shape and options of each tensor that part ``index`` gets."""
        before, after = border(self.plan, index)
        for each in self.chain.flow(self.plan.parts[index].first_layer - 1, self.plan.seq_len):
            dtype = getattr(torch, each.whole) if each.whole else self.chunks[0].dtype
            shape = (self.plan.microbatch_samples, *each.shape)
            yield before, after, shape, {"dtype": dtype, "requires_grad": each.needs_gradient}
        routers = self.chunks[0].routers
        if routers is not None:
            yield before.of_copies, after.of_copies, routers.loss.shape, {"dtype": torch.float32, "requires_grad": True}

    def _exchange(self, index: int) -> Exchange:
        """Return the pieces that part ``index`` of the pipeline exchanges with the ranks of its neighbours."""
        rank, found, pipeline = dist.get_rank(), {}, self.plan.pipeline
        if index > 0 and pipeline.stages_apart(index - 1, index):
            crossing = list(self._crossing(index))
            found["arriving"] = [received_pieces(rank, before, own, shape) for before, own, shape, _ in crossing]
            trained = [each for each in crossing if each[-1]["requires_grad"]]
            found["returning"] = [sent_pieces(rank, own, before, shape) for before, own, shape, _ in trained]
        if index < len(self.plan.parts) - 1 and pipeline.stages_apart(index, index + 1):
            crossing = list(self._crossing(index + 1))
            found["leaving"] = [sent_pieces(rank, own, after, shape) for own, after, shape, _ in crossing]
            trained = [each for each in crossing if each[-1]["requires_grad"]]
            found["coming_back"] = [received_pieces(rank, after, own, shape) for own, after, shape, _ in trained]
        return Exchange(**found)


@contextmanager
def _evaluating(chunks: Iterable[StageModule]) -> Iterator[None]:
    """Put the modules of the chunks in evaluation mode, including those that run in a layer but are not its own."""
    beside = (each for chunk in chunks for layer in chunk.layers.values() for each in layer.beside)
    modes = [(module, module.training) for each in (*chunks, *beside) for module in each.modules()]
    for module, _ in modes:
        module.training = False
    was_enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)  # its kernels take no matrices that tp has divided
    try:
        yield
    finally:
        mha.set_fastpath_enabled(was_enabled)
        for module, was_training in modes:
            module.training = was_training


def _numbers(samples: list[int]) -> Samples:
    """Return the sample numbers as `Samples`: the input of the chain of a user's own module."""
    return Samples(inputs=torch.tensor(samples), labels=torch.tensor(samples))


@checked
def parallelize(model: nn.Module, plan: Plan | str | Path, *, loss: Loss | None = None, seed: int = 0) -> ParallelModel:
    """Return this rank's part of ``model`` under ``plan`` (or its file); call it on every process of the plan's world.

    ``model`` is an unmodified `transformers` causal language model of the plan's config. On the meta device it gets
    initial weights that depend only on ``seed``, layer by layer; otherwise its weights are kept. Its modules are used
    in place. A `peft.PeftModel` whose plan was made for it keeps its adapters.

    ``model`` can also be any module with weights whose plan was made with `find_plan(model, …, sample=…)`; ``loss`` is
    then the one given there. The process group must be initialised (under torchrun, by `steelyard.processes.group`).
    Raises `InvalidPlanError` or `InvalidModelError` if the world size or the model is not the plan's.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    check_engine(plan)
    if not dist.is_initialized():
        raise InvalidPlanError(
            field="parallelize",
            found="no process group",
            expected="one process for each device of the plan, in a group",
            hint="start the script with torchrun, and call torch.distributed.init_process_group() first",
        )
    check_world_size(plan, dist.get_world_size())
    plan.chosen_levers.check_host("gpu" if current_device().type == "cuda" else "cpu")
    chain = plan.chain()
    if isinstance(chain.split, OwnSplit):
        return parallelize_checked(planned_module(model, chain.split, loss), plan, seed)
    refuse_compiled(model)
    model = _unwrapped(model, plan)
    check_same_model(getattr(model, "config", None), chain)
    check_same_modules(model, chain)
    return parallelize_checked(model, plan, seed)


def _unwrapped(model: nn.Module, plan: Plan) -> nn.Module:
    """Return the model inside one that its user has changed. Raises `InvalidPlanError` if the plan differs."""
    changed = changed_by_user(model)
    if changed is None:
        return model
    found, levers = changed
    for name, text in levers.items():
        planned = plan.chosen_levers.texts.get(name, "nothing")
        if text != planned:
            raise InvalidPlanError(
                field=f"levers.{name}",
                found=planned,
                expected=f"{text}, as in the model",
                hint="plan for the model: steelyard.find_plan(model, …)",
            )
    return found


def parallelize_checked(model: PreTrainedModel | OwnModel, plan: Plan, seed: int) -> ParallelModel:
    """Return this rank's part of a model that is known to be the plan's, as `parallelize` does."""
    device = current_device()
    return parallelize_on(build_mesh(plan, device.type), device, model, plan, seed=seed)


def parallelize_on(
    mesh: PlanMesh, device: torch.device, model: PreTrainedModel | OwnModel, plan: Plan, *, seed: int
) -> ParallelModel:
    """Return this rank's part of ``model`` on an existing mesh of the plan; otherwise as `parallelize`."""
    chain = plan.chain()
    chunks = build_chunks(model, plan, chain, mesh, seed=seed, device=device)
    return ParallelModel(plan, chain, mesh, chunks, device, seed=seed)


def parallelize_plan(plan: Plan, *, seed: int = 0) -> ParallelModel:
    """Return this rank's part of the plan's own model with initial weights, as `parallelize` does."""
    return parallelize(build_meta_model(plan.chain()), plan, seed=seed)


def _copies(parameter: nn.Parameter, strategy: Strategy) -> int:
    """Number of ranks of a stage that hold the same part of the parameter."""
    if not isinstance(parameter, DTensor):
        return strategy.num_devices
    mesh = parameter.device_mesh
    shards = prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())
    return strategy.num_devices // shards


def check_same_model(config: Any, chain: ModelChain) -> None:
    """Raise `InvalidPlanError` unless a `transformers` config (None: no config) has the sizes of the plan's model."""
    if config is None:
        raise InvalidPlanError(
            field="model",
            found="a module without a config, which is not a transformers model",
            expected=f"{chain.name}, the transformers model ({chain.family.model_type}) of the plan",
            hint="plan your own module: steelyard.find_plan(model, cluster, sample=…) (docs/how-to/your-own-model.md)",
        )
    own_type = getattr(config, "model_type", None)  # of some types the class holds the part of text alone
    parts = [each for each in chain.config.values() if isinstance(each, Mapping) and each.get("model_type") == own_type]
    model_type = own_type if parts else chain.family.model_type
    of_layers = getattr(config, "per_layer_attributes", None) or ()  # which a whole config refuses to be asked for
    written = config.to_dict() if of_layers else {}
    made = hub_config(chain)  # some config types return other values than they were given
    sizes = {key: size if key in of_layers else getattr(made, key, size) for key, size in chain.sizes.items()}
    for key, expected in {"model_type": model_type, **sizes}.items():
        found = written.get(key) if key in of_layers else getattr(config, key, None)
        if found != expected:
            raise InvalidPlanError(
                field=f"model.config.{key}",
                found=f"{expected!r} in the plan",
                expected=f"{found!r}, the value of the model",
                hint="plan for this model's config, or build the model from the plan's config",
            )


def check_same_modules(model: nn.Module, chain: ModelChain) -> None:
    """Raise `InvalidPlanError` unless the model has the modules of the plan's layers and ties the same weights."""
    holders: dict[nn.Parameter, set[int]] = {}
    for layer in range(chain.num_layers):
        for path in chain.family.modules(layer).values():
            try:
                module = model.get_submodule(path)
            except AttributeError:
                raise InvalidPlanError(
                    field="model",
                    found=f"{type(model).__name__}, which has no module {path}",
                    expected=f"a model as the plan's, a {type(build_meta_model(chain)).__name__}",
                    hint="pass the whole model with its head and all blocks, or plan for this model's config",
                ) from None
            for parameter in module.parameters():
                holders.setdefault(parameter, set()).add(layer)
    if any(isinstance(parameter, DTensor) for parameter in holders):
        raise InvalidPlanError(
            field="model",
            found="a model that is already sharded (parallelize, fully_shard)",
            expected="whole parameters, or parameters on the meta device",
            hint="build the model again for each call of parallelize",
        )
    tied = {tuple(sorted(layers)) for layers in holders.values() if len(layers) > 1}
    planned = {tuple(layer for layer, _ in shared.copies) for shared in chain.shared}
    for layers in sorted(tied ^ planned):
        found = ("shared by", "separate in") if layers in tied else ("separate in", "shared by")
        raise InvalidPlanError(
            field="model",
            found=f"weights {found[0]} layers {', '.join(map(str, layers))}",
            expected=f"weights {found[1]} these layers, as in the plan",
            hint="plan for this model's config (tie_word_embeddings)",
        )
