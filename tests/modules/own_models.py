"""Tiny modules as users write them, with samples and losses."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, BLOCKS, TOKENS, VOCABULARY = 32, 4, 4, 16, 64
SAMPLES = 4


class NanoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head = HEADS

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806
        q, k, v = (
            each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in self.c_attn(x).split(C, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), NanoAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), NanoMLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """NanoGPT's structure: a table that is also the projection, learned positions, and the loss in the forward pass."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(TOKENS, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([NanoBlock() for _ in range(BLOCKS)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def rotated(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[: x.shape[1], None]).flatten(3).type_as(x)


class TitanAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, HEADS // 2, WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, freqs_cis):
        bs, seqlen, _ = x.shape
        q, k, v = (each(x).view(bs, seqlen, -1, self.head_dim) for each in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        k, v = (each.repeat_interleave(2, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(bs, seqlen, -1))


class TitanFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(), TitanFeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.layer_id = layer_id
        self.weight_init_std = 0.02 / (2 * (layer_id + 1)) ** 0.5

    def forward(self, x, freqs_cis):
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class TitanLlama(nn.Module):
    """Torchtitan's structure: blocks in a dictionary, a rotary table that is a buffer and given to every block."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.outer(torch.arange(TOKENS).float(), 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(number): TitanBlock(number) for number in range(BLOCKS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def patches(width=8):
    return nn.Sequential(
        nn.Linear(width, WIDTH), *(NanoBlock() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
    )


class DiTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = DiTAttention()
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        a, b, g, d, e, f = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + g * self.attn(self.norm1(x) * (1 + b) + a)
        return x + f * self.mlp(self.norm2(x) * (1 + e) + d)


class DiT(nn.Module):
    """A diffusion transformer: the time and the class condition every block and the last layer."""

    def __init__(self, channels=3, size=8, patch=2, classes=10):
        super().__init__()
        self.patch = patch
        self.x_embedder = nn.Conv2d(channels, WIDTH, patch, patch)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2, WIDTH) * 0.1, requires_grad=False)
        self.t_embedder = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.y_embedder = nn.Embedding(classes, WIDTH)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.linear = nn.Linear(WIDTH, patch * patch * channels)

    def forward(self, x, t, y):
        tall = x.shape[-1] // self.patch
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(8, device=t.device) / 8)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)
        c = self.t_embedder(waves) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=-1)
        x = self.linear(self.norm(x) * (1 + scale) + shift)
        x = x.unflatten(1, (tall, tall)).unflatten(-1, (self.patch, self.patch, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(2, 3).flatten(3, 4)


class SkipBlock(nn.Module):
    def __init__(self, takes_skip):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.join = nn.Linear(2 * WIDTH, WIDTH) if takes_skip else None

    def forward(self, x, skip=None):
        x = x if skip is None else self.join(torch.cat([x, skip], dim=-1))
        return x + self.mlp(x)


class UNet(nn.Module):
    """Long skips: what the first blocks return is read by the last ones, in the blocks or between them."""

    def __init__(self, joins_in_block=True):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([SkipBlock(joins_in_block and number >= 2) for number in range(4)])
        self.head = nn.Linear(WIDTH, 3)
        self.joins_in_block = joins_in_block

    def forward(self, x):
        x = self.stem(x)
        skips = []
        for number, block in enumerate(self.blocks):
            if number < 2:
                x = block(x)
                skips.append(x)
            elif self.joins_in_block:
                x = block(x, skips.pop())
            else:
                x = block(x + skips.pop())
        return self.head(x)


class TowerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class TwoTowers(nn.Module):
    """Images and texts, each through a tower of its own width, and how well the two of a pair agree."""

    def __init__(self, text_before_blocks=True):
        super().__init__()
        self.patches = nn.Linear(8, WIDTH)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH // 2)
        self.vision = nn.ModuleList([TowerBlock(WIDTH) for _ in range(2)])
        self.text = nn.ModuleList([TowerBlock(WIDTH // 2) for _ in range(2)])
        self.project_image = nn.Linear(WIDTH, 16)
        self.project_text = nn.Linear(WIDTH // 2, 16)
        self.text_before_blocks = text_before_blocks

    def forward(self, image, text):
        x = self.patches(image)
        y = self.tokens(text) if self.text_before_blocks else None
        for block in self.vision:
            x = block(x)
        y = self.tokens(text) if y is None else y
        for block in self.text:
            y = block(y)
        image, text = self.project_image(x.mean(1)), self.project_text(y.mean(1))
        return functional.cosine_similarity(image, text, dim=-1)


class Stock(nn.Module):
    """Layers of torch, and a norm before and after them."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS)
        )

    def forward(self, x):
        x = self.norm(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """A module, its inputs for some samples, a loss, and its lists of blocks if they have to be named."""

    build: Any
    sample: Any
    loss: Any = None
    blocks: Any = None

    def module(self):
        torch.manual_seed(0)
        return self.build()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2))


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


TEXT = _ids(VOCABULARY, SAMPLES, TOKENS + 1)
CASES = {
    "nanogpt": Case(NanoGPT, (TEXT[:, :-1].contiguous(), TEXT[:, 1:].contiguous())),
    "titan": Case(TitanLlama, (TEXT[:, :-1], TEXT[:, 1:]), token_loss),
    "sequential": Case(patches, (_random(SAMPLES, TOKENS, 8), _random(SAMPLES, TOKENS, 3)), functional.mse_loss),
    "stock": Case(Stock, (_random(SAMPLES, TOKENS, 8), _random(SAMPLES, TOKENS, 3)), functional.mse_loss),
    "dit": Case(
        DiT,
        (
            {"x": _random(SAMPLES, 3, 8, 8), "t": _ids(1000, SAMPLES), "y": _ids(10, SAMPLES)},
            _random(SAMPLES, 3, 8, 8),
        ),
        functional.mse_loss,
    ),
    "unet": Case(UNet, (_random(SAMPLES, TOKENS, 8), _random(SAMPLES, TOKENS, 3)), functional.mse_loss),
    "towers": Case(
        TwoTowers,
        ({"image": _random(SAMPLES, TOKENS, 8), "text": _ids(VOCABULARY, SAMPLES, TOKENS)}, _random(SAMPLES)),
        functional.mse_loss,
        ("vision", "text"),
    ),
}
