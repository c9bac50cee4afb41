"""Tests that every parameter of every family keeps the name of the unmodified model under any plan."""

import pytest

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model
from steelyard.runtime.state import parameter_names
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS

ALL = FAMILY_CONFIGS | {"llama-tied": CONFIGS["llama-tied"]}


def chain_of(name: str) -> ModelChain:
    return chain_from_config(ALL[name], name=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_layers_hold_exactly_what_the_model_saves(name: str) -> None:
    chain = chain_of(name)
    model = build_meta_model(chain)
    without_ties = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    expected = model.state_dict().keys() & without_ties
    assert set(parameter_names(chain).by_path.values()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_of_what_layers_share_all_but_the_first_are_copies(name: str) -> None:
    chain = chain_of(name)
    names = parameter_names(chain)
    copies = {path: names.by_path[path] for path, number in names.copy_of_path.items() if number}
    expected = {}
    for shared in chain.shared:
        (first_layer, first_path), *others = shared.copies
        expected |= {f"{layer}.{path}": names.by_path[f"{first_layer}.{first_path}"] for layer, path in others}
    assert copies == expected


def test_a_tied_head_is_a_copy_of_the_embedding() -> None:
    names = parameter_names(chain_of("llama-tied"))
    assert (
        names.by_path["0.model__embed_tokens.weight"]
        == names.by_path["3.lm_head.weight"]
        == "model.embed_tokens.weight"
    )
    assert names.copy_of_path["3.lm_head.weight"] == 1
    assert names.num_copies == 2
