"""What every rank of the parity tests of ep does: a small model whose blocks are divided, against one process.

Each rank reads samples of its own. The references are found by the rank alone, from the unmodified model.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, build_model, build_rotary, materialize_layer, prepare_model
from steelyard.modules.data_parallel import replicate_over, shard_over
from steelyard.modules.experts import routed_experts
from steelyard.modules.kinds.ep import apply_expert_parallel, divide_data_axis, take_imbalance
from steelyard.modules.layers import BlockLayer, SideInputBuilder, build_layer
from steelyard.modules.replicated import Replica, Replicas
from steelyard.modules.tensor_parallel import apply_tensor_parallel
from steelyard.plan.strategy import Remat
from steelyard.runtime.parity import samples_of_step
from steelyard.runtime.stage import LayerLoop, StageModule
from steelyard.runtime.state import parameter_names
from tests.runtime.models import FAMILY_CONFIGS

SEED, SEQ_LEN, NUM_SAMPLES, NUM_MICROBATCHES = 1, 16, 16, 2
LEAST_GAP = 1e-4
"""Between the k-th and the next logit of a token: rounding does not change who is chosen."""

CONFIGS = {
    "mixtral": FAMILY_CONFIGS["mixtral"],
    "qwen3_moe": FAMILY_CONFIGS["qwen3_moe"] | {"num_experts": 8, "num_experts_per_tok": 3},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How all layers of a model are divided; ``ep`` is for those with experts."""

    config: str
    data: int
    ep: int
    tp: int = 1
    sp: bool = False
    zero: int | None = None
    """None where replicated."""
    replicas: int = 1
    """Of the data ranks, how many groups hold all shards (ZeRO)."""
    remat: Remat = Remat.NONE


OF_FOUR = {
    "dp4 ep2": Division(config="mixtral", data=4, ep=2),
    "dp4 ep4, selective": Division(config="mixtral", data=4, ep=4, remat=Remat.SELECTIVE),
    "fsdp4 ep2, full": Division(config="qwen3_moe", data=4, ep=2, zero=3, remat=Remat.FULL),
    "fsdp4 ep4": Division(config="mixtral", data=4, ep=4, zero=3),
    "fsdp4 ep2, zero2, selective": Division(config="mixtral", data=4, ep=2, zero=2, remat=Remat.SELECTIVE),
    "dp2 tp2 ep2, full": Division(config="mixtral", data=2, ep=2, tp=2, remat=Remat.FULL),
    "fsdp2 tp2 ep2, sp": Division(config="mixtral", data=2, ep=2, tp=2, sp=True, zero=3),
    "fsdp2 tp2 ep2, selective": Division(config="qwen3_moe", data=2, ep=2, tp=2, zero=3, remat=Remat.SELECTIVE),
    "dp2 tp2 ep2, sp": Division(config="qwen3_moe", data=2, ep=2, tp=2, sp=True),
}
OF_EIGHT = {
    "fsdp4 tp2 ep2, sp, full": Division(config="mixtral", data=4, ep=2, tp=2, sp=True, zero=3, remat=Remat.FULL),
    "dp4 tp2 ep2": Division(config="qwen3_moe", data=4, ep=2, tp=2),
    "fsdp8 ep4, more shards than experts": Division(config="mixtral", data=8, ep=4, zero=3),
    "dp2-fsdp4 ep2": Division(config="qwen3_moe", data=8, ep=2, zero=3, replicas=2),
}


