"""Cost tables of deep models: block types of different width in a repeating pattern, or all different."""

from dataclasses import replace

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.space import SpaceOptions
from tests.problems.transformer import Decoder, decoder_tables

PATTERN = ((4096, 14336), (4096, 8192), (5120, 13824), (3072, 8192))
"""Hidden and FFN width of the four block types, which follow one another."""


def deep_tables(
    num_layers: int,
    *,
    num_devices: int,
    num_stages: int,
    num_microbatches: int,
    global_batch: int,
    all_unlike: bool = False,
) -> CostTables:
    """Tables of one configuration; ``all_unlike`` gives every block times and sizes of its own, up to a fifth
    larger."""
    space = SpaceOptions(max_degrees={"tp": 8}, devices_per_node=8)
    blocks = [
        decoder_tables(
            Decoder(num_blocks=1, hidden=hidden, ffn=ffn, vocab=128256, seq_len=4096),
            num_devices=num_devices,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            global_batch=global_batch,
            space=space,
        )
        for hidden, ffn in PATTERN
    ]
    num_types = num_layers if all_unlike else len(PATTERN)
    rng = np.random.default_rng(num_stages)
    longer = 1 + 0.2 * rng.random((num_types, 1)) if all_unlike else np.ones((num_types, 1))
    larger = 1 + 0.2 * rng.random((num_types, 1)) if all_unlike else np.ones((num_types, 1))

    def block_rows(name: str) -> np.ndarray:
        return np.stack([getattr(blocks[layer_type % len(PATTERN)], name)[1] for layer_type in range(num_types)])

    return replace(
        blocks[0],
        layer_types=tuple(f"block{layer_type}" for layer_type in range(num_types)),
        layers=tuple(layer % num_types for layer in range(num_layers)),
        legal=block_rows("legal"),
        time_s=block_rows("time_s") * longer,
        static_bytes=(block_rows("static_bytes") * larger).astype(np.int64),
        activation_bytes=(block_rows("activation_bytes") * larger).astype(np.int64),
        transient_bytes=block_rows("transient_bytes"),
        switch_s=np.broadcast_to(blocks[0].switch_s[1], (num_types, *blocks[0].switch_s[1].shape)),
    )


def deep_configs(num_layers: int, *, num_devices: int, global_batch: int, all_unlike: bool = False) -> list[CostTables]:
    """All configurations with power-of-two stages and microbatches in which every block has a legal strategy."""
    powers = [2**exponent for exponent in range(20)]
    configs = (
        deep_tables(
            num_layers,
            num_devices=num_devices,
            num_stages=stages,
            num_microbatches=microbatches,
            global_batch=global_batch,
            all_unlike=all_unlike,
        )
        for stages in powers
        if stages <= min(num_devices, num_layers)
        for microbatches in powers
        if microbatches <= global_batch
    )
    return [tables for tables in configs if tables.legal.any(axis=1).all()]
