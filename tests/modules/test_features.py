"""Tests of models with features besides token ids: speech to text, and images with text."""

from dataclasses import replace

import pytest
import torch

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.model.split import BlockCall
from steelyard.modules.build import build_model, hub_config, read_hub_config
from steelyard.modules.model_inputs import decoder_inputs, random_samples
from steelyard.modules.pieces import SplitSharedInputs
from steelyard.modules.split_proof import split_model
from steelyard.modules.splitting import find_split
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS
from tests.sample import sampled


def _chain(name: str) -> ModelChain:
    return chain_from_config(split_config(name), name=name, split=SPLITS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(SPLITS, ("llava", "qwen3_vl", "speech_to_text")))
def test_the_splits_of_the_parity_tests_are_what_is_found(name: str) -> None:
    assert split_model(name, split_config(name)) == SPLITS[name]


def test_a_model_of_speech_reads_features_in_its_encoder_and_tokens_in_its_decoder() -> None:
    chain = _chain("whisper")
    assert chain.family.task is Task.SPEECH_SEQ2SEQ
    assert chain.features is not None
    assert chain.features.words(16) == "a sample: input_features of 8 × 48 for the encoder, 16 tokens for the decoder"
    assert [layer_type.num_streams for layer_type in chain.layer_types] == [1, 1, 2, 2, 1]
    assert chain.max_seq_len == 64
    assert chain.learned_positions


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
    assert chain.attended_share(chain.type_of(4), 16) == pytest.approx((8 + 24) / (16 + 24))


@pytest.mark.slow
def test_wide_convolutions_before_the_blocks_are_narrow_where_it_is_proved() -> None:
    sizes = {"d_model": 128, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "conv_channels": 512}
    wide = split_model("speech_to_text", {**split_config("speech_to_text"), **sizes, "vocab_size": 1024})
    assert [layer_type.styles for layer_type in wide.kinds] == [
        layer_type.styles for layer_type in SPLITS["speech_to_text"].kinds
    ]


def test_a_type_of_which_it_is_not_known_what_sound_is_refused_by_name() -> None:
    with pytest.raises(InvalidModelError, match="pop2piano, without the shape of its audio features"):
        split_model("pop2piano", {"architectures": ["Pop2PianoForConditionalGeneration"]})


def test_a_part_that_looks_its_attention_up_in_a_table_of_its_own_is_built() -> None:
    with pytest.raises(InvalidModelError, match="unlimited_ocr, without the size of its images"):
        find_split(read_hub_config("unlimited_ocr", {}))


def test_what_a_config_lacks_is_named_by_the_line_of_the_model_that_wants_it() -> None:
    with pytest.raises(InvalidModelError, match=r"in ChameleonImageVocabularyMapping.__init__ of transformers.models"):
        find_split(read_hub_config("chameleon", {}))


def test_a_list_of_all_samples_behind_a_dim_of_one_is_told_from_its_samples_and_back() -> None:
    call, hidden = BlockCall(places=3, lone=True), torch.randn(1, 6, 4)
    assert call.hidden(((hidden,), {})).shape == (2, 3, 4)
    assert torch.equal(call.returned(call.hidden(((hidden,), {}))), hidden)


def test_a_tower_for_images_stands_before_the_blocks_of_the_text_and_one_stream_flows() -> None:
    chain = _chain("llava")
    names = ["embedding", "image block", "text embedding", "text block", "head"]
    assert [layer_type.name for layer_type in chain.layer_types] == names
    assert [chain.flow_shapes(layer, 20) for layer in (0, 2, 3, 5)] == [
        ((5, 32),),
        ((5, 32),),
        ((20, 64),),
        ((20, 64),),
    ]
    assert [chain.is_causal(layer_type) for layer_type in chain.layer_types if "block" in layer_type.name] == [
        False,
        True,
    ]


def test_what_a_sample_of_an_image_with_text_holds_is_found() -> None:
    features = _chain("llava").features
    assert features is not None
    assert (features.token, features.places) == (127, 4)
    assert features.words(20) == (
        "a sample: pixel_values of 3 × 16 × 16; 20 tokens, of which the first 4 are the image's and the others text"
    )


def test_the_last_block_of_a_tower_of_which_the_state_before_is_read_rests_with_the_text_embedding() -> None:
    split = SPLITS["llava"]
    unread = ("model.vision_tower.encoder.layers.2", "model.vision_tower.post_layernorm")
    assert split.resting == unread
    assert {*unread, "model.language_model.embed_tokens"} <= {*split.modules(3).values()}
    assert SPLITS["whisper"].resting == ("model.encoder.embed_positions",)


