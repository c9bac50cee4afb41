"""The parts of the plain PyTorch script: those that a plan needs are put together by `steelyard.export.pytorch`.

Each is source text that stands alone among the others: stock PyTorch and transformers, nothing of this package. Names
in capitals are the plan, written in front of them. What they do is what `steelyard.runtime` does, without its checks.
"""

IMPORTS = """\
import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
"""

IMPORT_PIPELINE = "from torch.distributed.pipelining import PipelineStage, {schedule}\n"
IMPORT_TENSOR = """\
from torch.distributed.tensor import DTensor, Replicate, Shard
"""
IMPORT_TP = """\
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
{loss_parallel}    parallelize_module,
)
"""
IMPORT_REMAT = "from torch.utils.checkpoint import checkpoint\n"
IMPORT_SELECTIVE = "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts\n"
IMPORT_HF = """\
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
"""

LAYER = '''\
@dataclass(frozen=True)
class Layer:
    """How the ranks of a stage share the work of a layer; ``data`` × ``tensor`` of them."""

    data: int  # ways in which samples are divided
    tensor: int  # ways in which matrices are divided
    shard: bool  # whether data ranks share parameters (FSDP), or each has them all (replication)
    free: bool = True  # whether gathered parameters are freed between forward and backward (ZeRO-3, not ZeRO-2)
    sp: bool = False  # whether tensor ranks share the sequence between attention and MLP
    tensor_outside: bool = False  # whether neighbouring ranks are data ranks instead of tensor ranks
    remat: str = "none"  # what is computed again in backward
'''

MESHES = '''\
def build_meshes(device_type):
    """One mesh for every way of sharing a layer. Axes: pp stages, data, one (of size 1), tensor."""
    meshes = {}
    for layer in LAYERS:
        key = mesh_key(layer)
        if key not in meshes:
            sizes = [("data", layer.data), ("one", 1), ("tensor", layer.tensor)]
            if layer.tensor_outside:
                sizes = [sizes[2], sizes[0], sizes[1]]
            shape, names = (NUM_STAGES, *(size for _, size in sizes)), ("pp", *(name for name, _ in sizes))
            meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return meshes


def mesh_key(layer):
    return layer.data, layer.tensor, layer.tensor_outside
'''

SWITCH = '''\
def build_stage_mesh(device_type):
    """The ranks of this stage as small axes, on which the layouts of any two layers can be told apart."""
    names = tuple(f"a{axis}" for axis in range(len(STAGE_AXES)))
    return init_device_mesh(device_type, (NUM_STAGES, *STAGE_AXES), mesh_dim_names=("pp", *names))[names]


def placements(layer):
    """Where the hidden state [B, S, H] of a layer lies, for each small axis of the stage."""
    between = Shard(1) if layer.sp else Replicate()
    degrees = [(layer.data, Shard(0)), (layer.tensor, between)]
    if layer.tensor_outside:
        degrees.reverse()
    found, axes = [], list(STAGE_AXES)
    for degree, placement in degrees:
        product = 1
        while product < degree:
            product *= axes.pop(0)
            found.append(placement)
    return tuple(found)


def switch(hidden, stage_mesh, before, after):
    """The hidden state in the layout of the layer ``after``; backward brings its gradient back the same way."""
    if placements(before) == placements(after):
        return hidden
    whole = DTensor.from_local(hidden, stage_mesh, placements(before), run_check=False)
    return whole.redistribute(placements=placements(after)).to_local()
'''

