"""Train a Transformer under a plan with stock PyTorch; needs torch, transformers and numpy (and Pillow for images).

    torchrun --nproc-per-node 8 train.py --data tokens.bin --steps 1000

The plan is the JSON file of the same name next to this one (``train.json``), or ``--plan``. It defines for every layer
how the ranks of a pipeline stage share it. Supported entries and their implementation:

| in the plan                 | implemented by                                                      | here            |
|-----------------------------|---------------------------------------------------------------------|-----------------|
| ``"parallel": "fsdp4-tp2"`` | a `DeviceMesh` of 4 × 2 ranks; ``tp`` uses neighbouring ones        | `build_meshes`  |
| ``tp``, with or without sp  | `parallelize_module`, each module in the style given by the plan    | `shard_tensors` |
| ``fsdp``, ``dp``            | `fully_shard`, over the data ranks, or over one rank and replicated | `shard_data`    |
| ``remat``                   | `checkpoint`                                                        | `Layer`         |
| neighbours that differ      | `DTensor.redistribute` of the activations between them              | `LayerLoop`     |
| ``stages``, ``schedule``    | `torch.distributed.pipelining`                                      | `pipeline_step` |

Samples, initial weights and losses do not depend on the plan: one process and many train the same model. A rank's loss
is therefore its part of the sum over the global batch, divided by the number of all targets of the batch, and gradients
are added, never averaged.

Legend of shapes: B samples of this rank in a microbatch, S sequence, s sequence of this rank (S/tp under sp), H hidden.
"""

import argparse
import copy
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

MODELS = {
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "image-classification": AutoModelForImageClassification,
}
Flow = Tensor | tuple[Tensor, Tensor]
"""Activations between layers: token ids [B, S] or images, hidden states, in a decoder with the encoder's output."""


@dataclass(frozen=True)
class Strategy:
    """Parallelism dimensions of a layer on the ranks of a stage with their degrees, outermost first."""

    levels: tuple[tuple[str, int], ...]
    sp: bool = False  # whether tp ranks divide the sequence between attention and feed-forward part
    zero: int = 3  # 3 frees gathered parameters between forward and backward, 2 keeps them, 1 throughout a step
    remat: str = "none"  # recomputation in backward: none, selective or full

    def degree(self, *dimensions: str) -> int:
        """Number of ranks over which these dimensions divide the layer."""
        return math.prod(degree for dimension, degree in self.levels if dimension in dimensions)


class Plan:
    """The JSON file: the plan, whose keys are attributes, and its model as a chain of layers."""

    def __init__(self, path: str) -> None:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        vars(self).update(content["plan"])
        self.chain = content["chain"]
        self.dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        self.strategies, self.parts = [], []
        chunks = [stage.get("chunks") or [stage["runs"]] for stage in self.stages]
        for runs in (runs for parts in zip(*chunks, strict=True) for runs in parts):  # in the order of the layers
            first = len(self.strategies)
            for run in runs:
                levels = tuple(
                    (dimension, int(degree)) for dimension, degree in re.findall(r"([a-z]+)(\d+)", run["parallel"])
                )
                if not {dimension for dimension, _ in levels} <= {"dp", "fsdp", "tp"}:
                    raise SystemExit(f"layers {run['layers']}: this script does not support {run['parallel']!r}")
                rest = {key: value for key, value in run.items() if key not in ("layers", "parallel")}
                self.strategies += [Strategy(levels, **rest)] * (run["layers"][1] + 1 - run["layers"][0])
            self.parts.append(range(first, len(self.strategies)))
        for number, entry in enumerate(self.chain["layers"]):
            if "positions" in self.chain["kinds"][entry["kind"]]["styles"].values():  # added to whole sequences here
                self.strategies[number] = replace(self.strategies[number], sp=False)
        self.stage_size = self.stages[0]["ranks"][1] + 1 - self.stages[0]["ranks"][0]
        self.num_stages = len(self.stages)
        self.stage_of_part = [index % self.num_stages for index in range(len(self.parts))]
        roles = [self.chain["kinds"][entry["kind"]]["role"] for entry in self.chain["layers"]]
        self.decoder = max(number for number, role in enumerate(roles) if role == "embedding")  # 0 without an encoder
        targets = {"image-classification": 1, "masked-lm": max(1, round(0.15 * self.seq_len))}
        self.targets_of_sample = targets.get(self.chain["task"], self.seq_len)

    def share(self, strategy: Strategy) -> int:
        """Samples B of a microbatch on one of the ranks that divide them."""
        return self.global_batch // self.num_microbatches // strategy.degree("dp", "fsdp")

    def blank(self, samples: int, seq_len: int, device: torch.device | str) -> Tensor:
        """Return samples of zeros."""
        if self.chain["image"]:
            return torch.zeros((samples, *self.chain["image"]), device=device)
        return torch.zeros((samples, seq_len), dtype=torch.long, device=device)

    def owner(self, model: PreTrainedModel, number: int, path: str) -> tuple[nn.Module, list[str]]:
        """Return the module of a layer at the beginning of a path in it, and the remaining names of the path."""
        name, *names = path.split(".")
        return model.get_submodule(self.chain["layers"][number]["modules"][name]), names

    def copies(self, number: int, name: str) -> list[list]:
        """Return all parameters shared with this one, each by its layer and its path there; empty if it is not
        shared."""
        return next((copies for copies in self.chain["shared"] if [number, name] in copies), [])


