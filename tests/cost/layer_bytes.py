"""Bytes of the tensors of one layer under one strategy, read from the rows of `steelyard.cost.memory`."""

from dataclasses import dataclass

import numpy as np

from steelyard.cost.job import JobConfig
from steelyard.cost.memory import TERMS, layer_rows
from steelyard.model.chain import LayerType
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank: what it holds by term, of each microbatch in flight, and what it works with."""

    static_bytes: dict[str, int]
    activation_bytes: int
    transient_bytes: int


def layer_bytes(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> LayerBytes:
    """Bytes of the tensors of a layer of this type under a legal strategy."""
    layer_types = config.job.chain.layer_types
    legal = np.array([[each == layer_type] for each in layer_types])
    rows = layer_rows(config, (strategy,), legal).of_tensors
    *static, saved = rows.terms[:, layer_types.index(layer_type), 0].tolist()
    held = {name: num_bytes for name, num_bytes in zip(TERMS, static, strict=False) if num_bytes}
    return LayerBytes(
        static_bytes=held, activation_bytes=saved, transient_bytes=int(rows.works[layer_types.index(layer_type), 0])
    )
