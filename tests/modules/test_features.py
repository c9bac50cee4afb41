"""Models whose samples hold features beside token ids: speech to text."""

import pytest

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.modules.split_proof import split_model
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS


def _chain(name: str) -> ModelChain:
    return chain_from_config(split_config(name), name=name, split=SPLITS[name])


@pytest.mark.parametrize("name", SPLITS)
def test_the_splits_of_the_parity_tests_are_what_is_found(name: str) -> None:
    assert split_model(name, split_config(name)) == SPLITS[name]


def test_a_model_of_speech_reads_features_in_its_encoder_and_tokens_in_its_decoder() -> None:
    chain = _chain("whisper")
    assert chain.family.task is Task.SPEECH_SEQ2SEQ
    assert chain.features is not None
    assert chain.features.words(16) == "a sample: input_features of 8 × 48 for the encoder, 16 tokens for the decoder"
    assert [kind.num_streams for kind in chain.kinds] == [1, 1, 2, 2, 1]
    assert chain.max_seq_len == 64
    assert chain.layout.learned_positions


def test_the_encoder_has_its_own_length_and_the_decoder_that_of_the_tokens() -> None:
    chain = _chain("whisper")
    assert [chain.flow_shapes(layer, 16) for layer in (0, 2, 3, 5)] == [
        ((24, 64),),
        ((24, 64),),
        ((16, 64), (24, 64)),
        ((16, 64), (24, 64)),
    ]
    assert chain.num_flowing(3, 16) == (16 + 24) * 64


def test_a_block_of_the_decoder_attends_to_tokens_before_it_and_to_all_of_the_encoder() -> None:
    chain = _chain("whisper")
    assert chain.attended_share(chain.kind_of(4), 16) == pytest.approx((8 + 24) / (16 + 24))


def test_a_type_of_which_it_is_not_known_what_sound_is_refused_by_name() -> None:
    with pytest.raises(InvalidModelError, match="pop2piano, of which it is not known what a sample of sound is"):
        split_model("pop2piano", {"architectures": ["Pop2PianoForConditionalGeneration"]})