TENSOR_PARALLEL = '''\
def shard_tensors(module, role, layer, mesh, config):
    """Tensor parallelism of one layer: the model's own plan for a block, and what embedding and head need."""
    between = Shard(1) if layer.sp else Replicate()
    if role == "embedding":
        styles = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    elif role == "head":
        styles = {"output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
        if layer.sp:
            styles["norm"] = SequenceParallel()
    else:
        # attention and MLP read the whole sequence, as a DTensor: its readers' gradients are then reduced at once
        styles = {
            f"block.{ATTENTION}": _whole_input(between, keyword=ATTENTION_KEYWORD),
            f"block.{MLP}": _whole_input(between),
        }
        for path, style in config.base_model_tp_plan.items():
            if path.startswith(f"{BLOCKS}.*."):
                styles[f"block.{path.removeprefix(BLOCKS + '.*.')}"] = {
                    "colwise": ColwiseParallel(),
                    "rowwise": RowwiseParallel(output_layouts=between),
                    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
                }[style]
        if layer.sp:
            styles |= {f"block.{norm}": SequenceParallel() for norm in BLOCK_NORMS}
    parallelize_module(module, mesh, styles)


def _whole_input(between, keyword=None):
    if keyword is None:
        return PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),), use_local_output=False
        )
    return PrepareModuleInput(
        input_kwarg_layouts={keyword: between},
        desired_input_kwarg_layouts={keyword: Replicate()},
        use_local_output=False,
    )
'''

SHARD_DATA = '''\
def shard_data(module, layer, mesh):
    """FSDP2 over the data ranks of one layer, for sharding, replication (shards of one rank) and precision alike."""
    axes = "one" if layer.data == 1 else "data" if layer.shard else ("data", "one")
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE, reduce_dtype=torch.float32) if COMPUTE_DTYPE else None
    fully_shard(
        module,
        mesh=mesh[axes],
        reshard_after_forward=layer.free,
        **({"mp_policy": policy} if policy else {}),
    )
    # every rank's loss is a part of the sum over the global batch: gradients are added, not averaged
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
'''

SELECTIVE = """\
# selective remat keeps matrix products, attention and the reductions of tensor parallelism, and recomputes the rest
_aten, _collective = torch.ops.aten, torch.ops._c10d_functional
SAVED = [
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
"""

CHAIN_LAYER_HEAD = '''\
class ChainLayer(nn.Module):
    """One layer of the chain: the embedding, a block of transformers unchanged, or the head with the loss."""

    def __init__(self, role, remat, **modules):
        super().__init__()
        self.role = role
        self.remat = remat
        for name, module in modules.items():
            self.add_module(name, module)

    def run(self, inputs, side, labels):
        if self.role == "embedding":
            return self.embedding(inputs)
        if self.role == "block":
            positions, rotary, mask = side
            return self.block(
                inputs, attention_mask=mask, position_ids=positions, position_embeddings=rotary, use_cache=False
            )
        logits = self.output(self.norm(inputs)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # divided by the tokens of the global batch, so that the losses of ranks and microbatches add up to the mean
        return {loss} / (GLOBAL_BATCH * SEQ_LEN)
'''
LOSS = "loss"
LOSS_TP = "(loss.to_local() if isinstance(loss, DTensor) else loss)"

FORWARD_PLAIN = """
    def forward(self, inputs, side, labels):
        return self.run(inputs, side, labels)
"""
FORWARD_FULL = """
    def forward(self, inputs, side, labels):
        if self.remat == "none":
            return self.run(inputs, side, labels)
        return checkpoint(self.run, inputs, side, labels, use_reentrant=False)
"""
FORWARD_SELECTIVE = """
    def forward(self, inputs, side, labels):
        if self.remat == "none":
            return self.run(inputs, side, labels)
        if self.remat == "full":
            return checkpoint(self.run, inputs, side, labels, use_reentrant=False)
        return checkpoint(
            self.run,
            inputs,
            side,
            labels,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(SAVED),
        )
"""