def build_meshes(plan: Plan, device_type: str) -> dict[tuple, DeviceMesh]:
    """Build a mesh of all ranks for each parallelism of a layer: stages, then its levels, then an axis of one rank."""
    meshes = {}
    for levels in dict.fromkeys(strategy.levels for strategy in plan.strategies):
        names, degrees = zip(("pp", plan.num_stages), *levels, ("one", 1), strict=True)
        meshes[levels] = init_device_mesh(device_type, degrees, mesh_dim_names=names)
    return meshes


def build_stage_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Build a mesh of this stage's ranks with axes of prime size, which can express the layouts of all layers."""
    sizes, rest = [], plan.stage_size
    for factor in range(2, plan.stage_size + 1):
        while rest % factor == 0:
            sizes, rest = [factor, *sizes], rest // factor
    sizes = sizes or [1]
    names = tuple(f"axis{number}" for number in range(len(sizes)))
    return init_device_mesh(device_type, (plan.num_stages, *sizes), mesh_dim_names=("pp", *names))[names]


def placements(strategy: Strategy, stage_mesh: DeviceMesh) -> list[Placement]:
    """Return the placement of a layer's hidden state [B, s, H] on each axis of the stage; a level is a run of axes."""
    sizes, found = list(stage_mesh.shape), []
    for dimension, degree in strategy.levels:
        product = 1
        while product < degree:
            product *= sizes.pop(0)
            found.append(Shard(0) if dimension != "tp" else Shard(1) if strategy.sp else Replicate())
    return found or [Replicate()]


_aten, _collective = torch.ops.aten, torch.ops._c10d_functional
KEPT = [  # by selective remat: matrix products, attention, and reductions of tensor parallelism
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _collective.all_reduce.default,
    _collective.reduce_scatter_tensor.default,
]
REMAT = {"full": noop_context_fn, "selective": partial(create_selective_checkpoint_contexts, KEPT)}


class ReachedError(Exception):
    """A forward pass reached its end; holds the arguments of the call there, by place and by name."""


class Outline:
    """The model's own forward pass, in which only the modules of one layer compute, or none.

    Other modules return zeros of the right shape. The layer before returns the input of the layer; the pass ends where
    the next layer begins, or at the head without a layer. The model's own operations around its blocks thus stay
    unchanged.
    """

    def __init__(self, plan: Plan, bare: PreTrainedModel, number: int, layer: nn.Module | None = None) -> None:
        self.plan, self.model, self.given, self.calls = plan, copy.deepcopy(bare), None, {}
        self.before, self.end = (number - 1, number + 1) if layer else (None, number)
        for place, entry in enumerate(plan.chain["layers"]):
            for name, path in entry["modules"].items():
                if layer and place == number:
                    self.model.set_submodule(path, layer.get_submodule(name))
                else:
                    module = self.model.get_submodule(path)
                    module.forward = partial(self.stub, place, module)

    def __call__(
        self, inputs: Tensor, given: Tensor | None = None, decoder_ids: Tensor | None = None
    ) -> Tensor | tuple:
        """Return the logits, or the arguments of the call at which the pass ends; ``given`` is the layer's input."""
        self.given, self.device = given, inputs.device
        is_seq2seq = self.plan.chain["task"] == "seq2seq-lm"
        names = {"decoder_input_ids": inputs if decoder_ids is None else decoder_ids} if is_seq2seq else {}
        try:
            return self.model(inputs, **names).logits
        except ReachedError as reached:
            return reached.args
        finally:
            self.given = None

    def stub(self, number: int, module: nn.Module, *places: object, **names: object) -> Tensor | tuple:
        """Return the output of a module that does not compute."""
        if number == self.end:
            raise ReachedError(places, names)
        entry = self.plan.chain["layers"][number]
        layer_type = self.plan.chain["kinds"][entry["kind"]]
        if layer_type["role"] == "block":
            if self.before is None:
                self.calls[entry["kind"]] = places, names
            (hidden, *_), (length, width) = places, entry["flow"][0]
            found = hidden if hidden.shape[-1] == width else hidden.new_zeros((len(hidden), length, width))
            found = self.given if number == self.before else found
            return (found, *[None] * (layer_type["num_results"] - 1)) if layer_type["num_results"] else found
        tensors = {place: each.to("meta") for place, each in enumerate(places) if isinstance(each, Tensor)}
        tensors = {place: each.float() if each.is_floating_point() else each for place, each in tensors.items()}
        on_meta = [tensors.get(place, each) for place, each in enumerate(places)]
        shape = type(module).forward(module, *on_meta, **names).shape
        return torch.zeros(shape, dtype=self.plan.dtype, device=self.device)