@dataclass(slots=True)
class Reference:
    """What one process finds."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    least_gap: float


def train_alone(chain: ModelChain) -> Reference:
    """Loss and gradients of the unmodified model on the whole global batch."""
    model = build_model(chain, seed=SEED)
    gaps: list[float] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda gate, _inputs, found: gaps.append(_gap(found[0], gate.top_k)))
    samples = samples_of_step(chain, num_samples=NUM_SAMPLES, seq_len=SEQ_LEN, step=0)
    loss = functional.cross_entropy(model(samples.inputs).logits.flatten(0, 1), samples.labels.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    return Reference(loss.item(), norm, gradients, min(gaps))


def _gap(logits: Tensor, top_k: int) -> float:
    best = logits.topk(top_k + 1, dim=-1).values
    return (best[:, top_k - 1] - best[:, top_k]).min().item()


@dataclass(slots=True)
class Meshes:
    """The meshes of a division."""

    world: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh
    outer: DeviceMesh
    inner: DeviceMesh


def meshes_of(division: Division) -> Meshes:
    """Tensors on neighbouring ranks, ep on the next, then what is left of the data ranks."""
    world = init_device_mesh("cpu", (division.data, division.tp), mesh_dim_names=("data", "tensor"))
    data, (outer, inner) = world["data"], divide_data_axis(world["data"], division.ep)
    if division.replicas > 1:
        num_shards = division.data // division.replicas
        data = world["data"]._unflatten(0, (division.replicas, num_shards), ("replicas", "shards"))
        outer = outer._unflatten(0, (division.replicas, num_shards // division.ep), ("outer_replicas", "outer_shards"))
    return Meshes(world, data, world["tensor"], outer, inner)


def build_stage(chain: ModelChain, division: Division, meshes: Meshes) -> StageModule:
    """The whole model as one stage, divided."""
    model = build_meta_model(chain)
    prepare_model(model, chain)
    layers, replicas = {}, []
    for index in range(chain.num_layers):
        materialize_layer(model, chain, index, seed=SEED, device=torch.device("cpu"))
        layer = build_layer(model, chain, index, division.remat)
        if division.tp > 1:
            apply_tensor_parallel(layer, model, chain, meshes.tensor, sp=division.sp)
        has_experts = bool(routed_experts(layer))
        if has_experts:
            apply_expert_parallel(layer, meshes.inner)
        expert_mesh = meshes.outer if has_experts else None
        if division.zero is None:
            replicas.append(replicate_over(layer, meshes.data, "fp32", expert_mesh=expert_mesh))
        else:
            reshard = division.zero == 3
            shard_over(layer, meshes.data, "fp32", reshard_after_forward=reshard, expert_mesh=expert_mesh)
        layers[str(index)] = layer
    between = (Shard(0), Shard(1) if division.sp else Replicate())
    loop = LayerLoop(
        layers, placements=[between] * len(layers), incoming=between, mesh=meshes.world, shares=[0] * len(layers)
    )
    if division.zero is not None:
        fully_shard(loop, mesh=meshes.data)
    attention = {layer.attention_type for layer in layers.values() if isinstance(layer, BlockLayer)}
    return StageModule(
        loop,
        replicas=Replicas(replicas),
        side=SideInputBuilder(model, chain, build_rotary(model, chain, torch.device("cpu")), attention),
        seq_len=SEQ_LEN,
        dtype=torch.float32,
        num_tokens=NUM_SAMPLES * SEQ_LEN,
    )


def train(stage: StageModule, chain: ModelChain, division: Division, meshes: Meshes) -> float:
    """One step of several microbatches; the loss of the global batch."""
    samples = samples_of_step(chain, num_samples=NUM_SAMPLES, seq_len=SEQ_LEN, step=0)
    place = meshes.world.get_local_rank("data")
    inputs, labels = (each.chunk(division.data)[place] for each in (samples.inputs, samples.labels))
    stage.begin_step(NUM_MICROBATCHES)
    total = torch.zeros(())
    with loss_parallel() if division.tp > 1 else nullcontext():
        for tokens, targets in zip(inputs.chunk(NUM_MICROBATCHES), labels.chunk(NUM_MICROBATCHES), strict=True):
            loss = stage(tokens, labels_BS=targets)
            loss.backward()
            total += loss.detach() / division.tp
    stage.end_step()
    dist.all_reduce(total)
    return total.item()


def compare(division: Division) -> dict[str, Any]:
    """The largest differences between a division and one process, and what the parameters of experts look like."""
    chain = chain_from_config(CONFIGS[division.config], name="test")
    expected, meshes = train_alone(chain), meshes_of(division)
    stage = build_stage(chain, division, meshes)
    loss = train(stage, chain, division, meshes)
    names = parameter_names(chain).by_path
    errors: dict[str, float] = {}
    square = torch.zeros(())
    for path, parameter in stage.layers.named_parameters():
        whole = _whole(parameter.grad)
        right = expected.gradients[names[path]]
        errors[path] = ((whole - right).abs().max() / right.abs().max()).item()
        square += _local(parameter.grad).square().sum() / _copies(parameter)
    dist.all_reduce(square)
    worst = max(errors, key=errors.__getitem__)
    experts = next(each for layer in stage.layers.values() for each in routed_experts(layer))
    return {
        "loss_error": abs(loss - expected.loss) / expected.loss,
        "gradient_error": errors[worst],
        "gradient": worst,
        "norm_error": abs(square.sqrt().item() - expected.norm) / expected.norm,
        "least_gap": expected.least_gap,
        "num_experts_entries": _local(experts.down_proj).numel() / experts.down_proj.numel(),
        "weights_are_first_weights": weights_error(stage, chain, names),
        "imbalance": take_imbalance(dict(stage.layers.items())),
        "imbalance_of_nothing": take_imbalance(dict(stage.layers.items())),
    }


def weights_error(stage: StageModule, chain: ModelChain, names: dict[str, str]) -> float:
    """The largest difference of a parameter, gathered, from the unmodified model's."""
    model = build_model(chain, seed=SEED)
    found = ((_whole(p), model.get_parameter(names[path])) for path, p in stage.layers.named_parameters())
    return max((whole - right).abs().max().item() for whole, right in found)


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(parameter: nn.Parameter) -> int:
    """Ranks that hold the same part, as the placements say."""
    mesh = parameter.device_mesh
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(axis)
    return dist.get_world_size() // shards


def of_four() -> dict[str, Any]:
    """All cases of four ranks."""
    return dict(_compare_all(OF_FOUR))


def of_eight() -> dict[str, Any]:
    """All cases of eight ranks."""
    return dict(_compare_all(OF_EIGHT))


def _compare_all(divisions: dict[str, Division]) -> Iterator[tuple[str, Any]]:
    for name, division in divisions.items():
        try:
            yield name, compare(division)
        except Exception as error:
            raise RuntimeError(name) from error
