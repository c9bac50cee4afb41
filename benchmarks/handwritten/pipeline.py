"""Two pipeline stages under 1F1B, each replicated over half of the ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Stage(torch.nn.Module):
    """One half of the blocks, with the embedding in front or norm and head behind."""

    def __init__(self, model, index):
        super().__init__()
        half = len(model.model.layers) // 2
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.blocks = model.model.layers[half * index : half * (index + 1)]
        self.rotary = model.model.rotary_emb
        self.head = torch.nn.Sequential(model.model.norm, model.lm_head) if index == 1 else None

    def forward(self, hidden):
        """The hidden state behind the blocks, or the logits."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        places = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, places)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_ids=places, position_embeddings=rotary)
        return hidden if self.head is None else self.head(hidden)


def build(model, num_microbatches):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")
    module = DistributedDataParallel(Stage(model, index), process_group=mesh.get_group("dp"))
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step(tokens):
        parts = (part.chunk(mesh.size(1))[mesh.get_local_rank("dp")] for part in tokens.chunk(num_microbatches))
        mine = torch.cat(list(parts))
        if index == 0:
            schedule.step(mine[:, :-1], return_outputs=False)
        else:
            schedule.step(target=mine[:, 1:], losses=[], return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        square = norm.square()
        dist.all_reduce(square, group=mesh.get_group("pp"))
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_of(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
