"""Tests that layers that read more than a hidden state are timed as in the chain."""

import pytest
import torch

from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import parse_strategy
from steelyard.profiler.layers import build_short_chain, layer_meshes, repetition_laps
from tests.modules.split_configs import split_config
from tests.runtime.family_cases import SPLITS
from tests.runtime.processes import one_process


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["with the embedding", "blocks alone"])
def test_layers_that_read_what_others_made_are_timed(first: int) -> None:
    chain = chain_from_config(split_config("gemma4_text"), name="gemma4", split=SPLITS["gemma4_text"])
    with one_process():
        short = build_short_chain(
            chain,
            [layer_type.name for layer_type in chain.layer_types[first:]],
            strategy=parse_strategy("single"),
            seq_len=16,
            precision="fp32",
            device=torch.device("cpu"),
            mesh=layer_meshes(1, "cpu"),
        )
        assert len(repetition_laps(short, 2)) == 2 * (6 - first)
