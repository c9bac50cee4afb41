"""Trains a decoder under a plan with stock PyTorch; needs torch, transformers and numpy, and nothing else.

    torchrun --nproc-per-node 8 train.py --data tokens.bin --steps 1000

The plan is the JSON file beside this one that has its name (``train.json``), or ``--plan``. It says for every layer how
the ranks of a pipeline stage share it. What it may say, and where that is carried out:

| in the plan                 | carried out by                                                      | here            |
|-----------------------------|---------------------------------------------------------------------|-----------------|
| ``"parallel": "fsdp4-tp2"`` | a `DeviceMesh` of 4 × 2 ranks; ``tp`` works on neighbouring ones    | `build_meshes`  |
| ``tp``, with or without sp  | `parallelize_module`, each module in the style that the plan says   | `shard_tensors` |
| ``fsdp``, ``dp``            | `fully_shard`, over the data ranks, or over one rank and replicated | `shard_data`    |
| ``remat``                   | `checkpoint`                                                        | `Layer`         |
| neighbours that differ      | `DTensor.redistribute` of the hidden state between them             | `LayerLoop`     |
| ``stages``, ``schedule``    | `torch.distributed.pipelining`                                      | `pipeline_step` |

Samples, first weights and losses do not depend on the plan: one process and many train the same model. So a rank's loss
is its part of the sum over the global batch, divided by all tokens of it, and gradients are added, never averaged.

Legend of shapes: B samples of this rank in a microbatch, S sequence, s sequence of this rank (S/tp under sp), H hidden.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Strategy:
    """How the ranks of a stage share a layer: kinds of parallelism with their degrees, outermost first."""

    levels: tuple[tuple[str, int], ...]
    sp: bool = False  # whether tp ranks divide the sequence between attention and feed-forward part
    zero: int = 3  # 3 frees gathered parameters between forward and backward, 2 keeps them
    remat: str = "none"  # what is computed again in backward: none, selective or full

    def degree(self, *kinds: str) -> int:
        """Ranks over which these kinds divide the layer."""
        return math.prod(degree for kind, degree in self.levels if kind in kinds)


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
                levels = tuple((kind, int(degree)) for kind, degree in re.findall(r"([a-z]+)(\d+)", run["parallel"]))
                if not {kind for kind, _ in levels} <= {"dp", "fsdp", "tp"}:
                    raise SystemExit(f"layers {run['layers']}: this script cannot carry out {run['parallel']!r}")
                rest = {key: value for key, value in run.items() if key not in ("layers", "parallel")}
                self.strategies += [Strategy(levels, **rest)] * (run["layers"][1] + 1 - run["layers"][0])
            self.parts.append(range(first, len(self.strategies)))
        self.stage_size = self.stages[0]["ranks"][1] + 1 - self.stages[0]["ranks"][0]
        self.num_stages = len(self.stages)
        self.stage_of_part = [index % self.num_stages for index in range(len(self.parts))]

    def share(self, strategy: Strategy) -> int:
        """Samples B of a microbatch on one of the ranks that divide them."""
        return self.global_batch // self.num_microbatches // strategy.degree("dp", "fsdp")


def build_meshes(plan: Plan, device_type: str) -> dict[tuple, DeviceMesh]:
    """For each way of sharing a layer, all ranks as axes: stages, then its levels, then an axis of one rank."""
    meshes = {}
    for levels in dict.fromkeys(strategy.levels for strategy in plan.strategies):
        names, degrees = zip(("pp", plan.num_stages), *levels, ("one", 1), strict=True)
        meshes[levels] = init_device_mesh(device_type, degrees, mesh_dim_names=names)
    return meshes


def build_stage_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The ranks of this stage as axes of prime size: on these the layouts of any two layers can be told apart."""
    sizes, rest = [], plan.stage_size
    for factor in range(2, plan.stage_size + 1):
        while rest % factor == 0:
            sizes, rest = [factor, *sizes], rest // factor
    sizes = sizes or [1]
    names = tuple(f"axis{number}" for number in range(len(sizes)))
    return init_device_mesh(device_type, (plan.num_stages, *sizes), mesh_dim_names=("pp", *names))[names]