def with_argument(call: tuple, where: int | str, value: Tensor) -> tuple:
    """Return arguments by place and by name, with one value replaced."""
    places, names = call
    if isinstance(where, str):
        return places, names | {where: value}
    return (*places[:where], value, *places[where + 1 :]), names


class Layer(nn.Module):
    """A layer of the chain: an unchanged block of transformers, or its model's operations around blocks."""

    def __init__(self, plan: Plan, model: PreTrainedModel, bare: PreTrainedModel, number: int) -> None:
        super().__init__()
        entry = plan.chain["layers"][number]
        self.plan, self.number, self.type_name = plan, number, entry["kind"]
        self.layer_type = plan.chain["kinds"][self.type_name]
        self.remat, self.is_kept_whole = plan.strategies[number].remat, plan.strategies[number].zero == 1
        for name, path in entry["modules"].items():
            self.add_module(name, model.get_submodule(path))
        self.outline = None if self.layer_type["role"] == "block" else Outline(plan, bare, number, self)

    def forward(self, flow: Flow, side: dict, targets: dict[str, Tensor]) -> Flow:
        """Map samples or hidden states [B, s, H] to hidden states or to the loss."""
        if self.remat == "none":
            return self.compute(flow, side, targets)
        return checkpoint(self.compute, flow, side, targets, use_reentrant=False, context_fn=REMAT[self.remat])

    def compute(self, flow: Flow, side: dict, targets: dict[str, Tensor]) -> Flow:
        """Run the forward pass, which remat repeats in backward."""
        where = self.plan.chain["encoded"]
        hidden, *encoded = flow if isinstance(flow, tuple) else (flow,)
        if self.layer_type["role"] == "block":
            call = with_argument(side[self.type_name], 0, hidden)
            places, names = with_argument(call, where, *encoded) if encoded else call
            outputs = self.block(*places, **names)
            found = outputs[0] if isinstance(outputs, tuple) else outputs
            return (found, encoded[0].view_as(encoded[0])) if encoded else found
        inputs = self.plan.blank(*hidden.shape[:2], hidden.device) if self.number else hidden
        if self.layer_type["role"] == "embedding":
            given, ids = (hidden, targets["decoder_ids"]) if self.number else (None, None)
            places, names = self.outline(inputs, given, ids)
            read = (places[0], names[where] if isinstance(where, str) else places[where]) if self.number else places[:1]
            found = tuple(each.contiguous() for each in read)
            return found if self.number else found[0]
        for each in encoded:  # the encoder's output ends here, with a gradient of 0
            hidden = hidden + each[:0].sum()
        logits, labels = self.outline(inputs, hidden), targets["labels"]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        return loss / (self.plan.global_batch * self.plan.targets_of_sample)


@torch.no_grad()
def fill_buffers(plan: Plan, model: PreTrainedModel, device: torch.device) -> None:
    """Initialise the buffers of modules outside of layers, for example of rotary embeddings."""
    paths = [path for entry in plan.chain["layers"] for path in entry["modules"].values()]
    inside = {module for path in paths for module in model.get_submodule(path).modules()}
    outside = [(each, list(each.buffers(recurse=False))) for each in model.modules() if each not in inside]
    for module in (each for each, buffers in outside if buffers):
        module.to_empty(device=device, recurse=False)
        for each in filter(torch.is_floating_point, module.buffers(recurse=False)):
            each.fill_(math.nan)
        model._init_weights(module)
        if any(each.isnan().any() for each in module.buffers(recurse=False)):
            raise SystemExit(f"transformers does not initialize the buffers of {type(module).__name__}")


@torch.no_grad()
def shared_inputs(plan: Plan, bare: PreTrainedModel, device: torch.device) -> dict[str, tuple]:
    """Return the model's arguments for blocks of each type (masks, rotary embeddings), by place and by name."""
    outline = Outline(plan, bare, len(plan.strategies) - 1)
    outline(plan.blank(1, plan.seq_len, device))
    return outline.calls