LAYER_LOOP = '''\
class LayerLoop(nn.Module):
    """Layers in order. FSDP's root: its layers share streams, and the next one is gathered while one computes."""

    def __init__(self, layers, stage_mesh, before):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.stage_mesh = stage_mesh
        self.before = before

    def forward(self, hidden, side, labels):
{loop}        return hidden


class Part(nn.Module):
    """A part of the model on this rank: from token ids or a hidden state to a hidden state or the loss."""

    def __init__(self, loop, config, rotary):
        super().__init__()
        self.loop = loop
        self.config = config
        self.rotary = rotary
        self.replicated = [layer for number, layer in loop.layers.items() if not LAYERS[int(number)].shard]
        self.backwards_to_go = 0

    def begin_step(self):
        self.backwards_to_go = NUM_MICROBATCHES
        self.last_backward(NUM_MICROBATCHES == 1)

    def forward(self, inputs, labels=None):
        output = self.loop(inputs, self.side_inputs(inputs.device), labels)
        if output.requires_grad:
            output.register_hook(self.backward_begins)
        return output

    @torch.no_grad()
    def side_inputs(self, device):
        """Positions, rotary embedding and mask, the same for all blocks; plain causal attention needs no mask."""
        positions = torch.arange(SEQ_LEN, device=device).unsqueeze(0)
        like = torch.empty((1, SEQ_LEN, 1), dtype=COMPUTE_DTYPE or torch.float32, device=device)
        window, mask = getattr(self.config, "sliding_window", None), None
        if SLIDING and window is not None and window < SEQ_LEN:
            mask = create_sliding_window_causal_mask(
                config=self.config, inputs_embeds=like, attention_mask=None, past_key_values=None,
                position_ids=positions,
            )
        return positions, self.rotary(like, position_ids=positions), mask

    def backward_begins(self, _gradient):
        """Replicated layers reduce their gradients in the last backward pass of a step, sharded ones in each."""
        self.backwards_to_go -= 1
        if self.backwards_to_go == 0:
            self.last_backward(True)

    def last_backward(self, is_last):
        for layer in self.replicated:
            layer.set_requires_gradient_sync(is_last)
        self.loop.set_is_last_backward(is_last)
'''

BUILD = '''\
def build_parts(meshes, stage_mesh, stage, device, seed):
    """This rank's parts: layers are made one by one, each sharded before the next takes memory."""
    config = AutoConfig.for_model(**CONFIG)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    body = getattr(model, BODY)
    with torch.device(device):
        rotary = type(body.rotary_emb)(config)
    parts = []
    for first, last in PARTS[stage::NUM_STAGES]:
        layers = {}
        for number in range(first, last + 1):
            how = LAYERS[number]
            module, role = build_layer(model, body, number, how.remat)
            first_weights(model, module, role, number, device, seed)
            mesh = meshes[mesh_key(how)]
{tensor}            shard_data(module, how, mesh)
            layers[str(number)] = module
        loop = LayerLoop(layers, stage_mesh, LAYERS[max(first - 1, 0)])
        fully_shard(loop, mesh=mesh["one"], reshard_after_forward=True)
        parts.append(Part(loop, config, rotary))
    return parts


def build_layer(model, body, number, remat):
    if number == 0:
        return ChainLayer("embedding", remat, embedding=getattr(body, EMBEDDING)), "embedding"
    if number == len(LAYERS) - 1:
        return ChainLayer("head", remat, norm=getattr(body, FINAL_NORM), output=model.get_output_embeddings()), "head"
    return ChainLayer("block", remat, block=getattr(body, BLOCKS)[number - 1]), "block"


def first_weights(model, module, role, number, device, seed):
    """First weights that depend on the seed and the layer's place alone, so that any plan starts alike."""

    def fill(part, layer):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + layer)
            for submodule in reversed(list(part.modules())):
                model._init_weights(submodule)

{untie}    for part in list(module.children()):
        part.to_empty(device=device)
        fill(part, number)
{tie}'''
UNTIE = """\
    if role == "head":
        module.output.weight = nn.Parameter(torch.empty_like(module.output.weight))  # a matrix of its own
"""
TIE = """\
    if role == "head":  # tied to the embedding: the same first weights; gradients are added in every step
        table = nn.Embedding(*module.output.weight.shape, device=device)
        table.padding_idx = model.get_input_embeddings().padding_idx
        fill(table, 0)
        module.output.weight = table.weight
"""

