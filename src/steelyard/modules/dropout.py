"""Dropout that a plan can repeat: which entries fall out depends on step, microbatch, layer and share of the samples.

So does whatever else is drawn at random: the noise in front of routers, and the experts that some of them draw.

Before each layer the generators are seeded with a number made from these four and the seed of the run. So

- ranks that hold the same activations (tensor parallelism) drop the same entries, and their copies stay equal;
- ranks that hold other samples, and other microbatches, layers and steps, drop others;
- the same plan gives the same numbers twice, recomputed layers too, and a resumed run needs no generator's state.

Under another plan other entries fall out, as with any change of the ranks that draw them. Not modelled: under tensor
parallelism the shards of attention heads, and of the sequence with sp, drop alike entries on every rank.
"""

import torch
from torch import nn

_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_MOST_SEED = 1 << 63


_RATES = (
    *("attention_dropout", "dropout_prob", "drop_prob", "dropout"),
    *("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
)


def has_dropout(module: nn.Module) -> bool:
    """Whether anything in a module drops entries or adds noise while it trains."""
    return any(_rate(submodule) > 0 for submodule in module.modules())


def _rate(module: nn.Module) -> float:
    """The share of entries that a module drops: of a dropout layer, or of attention that drops inside its kernel.

    Of a router how large its noise is.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    rates = (getattr(module, name, 0.0) for name in _RATES)
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)


def seed_dropout(*parts: int) -> None:
    """Seeds the generators of all devices with a number that depends on every part and their order."""
    seed = 0
    for part in parts:
        seed = ((seed ^ part) * _MIX + 1) & _WORD
        seed ^= seed >> 29
    torch.manual_seed(seed % _MOST_SEED)