def shard_tensors(layer: Layer, mesh: DeviceMesh, sp: bool) -> None:
    """Divide the matrices of a layer over the ranks of ``mesh``, module by module, each in a style of `STYLES`."""
    between = Shard(1) if sp else Replicate()  # of the hidden state between attention and feed-forward part
    styles = {}
    for path, style in layer.layer_type["styles"].items():
        name, keywords, numbers = (*style.split(":"), "", "")[:3]
        styles[path], module = STYLES[name](between, keywords), layer.get_submodule(path)
        for number in filter(None, numbers.split(",")):  # attributes of attention that count heads
            setattr(module, number, max(1, getattr(module, number) // mesh.size()))
    tensor_parallel.parallelize_module(layer, mesh, {path: style for path, style in styles.items() if style})


class WholeInput(tensor_parallel.ParallelStyle):
    """Style that gathers the sequence, as a DTensor, for attention or the feed-forward part, which read it repeatedly.

    The input is the argument of the first keyword, or the first one; further keywords follow after a plus sign.
    """

    def __init__(self, between: Placement, keywords: str) -> None:
        self.between, (self.first, *self.others) = between, keywords.split("+")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(hidden: Tensor) -> DTensor:
            given = DTensor.from_local(hidden, device_mesh, [self.between], run_check=False)
            return given.redistribute(placements=[Replicate()])

        def prepare(_module: nn.Module, places: tuple, names: dict) -> tuple:
            keywords = [*filter(None, [self.first]), *self.others]
            places = places if self.first else (whole(places[0]), *places[1:])
            return places, names | {keyword: whole(names[keyword]) for keyword in keywords}

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module


class Rowwise(tensor_parallel.RowwiseParallel):
    """Stock `RowwiseParallel` whose result is not a view, because some blocks, as Falcon's, write into it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _module, _places, output: _aten._unsafe_view(output, output.shape))
        return module


STYLES = {
    "colwise": lambda between, _: tensor_parallel.ColwiseParallel(),
    "rowwise": lambda between, _: Rowwise(output_layouts=between),
    # every rank computes the operations between these two whole
    "colwise_gathered": lambda between, _: tensor_parallel.ColwiseParallel(output_layouts=Replicate()),
    "rowwise_of_whole": lambda between, _: Rowwise(input_layouts=Replicate(), output_layouts=between),
    "gather": WholeInput,
    # norms on this rank's part of the sequence, if the sequence is divided
    "sequence_local": lambda between, _: (
        tensor_parallel.SequenceParallel(use_local_output=True) if between.is_shard() else None
    ),
    # a table of positions, which the model reads for the whole sequence (`Plan`)
    "positions": lambda between, _: None,
    # norms of query and key [B, S, heads, width], of which each rank has some heads
    "replicated_with_grad_allreduce": lambda between, _: tensor_parallel.SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
    # embedding and head are divided by tokens: the logits stay divided, and `loss_parallel` works on their parts
    "vocabulary": lambda between, _: tensor_parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    "logits": lambda between, _: tensor_parallel.ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1), use_local_output=False
    ),
}


def shard_data(layer: Layer, strategy: Strategy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 over the data ranks: ``fsdp`` divides parameters, ``dp`` replicates them, both together are HSDP."""
    dimensions = tuple(dimension for dimension, _ in strategy.levels if dimension != "tp")
    axes = dimensions if "fsdp" in dimensions else (*dimensions, "one")
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    fully_shard(layer, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=strategy.zero == 3)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    experts = [each for path, each in layer.named_modules() if path.endswith(".experts")]
    if any(isinstance(each, nn.ModuleList | nn.ModuleDict) for each in experts):
        layer.set_reduce_scatter_unused_params(True)  # the tokens of other ranks choose other experts


def first_weights(
    plan: Plan, model: PreTrainedModel, layer: Layer, number: int, device: torch.device, seed: int
) -> None:
    """Initialise a layer by the seed and its place alone, so that every plan starts with the same weights."""

    def fill(module: nn.Module, place: int) -> None:
        numbers = [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        for each in numbers:
            each.data.fill_(math.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + place)
            for submodule in reversed(list(module.modules())):
                model._init_weights(submodule)
            for submodule in module.modules():  # some models leave these to constructors
                own = list(submodule.parameters(recurse=False))
                if any(each.isnan().any() for each in own) and hasattr(submodule, "reset_parameters"):
                    submodule.reset_parameters()
        if any(each.isnan().any() for each in numbers):
            raise SystemExit(f"layer {number}: transformers does not initialize all of {type(module).__name__}")

    shared = [(copies[0], path) for copies in plan.chain["shared"] for place, path in copies if place == number]
    owners = [(first, layer.get_submodule(path.rpartition(".")[0])) for first, path in shared]
    for _, owner in owners:  # a separate matrix instead of one shared with another layer
        owner.weight = nn.Parameter(torch.empty_like(owner.weight))
    for module in layer.children():
        module.to_empty(device=device)
        fill(module, number)
    for (place, path), owner in owners:
        table = nn.Embedding(*owner.weight.shape, device=device)
        first, names = plan.owner(model, place, path)
        table.padding_idx = getattr(first.get_submodule(".".join(names[:-1])), "padding_idx", None)
        fill(table, place)
        owner.weight = table.weight


def list_blocks(model: PreTrainedModel) -> None:
    """List blocks and patch merging of a model with stages of blocks (Swin) in one module list, as plans do."""
    for stack in list(model.modules()):
        stages = getattr(stack, "layers", None)
        if isinstance(stages, nn.ModuleList) and all(hasattr(each, "downsample") for each in stages):
            parts = (part for stage in stages for part in (*stage.blocks, stage.downsample))
            stack.parts = nn.ModuleList(filter(None, parts))


def give_tables(plan: Plan, model: PreTrainedModel) -> None:
    """Give every block a table of relative positions if the model's first block holds it for all."""
    for (number, path), *others in plan.chain["shared"]:
        first, names = plan.owner(model, number, path)
        table = first.get_submodule(".".join(names[:-1]))
        for place, its_path in others:
            module, names = plan.owner(model, place, its_path)
            attention = module.get_submodule(".".join(names[:-2]))
            if names[1:] and not hasattr(attention, names[-2]):
                attention.add_module(names[-2], copy.deepcopy(table))
                attention.has_relative_attention_bias = True


class LayerLoop(nn.Module):
    """Layers in order, and FSDP's root: the next layer is gathered while one computes.

    It is separate from `Part` because `torch.distributed.pipelining` controls the reductions of an FSDP module itself.
    """

    def __init__(self, layers: dict[str, Layer], side: dict, stage_mesh: DeviceMesh, layouts: list) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.side, self.stage_mesh, self.layouts = side, stage_mesh, layouts

    def forward(self, flow: Flow, targets: dict[str, Tensor]) -> Flow:
        """Return the output of the last layer; every layer reads its input in its own layout, also in backward."""
        for layer, (have, want) in zip(self.layers.values(), self.layouts, strict=True):
            if have != want:
                moved = partial(self.moved, have, want)
                flow = tuple(map(moved, flow)) if isinstance(flow, tuple) else moved(flow)
            flow = layer(flow, self.side, targets)
        return flow

    def moved(self, have: list[Placement], want: list[Placement], hidden: Tensor) -> Tensor:
        """Redistribute a hidden state to another layout."""
        whole = DTensor.from_local(hidden, self.stage_mesh, have, run_check=False)
        return whole.redistribute(placements=want).to_local()


class Part(nn.Module):
    """A part of the model that maps samples or hidden states [B, s, H] to hidden states or the loss."""

    def __init__(self, loop: LayerLoop, num_microbatches: int) -> None:
        super().__init__()
        self.loop = loop
        self.num_microbatches, self.num_backwards = num_microbatches, 0

    def forward(self, *flow: Tensor, **targets: Tensor) -> Flow:
        """Run the forward pass of one microbatch."""
        output = self.loop(flow if len(flow) > 1 else flow[0], targets)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(self.backward_begins)
        return output

    def backward_begins(self, _gradient: Tensor) -> None:
        """Set FSDP to reduce gradients over shards in every backward pass, and over replicas in the last of a step.

        A layer kept whole is reduced in the last backward pass alone, and its parameters are freed only then.
        """
        self.num_backwards += 1
        is_last = self.num_backwards % self.num_microbatches == 0
        self.loop.set_is_last_backward(is_last)
        for layer in self.loop.layers.values():
            layer.set_requires_all_reduce(is_last)
            if layer.is_kept_whole:
                layer.set_requires_gradient_sync(is_last)
                layer.set_reshard_after_backward(is_last)


def attend_with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend with sinks (``s_aux``), if there are any, as one more key whose value is zero, in a fused kernel.

    Eight more entries of each head make the product of a query with that key its sink. Without a mask there is one more
    query too, so that causal attention stays square.
    """
    size, width, front = query.size(-1), value.size(-1), int(attention_mask is None and s_aux is not None)
    if s_aux is not None:
        scaling = size**-0.5 if scaling is None else scaling
        query = pad(query, (0, 8, front, 0))
        query[..., size] = (s_aux / scaling).unsqueeze(1)
        key = pad(key, (0, 8, 1, 0))
        key[:, :, 0, size] = 1
        value = pad(value, (0, 8, 1, 0))
        if attention_mask is not None:
            attention_mask = pad(attention_mask, (1, 0), value=1.0)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    return output[:, front:, :, :width], None


AttentionInterface.register("sinks", attend_with_sinks)
AttentionMaskInterface.register("sinks", sdpa_mask)


def build_parts(plan: Plan, meshes: dict[tuple, DeviceMesh], device: torch.device, seed: int) -> dict[int, Part]:
    """Build the parts of this rank by place in the pipeline; a layer is sharded before the next allocates memory."""
    config = AutoConfig.for_model(**plan.model["config"])
    attention = plan.chain["attention"]
    with torch.device("meta"):
        model = MODELS[plan.chain["task"]].from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.train()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False
    list_blocks(model)
    give_tables(plan, model)
    fill_buffers(plan, model, device)
    bare = copy.deepcopy(model)  # never gets weights
    side, stage_mesh = shared_inputs(plan, bare, device), build_stage_mesh(plan, device.type)
    layouts = [placements(strategy, stage_mesh) for strategy in plan.strategies]
    moves = list(zip([layouts[0], *layouts[:-1]], layouts, strict=True))  # hidden states are sent as they were made
    parts = {}
    for index, numbers in enumerate(plan.parts):
        if plan.stage_of_part[index] != dist.get_rank() // plan.stage_size:
            continue
        layers = {}
        for number in numbers:
            strategy, mesh = plan.strategies[number], meshes[plan.strategies[number].levels]
            layer = layers[str(number)] = Layer(plan, model, bare, number)
            first_weights(plan, model, layer, number, device, seed)
            if strategy.degree("tp") > 1:
                shard_tensors(layer, mesh["tp"], strategy.sp)
            shard_data(layer, strategy, mesh, plan.dtype)
        loop = LayerLoop(layers, side, stage_mesh, moves[numbers.start : numbers.stop])
        parts[index] = Part(fully_shard(loop, mesh=mesh["one"]), plan.num_microbatches)
    return parts


Step = Callable[[Tensor | None, dict[str, Tensor]], list[Tensor]]
"""Function that runs forward and backward of a global batch on this rank's inputs and targets; returns the losses."""


def accumulation_step(plan: Plan, parts: dict[int, Part]) -> Step:
    """Return a step without a pipeline: microbatches one after another."""

    def step(inputs: Tensor | None, targets: dict[str, Tensor]) -> list[Tensor]:
        losses = []
        for each, *rest in zip(
            *(part.chunk(plan.num_microbatches) for part in (inputs, *targets.values())), strict=True
        ):
            loss = parts[0](each, **dict(zip(targets, rest, strict=True)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def pipeline_step(plan: Plan, parts: dict[int, Part], group: dist.ProcessGroup | None, device: torch.device) -> Step:
    """Return a step through the pipeline, in the order of the plan's schedule."""
    examples = [example(plan, part.start - 1) for part in plan.parts] + [example(plan, len(plan.strategies) - 1)]
    stages = [
        PipelineStage(part, index, len(plan.parts), device, examples[index], examples[index + 1], group=group)
        for index, part in parts.items()
    ]
    schedule_class = get_schedule_class(plan.schedule.replace("-", ""))
    schedule = schedule_class(
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        plan.num_microbatches,
        loss_fn=lambda loss, _labels: loss,
        scale_grads=False,
    )

    def step(inputs: Tensor | None, targets: dict[str, Tensor]) -> list[Tensor]:
        losses = []
        of_loss = {"target": targets["labels"], "losses": losses} if "labels" in targets else {}
        schedule.step(*(() if inputs is None else (inputs,)), **of_loss, **targets, return_outputs=False)
        return [loss.detach() for loss in losses]

    return step


def example(plan: Plan, layer: int) -> tuple[Tensor, ...]:
    """Return meta tensors of a layer's output, or of the first one's input (layer -1), for one microbatch."""
    if layer < 0:
        return (plan.blank(plan.share(plan.strategies[0]), plan.seq_len, "meta"),)
    if layer == len(plan.strategies) - 1:
        return (torch.empty((), device="meta", requires_grad=True),)
    strategy = plan.strategies[layer]
    ranks = strategy.degree("tp") if strategy.sp else 1
    shapes = [(plan.share(strategy), length // ranks, width) for length, width in plan.chain["layers"][layer]["flow"]]
    return tuple(torch.empty(shape, dtype=plan.dtype, device="meta", requires_grad=True) for shape in shapes)


def shared_groups(plan: Plan) -> list[dist.ProcessGroup | None]:
    """Return a group for each shared matrix: the ranks at this one's place in its stages; None for one stage."""
    found, pairs = [], list(zip(plan.parts, plan.stage_of_part, strict=True))
    for copies in plan.chain["shared"]:
        stages = sorted({stage for part, stage in pairs if any(number in part for number, _ in copies)})
        found.append(None)
        for place in range(plan.stage_size if len(stages) > 1 else 0):
            ranks = [stage * plan.stage_size + place for stage in stages]
            group = dist.new_group(ranks)
            found[-1] = group if dist.get_rank() in ranks else found[-1]
    return found


@torch.no_grad()
def sum_shared_gradients(
    plan: Plan, copies: list[list], layers: dict[str, Layer], group: dist.ProcessGroup | None
) -> None:
    """Replace the gradients of layers that share a matrix, as embedding and head, by their sum, on any stages."""
    gradients = [layers[str(number)].get_parameter(path).grad for number, path in copies if str(number) in layers]
    if not gradients:
        return
    are_alike = len({plan.strategies[number].levels for number, _ in copies}) == 1
    # if all are divided identically, each rank adds its parts; else whole matrices
    total = sum(each.to_local() if are_alike else each.full_tensor() for each in gradients).contiguous()
    if group is not None:
        dist.all_reduce(total, group=group)
    for each in gradients:
        whole = None if are_alike else DTensor.from_local(total, each.device_mesh, run_check=False)
        each.to_local().copy_(total if are_alike else whole.redistribute(placements=each.placements).to_local())


@torch.no_grad()
def clip_gradients(plan: Plan, layers: dict[str, Layer], max_norm: float, device: torch.device) -> Tensor:
    """Scale all gradients to a global norm of at most ``max_norm``; an entry on several ranks counts once."""
    named = [([int(number), name], each) for number, layer in layers.items() for name, each in layer.named_parameters()]
    named = [(name, each) for name, each in named if each.grad is not None]  # no sample trains the others
    square = torch.zeros((), device=device)
    for name, parameter in named:
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
        if name not in plan.copies(*name)[1:]:
            square += parameter.grad.to_local().float().square().sum() * shards / plan.stage_size
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, parameter in named:
        parameter.grad.to_local().mul_(scale)
    return norm


def open_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """Open the token ids of a file, read in place, in the formats of `steelyard train`; those of a text are its bytes.

    A .bin file holds unsigned little-endian numbers: of the type in its name (tokens.uint32.bin), else of 16 bits if
    the vocabulary has at most 65,536 tokens, else of 32.
    """
    if path.suffix == ".npy":
        return np.load(path, "r")
    if path.is_dir() or path.suffix in (".jsonl", ".ndjson"):
        raise ValueError("holds documents, which only `steelyard train` tokenizes: pass token ids (.npy, .bin)")
    named = re.search(r"\.(uint8|uint16|uint32)\.bin$", path.name)
    by_vocabulary = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype = named[1] if named else by_vocabulary if path.suffix == ".bin" else "uint8"
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")


def image_files(path: Path, num_classes: int) -> list[tuple[Path, int]]:
    """Return the images of a folder that has a folder for each class, and their classes."""
    suffixes = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
    classes = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    found = [(file, label) for label, each in enumerate(classes) for file in sorted(each.rglob("*"))]
    found = [(file, label) for file, label in found if file.suffix.lower() in suffixes]
    if not found or len(classes) > num_classes:
        raise ValueError(
            f"holds {len(found)} images in {len(classes)} folders, but the model has {num_classes} classes"
        )
    return found


def read_image(file: Path, shape: list[int]) -> np.ndarray:
    """Return the values [C, H, W], from -1 to 1, of an image that is scaled to cover the shape and center-cropped."""
    from PIL import Image, ImageOps

    with Image.open(file) as opened:
        image = ImageOps.fit(opened.convert("L" if shape[0] == 1 else "RGB"), (shape[2], shape[1]))
    return np.asarray(image, np.float32).reshape(*shape[1:], -1).transpose(2, 0, 1) / np.float32(127.5) - 1


class Data:
    """Samples from a .npy or .bin file of token ids, the bytes of a text, or a folder of images."""

    def __init__(self, plan: Plan, path: str, seed: int, mask_token: int | None = None) -> None:
        self.plan, self.path, self.seed, self.task = plan, Path(path), seed, plan.chain["task"]
        is_text = self.path.suffix not in (".npy", ".bin")
        self.mask_token = 256 if mask_token is None and is_text else mask_token
        self.length = plan.seq_len * (2 if self.task == "seq2seq-lm" else 1)
        vocab_size = plan.chain["vocab_size"]
        try:
            is_image = self.task == "image-classification"
            self.content = (image_files if is_image else open_tokens)(self.path, vocab_size)
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: {error}") from None
        self.num_samples = len(self.content) if is_image else (len(self.content) - 1) // self.length
        is_row = is_image or (self.content.ndim == 1 and self.content.dtype.kind in "iu")
        if not is_row or self.num_samples < 1:
            raise SystemExit(f"{path}: expected a row of at least {self.length + 1} token ids")
        if self.task == "masked-lm" and not 0 <= (-1 if self.mask_token is None else self.mask_token) < vocab_size:
            raise SystemExit(f"{path}: expected a --mask-token from 0 to {vocab_size - 1}")

    def read(self, step: int, layer: int, mesh: DeviceMesh, part: int) -> Tensor:
        """Return this rank's inputs (part 0) or targets (1) of a step for a layer, microbatch after microbatch."""
        strategy = self.plan.strategies[layer]
        place, share = 0, self.plan.share(strategy)
        for dimension, degree in strategy.levels:
            place = place if dimension == "tp" else place * degree + mesh.get_local_rank(dimension)
        size = self.plan.global_batch // self.plan.num_microbatches
        firsts = range(step * self.plan.global_batch + place * share, (step + 1) * self.plan.global_batch, size)
        found = [self.pair(first + index)[part] for first in firsts for index in range(share)]
        if isinstance(found[0], Path):
            found = [read_image(file, self.plan.chain["image"]) for file in found]
        return torch.from_numpy(np.stack(found))

    def pair(self, number: int) -> tuple[np.ndarray | Path, np.ndarray | int]:
        """Return the input of the ``number``-th sample, or its file, and its targets."""
        place = self.sample(number)
        if self.task == "image-classification":
            return self.content[place]
        row = self.content[place * self.length : (place + 1) * self.length + 1].astype(np.int64)
        if row.min() < 0 or row.max() >= self.plan.chain["vocab_size"]:
            raise SystemExit(f"{self.path}: expected token ids from 0 to {self.plan.chain['vocab_size'] - 1}")
        if self.task == "masked-lm":
            return self.masked(row[:-1], number)
        cut = self.plan.seq_len if self.task == "seq2seq-lm" else 1
        return row[: self.plan.seq_len], row[cut : cut + self.plan.seq_len]

    def masked(self, tokens: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a sample with masked tokens, and these as targets, else -100 (Devlin et al. 2019, section 3.1)."""
        generator = np.random.default_rng((mixed(self.seed), number))
        chosen = generator.choice(len(tokens), self.plan.targets_of_sample, replace=False, shuffle=False)
        fate = generator.random(len(chosen))
        others = generator.integers(0, self.plan.chain["vocab_size"], len(chosen))
        inputs, targets = tokens.copy(), np.full_like(tokens, -100)
        inputs[chosen] = np.where(fate < 0.8, self.mask_token, np.where(fate < 0.9, others, tokens[chosen]))
        targets[chosen] = tokens[chosen]
        return inputs, targets

    def sample(self, number: int) -> int:
        """Return the index of a run's ``number``-th sample; every epoch has another order (a Feistel network)."""
        epoch, place = divmod(number, self.num_samples)
        bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        key = mixed(mixed(self.seed) ^ epoch)
        while True:
            left, right = divmod(place, 1 << bits)
            for turn in range(4):
                left, right = right, left ^ (mixed(key ^ mixed(right * 4 + turn)) & ((1 << bits) - 1))
            place = left << bits | right
            if place < self.num_samples:
                return place


def mixed(value: int) -> int:
    """Return a 64-bit number that depends on every bit of the value (Steele et al. 2014)."""
    word = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & word
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
    return value ^ (value >> 31)


def make_optimizers(plan: Plan, layers: dict[str, Layer], options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Make an AdamW for each mesh and placement, because fused updates do not mix meshes; only matrices decay."""
    groups = {}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            of_layers = [int(number), *(copy[0] for copy in plan.copies(int(number), name))]
            roles = {plan.chain["kinds"][plan.chain["layers"][each]["kind"]]["role"] for each in of_layers}
            is_table = "embedding" in roles and parameter.ndim != 4  # of tokens, places or classes, and no convolution
            decays = parameter.ndim > 1 and "bias" not in name and not is_table
            groups.setdefault((parameter.device_mesh, parameter.placements, decays), []).append(parameter)
    return [
        torch.optim.AdamW(
            group, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay * decays, fused=True
        )
        for (_, _, decays), group in groups.items()
    ]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Learning rate of a step: a linear warm-up, then a cosine to a tenth."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train(plan: Plan, device: torch.device, options: argparse.Namespace) -> None:
    """Train and report every step; the process group must have as many processes as the plan has ranks."""
    if dist.get_world_size() != plan.num_stages * plan.stage_size:
        raise SystemExit(f"this plan is for {plan.num_stages * plan.stage_size} processes, not {dist.get_world_size()}")
    torch.manual_seed(options.seed)  # of dropout, which must be identical on the ranks of a tp group
    meshes = build_meshes(plan, device.type)
    parts = build_parts(plan, meshes, device, options.seed)
    layers = {number: layer for part in parts.values() for number, layer in part.loop.layers.items()}
    optimizers, groups = make_optimizers(plan, layers, options), shared_groups(plan)
    data, end = Data(plan, options.data, options.seed, options.mask_token), len(plan.strategies) - 1
    mesh_of, is_last = [meshes[strategy.levels] for strategy in plan.strategies], len(plan.parts) - 1 in parts
    run_step = accumulation_step(plan, parts)
    if plan.num_stages > 1:
        run_step = pipeline_step(plan, parts, mesh_of[0].get_group("pp"), device)
    for step in range(options.steps):
        started, targets = time.perf_counter(), {}
        inputs = data.read(step, 0, mesh_of[0], 0).to(device) if 0 in parts else None
        if is_last:
            targets["labels"] = data.read(step, end, mesh_of[end], 1).to(device)
        if plan.decoder and str(plan.decoder) in layers:  # the decoder reads the targets shifted by one
            ids = data.read(step, plan.decoder, mesh_of[plan.decoder], 1).to(device)
            targets["decoder_ids"] = nn.functional.pad(ids[:, :-1], (1, 0), value=plan.chain["decoder_start"])
        with tensor_parallel.loss_parallel() if is_last and plan.strategies[end].degree("tp") > 1 else nullcontext():
            losses = run_step(inputs, targets)
        for copies, group in zip(plan.chain["shared"], groups, strict=True):
            sum_shared_gradients(plan, copies, layers, group)
        norm = clip_gradients(plan, layers, options.max_grad_norm, device)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, options)
            optimizer.step()
            optimizer.zero_grad()
        loss = sum(losses, torch.zeros((), device=device)) / plan.strategies[end].degree("tp")
        dist.all_reduce(loss)
        report(options, step=step + 1, loss=loss.item(), grad_norm=norm.item(), time_s=time.perf_counter() - started)


def report(options: argparse.Namespace, **line: float) -> None:
    """Print the line of a step and append it to the metrics file, on the first rank."""
    if dist.get_rank() == 0:
        print("step {step}  loss {loss:.4f}  grad norm {grad_norm:.3f}  {time_s:.3f} s".format(**line), flush=True)
    if dist.get_rank() == 0 and options.metrics:
        with open(options.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Join the other processes of torchrun, and train."""
    parser = argparse.ArgumentParser(description="Train a model under a plan.")
    parser.add_argument("--plan", default=Path(__file__).with_suffix(".json"), help="default: this script's .json")
    parser.add_argument("--data", required=True, help=".npy or .bin file of token ids, a text, or a folder of images")
    parser.add_argument("--mask-token", type=int, help="mask token ID for masked-token prediction; 256 for a text")
    numbers = {"steps": 100, "lr": 3e-4, "warmup-steps": 10, "weight-decay": 0.1, "max-grad-norm": 1.0, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--metrics", help="file for one JSON line per step")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # of the encoder's output, which decoder blocks pass on and never write into
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(Plan(options.plan), device, options)
    dist.barrier()  # leaving a group in which another rank still works may abort that rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
