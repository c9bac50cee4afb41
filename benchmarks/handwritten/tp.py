"""Tensor parallelism: `parallelize_module` on embedding, blocks and head, with the loss over a sharded vocabulary."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy


def build(model, num_microbatches):
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizers = [torch.optim.AdamW(group, lr=1e-3, fused=True) for group in by_kind(model.parameters())]

    def step(tokens):
        for microbatch in tokens.chunk(num_microbatches):
            with loss_parallel():
                logits = model(microbatch[:, :-1], use_cache=False).logits
                loss = cross_entropy(logits.flatten(0, 1), microbatch[:, 1:].flatten()) / num_microbatches
                loss.backward()
        clip(model, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def by_kind(parameters):
    """Sharded and whole parameters apart: one fused update takes no mixture."""
    sharded, whole = [], []
    for parameter in parameters:
        (sharded if hasattr(parameter, "placements") else whole).append(parameter)
    return sharded, whole


def clip(model, max_norm):
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in by_kind(model.parameters())]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_kind(model.parameters()):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