TIED = '''\
def sum_tied_gradients(layers, pair):
    """Adds the gradients of the embedding and of the head, which hold the same matrix, on every rank of either."""
    copies = [layers[number].get_parameter(path) for number, path in TIED_COPIES if number in layers]
    if not copies:
        return
    with torch.no_grad():
        full = sum(full_gradient(parameter) for parameter in copies)
        if pair is not None:
            dist.all_reduce(full, group=pair)
        for parameter in copies:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                spread = DTensor.from_local(full, gradient.device_mesh, run_check=False)
                gradient.to_local().copy_(spread.redistribute(placements=gradient.placements).to_local())
            else:
                gradient.copy_(full)


def full_gradient(parameter):
    gradient = parameter.grad
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.clone(memory_format=torch.contiguous_format)


def tied_pair():
    """The group of this rank's place in the first and the last stage; None for one stage or a stage between."""
    mine = None
    last = (NUM_STAGES - 1) * STAGE_SIZE
    for rank in range(STAGE_SIZE if NUM_STAGES > 1 else 0):
        group = dist.new_group([rank, last + rank])
        if dist.get_rank() in (rank, last + rank):
            mine = group
    return mine
'''

STEP_ONE_STAGE = '''\
def make_step(parts, meshes, device):
    """Forward and backward of one global batch, microbatch by microbatch; returns the losses on this rank."""

    def step(tokens, labels):
        losses = []
        for inputs, targets in zip(tokens.chunk(NUM_MICROBATCHES), labels.chunk(NUM_MICROBATCHES), strict=True):
            loss = parts[0](inputs, labels=targets)
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step
'''
STEP_PIPELINE = '''\
def make_step(parts, meshes, device):
    """Forward and backward of one global batch through the pipeline; returns the losses on this rank."""
    pipeline = meshes[mesh_key(LAYERS[0])]["pp"]
    stages = [
        PipelineStage(
            part,
            index,
            len(PARTS),
            device,
            input_args=example(index, is_input=True),
            output_args=example(index, is_input=False),
            group=pipeline.get_group(),
        )
        for number, part in enumerate(parts)
        for index in [number * NUM_STAGES + pipeline.get_local_rank()]
    ]
    schedule = {schedule}(
        {stages}, NUM_MICROBATCHES, loss_fn=lambda loss, _labels: loss, scale_grads=False
    )

    def step(tokens, labels):
        inputs = () if tokens is None else (tokens,)
        losses = []
        if labels is None:
            schedule.step(*inputs, return_outputs=False)
        else:
            schedule.step(*inputs, target=labels, losses=losses, return_outputs=False, labels=labels)
        return [loss.detach() for loss in losses]

    return step


def example(part, *, is_input):
    """A tensor like the one that a part receives or sends for one microbatch."""
    if is_input and part == 0:
        return torch.empty(samples_of(LAYERS[0]), SEQ_LEN, dtype=torch.long, device="meta")
    if not is_input and part == len(PARTS) - 1:
        return torch.empty((), device="meta", requires_grad=True)
    first, last = PARTS[part]
    sender = LAYERS[first - 1 if is_input else last]
    sequence = SEQ_LEN // sender.tensor if sender.sp else SEQ_LEN
    shape = (samples_of(sender), sequence, CONFIG["hidden_size"])
    return torch.empty(shape, dtype=COMPUTE_DTYPE or torch.float32, device="meta", requires_grad=True)
'''

DATA = '''\
def samples_of(layer):
    """Samples of a microbatch on one data rank."""
    return GLOBAL_BATCH // NUM_MICROBATCHES // layer.data


def share_of_batch(layer, meshes):
    """The samples of a global batch that this rank reads for a layer, microbatch after microbatch."""
    share, place = samples_of(layer), meshes[mesh_key(layer)]["data"].get_local_rank()
    size = GLOBAL_BATCH // NUM_MICROBATCHES
    return [number * size + place * share + index for number in range(NUM_MICROBATCHES) for index in range(share)]


class Data:
    """Samples of SEQ_LEN + 1 tokens from a .npy or .bin (uint16) file of token ids, or from the bytes of a text."""

    def __init__(self, path, seed):
        path = Path(path)
        if path.suffix == ".npy":
            self.tokens = np.load(path, mmap_mode="r")
        elif path.suffix == ".bin":
            self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        else:
            self.tokens = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        self.seed = seed
        self.num_samples = (len(self.tokens) - 1) // SEQ_LEN

    def read(self, step, indices):
        starts = [self.place(step * GLOBAL_BATCH + index) * SEQ_LEN for index in indices]
        rows = [torch.from_numpy(self.tokens[start : start + SEQ_LEN + 1].astype(np.int64)) for start in starts]
        return torch.stack(rows)

    def place(self, sample):
        """A permutation of the samples for every epoch, worked out place by place (a Feistel network of 4 rounds)."""
        epoch, place = divmod(sample, self.num_samples)
        bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        key = mixed(mixed(self.seed) ^ epoch)
        while True:
            left, right = place >> bits, place & ((1 << bits) - 1)
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
'''

