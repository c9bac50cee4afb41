"""Tests of which layers support cp, what they read, and of attention that does not."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.errors import InvalidModelError
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, build_model, prepare_model
from steelyard.modules.context_attention import IMPLEMENTATION, reads_mask
from steelyard.modules.dimensions.cp import apply_context_parallel
from steelyard.modules.layers import build_layer
from steelyard.plan.strategy import Remat
from tests.runtime.models import FAMILY_CONFIGS
from tests.runtime.processes import one_process
from tests.sample import FAMILIES, sampled

CAUSAL = (
    *("llama", "qwen2", "qwen3", "gemma", "mistral", "gpt_neox", "gpt2", "gemma3_text", "mixtral", "qwen3_moe"),
    "deepseek_v3",
)
NOT_CAUSAL = tuple(name for name in FAMILY_CONFIGS if name.split(" with ")[0] not in CAUSAL)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_process():
        yield init_device_mesh("cpu", (1,))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CAUSAL, FAMILIES))
def test_every_layer_of_a_causal_family_can_be_under_cp(mesh: DeviceMesh, name: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[name], name=name)
    model = build_meta_model(chain)
    prepare_model(model, chain)
    for index in range(chain.num_layers):
        apply_context_parallel(build_layer(model, chain, index, Remat.NONE), mesh, "gather")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "reads"), [("gather", False), ("ulysses", True)])
def test_only_ulysses_reads_the_mask_of_the_whole_sequence(mesh: DeviceMesh, method: str, reads: bool) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["mistral"], name="mistral")
    block = build_layer(build_meta_model(chain), chain, 1, Remat.NONE)
    assert reads_mask(block)
    apply_context_parallel(block, mesh, method)
    assert reads_mask(block) is reads


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(NOT_CAUSAL, FAMILIES))
def test_every_layer_of_another_family_is_refused(mesh: DeviceMesh, name: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[name], name=name)
    model = build_meta_model(chain)
    for index in range(chain.num_layers):
        layer = build_layer(model, chain, index, Remat.NONE)
        with pytest.raises(InvalidModelError, match="causal language model"):
            apply_context_parallel(layer, mesh, "gather")


def test_a_model_whose_attention_runs_elsewhere_is_refused(mesh: DeviceMesh) -> None:
    chain = chain_from_config(FAMILY_CONFIGS["llama"], name="llama")
    model = build_meta_model(chain)
    model.set_attn_implementation("eager")
    with pytest.raises(InvalidModelError, match="one fused kernel"):
        apply_context_parallel(build_layer(model, chain, 1, Remat.NONE), mesh, "gather")


def test_an_unmodified_model_is_prepared_for_cp() -> None:
    chain = chain_from_config(FAMILY_CONFIGS["llama"], name="llama")
    model = build_meta_model(chain)
    model.set_attn_implementation("sdpa")
    prepare_model(model, chain)
    assert model.config._attn_implementation == IMPLEMENTATION


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "t5"])
def test_without_cp_attention_is_that_of_pytorch_to_the_bit(name: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[name], name=name)
    model = build_model(chain, seed=1)
    assert model.config._attn_implementation == IMPLEMENTATION
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    found = model(ids, labels=ids).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model(ids, labels=ids).logits)
