"""Tests of inputs besides the hidden state: samples of a step, and data shared by all layers of a pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.job import DeviceGroup, Job, sample_bytes, side_bytes
from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import parse_strategy
from tests.cost.examples import SEQ_LEN, cluster, config, job
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS
from tests.runtime.models import FAMILY_CONFIGS

SINGLE = parse_strategy("single")


def job_of(chain: ModelChain, seq_len: int) -> Job:
    return Job(
        chain=chain,
        groups=(DeviceGroup(profile=job().profile, cluster=cluster(1, 1), budget_bytes=2**30),),
        seq_len=seq_len,
        global_batch=8,
        precision="bf16",
    )


def family(name: str, seq_len: int = SEQ_LEN) -> Job:
    return job_of(chain_from_config(FAMILY_CONFIGS[name], name=name), seq_len)


def layer_types(of: Job, *roles: LayerRole) -> set[LayerType]:
    return {layer_type for layer_type in of.chain.layer_types if layer_type.role in roles}


def read_bytes(of: Job, role: LayerRole) -> int:
    (layer_type, *_) = layer_types(of, role)
    return sample_bytes(layer_type, SINGLE, config(of, num_microbatches=2))


@pytest.mark.parametrize("role", [LayerRole.EMBEDDING, LayerRole.HEAD])
def test_text_is_read_with_one_token_more_than_a_sequence(role: LayerRole) -> None:
    assert read_bytes(family("llama"), role) == 8 * 8 * (SEQ_LEN + 1)


@pytest.mark.slow
def test_images_are_read_in_fp32_by_the_first_layer_and_classes_by_the_head() -> None:
    of = family("swin")
    assert read_bytes(of, LayerRole.EMBEDDING) == 8 * 4 * 3 * 16 * 16
    assert read_bytes(of, LayerRole.HEAD) == 8 * 8


def test_features_are_read_in_fp32_by_the_first_layer_and_tokens_by_the_decoder_and_the_head() -> None:
    of = job_of(chain_from_config(split_config("whisper"), name="w", split=SPLITS["whisper"]), 16)
    first, *later = [layer_type for layer_type in of.chain.layer_types if layer_type.role is not LayerRole.BLOCK]
    assert sample_bytes(first, SINGLE, config(of, num_microbatches=2)) == 8 * 4 * 8 * 48
    assert [sample_bytes(layer_type, SINGLE, config(of, num_microbatches=2)) for layer_type in later] == [
        8 * 8 * 17
    ] * 2


def test_blocks_read_no_samples() -> None:
    assert read_bytes(family("llama"), LayerRole.BLOCK) == 0


@given(st.sampled_from([1, 2, 4, 8]))
def test_the_samples_of_a_step_do_not_depend_on_the_microbatches(num_microbatches: int) -> None:
    of = job()
    (layer_type,) = layer_types(of, LayerRole.EMBEDDING)
    whole, cut = (
        sample_bytes(layer_type, SINGLE, config(of, num_microbatches=count)) for count in (1, num_microbatches)
    )
    assert whole == cut


def test_layers_without_attention_share_positions_alone() -> None:
    of = family("llama")
    assert side_bytes(layer_types(of, LayerRole.EMBEDDING, LayerRole.HEAD), config(of)) == 8 * SEQ_LEN


@pytest.mark.slow
def test_a_sliding_window_takes_a_mask_where_the_sequence_is_longer() -> None:
    short, long = (family("mistral", length) for length in (8, 32))
    of_llama = [family("llama", length) for length in (8, 32)]
    plain = [side_bytes(layer_types(of, LayerRole.BLOCK), config(of)) for of in of_llama]
    assert side_bytes(layer_types(short, LayerRole.BLOCK), config(short)) == plain[0]
    assert side_bytes(layer_types(long, LayerRole.BLOCK), config(long)) == plain[1] + 32**2