TRAIN = '''\
def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(layers, max_norm, device):
    """Scales the gradients of all ranks to a global norm of at most ``max_norm``; each entry counts once."""
    square = torch.zeros((), device=device)
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if parameter.grad is None or (number, name) in TIED_COPIES[1:]:
                continue
            mesh, places = parameter.device_mesh, parameter.placements
            shards = math.prod(mesh.size(axis) for axis, place in enumerate(places) if not place.is_replicate())
            square += local(parameter.grad).float().square().sum() * shards / STAGE_SIZE
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for layer in layers.values():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)
    return norm


def make_optimizers(layers, options):
    """One AdamW for each mesh and placement, since fused updates do not mix meshes; decay is for matrices alone."""
    groups = {}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            decays = parameter.ndim > 1 and number != "0" and (number, name) not in TIED_COPIES
            key = (parameter.device_mesh, parameter.placements, decays)
            groups.setdefault(key, []).append(parameter)
    return [
        torch.optim.AdamW(group, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay * key[-1])
        for key, group in groups.items()
    ]


def learning_rate(step, options):
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train(options):
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if dist.get_world_size() != NUM_STAGES * STAGE_SIZE:
        raise SystemExit(f"this plan is for {NUM_STAGES * STAGE_SIZE} processes, not {dist.get_world_size()}")
    meshes = build_meshes(device_type)
    stage = dist.get_rank() // STAGE_SIZE
    parts = build_parts(meshes, {stage_mesh}, stage, device, options.seed)
    layers = {number: layer for part in parts for number, layer in part.loop.layers.items()}
    optimizers = make_optimizers(layers, options)
    run_step = make_step(parts, meshes, device)
{pair}    data = Data(options.data, options.seed)
    for step in range(options.steps):
        started = time.perf_counter()
        tokens = labels = None
        if stage == 0:
            tokens = data.read(step, share_of_batch(LAYERS[0], meshes))[:, :-1].to(device)
        if stage == NUM_STAGES - 1:
            labels = data.read(step, share_of_batch(LAYERS[-1], meshes))[:, 1:].to(device)
        for part in parts:
            part.begin_step()
{run}
{tied}        norm = clip_gradients(layers, options.max_grad_norm, device)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options)
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        if losses:
            loss += torch.stack(losses).sum() / LAYERS[-1].tensor
        dist.all_reduce(loss)
        report(step, loss.item(), norm.item(), time.perf_counter() - started, options)
    dist.destroy_process_group()


def report(step, loss, norm, seconds, options):
    if dist.get_rank() != 0:
        return
    tokens_per_s = GLOBAL_BATCH * SEQ_LEN / seconds
    progress = f"step {step + 1}/{options.steps}  loss {loss:.4f}  {tokens_per_s:.0f} tokens/s"
    print(f"{progress}  grad norm {norm:.3f}", flush=True)
    if options.metrics:
        with open(options.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step + 1, "loss": loss, "grad_norm": norm, "time_s": seconds}) + "\\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help=".npy or .bin (uint16) token ids, or a text read as bytes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="file to add a JSON line per step to")
    train(parser.parse_args())
'''

LOOP = """\
        for layer in self.layers.values():
            hidden = layer(hidden, side, labels)
"""
LOOP_SWITCHING = """\
        before = self.before
        for number, layer in self.layers.items():
            hidden = switch(hidden, self.stage_mesh, before, LAYERS[int(number)])
            hidden = layer(hidden, side, labels)
            before = LAYERS[int(number)]
"""

RUN = "        losses = run_step(tokens, labels)"
RUN_LOSS_PARALLEL = """\
        if stage == NUM_STAGES - 1:  # the logits stay divided by tokens
            with loss_parallel():
                losses = run_step(tokens, labels)
        else:
            losses = run_step(tokens, labels)"""
