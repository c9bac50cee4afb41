"""A small diffusion transformer of your own under a plan: docs/how-to/your-own-model.md goes through it.

steelyard plan examples/diffusion.py:build_model --cluster 1x8xa100-80gb --global-batch 512 -o plan.json
torchrun --nproc-per-node 8 examples/diffusion.py plan.json checkpoint
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import steelyard

WIDTH, HEADS, DEPTH, PATCHES, ENTRIES, CLASSES = 64, 4, 4, 16, 12, 10


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x, condition):
        shift, scale, gate, gate_mlp = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(4, dim=-1)
        x = x + gate * self.attention(functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(functional.layer_norm(x, (WIDTH,)))


class DiffusionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(ENTRIES, WIDTH)
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.time, self.label = nn.Linear(WIDTH, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.register_buffer("rates", torch.logspace(0, -4, WIDTH // 2), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, ENTRIES)

    def forward(self, noisy, time, label):
        angles = time[:, None] * self.rates
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.time.weight.dtype)
        condition = self.time(waves) + self.label(label)  # per sample; passes through the blocks with x, with gradients
        x = self.patches(noisy) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x + condition.unsqueeze(1))


def read(samples, step=0):
    """The samples at these places of a step's batch: the same for a place, whichever process asks."""
    drawn = torch.Generator().manual_seed(step)
    label = torch.randint(CLASSES, (512,), generator=drawn)
    clean = torch.sin(label[:, None, None] + torch.arange(PATCHES * ENTRIES).view(PATCHES, ENTRIES))
    time = torch.randint(1000, (512,), generator=drawn)
    noise = torch.randn(clean.shape, generator=drawn)
    share = (time / 1000)[:, None, None]
    inputs = {"noisy": (1 - share) * clean + share * noise, "time": time, "label": label}
    return {name: each[samples] for name, each in inputs.items()}, noise[samples]


def build_model():
    """Return the module, sample inputs with targets, and the loss, for `steelyard plan FILE.py:build_model`."""
    torch.manual_seed(0)  # identical initial weights on every process
    return DiffusionTransformer(), read([0, 1]), functional.mse_loss


def train(plan, folder, num_steps=10):
    """The losses of some more steps; goes on from the checkpoint in a folder, and leaves one there."""
    model, _, loss_function = build_model()
    trainer = steelyard.parallelize(model, plan, loss=loss_function)
    optimizers = trainer.make_optimizers(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
    if Path(folder).exists():
        steelyard.load_checkpoint(trainer, optimizers, folder)
    losses = []
    for step in range(trainer.num_steps, trainer.num_steps + num_steps):
        loss = trainer.train_step(lambda samples, step=step: read(samples, step))
        trainer.clip_gradients(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    steelyard.save_checkpoint(trainer, optimizers, folder)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    train(steelyard.read_plan(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
