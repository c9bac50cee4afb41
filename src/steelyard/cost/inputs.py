"""Bytes of what a rank reads beside the hidden state: its samples for a whole step, and what every layer shares.

| bytes          | of                                                                     | lives                    |
|----------------|------------------------------------------------------------------------|--------------------------|
| `sample_bytes` | token ids, images or features on an embedding, labels on the head      | the whole step           |
| `side_bytes`   | positions, rotary embeddings and masks, which every forward pass makes | per microbatch in flight |
"""

import math
from typing import cast

from steelyard.cost.job import AnyStrategy, JobConfig
from steelyard.model.chain import LayerRole, LayerType
from steelyard.units import Amount

_TOKEN_BYTES = 8
_IMAGE_ENTRY_BYTES = 4


def sample_bytes(layer_type: LayerType, strategy: AnyStrategy, config: JobConfig) -> Amount:
    """Return the bytes that a rank reads for a layer of this type in a step: ids, images, labels of all microbatches.

    Token ids come with one more than the sequence has: inputs and labels are the same tensor, one place apart.
    Frameworks with states of their own: not counted.
    """
    if layer_type.role is LayerRole.BLOCK or config.job.execution.keeps_own_buffers:
        return 0
    samples = cast(Amount, config.num_microbatches * (config.microbatch_samples // strategy.sample_degree))
    chain = config.job.chain
    image, own = chain.image, chain.sample_bytes
    if own is not None:
        return samples * own
    if chain.features and layer_type == chain.type_of(0):
        return samples * _IMAGE_ENTRY_BYTES * math.prod(chain.features.shape)
    if image is None:
        return samples * _TOKEN_BYTES * (config.job.seq_len + 1)
    return samples * (_IMAGE_ENTRY_BYTES * math.prod(image) if layer_type.role is LayerRole.EMBEDDING else _TOKEN_BYTES)


def side_bytes(layer_types: set[LayerType], config: JobConfig) -> int:
    """Return the bytes that a forward pass through layers of these types makes for all: positions, rotary, masks.

    A fused kernel takes a mask of one byte an entry, and only where a window slides; step by step every layer type of
    attention takes one that is added to the scores.
    """
    job, chain = config.job, config.job.chain
    if chain.sample_bytes is not None:
        whole, of_sample = chain.side_bytes
        return whole + config.microbatch_samples * (chain.sample_bytes + of_sample)
    attention = {
        layer_type.attention for layer_type in layer_types if layer_type.role is LayerRole.BLOCK and chain.rotary_size
    }
    num_rotary = len(attention) if chain.family.rotary_by_attention else bool(attention)
    rotary = 2 * num_rotary * chain.rotary_size * job.compute_bytes
    window = int(chain.config.get("sliding_window") or 0)
    slides = "sliding_attention" in attention and 0 < window < job.seq_len
    mask = int(slides) if chain.family.fused_attention else len(attention) * job.compute_bytes
    return job.seq_len * (_TOKEN_BYTES + rotary + mask * job.seq_len)
