"""Work of every rank in the tests of ep: a small model with divided blocks, against one process.

Each rank reads its own samples, and computes its references alone from the unmodified model.
"""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, build_model, materialize_layer, prepare_model
from steelyard.modules.dimensions.ep import apply_expert_parallel, take_imbalance
from steelyard.modules.dimensions.tp import apply_tensor_parallel
from steelyard.modules.experts import routed_experts
from steelyard.modules.layers import build_layer, shared_inputs_of
from steelyard.modules.replicated import Replicas, activation_dtype, replicate_over, shard_over
from steelyard.modules.updates import local_part
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision
from steelyard.runtime.parity import samples_of_step
from steelyard.runtime.stage import LayerLoop, StageModule
from steelyard.runtime.state import parameter_names
from tests.runtime.models import FAMILY_CONFIGS
from tests.runtime.processes import one_of_many_cases

SEED, SEQ_LEN, NUM_SAMPLES, NUM_MICROBATCHES = 1, 16, 16, 2
LEAST_GAP = 1e-4
"""Between the k-th and the next logit of a token: rounding does not change who is chosen."""

CONFIGS = {
    "mixtral": FAMILY_CONFIGS["mixtral"],
    "qwen3_moe": FAMILY_CONFIGS["qwen3_moe"] | {"num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"] | {"n_group": 1, "num_experts_per_tok": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of all layers of a model; ``ep`` is for those with experts."""

    config: str
    data: int
    ep: int
    tp: int = 1
    sp: bool = False
    zero: int | None = None
    """None where replicated."""
    replicas: int = 1
    """Number of groups of data ranks that hold all shards (ZeRO)."""
    remat: Remat = Remat.NONE
    precision: Precision = "fp32"
    sums_experts: bool = True
    """False plants a fault: the gradients of experts stay those of one ep group."""


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
    "fsdp4 ep2, beside a shared expert": Division(config="deepseek_v3", data=4, ep=2, zero=3, remat=Remat.SELECTIVE),
    "fsdp4 ep2, bf16": Division(config="mixtral", data=4, ep=2, zero=3, precision="bf16", remat=Remat.FULL),
    "fsdp4 ep2, experts not summed": Division(config="mixtral", data=4, ep=2, zero=3, sums_experts=False),
}
OF_EIGHT = {
    "fsdp4 tp2 ep2, sp, full": Division(config="mixtral", data=4, ep=2, tp=2, sp=True, zero=3, remat=Remat.FULL),
    "fsdp8 ep4, more shards than experts": Division(config="mixtral", data=8, ep=4, zero=3),
    "dp2-fsdp4 ep2": Division(config="qwen3_moe", data=8, ep=2, zero=3, replicas=2),
}
NIGHTLY = OF_EIGHT.keys() | {
    *("dp4 ep2", "fsdp4 ep2, full", "fsdp2 tp2 ep2, selective", "dp2 tp2 ep2, sp", "fsdp4 ep2, bf16"),
}
"""Other dimensions, remats and models meet in those that stay, and all of these in `tests.runtime.ep_cases`."""


@dataclass(slots=True)
class Reference:
    """Results of one process."""

    loss: float
    norm: float
    weights: dict[str, Tensor]
    """The first ones."""
    gradients: dict[str, Tensor]
    least_gap: float


@cache
def train_alone(config: str) -> Reference:
    """Loss and gradients of the unmodified model on the whole global batch."""
    chain = chain_from_config(CONFIGS[config], name="test")
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
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Reference(loss.item(), norm, weights, gradients, min(gaps))


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
    sizes = (1, division.data, division.tp)
    whole = init_device_mesh("cpu", sizes, mesh_dim_names=("one", "data", "tensor"))
    world = whole["data", "tensor"]
    data = world["data"]
    parts = data._unflatten(0, (division.data // division.ep, division.ep), ("outer", "inner"))
    outer, inner = parts["outer"], parts["inner"]
    if division.replicas > 1:
        num_shards = division.data // division.replicas
        data = world["data"]._unflatten(0, (division.replicas, num_shards), ("replicas", "shards"))
        outer = outer._unflatten(0, (division.replicas, num_shards // division.ep), ("outer_replicas", "outer_shards"))
    return Meshes(world, data, world["tensor"], outer if division.sums_experts else whole["one"], inner)


def build_stage(chain: ModelChain, division: Division, meshes: Meshes, seed: int = SEED) -> StageModule:
    """The whole model as one stage, divided."""
    model = build_meta_model(chain)
    prepare_model(model, chain)
    layers, replicas = {}, []
    for index in range(chain.num_layers):
        materialize_layer(model, chain, index, seed=seed, device=torch.device("cpu"))
        layer = build_layer(model, chain, index, division.remat)
        if division.tp > 1:
            apply_tensor_parallel(layer, chain, meshes.tensor, sp=division.sp)
        has_experts = division.ep > 1 and bool(routed_experts(layer))
        if has_experts:
            apply_expert_parallel(layer, meshes.inner)
        expert_mesh = meshes.outer if has_experts else None
        if division.zero is None:
            replicas.append(replicate_over(layer, meshes.data, division.precision, expert_mesh=expert_mesh))
        else:
            reshard = division.zero == 3
            shard_over(layer, meshes.data, division.precision, reshard_after_forward=reshard, expert_mesh=expert_mesh)
        layers[str(index)] = layer
    between = (Shard(0), Shard(1) if division.sp else Replicate())
    loop = LayerLoop(
        layers,
        placements=[between] * len(layers),
        incoming=between,
        outgoing=None,
        mesh=meshes.world,
        shares=[0] * len(layers),
        routers=None,
    )
    if division.zero is not None:
        fully_shard(loop, mesh=meshes.data)
    return StageModule(
        loop,
        kept_whole=(),
        waiting=(),
        replicas=Replicas(replicas),
        side=shared_inputs_of(layers.values(), model, chain, torch.device("cpu")),
        seq_len=SEQ_LEN,
        dtype=activation_dtype(division.precision),
        num_tokens=NUM_SAMPLES * SEQ_LEN,
        routers=None,
        has_backward=True,
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
    expected, meshes = train_alone(division.config), meshes_of(division)
    stage = build_stage(chain, division, meshes)
    loss = train(stage, chain, division, meshes)
    names = parameter_names(chain).by_path
    weights = weights_error(stage, division)
    errors: dict[str, float] = {}
    square = torch.zeros(())
    for path, parameter in stage.layers.named_parameters():
        whole = _whole(parameter.grad)
        right = expected.gradients[names[path]]
        errors[path] = ((whole - right).abs().max() / right.abs().max()).item()
        square += local_part(parameter.grad).square().sum() / _copies(parameter)
    dist.all_reduce(square)
    worst = max(errors, key=errors.__getitem__)
    experts = next(each for layer in stage.layers.values() for each in routed_experts(layer))
    return {
        "loss_error": abs(loss - expected.loss) / expected.loss,
        "gradient_error": errors[worst],
        "gradient": worst,
        "norm_error": abs(square.sqrt().item() - expected.norm) / expected.norm,
        "least_gap": expected.least_gap,
        "num_experts_entries": local_part(experts.down_proj).numel() / experts.down_proj.numel(),
        "weights_error": weights,
        "imbalance": take_imbalance(dict(stage.layers.items())),
        "imbalance_of_nothing": take_imbalance(dict(stage.layers.items())),
    }


def weights_error(stage: StageModule, division: Division) -> float:
    """The largest difference of a parameter from the first weights, gathered, and at the offsets that it states."""
    chain = chain_from_config(CONFIGS[division.config], name="test")
    weights, names = train_alone(division.config).weights, parameter_names(chain).by_path
    errors = []
    for path, parameter in stage.layers.named_parameters():
        right = weights[names[path]]
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        part = right[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        errors += [(_whole(parameter) - right).abs(), (local_part(parameter.detach()) - part).abs()]
    return max(each.max().item() for each in errors if each.numel())


def resume(saved: Division, loaded: Division) -> float:
    """Error of the weights that one division has saved and another has loaded."""
    chain = chain_from_config(CONFIGS[saved.config], name="test")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    first = build_stage(chain, saved, meshes_of(saved))
    dcp.save({name: p.detach() for name, p in first.layers.named_parameters()}, checkpoint_id=folder[0])
    second = build_stage(chain, loaded, meshes_of(loaded), seed=SEED + 1)
    if weights_error(second, loaded) == 0.0:
        raise RuntimeError("what is loaded was there before")
    dcp.load({name: p.detach() for name, p in second.layers.named_parameters()}, checkpoint_id=folder[0])
    return weights_error(second, loaded)


RESUMED = {
    "fsdp4 ep2 as dp2 tp2 ep2": (OF_FOUR["fsdp4 ep2, zero2, selective"], OF_FOUR["dp2 tp2 ep2, full"]),
    "fsdp2 tp2 ep2 as fsdp4 ep4": (OF_FOUR["fsdp2 tp2 ep2, sp"], OF_FOUR["fsdp4 ep4"]),
    "dp4 ep4 without ep": (OF_FOUR["dp4 ep4, selective"], Division(config="mixtral", data=4, ep=1, zero=3)),
}


def route_to(experts_Tk: Tensor) -> float:  # noqa: N803
    """The largest difference of divided experts from undivided ones, where this rank chooses ``experts_Tk``."""
    chain = chain_from_config(CONFIGS["mixtral"], name="test")
    layers = []
    for _ in range(2):
        model = build_model(chain, seed=SEED)
        prepare_model(model, chain)
        layers.append(build_layer(model, chain, 1, Remat.NONE))
    apply_expert_parallel(layers[1], init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden_TH = torch.randn(experts_Tk.size(0), chain.hidden_size, generator=generator)  # noqa: N806
    weights_Tk = torch.rand(experts_Tk.shape, generator=generator)  # noqa: N806
    whole, divided = (routed_experts(layer)[0] for layer in layers)
    found = []
    for experts in (whole, divided):
        inputs, weights = hidden_TH.clone().requires_grad_(), weights_Tk.clone().requires_grad_()
        output = experts(inputs, experts_Tk, weights)
        output.square().sum().backward()
        found.append((output, inputs.grad, weights.grad))
    errors = [(one - other).abs().max().item() for one, other in zip(*found, strict=True) if one.numel()]
    for parameter, own in zip(whole.parameters(), divided.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        errors.append((parameter.grad - own.grad.full_tensor()).abs().max().item())
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, max(errors))
    return max(reports)


def extremes() -> dict[str, float]:
    """Routings that leave ranks or experts without work, with as many tokens as a rank has."""
    rank = dist.get_rank()
    choices = {
        "all to one expert": torch.zeros(6, 2, dtype=torch.int64) + torch.tensor([0, 3]),
        "ranks with fewer tokens, one with none": torch.arange(rank * 6).view(-1, 2) % 4,
        "each to itself": torch.full((5, 1), rank),
        "no tokens anywhere": torch.zeros(0, 2, dtype=torch.int64),
    }
    return {name: route_to(experts_Tk) for name, experts_Tk in choices.items()}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copies(parameter: nn.Parameter) -> int:
    """Ranks that hold the same part, as the placements say."""
    mesh = parameter.device_mesh
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(axis)
    return dist.get_world_size() // shards


def before_ranks() -> None:
    """Build every model once, which imports it."""
    for config in CONFIGS.values():
        build_model(chain_from_config(config, name="test"), seed=SEED)


def of_four() -> dict[str, Any]:
    """All cases of four ranks but those of every night."""
    return {
        "parity": dict(_compare_all({name: each for name, each in OF_FOUR.items() if name not in NIGHTLY})),
        "resumed": {name: resume(*divisions) for name, divisions in RESUMED.items()},
        "extremes": extremes(),
    }


def of_four_nightly() -> dict[str, Any]:
    """The cases of four ranks of every night."""
    return {"parity": dict(_compare_all({name: each for name, each in OF_FOUR.items() if name in NIGHTLY}))}


def of_eight() -> dict[str, Any]:
    """All cases of eight ranks."""
    return {"parity": dict(_compare_all(OF_EIGHT))}


def _compare_all(divisions: dict[str, Division]) -> Iterator[tuple[str, Any]]:
    for name, division in divisions.items():
        try:
            with one_of_many_cases():
                yield name, compare(division)
        except Exception as error:
            raise RuntimeError(f"{name} failed") from error
