"""Trains a decoder under a plan with stock PyTorch; needs torch, transformers and numpy, and nothing else.

    torchrun --nproc-per-node 8 train.py --data tokens.bin --steps 1000

The plan is the JSON file beside this one that has its name (``train.json``), or ``--plan``. It says for every layer how
the ranks of a pipeline stage share it. What it may say, and where that is carried out:

| in the plan                 | carried out by                                                      | here            |
|-----------------------------|---------------------------------------------------------------------|-----------------|
| ``"parallel": "fsdp4-tp2"`` | a `DeviceMesh` of 4 × 2 ranks; ``tp`` works on neighbouring ones    | `build_meshes`  |
| ``tp``, with or without sp  | `parallelize_module`, from what transformers' config says of blocks | `shard_tensors` |
| ``fsdp``, ``dp``            | `fully_shard`, over the data ranks, or over one rank and replicated | `shard_data`    |
| ``remat``                   | `checkpoint`                                                        | `Layer`         |
| neighbours that differ      | `DTensor.redistribute` of the hidden state between them             | `switch`        |
| ``stages``, ``schedule``    | `torch.distributed.pipelining`                                      | `pipeline_step` |

Samples, first weights and losses do not depend on the plan: one process and many train the same model. For that, each
rank's loss is its part of the sum over the global batch, divided by all tokens of it, so gradients are added.

Legend of shapes: B samples of this rank in a microbatch, S sequence, s sequence of this rank (S/tp under sp), H hidden.
"""

import argparse
import json
import math
import os
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

# what the plan says


@dataclass(frozen=True)
class Strategy:
    """How the ranks of a stage share a layer: kinds of parallelism with their degrees, outermost first."""

    levels: tuple
    sp: bool  # whether tp ranks divide the sequence between attention and feed-forward part
    zero: int  # 3 frees gathered parameters between forward and backward, 2 keeps them
    remat: str  # what is computed again in backward: none, selective or full

    @classmethod
    def read(cls, run):
        """The strategy of a run of layers in the plan."""
        words = [] if run["parallel"] == "single" else run["parallel"].split("-")
        matches = [re.fullmatch(r"(dp|fsdp|tp)(\d+)", word) for word in words]
        if None in matches:
            raise SystemExit(f"layers {run['layers']}: this script cannot carry out {run['parallel']!r}")
        levels = tuple((match[1], int(match[2])) for match in matches)
        return cls(levels, run.get("sp", False), run.get("zero", 3), run.get("remat", "none"))

    def degree(self, *kinds):
        """Ranks over which these kinds divide the layer or its samples."""
        return math.prod(degree for kind, degree in self.levels if kind in kinds)

    @property
    def tp(self):
        """Ranks that divide the matrices."""
        return self.degree("tp")

    @property
    def data(self):
        """Ranks that divide the samples."""
        return self.degree("dp", "fsdp")


