"""Worker for cp on four processes: small models with cp on all layers, against the unmodified model in one process."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from steelyard.errors import UserError
from steelyard.model.chain import LayerRole
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_model, layer_modules, prepare_model
from steelyard.modules.dimensions import cp
from steelyard.modules.dimensions.cp import _own_side, apply_context_parallel
from steelyard.modules.dimensions.tp import apply_tensor_parallel
from steelyard.modules.layers import ChainLayer, LayerContext, build_layer, shared_inputs_of
from steelyard.modules.replicated import Replicas, replicate_over, shard_over
from steelyard.plan.strategy import Remat
from tests.runtime.models import FAMILY_CONFIGS
from tests.runtime.processes import one_of_many_cases

NUM_PROCESSES, NUM_SAMPLES, SEQ_LEN = 4, 2, 32
GQA = {"num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: FAMILY_CONFIGS[name] for name in ("llama", "qwen3", "mistral", "gpt_neox", "mixtral")},
    **{name: {**FAMILY_CONFIGS[name], "tie_word_embeddings": False} for name in ("gpt2", "gemma3_text")},
    "llama, fewer key-value heads": {**FAMILY_CONFIGS["llama"], **GQA},
    "mistral, fewer key-value heads": {**FAMILY_CONFIGS["mistral"], **GQA, "sliding_window": 5},
    "deepseek_v3": {**FAMILY_CONFIGS["deepseek_v3"], "n_group": 1, "num_experts_per_tok": 2},
    "llama, dropout": {**FAMILY_CONFIGS["llama"], "attention_dropout": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    config: str
    degree: int
    method: str = "gather"
    remat: Remat = Remat.NONE
    tp: bool = False
    sp: bool = False
    fsdp: bool = False
    replicas: bool = False
    seq_len: int = SEQ_LEN
    fault: bool = False


_LLAMA = Case(config="llama, fewer key-value heads", degree=2)
_MISTRAL = Case(config="mistral, fewer key-value heads", degree=2)
CASES: dict[str, Case] = {
    "llama, gather over 2": _LLAMA,
    "llama, gather over 4, selective": replace(_LLAMA, degree=4, remat=Remat.SELECTIVE),
    "llama, gather over 4, full": replace(_LLAMA, degree=4, remat=Remat.FULL),
    "llama, ulysses over 2, full": replace(_LLAMA, method="ulysses", remat=Remat.FULL),
    "llama, ulysses over 4": Case(config="llama", degree=4, method="ulysses"),
    "llama, tp with sp inside gather, selective": replace(_LLAMA, tp=True, sp=True, remat=Remat.SELECTIVE),
    "llama, tp with sp inside ulysses": Case(config="llama", degree=2, method="ulysses", tp=True, sp=True),
    "llama, parameters sharded over the 4 that gather": replace(_LLAMA, degree=4, fsdp=True, remat=Remat.SELECTIVE),
    "llama, replicas over the 4 that gather": replace(_LLAMA, degree=4, replicas=True, remat=Remat.FULL),
    "qwen3, ulysses over 2": Case(config="qwen3", degree=2, method="ulysses"),
    "gpt2, gather over 4": Case(config="gpt2", degree=4),
    "mistral, gather over 4, selective": replace(_MISTRAL, degree=4, remat=Remat.SELECTIVE),
    "mistral, ulysses over 4, full": Case(config="mistral", degree=4, method="ulysses", remat=Remat.FULL),
    "gemma3, gather over 4": Case(config="gemma3_text", degree=4),
    "gpt_neox, gather over 2, selective": Case(config="gpt_neox", degree=2, remat=Remat.SELECTIVE),
    "mixtral, gather over 2": Case(config="mixtral", degree=2),
    "deepseek_v3, gather over 4, full": Case(config="deepseek_v3", degree=4, remat=Remat.FULL),
    "deepseek_v3, ulysses over 2, selective": Case(
        config="deepseek_v3", degree=2, method="ulysses", remat=Remat.SELECTIVE
    ),
}
SAMPLE = ["llama, gather over 2"] + [
    name for name in CASES if name.startswith(("qwen3", "gemma3", "gpt_neox", "mix", "deep"))
]
"""Attention of every kind. Plans in `tests.runtime.context_cases` hold the other divisions of llama, qwen3 and gpt2."""
CONTROL = replace(_LLAMA, fault=True)
REFUSED: dict[str, Case] = {
    "seq_len": replace(_LLAMA, degree=4, seq_len=28),
    "cp method": replace(_LLAMA, degree=4, method="ulysses"),
    "attention dropout": Case(config="llama, dropout", degree=2),
}


def samples(seq_len: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randint(64, (2, NUM_SAMPLES, seq_len), generator=generator)
    return inputs, labels


@cache
def alone(config: str, seq_len: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the unmodified model with PyTorch's attention, by parameter."""
    model = build_model(chain_from_config(CONFIGS[config], name=config), seed=1)
    model.set_attn_implementation("sdpa")
    inputs, labels = samples(seq_len)
    logits = model(inputs, use_cache=False).logits.float()
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def divided(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients summed over the ranks of a model under cp."""
    chain = chain_from_config(CONFIGS[case.config], name=case.config)
    model = build_model(chain, seed=1)
    prepare_model(model, chain)
    world = init_device_mesh("cpu", (NUM_PROCESSES // case.degree, case.degree), mesh_dim_names=("other", "cp"))
    mesh, tensor = world["cp"], world["other"]
    layers = [
        build_layer(model, chain, index, _remat(chain.type_of(index).role, case)) for index in range(chain.num_layers)
    ]
    for layer in layers:
        if case.tp:
            apply_tensor_parallel(layer, chain, tensor, sp=case.sp)
        apply_context_parallel(layer, mesh, case.method)
        if case.fsdp:
            shard_over(layer, mesh, "fp32", reshard_after_forward=True)
    replicas = Replicas([replicate_over(layer, mesh, "fp32") for layer in layers] if case.replicas else [])
    replicas.begin_step(1)
    inputs, labels = samples(case.seq_len)
    side = shared_inputs_of(layers, model, chain, torch.device("cpu"))
    context = LayerContext(
        side=side(case.seq_len, torch.float32, torch.device("cpu")),
        labels_BS=labels,
        num_targets=labels.numel(),
    )
    with ExitStack() as stack:
        if case.tp:
            stack.enter_context(loss_parallel())
        if case.fault:
            stack.enter_context(mock.patch.object(cp, "_own_side", _first_tokens))
        loss = run(layers, inputs, context)
        loss.backward()
    replicas.end_step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    gradients = {}
    for index in range(chain.num_layers):
        for path, module in layer_modules(model, chain, index).items():
            for name, parameter in module.named_parameters():
                gradients[f"{path}.{name}"] = _summed(parameter, mesh)
    return total.item(), gradients


def run(layers: list[ChainLayer], inputs: Tensor, context: LayerContext) -> Tensor:
    flow = inputs
    for layer in layers:
        flow = layer(flow, context)
    return flow


def _remat(role: LayerRole, case: Case) -> Remat:
    return case.remat if role is LayerRole.BLOCK else Remat.NONE


def _summed(parameter: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    gradient = parameter.grad
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    if not (isinstance(gradient, DTensor) and gradient.device_mesh == mesh):  # else the axis has summed it
        dist.all_reduce(whole, group=mesh.get_group())
    return whole


def _first_tokens(side: Any, mesh: DeviceMesh) -> Any:
    """A fault: every rank takes the positions of the first tokens."""

    def first(tensor: Tensor, dim: int, _mesh: DeviceMesh) -> Tensor:
        return tensor.narrow(dim, 0, tensor.size(dim) // mesh.size())

    with mock.patch.object(cp, "local_tokens", first):
        return _own_side(side, mesh)


def _difference(case: Case, expected: tuple[float, dict[str, Tensor]]) -> dict[str, Any]:
    with one_of_many_cases():
        loss, gradients = divided(case)
    assert set(gradients) == set(expected[1]), set(gradients) ^ set(expected[1])
    errors = {
        name: ((found - expected[1][name]).abs().max() / expected[1][name].abs().max()).item()
        for name, found in gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    error = torch.tensor([abs(loss / expected[0] - 1), errors[worst]])
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return {"loss_error": error[0].item(), "gradient_error": error[1].item(), "tensor": worst}


def _refusal(case: Case) -> str:
    try:
        divided(case)
    except UserError as error:
        return error.field
    return "nothing"


def before_ranks() -> None:
    """Build every model once, which imports it."""
    for config in {case.config for case in CASES.values()}:
        build_model(chain_from_config(CONFIGS[config], name=config), seed=1)


def compare() -> dict[str, Any]:
    """Return the results of a sample of the cases, of the control and of the refused cases, identical on every rank."""
    return {
        "cases": _differences({name: CASES[name] for name in SAMPLE}),
        "control": _differences({"": CONTROL})[""],
        "refused": {name: _refusal(case) for name, case in REFUSED.items()},
    }


def compare_nightly() -> dict[str, Any]:
    """Results of all other cases."""
    return {"cases": _differences({name: case for name, case in CASES.items() if name not in SAMPLE})}


def _differences(cases: dict[str, Case]) -> dict[str, Any]:
    expected = {config: alone(config, SEQ_LEN) for config in {case.config for case in cases.values()}}
    return {name: _difference(case, expected[case.config]) for name, case in cases.items()}
