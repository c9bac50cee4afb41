"""What a rank reads beside the hidden state: samples of a whole step, and what all layers of a pass share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.inputs import sample_bytes, side_bytes
from steelyard.cost.setting import DeviceGroup, Job
from steelyard.model.chain import LayerKind, LayerRole, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import parse_strategy
from tests.cost.examples import SEQ_LEN, cluster, job, setting
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


def kinds(of: Job, *roles: LayerRole) -> set[LayerKind]:
    return {kind for kind in of.chain.kinds if kind.role in roles}


def read_bytes(of: Job, role: LayerRole) -> int:
    (kind, *_) = kinds(of, role)
    return sample_bytes(kind, SINGLE, setting(of, num_microbatches=2))


@pytest.mark.parametrize("role", [LayerRole.EMBEDDING, LayerRole.HEAD])
def test_text_is_read_with_one_token_more_than_a_sequence(role: LayerRole) -> None:
    assert read_bytes(family("llama"), role) == 8 * 8 * (SEQ_LEN + 1)


def test_images_are_read_in_fp32_by_the_first_layer_and_classes_by_the_head() -> None:
    of = family("swin")
    assert read_bytes(of, LayerRole.EMBEDDING) == 8 * 4 * 3 * 16 * 16
    assert read_bytes(of, LayerRole.HEAD) == 8 * 8


def test_features_are_read_in_fp32_by_the_first_layer_and_tokens_by_the_decoder_and_the_head() -> None:
    of = job_of(chain_from_config(split_config("whisper"), name="w", split=SPLITS["whisper"]), 16)
    first, *later = [kind for kind in of.chain.kinds if kind.role is not LayerRole.BLOCK]
    assert sample_bytes(first, SINGLE, setting(of, num_microbatches=2)) == 8 * 4 * 8 * 48
    assert [sample_bytes(kind, SINGLE, setting(of, num_microbatches=2)) for kind in later] == [8 * 8 * 17] * 2


def test_blocks_read_no_samples() -> None:
    assert read_bytes(family("llama"), LayerRole.BLOCK) == 0


@given(st.sampled_from([1, 2, 4, 8]))
def test_the_samples_of_a_step_do_not_depend_on_the_microbatches(num_microbatches: int) -> None:
    of = job()
    (kind,) = kinds(of, LayerRole.EMBEDDING)
    whole, cut = (sample_bytes(kind, SINGLE, setting(of, num_microbatches=count)) for count in (1, num_microbatches))
    assert whole == cut


def test_layers_without_attention_share_positions_alone() -> None:
    of = family("llama")
    assert side_bytes(kinds(of, LayerRole.EMBEDDING, LayerRole.HEAD), setting(of)) == 8 * SEQ_LEN


def test_a_sliding_window_takes_a_mask_where_the_sequence_is_longer() -> None:
    short, long = (family("mistral", length) for length in (8, 32))
    of_llama = [family("llama", length) for length in (8, 32)]
    plain = [side_bytes(kinds(of, LayerRole.BLOCK), setting(of)) for of in of_llama]
    assert side_bytes(kinds(short, LayerRole.BLOCK), setting(short)) == plain[0]
    assert side_bytes(kinds(long, LayerRole.BLOCK), setting(long)) == plain[1] + 32**2