def placements(strategy: Strategy, stage_mesh: DeviceMesh) -> list[Placement]:
    """How the hidden state [B, s, H] of a layer lies on each axis of the stage; a level is a run of axes."""
    sizes, found = list(stage_mesh.shape), []
    for kind, degree in strategy.levels:
        product = 1
        while product < degree:
            product *= sizes.pop(0)
            found.append(Shard(0) if kind != "tp" else Shard(1) if strategy.sp else Replicate())
    return found or [Replicate()]


_aten, _collective = torch.ops.aten, torch.ops._c10d_functional
KEPT = [  # by selective remat: matrix products, attention, and what tensor parallelism reduces over ranks
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


OPERATIONS = {"mul": torch.mul, "div": torch.div, "tanh": torch.tanh}  # of hidden states and logits with numbers


class Layer(nn.Module):
    """A layer of the chain: the embedding, a block of transformers unchanged, or the head with the loss."""

    def __init__(self, plan: Plan, model: PreTrainedModel, number: int) -> None:
        super().__init__()
        entry = plan.chain["layers"][number]
        self.kind_name, self.steps = entry["kind"], entry["steps"]
        self.kind = plan.chain["kinds"][self.kind_name]
        self.remat = plan.strategies[number].remat
        self.num_targets = plan.global_batch * plan.seq_len
        for name, path in entry["modules"].items():
            self.add_module(name, model.get_submodule(path))

    def forward(self, inputs: Tensor, side: dict, labels: Tensor | None) -> Tensor:
        """Token ids [B, S] or a hidden state [B, s, H] to a hidden state, or to the loss."""
        if self.remat == "none":
            return self.compute(inputs, side, labels)
        return checkpoint(self.compute, inputs, side, labels, use_reentrant=False, context_fn=REMAT[self.remat])

    def compute(self, inputs: Tensor, side: dict, labels: Tensor | None) -> Tensor:
        """The forward pass, which remat runs again in backward."""
        if self.kind["role"] == "block":
            places, names = side[self.kind_name]
            outputs = self.block(inputs, *places, **names)
            return outputs[0] if isinstance(outputs, tuple) else outputs
        found = inputs
        for name, *operands in self.steps:
            if name == "call":
                found = self.get_submodule(*operands)(found)
            elif name == "positions":
                found = found + self.get_submodule(*operands)(torch.arange(inputs.shape[1], device=inputs.device)[None])
            else:
                found = OPERATIONS[name](found, *operands)
        if self.kind["role"] == "embedding":
            return found
        loss = nn.functional.cross_entropy(found.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return (loss.to_local() if isinstance(loss, DTensor) else loss) / self.num_targets


@torch.no_grad()
def side_inputs(plan: Plan, model: PreTrainedModel, device: torch.device) -> dict[str, tuple]:
    """What the model gives blocks of each kind beside the hidden state (masks, rotary embeddings), by place and name.

    Its own forward pass shows it, in which all modules of layers only return a hidden state without values.
    """
    like = torch.zeros((1, plan.seq_len, plan.chain["hidden_size"]), dtype=plan.dtype, device=device)
    found, holes = {}, {}

    def hole(kind: str, _hidden: Tensor, *places: object, **names: object) -> Tensor | tuple:
        found[kind] = places, names
        is_block = plan.chain["kinds"][kind]["role"] == "block"
        return (like,) * plan.chain["num_results"] if is_block and plan.chain["num_results"] else like

    for entry in plan.chain["layers"]:
        holes |= {model.get_submodule(path): entry["kind"] for path in entry["modules"].values()}
    inside = {module for each in holes for module in each.modules()}
    for module in model.modules():
        if module not in inside and any(True for _ in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    for each, kind in holes.items():
        each.forward = partial(hole, kind)
    model(torch.zeros((1, plan.seq_len), dtype=torch.long, device=device), use_cache=False)
    for each in holes:
        del each.forward
    return found


def shard_tensors(layer: Layer, mesh: DeviceMesh, sp: bool) -> None:
    """Divides the matrices of a layer over the ranks of ``mesh``, module by module, each in a style of `STYLES`."""
    named = layer.kind["styles"]
    between = Shard(1) if sp else Replicate()  # of the hidden state between attention and feed-forward part
    styles = {path: STYLES[name.partition(":")[0]](between, name.partition(":")[2]) for path, name in named.items()}
    tensor_parallel.parallelize_module(layer, mesh, {path: style for path, style in styles.items() if style})


def whole_input(between: Placement, keyword: str) -> tensor_parallel.ParallelStyle:
    """The whole sequence for attention or the feed-forward part, which read it several times: as one DTensor."""
    if keyword:
        layouts = {"input_kwarg_layouts": {keyword: between}, "desired_input_kwarg_layouts": {keyword: Replicate()}}
    else:
        layouts = {"input_layouts": (between,), "desired_input_layouts": (Replicate(),)}
    return tensor_parallel.PrepareModuleInput(**layouts, use_local_output=False)


STYLES = {
    "colwise": lambda between, _: tensor_parallel.ColwiseParallel(),
    "rowwise": lambda between, _: tensor_parallel.RowwiseParallel(output_layouts=between),
    # what is computed between these two every rank computes whole
    "colwise_gathered": lambda between, _: tensor_parallel.ColwiseParallel(output_layouts=Replicate()),
    "rowwise_of_whole": lambda between, _: tensor_parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=between
    ),
    "gather": whole_input,
    # norms on this rank's part of the sequence, where it has a part
    "sequence_local": lambda between, _: (
        tensor_parallel.SequenceParallel(use_local_output=True) if between.is_shard() else None
    ),
    # norms of query and key [B, S, heads, width], of which each rank has some heads
    "replicated_with_grad_allreduce": lambda between, _: tensor_parallel.SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
    # embedding and head are divided by tokens: the logits stay so, and `loss_parallel` works on their parts
    "vocabulary": lambda between, _: tensor_parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    "logits": lambda between, _: tensor_parallel.ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1), use_local_output=False
    ),
}