def test_states_of_a_tower_flow_to_the_layer_between_and_what_is_made_of_them_to_blocks_of_text() -> None:
    chain = _chain("qwen3_vl")
    state, features, hidden = (24, 32), (6, 64), (20, 64)
    assert [chain.flow_shapes(layer, 20) for layer in range(8)] == [
        (state,),
        (state, state),
        (state, state, state),
        (state, state, state),
        (hidden, features, features),
        (hidden, features),
        (hidden,),
        (hidden,),
    ]


def test_blocks_that_add_to_an_image_are_of_one_type_whatever_they_add() -> None:
    names = [SPLITS["qwen3_vl"].type_of(layer).name for layer in (1, 2, 3, 5, 6, 7)]
    assert names == ["image block of kind 1"] * 2 + ["image block of kind 2", *["text block of kind 1"] * 2] + [
        "text block of kind 2"
    ]


def test_a_sequence_that_the_image_fills_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="more than 4, the tokens of an image"):
        _chain("llava").check_seq_len(4)


def test_an_image_of_two_sides_in_the_config_is_read() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {
        "vision_config": {**sizes, "image_size": [24, 24], "patch_size": [4, 4]},
        "text_config": {"model_type": "qwen2", **sizes, "num_key_value_heads": 2, "vocab_size": 128},
        **{"image_token_id": 127, "architectures": ["InternVLForConditionalGeneration"]},
    }
    features = find_split(read_hub_config("internvl", config)).split.features
    assert features is not None
    assert (features.shape, features.places, features.grid) == ((3, 24, 24), 9, None)


@pytest.mark.parametrize(("size", "found"), [(None, "none"), (27, "27 × 27"), ([16, 20], "16 × 20"), ([16], "16")])
def test_images_of_any_size_need_one_size_that_fits_the_patches(size: object, found: str) -> None:
    config = split_config("qwen2_vl")
    config["vision_config"] = {**config["vision_config"], "image_size": size}
    with pytest.raises(InvalidModelError, match=f"image_size: found {found} for qwen2_vl, which reads images of any"):
        split_model("qwen2_vl", config)


def test_patches_of_a_grid_are_one_image_of_the_size_that_is_given() -> None:
    chain = _chain("qwen2_vl")
    assert chain.features is not None
    assert (chain.features.grid, chain.features.places) == ((1, 4, 6), 6)
    assert chain.features.words(20) == (
        "a sample: pixel_values of 24 × 96 (4 × 6 patches); 20 tokens, of which the first 6 are the image's and the "
        "others text"
    )
    assert chain.flow_shapes(0, 20) == ((24, 32),)


def test_blocks_of_a_tower_that_attend_in_windows_are_a_layer_type_of_their_own() -> None:
    chain = _chain("qwen2_5_vl")
    assert [chain.layers[layer] for layer in (1, 2, 3)] == [1, 2, 1]


def test_positions_of_the_text_behind_an_image_are_those_that_the_model_computes() -> None:
    chain = _chain("qwen2_vl")
    model = build_model(chain, seed=0)
    ids = torch.tensor([[127] * 6 + [3, 4, 5]])
    types = (ids == 127).int()
    positions, _ = model.model.get_rope_index(ids, types, image_grid_thw=torch.tensor([[1, 4, 6]]))
    rotary = model.model.language_model.rotary_emb(torch.zeros(1, 9, 64), positions)
    side = SplitSharedInputs(model, chain, [chain.type_of(4).name])(9, torch.float32, torch.device("cpu"))
    (_, names) = side.arguments[chain.type_of(4).name]
    for found, expected in zip(names["position_embeddings"], rotary, strict=True):
        assert found.of(1).equal(expected)


def test_ids_of_an_image_with_text_follow_from_the_labels() -> None:
    chain = _chain("llava")
    _, labels = random_samples(chain, 2, 12, torch.Generator().manual_seed(0))
    ids = decoder_inputs(labels, hub_config(chain), chain.features)
    assert (ids == 127).sum(1).tolist() == [4, 4]
    assert ids[:, 4:].equal(labels[:, 3:-1])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("clip", "AutoModelForImageClassification: the image tower with a classifier"),
        ("whisper", "AutoModelForCausalLM (decoder only)"),
    ],
)
def test_a_plan_of_a_part_of_a_model_says_what_it_leaves_out(config: str, said: str) -> None:
    chain = _chain("whisper")
    task = Task.IMAGE_CLASSIFICATION if config == "clip" else Task.CAUSAL_LM
    content = {"text_config": {}} if config == "clip" else {"is_encoder_decoder": True}
    part = replace(chain, family=replace(chain.family, task=task), config=content)
    assert said in part.left_out()
    assert any(said in each for each in part.warnings(16))