class Plan:
    """The JSON file: the plan itself, and what of the model is not in its Hugging Face config."""

    def __init__(self, path):
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        plan, self.model = content["plan"], content["model"]
        self.config = plan["model"]["config"]
        self.seq_len, self.global_batch = plan["seq_len"], plan["global_batch"]
        self.num_microbatches, self.schedule = plan["num_microbatches"], plan["schedule"]
        self.dtype = torch.bfloat16 if plan["precision"] == "bf16" else torch.float32
        runs = [run for part in plan["stages"] for run in part["runs"]]
        self.strategies = [Strategy.read(run) for run in runs for _ in range(run["layers"][0], run["layers"][1] + 1)]
        # a stage is a range of ranks, which holds one part of the model or, interleaved, several
        self.parts = [range(part["runs"][0]["layers"][0], part["runs"][-1]["layers"][1] + 1) for part in plan["stages"]]
        ranks = [tuple(part["ranks"]) for part in plan["stages"]]
        self.num_stages = len(set(ranks))
        self.stage_size = ranks[0][1] - ranks[0][0] + 1
        self.stage_of_part = [first // self.stage_size for first, _ in ranks]

    def stage_of(self, layer):
        """The stage that holds a layer."""
        return next(stage for part, stage in zip(self.parts, self.stage_of_part, strict=True) if layer in part)

    def share(self, strategy):
        """Samples B of a microbatch on one of the ranks that divide them."""
        return self.global_batch // self.num_microbatches // strategy.data


# where ranks and activations lie


def build_meshes(plan, device_type):
    """For each way of sharing a layer, all ranks as axes: stages, then its levels, then an axis of one rank."""
    meshes = {}
    for levels in dict.fromkeys(strategy.levels for strategy in plan.strategies):
        names, degrees = zip(("pp", plan.num_stages), *levels, ("one", 1), strict=True)
        meshes[levels] = init_device_mesh(device_type, degrees, mesh_dim_names=names)
    return meshes


def build_stage_mesh(plan, device_type):
    """The ranks of this stage as axes of prime size: on these the layouts of any two layers can be told apart."""
    sizes = prime_factors(plan.stage_size)
    names = tuple(f"axis{number}" for number in range(len(sizes)))
    return init_device_mesh(device_type, (plan.num_stages, *sizes), mesh_dim_names=("pp", *names))[names]


def prime_factors(number):
    """The factors, largest first; 1 for 1."""
    for factor in range(number, 1, -1):
        if number % factor == 0 and all(factor % smaller for smaller in range(2, factor)):
            return [factor, *(each for each in prime_factors(number // factor) if each > 1)]
    return [1]


def placements(strategy, stage_mesh):
    """How the hidden state [B, s, H] of a layer lies on each axis of the stage; a level is a run of axes."""
    sizes, found = list(stage_mesh.shape), []
    for kind, degree in strategy.levels:
        placement = Shard(0) if kind != "tp" else Shard(1) if strategy.sp else Replicate()
        product = 1
        while product < degree:
            product *= sizes.pop(0)
            found.append(placement)
    return found or [Replicate()]


def switch(hidden, stage_mesh, before, after):
    """The hidden state of one layer as another reads it; backward brings its gradient back the same way."""
    have, want = placements(before, stage_mesh), placements(after, stage_mesh)
    if have == want:
        return hidden
    return DTensor.from_local(hidden, stage_mesh, have, run_check=False).redistribute(placements=want).to_local()


# one layer, shared as its strategy says

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


class Layer(nn.Module):
    """A layer of the chain: the embedding, a block of transformers unchanged, or the head with the loss."""

    def __init__(self, plan, model, number):
        super().__init__()
        entry = plan.model["layers"][number]
        self.kind = plan.model["kinds"][entry["kind"]]
        self.remat = plan.strategies[number].remat
        self.num_targets = plan.global_batch * plan.seq_len
        self.logit_cap = getattr(model.config, "final_logit_softcapping", None)
        for name, path in entry["modules"].items():
            self.add_module(name, model.get_submodule(path))

    def forward(self, inputs, side, labels):
        """Token ids [B, S] or a hidden state [B, s, H] to a hidden state, or to the loss."""
        if self.remat == "none":
            return self.compute(inputs, side, labels)
        return checkpoint(self.compute, inputs, side, labels, use_reentrant=False, context_fn=REMAT[self.remat])

    def compute(self, inputs, side, labels):
        """The forward pass, which remat runs again in backward."""
        if self.kind["role"] == "embedding":
            return self.embedding(inputs)
        if self.kind["role"] == "block":
            positions, rotary, masks = side
            return self.block(
                inputs,
                attention_mask=masks[self.kind["attention"]],
                position_ids=positions,
                position_embeddings=rotary[self.kind["attention"]],
                use_cache=False,
            )
        logits = self.output(self.norm(inputs))
        if self.logit_cap is not None:
            logits = (logits / self.logit_cap).tanh() * self.logit_cap
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return local(loss) / self.num_targets


def shard_tensors(layer, mesh, sp, config):
    """Divides the matrices of a layer over the ranks of ``mesh``, module by module."""
    styles = dict(layer.kind["styles"])
    prefix = styles.pop("*", None)  # of the paths in the config that name parts of this layer
    from_config = config.base_model_tp_plan.items() if prefix else ()
    found = {f"block.{path.removeprefix(prefix)}": name for path, name in from_config if path.startswith(prefix)}
    made = {path: tensor_style(name, sp) for path, name in (found | styles).items()}
    parallelize_module(layer, mesh, {path: style for path, style in made.items() if style is not None})


def tensor_style(name, sp):
    """What becomes of a module, by the name of its style; None for nothing."""
    word, _, keyword = name.partition(":")
    if word not in STYLES:
        raise SystemExit(f"this script does not know the style {word!r} of the model's tensor parallelism")
    arguments = (keyword,) if keyword else ()
    return STYLES[word](Shard(1) if sp else Replicate(), *arguments)


def whole_input(between, keyword=None):
    """The whole sequence for attention or the feed-forward part, which read it several times: as one DTensor."""
    if keyword is None:
        layouts = {"input_layouts": (between,), "desired_input_layouts": (Replicate(),)}
    else:
        layouts = {"input_kwarg_layouts": {keyword: between}, "desired_input_kwarg_layouts": {keyword: Replicate()}}
    return PrepareModuleInput(**layouts, use_local_output=False)


STYLES = {  # given how the hidden state lies between attention and feed-forward part
    "colwise": lambda between: ColwiseParallel(),
    "rowwise": lambda between: RowwiseParallel(output_layouts=between),
    "gather": whole_input,
    # norms on each rank's part of the sequence; those of query and key on each rank's heads [B, S, heads, width]
    "sequence": lambda between: SequenceParallel() if between.is_shard() else None,
    "sequence_local": lambda between: SequenceParallel(use_local_output=True) if between.is_shard() else None,
    "replicated_with_grad_allreduce": lambda between: SequenceParallel(sequence_dim=2, use_local_output=True),
    # embedding and head, divided by tokens: the logits stay so, and `loss_parallel` works on their parts
    "vocabulary": lambda between: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    "logits": lambda between: ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
}


def shard_data(layer, strategy, mesh, dtype):
    """FSDP2 over the data ranks: ``fsdp`` divides parameters, ``dp`` replicates them, both do both (HSDP)."""
    kinds = tuple(kind for kind, _ in strategy.levels if kind != "tp")
    axes = kinds if "fsdp" in kinds else (*kinds, "one")
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    fully_shard(layer, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=strategy.zero == 3)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)


# the parts of the model on this rank


class LayerLoop(nn.Module):
    """Layers in order, and FSDP's root: the next layer is gathered while one computes.

    Not the part itself: `torch.distributed.pipelining` takes an FSDP module's reductions into its own hands.
    """

    def __init__(self, plan, numbers, layers, stage_mesh):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.steps = [(plan.strategies[max(number - 1, 0)], plan.strategies[number]) for number in numbers]
        self.stage_mesh = stage_mesh

    def forward(self, hidden, side, labels):
        """The output of the last layer."""
        for layer, (before, after) in zip(self.layers.values(), self.steps, strict=True):
            hidden = layer(switch(hidden, self.stage_mesh, before, after), side, labels)
        return hidden


class Part(nn.Module):
    """A part of the model: token ids [B, S] or a hidden state [B, s, H] to a hidden state or the loss.

    It begins with the layout of the layer before it, so a hidden state is sent as it was made.
    """

    def __init__(self, plan, loop, config, rotary):
        super().__init__()
        self.plan, self.loop, self.config, self.rotary = plan, loop, config, rotary
        self.attentions = {layer.kind["attention"] for layer in loop.layers.values()}
        self.backwards_to_go = 0

    def begin_step(self):
        """Prepares for the backward passes of a step, one for every microbatch."""
        self.backwards_to_go = self.plan.num_microbatches
        self.set_last_backward(self.backwards_to_go == 1)

    def forward(self, inputs, labels=None):
        """The pass of one microbatch."""
        output = self.loop(inputs, self.side_inputs(inputs.device), labels)
        if output.requires_grad:
            output.register_hook(self.backward_begins)
        return output

    def backward_begins(self, _gradient):
        """Counts the backward passes of the step."""
        self.backwards_to_go -= 1
        if self.backwards_to_go == 0:
            self.set_last_backward(True)

    def set_last_backward(self, is_last):
        """Gradients are divided over shards in every backward pass, and added over replicas in the last one."""
        self.loop.set_is_last_backward(is_last)
        for layer in self.loop.layers.values():
            layer.set_requires_all_reduce(is_last)

    @torch.no_grad()
    def side_inputs(self, device):
        """Positions, rotary embeddings and masks, by kind of attention; a kernel for causal attention needs no mask."""
        positions = torch.arange(self.plan.seq_len, device=device).unsqueeze(0)
        like = torch.empty((1, self.plan.seq_len, 1), dtype=self.plan.dtype, device=device)
        rotary, masks = {}, {}
        for attention in sorted(self.attentions):
            which = (attention,) if self.plan.model["rotary_by_attention"] else ()
            rotary[attention] = self.rotary(like, positions, *which)
            window = getattr(self.config, "sliding_window", None)
            slides = attention == "sliding_attention" and window is not None and window < self.plan.seq_len
            make = create_sliding_window_causal_mask if slides else create_causal_mask
            masks[attention] = None
            if slides or not self.plan.model["fused_attention"]:
                masks[attention] = make(self.config, like, None, past_key_values=None, position_ids=positions)
        return positions, rotary, masks


def build_parts(plan, meshes, stage_mesh, stage, device, seed):
    """The parts of this rank by their place in the pipeline; a layer is shared before the next takes memory."""
    config = AutoConfig.for_model(**plan.config)
    attention = "sdpa" if plan.model["fused_attention"] else "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.train()
    with torch.device(device):
        rotary = type(model.get_submodule(plan.model["rotary"]))(config)
    parts = {}
    for index, numbers in enumerate(plan.parts):
        if plan.stage_of_part[index] != stage:
            continue
        layers = {}
        for number in numbers:
            strategy = plan.strategies[number]
            mesh = meshes[strategy.levels]
            layer = layers[str(number)] = Layer(plan, model, number)
            first_weights(plan, model, layer, number, device, seed)
            if strategy.tp > 1:
                shard_tensors(layer, mesh["tp"], strategy.sp, config)
            shard_data(layer, strategy, mesh, plan.dtype)
        loop = LayerLoop(plan, numbers, layers, stage_mesh)
        fully_shard(loop, mesh=mesh["one"], reshard_after_forward=True)
        parts[index] = Part(plan, loop, config, rotary)
    return parts


def first_weights(plan, model, layer, number, device, seed):
    """First weights that depend on the seed and the layer's place alone, so that any plan starts alike."""

    def fill(module, place):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + place)
            for submodule in reversed(list(module.modules())):
                model._init_weights(submodule)

    is_tied = layer.kind["role"] == "head" and plan.model["tied"]
    if is_tied:  # a matrix of its own instead of the embedding's
        layer.output.weight = nn.Parameter(torch.empty_like(layer.output.weight))
    for module in layer.children():
        module.to_empty(device=device)
        fill(module, number)
    if is_tied:
        table = nn.Embedding(*layer.output.weight.shape, device=device)
        table.padding_idx = model.get_input_embeddings().padding_idx
        fill(table, 0)
        layer.output.weight = table.weight


# a step: forward and backward of a global batch


def accumulation_step(plan, parts, _meshes, _device):
    """A step without a pipeline: microbatches one after the other. Returns their losses on this rank."""

    def step(tokens, labels):
        losses = []
        for inputs, targets in zip(*(each.chunk(plan.num_microbatches) for each in (tokens, labels)), strict=True):
            loss = parts[0](inputs, targets)
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def pipeline_step(plan, parts, meshes, device):
    """A step through the pipeline, in the order of the plan's schedule. Returns the losses on this rank."""
    group = meshes[plan.strategies[0].levels]["pp"].get_group()
    stages = [
        PipelineStage(
            part,
            index,
            len(plan.parts),
            device,
            input_args=example(plan, plan.parts[index][0] - 1),
            output_args=example(plan, plan.parts[index][-1]),
            group=group,
        )
        for index, part in parts.items()
    ]
    schedule_class = get_schedule_class(plan.schedule.replace("-", ""))
    schedule = schedule_class(
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        plan.num_microbatches,
        loss_fn=lambda loss, _labels: loss,
        scale_grads=False,
    )

    def step(tokens, labels):
        losses = []
        inputs = () if tokens is None else (tokens,)
        targets = {} if labels is None else {"target": labels, "losses": losses, "labels": labels}
        schedule.step(*inputs, **targets, return_outputs=False)
        return [loss.detach() for loss in losses]

    return step


def example(plan, layer):
    """A tensor like what flows out of a layer, or into the first one (layer -1), for one microbatch."""
    if layer < 0:
        return torch.empty(plan.share(plan.strategies[0]), plan.seq_len, dtype=torch.long, device="meta")
    if layer == len(plan.strategies) - 1:
        return torch.empty((), device="meta", requires_grad=True)
    strategy = plan.strategies[layer]
    sequence = plan.seq_len // (strategy.tp if strategy.sp else 1)
    shape = (plan.share(strategy), sequence, plan.model["hidden_size"])
    return torch.empty(shape, dtype=plan.dtype, device="meta", requires_grad=True)


def local(tensor):
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TiedGradients:
    """Adds the gradients of the embedding and of the head, which hold the same matrix, wherever they lie."""

    def __init__(self, plan, layers):
        tied = plan.model["tied"]
        self.copies = [layers[str(number)].get_parameter(path) for number, path in tied if str(number) in layers]
        self.are_alike = len({plan.strategies[number].levels for number, _ in tied}) == 1
        self.group = None  # of this rank and the one at its place in the other stage
        stages = sorted({plan.stage_of(number) for number, _ in tied})
        for place in range(plan.stage_size if len(stages) > 1 else 0):
            ranks = [stage * plan.stage_size + place for stage in stages]
            group = dist.new_group(ranks)
            self.group = group if dist.get_rank() in ranks else self.group

    @torch.no_grad()
    def add(self):
        """Gives all copies the sum: part by part where they are divided alike, else as whole matrices."""
        gradients = [copy.grad for copy in self.copies]
        if not gradients:
            return
        total = sum(local(each) if self.are_alike else each.full_tensor() for each in gradients).contiguous()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for each in gradients:
            mine = total
            if not self.are_alike:
                whole = DTensor.from_local(total, each.device_mesh, run_check=False)
                mine = whole.redistribute(placements=each.placements).to_local()
            each.to_local().copy_(mine)


@torch.no_grad()
def clip_gradients(plan, layers, max_norm, device):
    """Scales all gradients to a global norm of at most ``max_norm``; an entry counts once, whoever holds it."""
    parameters = [(int(number), *each) for number, layer in layers.items() for each in layer.named_parameters()]
    repeated = plan.model["tied"][1:]
    square = torch.zeros((), device=device)
    for number, name, parameter in parameters:
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
        if parameter.grad is not None and [number, name] not in repeated:
            square += local(parameter.grad).float().square().sum() * shards / plan.stage_size
    dist.all_reduce(square)
    norm = square.sqrt()
    for _, _, parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


# training


class Data:
    """Samples of S + 1 tokens from a .npy or .bin file of token ids, or from the bytes of a text."""

    def __init__(self, plan, path, seed):
        self.plan, self.path, self.seed = plan, Path(path), seed
        named = re.search(r"\.(uint8|uint16|uint32)\.bin$", self.path.name)
        if self.path.suffix == ".npy":
            self.tokens = np.load(self.path, mmap_mode="r")
        elif self.path.suffix == ".bin":
            by_vocabulary = "uint16" if plan.model["vocab_size"] <= 1 << 16 else "uint32"
            self.tokens = np.memmap(self.path, np.dtype(named[1] if named else by_vocabulary).newbyteorder("<"), "r")
        else:
            self.tokens = np.memmap(self.path, np.uint8, "r")
        self.num_samples = (len(self.tokens) - 1) // plan.seq_len
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu" or self.num_samples < 1:
            raise SystemExit(f"{path}: expected a row of at least {plan.seq_len + 1} token ids")

    def read(self, step, strategy, mesh):
        """The samples [·, S + 1] of a step that this rank reads for a layer, microbatch after microbatch."""
        place, share = 0, self.plan.share(strategy)
        for kind, degree in strategy.levels:
            place = place if kind == "tp" else place * degree + mesh.get_local_rank(kind)
        size = self.plan.global_batch // self.plan.num_microbatches
        first = step * self.plan.global_batch + place * share
        wanted = [
            first + number * size + index for number in range(self.plan.num_microbatches) for index in range(share)
        ]
        starts = [self.sample(each) * self.plan.seq_len for each in wanted]
        rows = np.stack([self.tokens[start : start + self.plan.seq_len + 1].astype(np.int64) for start in starts])
        if rows.min() < 0 or rows.max() >= self.plan.model["vocab_size"]:
            raise SystemExit(f"{self.path}: expected token ids from 0 to {self.plan.model['vocab_size'] - 1}")
        return torch.from_numpy(rows)

    def sample(self, number):
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


def mixed(value):
    """A 64-bit number that depends on every bit of the value (Steele et al. 2014)."""
    word = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & word
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
    return value ^ (value >> 31)


def make_optimizers(plan, layers, options):
    """One AdamW for each mesh and placement, since fused updates do not mix meshes; decay is for matrices alone."""
    groups = {}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            is_table = layer.kind["role"] == "embedding" or [int(number), name] in plan.model["tied"]
            decays = parameter.ndim > 1 and "bias" not in name and not is_table
            groups.setdefault((parameter.device_mesh, parameter.placements, decays), []).append(parameter)
    return [
        torch.optim.AdamW(group, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay * decays)
        for (_, _, decays), group in groups.items()
    ]


def learning_rate(step, options):
    """A linear warm-up, then a cosine to a tenth."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train(plan, device, options):
    """Trains and reports every step; the process group has as many processes as the plan has ranks."""
    if dist.get_world_size() != plan.num_stages * plan.stage_size:
        raise SystemExit(f"this plan is for {plan.num_stages * plan.stage_size} processes, not {dist.get_world_size()}")
    meshes = build_meshes(plan, device.type)
    stage = dist.get_rank() // plan.stage_size
    parts = build_parts(plan, meshes, build_stage_mesh(plan, device.type), stage, device, options.seed)
    layers = {number: layer for part in parts.values() for number, layer in part.loop.layers.items()}
    optimizers = make_optimizers(plan, layers, options)
    tied = TiedGradients(plan, layers)
    run_step = (pipeline_step if plan.num_stages > 1 else accumulation_step)(plan, parts, meshes, device)
    data, (first, last) = Data(plan, options.data, options.seed), (plan.strategies[0], plan.strategies[-1])
    for step in range(options.steps):
        started = time.perf_counter()
        tokens = labels = None
        if 0 in parts:
            tokens = data.read(step, first, meshes[first.levels])[:, :-1].to(device)
        if len(plan.parts) - 1 in parts:
            labels = data.read(step, last, meshes[last.levels])[:, 1:].to(device)
        for part in parts.values():
            part.begin_step()
        with loss_parallel() if labels is not None and last.tp > 1 else nullcontext():
            losses = run_step(tokens, labels)
        tied.add()
        norm = clip_gradients(plan, layers, options.max_grad_norm, device)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, options)
            optimizer.step()
            optimizer.zero_grad()
        loss = sum(losses, torch.zeros((), device=device)) / last.tp
        dist.all_reduce(loss)
        seconds = time.perf_counter() - started
        report(options, {"step": step + 1, "loss": loss.item(), "grad_norm": norm.item(), "time_s": seconds})


def report(options, line):
    """Prints the line of a step and adds it to the file of metrics, on the first rank."""
    if dist.get_rank() != 0:
        return
    shown = f"step {line['step']}/{options.steps}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3f}"
    print(f"{shown}  {line['time_s']:.3f} s", flush=True)
    if options.metrics:
        with open(options.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_options():
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a decoder under a plan.")
    parser.add_argument("--plan", default=Path(__file__).with_suffix(".json"), help="default: beside this file")
    parser.add_argument("--data", required=True, help=".npy or .bin file of token ids, or a text, read as bytes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="file to add a line of JSON to in every step")
    return parser.parse_args()


def main():
    """Joins the other processes of torchrun, and trains."""
    options = read_options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(Plan(options.plan), device, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
