"""Cost tables of the size and shape of real decoders, from rough closed forms (not predictions)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.plan.dimensions.dimension import Placed
from steelyard.plan.strategy import HiddenPlacement, Remat, Strategy
from steelyard.search.space import SpaceOptions, enumerate_strategies
from tests.schedules.examples import pipeline

PEAK_FLOP_PER_S = 400e12
NODE_BYTES_PER_S = 200e9
NETWORK_BYTES_PER_S = 40e9
DEVICES_PER_NODE = 8
OVERHEAD_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes that a decoder's rough costs need."""

    num_blocks: int
    hidden: int
    ffn: int
    vocab: int
    seq_len: int

    @property
    def params(self) -> tuple[float, float, float]:
        """Parameters of the embedding, a block and the head."""
        block = 4.0 * self.hidden**2 + 3.0 * self.hidden * self.ffn
        return float(self.vocab * self.hidden), block, float(self.vocab * self.hidden)


LLAMA3_8B = Decoder(num_blocks=32, hidden=4096, ffn=14336, vocab=128256, seq_len=8192)
LLAMA3_405B = Decoder(num_blocks=126, hidden=16384, ffn=53248, vocab=128256, seq_len=8192)
KEPT = {Remat.NONE: 34.0, Remat.SELECTIVE: 16.0, Remat.FULL: 2.0}
RECOMPUTED = {Remat.NONE: 0.0, Remat.SELECTIVE: 0.12, Remat.FULL: 1.0}


def decoder_tables(
    decoder: Decoder,
    *,
    num_devices: int,
    num_stages: int,
    num_microbatches: int,
    global_batch: int,
    space: SpaceOptions | None = None,
    schedule: str = "1f1b",
    layers: Sequence[int] | None = None,
    jitter: float = 0.03,
    most_strategies: int | None = None,
) -> CostTables:
    """Tables for embedding, blocks and head; ``jitter`` spreads the times so that few are equal."""
    devices = num_devices // num_stages
    space = space or SpaceOptions(max_degrees={"tp": 8}, devices_per_node=8)
    strategies = enumerate_strategies(devices, space)[:most_strategies]
    rng = np.random.default_rng(devices)
    samples = global_batch / num_microbatches
    shape = (3, len(strategies))
    time_s, static, saved, transient = (np.zeros(shape) for _ in range(4))
    legal = np.array([[samples % each.sample_degree == 0 for each in strategies]] * 3)
    for layer_type, params in enumerate(decoder.params):
        for index, each in enumerate(strategies):
            (
                time_s[layer_type, index],
                static[layer_type, index],
                saved[layer_type, index],
                transient[layer_type, index],
            ) = _layer_costs(decoder, each, layer_type, params, samples, num_microbatches)
    time_s *= 1 + jitter * rng.random(shape)
    return CostTables(
        pipeline=pipeline(num_stages, num_microbatches, schedule),
        layer_types=("embedding", "block", "head"),
        layers=tuple(layers) if layers is not None else (0, *(1 for _ in range(decoder.num_blocks)), 2),
        strategies=strategies,
        legal=legal,
        time_s=time_s,
        static_bytes=static.astype(np.int64),
        activation_bytes=saved.astype(np.int64),
        transient_bytes=transient.astype(np.int64),
        switch_s=_switches(decoder, strategies, samples),
        transfer_s=samples / devices * decoder.seq_len * decoder.hidden * 4 / NETWORK_BYTES_PER_S,
        overhead_bytes=OVERHEAD_BYTES,
    )


def _layer_costs(
    decoder: Decoder, strategy: Strategy, layer_type: int, params: float, samples: float, num_microbatches: int
) -> tuple[float, float, float, float]:
    """Seconds per microbatch, static, saved and transient bytes of one layer."""
    tokens = samples / strategy.data_degree * decoder.seq_len
    flop = 0.0 if layer_type == 0 else 6 * params / strategy.tensor_degree * tokens
    seconds = flop * (1 + RECOMPUTED[strategy.remat] / 3) / PEAK_FLOP_PER_S
    message = tokens * decoder.hidden * 2
    if strategy.tensor_degree > 1:
        calls = 4 if layer_type == 1 else 2
        extra = 1 + RECOMPUTED[strategy.remat] / 2
        seconds += (
            calls * extra * 2 * (strategy.tensor_degree - 1) / strategy.tensor_degree * message / NODE_BYTES_PER_S
        )
    if strategy.token_degree > 1:
        seconds += 4 * message * strategy.token_degree / NETWORK_BYTES_PER_S
    weights = 2 * params / strategy.tensor_degree
    shards, replicas = strategy.state_shards, strategy.replicas
    if shards > 1:
        near = strategy.num_devices // replicas <= DEVICES_PER_NODE
        speed, exposed = (NODE_BYTES_PER_S, 0.3) if near else (NETWORK_BYTES_PER_S, 1.0)
        seconds += 3 * weights * (shards - 1) / shards / speed * exposed
    if replicas > 1:
        speed = NODE_BYTES_PER_S if strategy.num_devices <= DEVICES_PER_NODE else NETWORK_BYTES_PER_S
        seconds += 2 * weights / shards * (replicas - 1) / replicas / speed / num_microbatches
    static = 8 * weights / strategy.state_shards
    kept = KEPT[strategy.remat] if layer_type == 1 else 2.0
    split = strategy.tensor_degree if strategy.mode("sp") else (strategy.tensor_degree + 1) / 2
    saved = kept * tokens * decoder.hidden / split
    transient = 2 * weights * (strategy.state_shards > 1) + (
        34.0 * message / 2 / strategy.tensor_degree if layer_type == 1 else message
    )
    if layer_type == 2:
        transient += 8 * tokens * decoder.vocab / strategy.tensor_degree
    return seconds, static, saved, transient


def _ways(layout: HiddenPlacement) -> int:
    """Parts into which a layout divides the tokens of all samples."""
    return math.prod(degree for placed, degree in layout.axes if placed is not Placed.WHOLE)


def _switches(decoder: Decoder, strategies: Sequence[Strategy], samples: float) -> np.ndarray:
    """[3, S, S] seconds: equal layouts switch for nothing, others move the activation and its gradient."""
    layouts = list(dict.fromkeys(strategy.hidden for strategy in strategies))
    between = np.zeros((len(layouts), len(layouts)))
    for before, old in enumerate(layouts):
        for after, new in enumerate(layouts):
            if old != new:
                share = max(1 / _ways(old), 1 / _ways(new))
                between[before, after] = 4 * samples * share * decoder.seq_len * decoder.hidden / NODE_BYTES_PER_S
    places = [layouts.index(strategy.hidden) for strategy in strategies]
    once = between[np.ix_(places, places)]
    return np.stack([once] * 3)


def decoder_configs(
    decoder: Decoder,
    *,
    num_devices: int,
    global_batch: int,
    most_stages: int,
    most_microbatches: int,
    space: SpaceOptions | None = None,
    most_strategies: int | None = None,
) -> list[CostTables]:
    """All configurations with power-of-two stages and microbatches that have some legal strategy."""
    found = []
    stages = 1
    while stages <= min(most_stages, num_devices, decoder.num_blocks + 2):
        microbatches = 1
        while microbatches <= min(most_microbatches, global_batch):
            tables = decoder_tables(
                decoder,
                num_devices=num_devices,
                num_stages=stages,
                num_microbatches=microbatches,
                global_batch=global_batch,
                space=space,
                most_strategies=most_strategies,
            )
            if tables.legal.any():
                found.append(tables)
            microbatches *= 2
        stages *= 2
    return found
