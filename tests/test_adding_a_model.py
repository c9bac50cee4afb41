"""docs/adding-a-model.md: its families work as they stand there, and are as short as it says."""

import re
from pathlib import Path

import pytest
import torch

from steelyard.model import families, read
from steelyard.model.family import Family
from steelyard.model.read import chain_from_config
from steelyard.modules.batch import random_samples
from steelyard.modules.build import build_model
from steelyard.tracer.trace import trace
from tests.runtime.family_chain import loss_of_chain, loss_of_model
from tests.shapes import tp_shape

TEXT = (Path(__file__).parents[1] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
CONFIGS = {
    "distilbert": {
        **{"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64},
        **{"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0},
    },
}


def family_of_block(block: str) -> Family:
    names: dict[str, object] = {}
    exec(block, names)
    found = names["FAMILY"]
    assert isinstance(found, Family)
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_family_of_the_page_computes_and_divides_as_the_real_model(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of_block(block)
    monkeypatch.setattr(read, "FAMILIES", {**families.FAMILIES, family.model_type: family})
    chain = chain_from_config(CONFIGS[family.model_type], name="new")
    inputs, labels = random_samples(chain, 3, 16, torch.Generator().manual_seed(0))
    model = build_model(chain, seed=1)
    expected = loss_of_model(model, chain, inputs, labels).item()
    assert loss_of_chain(model, chain, inputs, labels).item() == pytest.approx(expected, rel=1e-6)
    profile = trace(chain, seq_len=16, precision="bf16", degrees=(1, 2))
    for kind in ("embedding", "block", "head"):
        whole, part = profile.layer(kind, tp_shape(1, False)), profile.layer(kind, tp_shape(2, False))
        assert whole is not None
        assert part is not None
        assert part.forward.matmul_flop.at(1) <= whole.forward.matmul_flop.at(1)
        assert part.num_params < whole.num_params


def test_the_page_shows_both_kinds_of_family() -> None:
    assert {family_of_block(block).model_type for block in BLOCKS} == set(CONFIGS)


def test_a_family_is_shorter_than_the_error_message_says() -> None:
    assert all(sum(bool(line.strip()) for line in block.splitlines()) < 50 for block in BLOCKS)
