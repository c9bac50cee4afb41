"""Own modules on CPU processes: predicted against measured step time and memory, by the command line alone.

Three modules of different kinds (a decoder with a table that is also the projection, an encoder of patches, blocks
that a condition modulates) are profiled on 2 processes (`steelyard profile FILE.py:FUNCTION`), planned as dp, fsdp, tp
and two stages (`plan --pin`, `--stages`), and each plan is trained for some steps (`train --builder`). A row has the
median step of the run's record, and the least that was predicted over measured memory of a rank.

Run on idle cores: python benchmarks/own_modules.py [--steps N] [--budget S] [--only NAME]
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, DEPTH, TOKENS, VOCABULARY, BATCH = 256, 8, 6, 128, 1024, 16
PLANS = {
    "dp2": ["--pin", "layers 0-7: dp=2"],
    "fsdp2": ["--pin", "layers 0-7: fsdp=2"],
    "tp2": ["--pin", "blocks 0-5: tp=2"],
    "2 stages": ["--stages", "2", "--microbatches", "4"],
}


class Attention(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        heads = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(is_causal=is_causal)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(is_causal=True) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(48, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(is_causal=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, gate = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        x = x + gate * self.attention(functional.layer_norm(x, (WIDTH,)) * (1 + scale))
        return x + self.mlp(functional.layer_norm(x, (WIDTH,)))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.label = nn.Linear(48, WIDTH), nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Modulated() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 48)

    def forward(self, noisy: Tensor, label: Tensor) -> Tensor:
        condition, x = self.label(label), self.patches(noisy)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def decoder():
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    return Decoder(), (tokens, tokens), _entropy


def encoder():
    return Encoder(), (torch.randn(2, TOKENS, 48), torch.randint(10, (2,))), _entropy


def diffusion():
    noisy = torch.randn(2, TOKENS, 48)
    return Diffusion(), ({"noisy": noisy, "label": torch.randint(10, (2,))}, noisy), functional.mse_loss


def steelyard(*words: object) -> None:
    """Run a command; raises `RuntimeError` with what it says where it fails."""
    finished = subprocess.run(["steelyard", *map(str, words)], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"steelyard {' '.join(map(str, words))}\n{finished.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"{'module':<10} {'plan':<9} {'predicted':>10} {'measured':>9} {'ratio':>6} {'memory':>7}")
    for name in ("decoder", "encoder", "diffusion"):
        if options.only not in name:
            continue
        builder = f"{Path(__file__).resolve()}:{name}"
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            job = ["--precision", "fp32", "--global-batch", BATCH]
            steelyard("profile", builder, "-n", 2, *job, "--budget", options.budget, "-o", folder / "profile.json")
            for plan, choices in PLANS.items():
                priced = ["--profile", folder / "profile.json", "--cluster", "1x2xcpu", "--memory", "4GiB"]
                try:
                    steelyard("plan", builder, *job, *priced, *choices, "-o", folder / "plan.json")
                except RuntimeError as error:
                    print(f"{name:<10} {plan:<9} refused: {error}", flush=True)
                    continue
                run = ["--data", "synthetic", "--steps", options.steps, "--record", folder / "record.json"]
                steelyard("train", folder / "plan.json", "--builder", builder, "--keep-going", *run)
                record = json.loads((folder / "record.json").read_text())
                predicted, measured = record["predicted_step_s"], record["median_step_s"]
                memory = min(
                    record["predicted_peak_bytes"][rank["stage"]] / rank["peak_bytes"] for rank in record["ranks"]
                )
                print(
                    f"{name:<10} {plan:<9} {predicted:>9.3f}s {measured:>8.3f}s {predicted / measured:>6.2f} "
                    f"{memory:>7.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