def shard_data(layer: Layer, strategy: Strategy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 over the data ranks: ``fsdp`` divides parameters, ``dp`` replicates them, both do both (HSDP)."""
    kinds = tuple(kind for kind, _ in strategy.levels if kind != "tp")
    axes = kinds if "fsdp" in kinds else (*kinds, "one")
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    fully_shard(layer, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=strategy.zero == 3)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)


def first_weights(
    plan: Plan, model: PreTrainedModel, layer: Layer, number: int, device: torch.device, seed: int
) -> None:
    """First weights that depend on the seed and the layer's place alone, so that any plan starts alike."""

    def fill(module: nn.Module, place: int) -> None:
        numbers = [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        for each in numbers:
            each.data.fill_(math.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + place)
            for submodule in reversed(list(module.modules())):
                model._init_weights(submodule)
        if any(each.isnan().any() for each in numbers):
            raise SystemExit(f"layer {number}: transformers gives a part of {type(module).__name__} no first weights")

    owners = [layer.get_submodule(path.rpartition(".")[0]) for place, path in plan.chain["tied"][1:] if place == number]
    for owner in owners:  # a matrix of its own instead of the embedding's
        owner.weight = nn.Parameter(torch.empty_like(owner.weight))
    for module in layer.children():
        module.to_empty(device=device)
        fill(module, number)
    for owner in owners:
        table = nn.Embedding(*owner.weight.shape, device=device)
        table.padding_idx = model.get_input_embeddings().padding_idx
        fill(table, 0)
        owner.weight = table.weight


class LayerLoop(nn.Module):
    """Layers in order, and FSDP's root: the next layer is gathered while one computes.

    Not the part itself: `torch.distributed.pipelining` takes an FSDP module's reductions into its own hands.
    """

    def __init__(self, layers: dict[str, Layer], side: dict, stage_mesh: DeviceMesh, layouts: list) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.side, self.stage_mesh, self.layouts = side, stage_mesh, layouts

    def forward(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """The output of the last layer, each layer reading the hidden state in its own layout; backward likewise."""
        for layer, (have, want) in zip(self.layers.values(), self.layouts, strict=True):
            if have != want:
                whole = DTensor.from_local(hidden, self.stage_mesh, have, run_check=False)
                hidden = whole.redistribute(placements=want).to_local()
            hidden = layer(hidden, self.side, labels)
        return hidden


class Part(nn.Module):
    """A part of the model: token ids [B, S] or a hidden state [B, s, H] to a hidden state or the loss."""

    def __init__(self, loop: LayerLoop, num_microbatches: int) -> None:
        super().__init__()
        self.loop = loop
        self.num_microbatches, self.num_backwards = num_microbatches, 0

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """The pass of one microbatch."""
        output = self.loop(inputs, labels)
        if output.requires_grad:
            output.register_hook(self.backward_begins)
        return output

    def backward_begins(self, _gradient: Tensor) -> None:
        """Gradients are divided over shards in every backward pass, and added over replicas in the last of a step."""
        self.num_backwards += 1
        is_last = self.num_backwards % self.num_microbatches == 0
        self.loop.set_is_last_backward(is_last)
        for layer in self.loop.layers.values():
            layer.set_requires_all_reduce(is_last)


def build_parts(plan: Plan, meshes: dict[tuple, DeviceMesh], device: torch.device, seed: int) -> dict[int, Part]:
    """The parts of this rank by their place in the pipeline; a layer is shared before the next takes memory."""
    config = AutoConfig.for_model(**plan.model["config"])
    attention = "sdpa" if plan.chain["fused_attention"] else "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.train()
    side, stage_mesh = side_inputs(plan, model, device), build_stage_mesh(plan, device.type)
    layouts = [placements(strategy, stage_mesh) for strategy in plan.strategies]
    moves = list(zip([layouts[0], *layouts[:-1]], layouts, strict=True))  # a hidden state is sent as it was made
    parts = {}
    for index, numbers in enumerate(plan.parts):
        if plan.stage_of_part[index] != dist.get_rank() // plan.stage_size:
            continue
        layers = {}
        for number in numbers:
            strategy, mesh = plan.strategies[number], meshes[plan.strategies[number].levels]
            layer = layers[str(number)] = Layer(plan, model, number)
            first_weights(plan, model, layer, number, device, seed)
            if strategy.degree("tp") > 1:
                shard_tensors(layer, mesh["tp"], strategy.sp)
            shard_data(layer, strategy, mesh, plan.dtype)
        loop = LayerLoop(layers, side, stage_mesh, moves[numbers.start : numbers.stop])
        parts[index] = Part(fully_shard(loop, mesh=mesh["one"]), plan.num_microbatches)
    return parts


Step = Callable[[Tensor | None, Tensor | None], list[Tensor]]
"""Runs forward and backward of a global batch, of which it gets this rank's tokens and labels; returns the losses."""


def accumulation_step(plan: Plan, parts: dict[int, Part]) -> Step:
    """A step without a pipeline: microbatches one after the other."""

    def step(tokens: Tensor | None, labels: Tensor | None) -> list[Tensor]:
        losses = []
        for inputs, targets in zip(*(each.chunk(plan.num_microbatches) for each in (tokens, labels)), strict=True):
            loss = parts[0](inputs, targets)
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def pipeline_step(plan: Plan, parts: dict[int, Part], group: dist.ProcessGroup | None, device: torch.device) -> Step:
    """A step through the pipeline, in the order of the plan's schedule."""
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

    def step(tokens: Tensor | None, labels: Tensor | None) -> list[Tensor]:
        losses = []
        inputs = () if tokens is None else (tokens,)
        targets = {} if labels is None else {"target": labels, "losses": losses, "labels": labels}
        schedule.step(*inputs, **targets, return_outputs=False)
        return [loss.detach() for loss in losses]

    return step


def example(plan: Plan, layer: int) -> Tensor:
    """A tensor like what flows out of a layer, or into the first one (layer -1), for one microbatch."""
    if layer < 0:
        return torch.empty(plan.share(plan.strategies[0]), plan.seq_len, dtype=torch.long, device="meta")
    if layer == len(plan.strategies) - 1:
        return torch.empty((), device="meta", requires_grad=True)
    strategy = plan.strategies[layer]
    sequence = plan.seq_len // (strategy.degree("tp") if strategy.sp else 1)
    shape = (plan.share(strategy), sequence, plan.chain["hidden_size"])
    return torch.empty(shape, dtype=plan.dtype, device="meta", requires_grad=True)


def tied_group(plan: Plan) -> dist.ProcessGroup | None:
    """The group of the ranks at this one's place in the stages that hold a tied matrix; None for one stage."""
    tied = [number for number, _ in plan.chain["tied"]]
    pairs = zip(plan.parts, plan.stage_of_part, strict=True)
    stages = sorted({stage for part, stage in pairs if any(number in part for number in tied)})
    mine = None
    for place in range(plan.stage_size if len(stages) > 1 else 0):
        ranks = [stage * plan.stage_size + place for stage in stages]
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


@torch.no_grad()
def sum_tied_gradients(plan: Plan, layers: dict[str, Layer], group: dist.ProcessGroup | None) -> None:
    """Gives embedding and head, if they hold one matrix, the sum of their gradients, wherever they lie."""
    tied = plan.chain["tied"]
    gradients = [layers[str(number)].get_parameter(path).grad for number, path in tied if str(number) in layers]
    if not gradients:
        return
    are_alike = len({plan.strategies[number].levels for number, _ in tied}) == 1
    # where all are divided alike, each rank adds its parts; else whole matrices
    total = sum(each.to_local() if are_alike else each.full_tensor() for each in gradients).contiguous()
    if group is not None:
        dist.all_reduce(total, group=group)
    for each in gradients:
        whole = None if are_alike else DTensor.from_local(total, each.device_mesh, run_check=False)
        each.to_local().copy_(total if are_alike else whole.redistribute(placements=each.placements).to_local())


@torch.no_grad()
def clip_gradients(plan: Plan, layers: dict[str, Layer], max_norm: float, device: torch.device) -> Tensor:
    """Scales all gradients to a global norm of at most ``max_norm``; an entry counts once, whoever holds it."""
    named = [([int(number), name], each) for number, layer in layers.items() for name, each in layer.named_parameters()]
    square = torch.zeros((), device=device)
    for name, parameter in named:
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
        if name not in plan.chain["tied"][1:]:
            square += parameter.grad.to_local().float().square().sum() * shards / plan.stage_size
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, parameter in named:
        parameter.grad.to_local().mul_(scale)
    return norm


def open_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """The token ids of a file, read in place, in the formats of `steelyard train`; a text's are its bytes.

    A .bin file holds unsigned little-endian numbers: of the type in its name (tokens.uint32.bin), else of 16 bits where
    the vocabulary has at most 65,536 tokens, else of 32.
    """
    if path.suffix == ".npy":
        return np.load(path, "r")
    if path.is_dir() or path.suffix in (".jsonl", ".ndjson"):
        raise ValueError("holds documents, of which `steelyard train` makes tokens: give a .npy or .bin file of those")
    named = re.search(r"\.(uint8|uint16|uint32)\.bin$", path.name)
    by_vocabulary = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype = named[1] if named else by_vocabulary if path.suffix == ".bin" else "uint8"
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")


class Data:
    """Samples of S + 1 tokens from a .npy or .bin file of token ids, or from the bytes of a text."""

    def __init__(self, plan: Plan, path: str, seed: int) -> None:
        self.plan, self.path, self.seed = plan, Path(path), seed
        try:
            self.tokens = open_tokens(self.path, plan.chain["vocab_size"])
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: {error}") from None
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu" or len(self.tokens) <= plan.seq_len:
            raise SystemExit(f"{path}: expected a row of at least {plan.seq_len + 1} token ids")
        self.num_samples = (len(self.tokens) - 1) // plan.seq_len

    def read(self, step: int, strategy: Strategy, mesh: DeviceMesh) -> Tensor:
        """The samples [·, S + 1] of a step that this rank reads for a layer, microbatch after microbatch."""
        place, share, seq_len = 0, self.plan.share(strategy), self.plan.seq_len
        for kind, degree in strategy.levels:
            place = place if kind == "tp" else place * degree + mesh.get_local_rank(kind)
        size = self.plan.global_batch // self.plan.num_microbatches
        firsts = range(step * self.plan.global_batch + place * share, (step + 1) * self.plan.global_batch, size)
        starts = [self.sample(first + index) * seq_len for first in firsts for index in range(share)]
        rows = np.stack([self.tokens[start : start + seq_len + 1].astype(np.int64) for start in starts])
        if rows.min() < 0 or rows.max() >= self.plan.chain["vocab_size"]:
            raise SystemExit(f"{self.path}: expected token ids from 0 to {self.plan.chain['vocab_size'] - 1}")
        return torch.from_numpy(rows)

    def sample(self, number: int) -> int:
        """The sample that a run reads as its ``number``-th: every epoch in another order (a Feistel network)."""
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
    """A 64-bit number that depends on every bit of the value (Steele et al. 2014)."""
    word = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & word
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
    return value ^ (value >> 31)


def make_optimizers(plan: Plan, layers: dict[str, Layer], options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """One AdamW for each mesh and placement, since fused updates do not mix meshes; decay is for matrices alone."""
    groups = {}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            is_table = layer.kind["role"] == "embedding" or [int(number), name] in plan.chain["tied"]
            decays = parameter.ndim > 1 and "bias" not in name and not is_table
            groups.setdefault((parameter.device_mesh, parameter.placements, decays), []).append(parameter)
    return [
        torch.optim.AdamW(group, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay * decays)
        for (_, _, decays), group in groups.items()
    ]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """A linear warm-up, then a cosine to a tenth."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train(plan: Plan, device: torch.device, options: argparse.Namespace) -> None:
    """Trains and reports every step; the process group has as many processes as the plan has ranks."""
    if dist.get_world_size() != plan.num_stages * plan.stage_size:
        raise SystemExit(f"this plan is for {plan.num_stages * plan.stage_size} processes, not {dist.get_world_size()}")
    torch.manual_seed(options.seed)  # of dropout, which must be alike on the ranks of a tp group
    meshes = build_meshes(plan, device.type)
    parts = build_parts(plan, meshes, device, options.seed)
    layers = {number: layer for part in parts.values() for number, layer in part.loop.layers.items()}
    optimizers, tied = make_optimizers(plan, layers, options), tied_group(plan)
    data, first, last = Data(plan, options.data, options.seed), plan.strategies[0], plan.strategies[-1]
    is_last, run_step = len(plan.parts) - 1 in parts, accumulation_step(plan, parts)
    if plan.num_stages > 1:
        run_step = pipeline_step(plan, parts, meshes[first.levels].get_group("pp"), device)
    for step in range(options.steps):
        started = time.perf_counter()
        tokens = data.read(step, first, meshes[first.levels])[:, :-1].to(device) if 0 in parts else None
        labels = data.read(step, last, meshes[last.levels])[:, 1:].to(device) if is_last else None
        with tensor_parallel.loss_parallel() if is_last and last.degree("tp") > 1 else nullcontext():
            losses = run_step(tokens, labels)
        sum_tied_gradients(plan, layers, tied)
        norm = clip_gradients(plan, layers, options.max_grad_norm, device)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, options)
            optimizer.step()
            optimizer.zero_grad()
        loss = sum(losses, torch.zeros((), device=device)) / last.degree("tp")
        dist.all_reduce(loss)
        report(options, step=step + 1, loss=loss.item(), grad_norm=norm.item(), time_s=time.perf_counter() - started)


def report(options: argparse.Namespace, **line: float) -> None:
    """Prints the line of a step and adds it to the file of metrics, on the first rank."""
    if dist.get_rank() == 0:
        print("step {step}  loss {loss:.4f}  grad norm {grad_norm:.3f}  {time_s:.3f} s".format(**line), flush=True)
    if dist.get_rank() == 0 and options.metrics:
        with open(options.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Joins the other processes of torchrun, and trains."""
    parser = argparse.ArgumentParser(description="Trains a decoder under a plan.")
    parser.add_argument("--plan", default=Path(__file__).with_suffix(".json"), help="default: beside this file")
    parser.add_argument("--data", required=True, help=".npy or .bin file of token ids, or a text, read as bytes")
    numbers = {"steps": 100, "lr": 3e-4, "warmup-steps": 10, "weight-decay": 0.1, "max-grad-norm": 1.0, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--metrics", help="file to add a line of JSON to in every step")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(Plan(options.plan), device, options)
    dist.barrier()  # a group that is left while another rank still works in it may abort that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
