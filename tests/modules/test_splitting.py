"""Tests of models without a family file: split by structure, proved, or refused by name."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.model.small import small_config, structure_of
from steelyard.model.split import ModelSplit
from steelyard.modules import any_model, kept_splits, split_proof, split_tp
from steelyard.modules.build import (
    build_from_config,
    build_meta_model,
    build_model,
    materialize_layer,
    materialize_module,
    prepare_model,
    read_hub_config,
)
from steelyard.modules.layers import build_layer
from steelyard.modules.model_inputs import forward_options
from steelyard.modules.prepared import prepare, stored_apart
from steelyard.modules.split_proof import no_cp, split_model
from steelyard.modules.splitting import find_split, task_of
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.profiles.profile import Profile
from steelyard.runtime.parity import samples_of_step
from steelyard.tracer.trace import trace
from tests.modules.split_configs import OTHERWISE_CONFIGS, SPLIT_CONFIGS, split_config
from tests.runtime.family_cases import SPLITS
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.sample import TYPES, sampled

pytestmark = pytest.mark.slow

_found: dict[str, ModelSplit] = {}


@pytest.fixture(autouse=True)
def _nothing_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove the small models of packaged structures here as well."""
    monkeypatch.setattr(kept_splits, "packaged_split", lambda _config_hash: None)


def split_of(model_type: str) -> ModelSplit:
    """Split once for all tests of this module."""
    if model_type not in _found:
        _found[model_type] = split_model(model_type, split_config(model_type))
    return _found[model_type]


@cache
def structure(model_type: str) -> ModelSplit:
    """Split of a type, without the proofs of how its blocks are divided, which take most of the time."""
    return structure_with(model_type, split_config(model_type))


def structure_with(model_type: str, config: dict[str, Any]) -> ModelSplit:
    return find_split(read_hub_config(model_type, config)).split


@pytest.mark.parametrize("model_type", sampled(SPLIT_CONFIGS, TYPES))
def test_a_type_without_a_family_splits_into_pieces_that_are_the_whole(model_type: str) -> None:
    split = split_of(model_type)
    assert len(split.layers) == 4
    assert split.hidden_size == 64


def test_blocks_that_attend_otherwise_are_layer_types_of_their_own() -> None:
    assert [layer_type.name for layer_type in split_of("cohere2").kinds] == [
        "embedding",
        "sliding block",
        "full block",
        "head",
    ]


def test_a_tied_embedding_is_found() -> None:
    split = split_of("cohere2")
    assert split.shared == (((0, "model.embed_tokens.weight"), (3, "lm_head.weight")),)
    assert split.layout().shared[0].copies == ((0, "model__embed_tokens.weight"), (3, "lm_head.weight"))


@pytest.mark.parametrize("model_type", sampled(SPLITS, {"cohere2", "convnext", "roberta"}))
def test_the_splits_of_the_parity_tests_are_what_is_found(model_type: str) -> None:
    assert split_of(model_type) == SPLITS[model_type]


def test_tensor_and_sequence_parallelism_are_proved() -> None:
    assert [(layer_type.no_tp, layer_type.no_sp) for layer_type in split_of("cohere2").kinds] == [("", "")] * 4


def test_sizes_that_a_degree_must_divide_are_found_and_those_that_ranks_may_share() -> None:
    layer_type = split_of("cohere2").kinds[1]
    assert dict(layer_type.tp_divides)["key-value heads"] == 2
    assert layer_type.tp_shares == ("key-value heads",)
    chain = chain_from_config(split_config("cohere2"), name="c", split=split_of("cohere2"))
    batch = Batch(microbatch_samples=8, seq_len=16)
    assert illegal_reason(chain.type_of(1), parse_strategy("tp4"), batch) is None
    assert "attention heads" in str(illegal_reason(chain.type_of(1), parse_strategy("tp8"), batch))


@pytest.mark.parametrize("model_type", ["phi3", "olmo2"])
def test_heads_that_every_rank_gathers_may_be_fewer_than_the_ranks(model_type: str) -> None:
    layer_type = split_of(model_type).kinds[1]
    assert "columns_gathered" in layer_type.styles.values()
    assert layer_type.tp_shares == ("key-value heads",)


def test_context_parallelism_is_proved() -> None:
    assert [layer_type.no_cp for layer_type in split_of("cohere2").kinds] == [""] * 4
    assert [layer_type.attention for layer_type in split_of("cohere2").kinds[1:3]] == [
        "sliding_attention",
        "full_attention",
    ]


def test_attention_that_runs_step_by_step_cannot_be_divided_by_tokens() -> None:
    assert "step by step" in split_of("bloom").kinds[1].no_cp


def test_layers_without_attention_cannot_be_divided_by_tokens() -> None:
    layer_types = split_of("mamba").kinds
    assert all("its blocks are of linear_attention" in layer_type.no_cp for layer_type in layer_types)


def test_a_window_that_every_block_has_is_found() -> None:
    config = {**split_config("starcoder2"), "num_hidden_layers": 1, "sliding_window": 8}
    assert structure_with("starcoder2", config).kinds[1].attention == "sliding_attention"


def test_modules_that_are_all_of_an_embedding_or_a_head_are_called_one_after_another() -> None:
    split = structure_with("olmo2", {**split_config("olmo2"), "num_hidden_layers": 1})
    assert (split.embedding_calls, split.head_calls) == (("model.embed_tokens",), ("model.norm", "lm_head"))


def test_a_head_that_scales_its_logits_is_an_operation_more() -> None:
    split = structure_with("cohere2", split_config("cohere2") | {"logit_scale": 0.25})
    assert split.head_calls == ("model.norm", "lm_head", ":mul:0.25")


def test_a_head_that_caps_its_logits_is_three_operations_more() -> None:
    config = FAMILY_CONFIGS["gemma2"] | {"final_logit_softcapping": 20.0}
    calls = ("model.norm", "lm_head", ":div:20.0", ":tanh", ":mul:20.0")
    assert structure_with("gemma2", config).head_calls == calls


def test_stages_of_blocks_are_one_list_and_blocks_that_shift_their_windows_a_layer_type() -> None:
    drop = {"drop_path_rate": 0.2}  # which differs from block to block
    split = split_model("swin", FAMILY_CONFIGS["swin"] | {"depths": [4, 2]} | drop)
    assert split.layers == (0, 1, 2, 1, 2, 3, 4, 4, 5)
    assert [layer_type.shape for layer_type in split.kinds[2:5]] == [(64, 8), (16, 16), (16, 16)]
    assert split.kinds[1].styles["block.attention.q_proj"] == "columns_gathered"
    assert split.kinds[3].no_tp == "no way is known to divide its modules"  # merges patches with one matrix


def test_a_first_block_that_is_never_left_out_is_of_the_layer_type_of_others() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
    image = {"image_size": 32, "patch_size": 8, "drop_path_rate": 0.2, "num_labels": 10}
    split = structure_with("beit", sizes | image | {"architectures": ["BeitForImageClassification"]})
    assert split.layers == (0, 1, 1, 1, 1, 2)


def test_a_tensor_that_transformers_caches_by_size_is_not_one_without_values() -> None:
    config = FAMILY_CONFIGS["vit"] | {"model_type": "beit", "vocab_size": 64, "use_relative_position_bias": True}
    config |= {"use_mean_pooling": True, "architectures": ["BeitForImageClassification"]}
    chain = chain_from_config(config, name="test")
    trace(chain, seq_len=17, precision="bf16", degrees=(1,))
    for layers in (2, 3):
        assert len(split_model("beit", config | {"num_hidden_layers": layers}).layers) == layers + 2


@pytest.mark.parametrize("model_type", ["donut-swin", "swinv2"])
def test_types_of_swin_split_likewise(model_type: str) -> None:
    config = FAMILY_CONFIGS["swin"] | {"model_type": model_type}
    assert structure_with(model_type, config).layers == (0, 1, 2, 3, 4, 4, 5)


def test_an_encoder_without_a_task_fills_in_masked_tokens() -> None:
    configs = (FAMILY_CONFIGS["bert"], FAMILY_CONFIGS["bert"] | {"is_decoder": True})
    assert [task_of(read_hub_config("bert", each)) for each in configs] == [Task.MASKED_LM, Task.CAUSAL_LM]


def test_a_classifier_that_reads_one_token_is_an_operation_between_two_modules() -> None:
    split = structure_with("vit", FAMILY_CONFIGS["vit"])
    assert split.head_calls == ("vit.layernorm", ":select:1.0:0.0", "classifier")


def test_why_a_layer_type_cannot_be_divided_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_tp, "_by_structure", lambda *_: [{"self_attn.q_proj": "columns"}])
    config = {**split_config("stablelm"), "num_hidden_layers": 1}
    assert "raises" in split_model("stablelm", config).kinds[1].no_tp


@pytest.mark.parametrize("model_type", sampled(SPLIT_CONFIGS, TYPES))
def test_every_block_type_is_divided_between_two_ranks(model_type: str) -> None:
    assert [layer_type.no_tp for layer_type in split_of(model_type).kinds[1:-1] if layer_type.no_tp] == []


def test_parameters_with_an_entry_for_each_head_are_divided() -> None:
    assert split_of("gpt_oss").kinds[1].styles["block.self_attn"].endswith(":sinks")


def test_what_latent_attention_compresses_is_whole_on_every_rank() -> None:
    styles = split_of("deepseek_v2").kinds[1].styles
    assert styles["block.self_attn.kv_a_proj_with_mqa"].startswith("whole")
    assert styles["block.self_attn.kv_b_proj"] == "columns"


def test_what_one_matrix_gives_several_of_is_gathered() -> None:
    layer_type = split_of("bloom").kinds[1]
    assert layer_type.styles["block.self_attention.query_key_value"] == "columns_gathered"
    assert layer_type.styles["block.self_attention.dense"] == "rows_of_whole"
    assert dict(layer_type.tp_divides)["outputs of self_attention.query_key_value"] == 3 * 64


def test_parameters_that_a_module_reads_of_one_that_it_does_not_call_are_whole() -> None:
    mixer = split_of("mamba").kinds[1].styles["block.mixer"]
    assert mixer.split(":")[-1].split(",") == ["conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias"]


def test_experts_are_divided_where_attention_is_recurrent() -> None:
    layer_type = split_of("qwen3_next").kinds[1]
    assert layer_type.name == "linear block"
    assert layer_type.styles["block.mlp.experts"] == "own_experts"
    assert layer_type.styles["block.linear_attn.in_proj_qkvz"] == "columns_gathered"


def test_parts_of_a_block_in_a_list_are_divided_one_by_one() -> None:
    layer_types = split_of("mt5").kinds
    assert [layer_type.no_tp for layer_type in layer_types] == [""] * len(layer_types)
    assert layer_types[1].styles["block.layer.1.DenseReluDense.wo"] == "rows"


def test_a_table_with_an_entry_for_each_head_is_divided_with_the_heads() -> None:
    styles = split_of("mt5").kinds[1].styles
    attention = "block.layer.0.SelfAttention"
    assert styles[f"{attention}.relative_attention_bias"] == styles[f"{attention}.q"] == "columns"
    assert "n_heads" in styles[attention]


def test_attention_of_classes_that_read_the_registry_and_do_not_say_so_runs_in_one_kernel() -> None:
    assert split_of("mt5").fused_attention
    assert not split_of("bloom").fused_attention


def test_what_alone_is_called_between_an_encoder_and_its_decoder_is_known() -> None:
    encoder = split_of("mt5").encoder
    assert encoder is not None
    assert encoder.between_calls == (("decoder.embed_tokens",), ("encoder.final_layer_norm",))
    more = split_of("bart").encoder
    assert more is not None
    assert more.between_calls is None


def test_the_head_of_a_decoder_copies_no_hidden_state() -> None:
    chain = _chain_of("mt5")
    head = build_layer(build_model(chain, seed=0), chain, chain.num_layers - 1, Remat.NONE)
    hidden, encoded = (torch.ones((2, 4, 64), requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        logits = head.run_alone(head, (hidden, encoded), None)
    assert hidden.data_ptr() in {each.data_ptr() for each in kept}
    logits.sum().backward()
    assert encoded.grad is not None
    assert not encoded.grad.any()


def test_a_part_of_a_config_is_made_small_whatever_its_name() -> None:
    small = small_config({"encoder": {"model_type": "t5_gemma_module", "hidden_size": 2304}, "rope": {"dim": 2304}})
    assert small["encoder"]["hidden_size"] == 64
    assert small["rope"] == {"dim": 2304}


def test_what_a_config_says_is_not_there_stays_away_at_small_width() -> None:
    assert small_config({"n_shared_experts": 0, "shared_intermediate_size": 0, "hidden_size": 512}) == {
        **{"n_shared_experts": 0, "shared_intermediate_size": 0, "hidden_size": 64},
    }


def test_attention_is_divided_where_experts_cannot_be() -> None:
    """All experts of llama4 read every token, so no expert belongs to one rank."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16, "vocab_size": 128}
    small |= {"num_local_experts": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    styles = split_model("llama4_text", {"model_type": "llama4_text", **small}).kinds[1].styles
    assert styles["block.self_attn.o_proj"] == "rows"
    assert styles["block.feed_forward.experts"] == "on_part"


def test_the_matrices_of_gpt2_are_divided_by_structure() -> None:
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    layer_type = split_model("gpt2", small).kinds[1]
    assert (layer_type.no_tp, layer_type.no_sp) == ("", "")
    assert layer_type.styles["block.mlp.c_fc"] == layer_type.styles["block.attn.c_attn"] == "columns"


@pytest.mark.parametrize("model_type", ["gpt2", "openai-gpt"])
def test_a_matrix_whose_result_is_split_is_stored_apart(model_type: str) -> None:
    config = read_hub_config(model_type, {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32})
    model = find_split(config).model
    attention = "transformer.h.0.attn"
    assert stored_apart(model) == {f"{attention}.c_attn": 3}
    assert model.get_submodule(f"{attention}.c_attn").weight.shape == (16, 3, 16)
    assert model.get_submodule(f"{attention}.c_attn").bias.shape == (3, 16)


@pytest.mark.parametrize(("model_type", "longest"), [("roberta", 63), ("opt", 64)])
def test_a_table_with_a_padding_entry_is_for_fewer_tokens(model_type: str, longest: int) -> None:
    split = split_of(model_type)
    assert (split.learned_positions, split.max_seq_len) == (True, longest)


def test_a_table_of_positions_is_looked_up_for_the_places_of_the_tokens() -> None:
    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    split = find_split(read_hub_config("gpt2", config)).split
    assert split.embedding_calls == ("transformer.wte", ":positions:transformer.wpe", "transformer.drop")
    assert not find_split(read_hub_config("openai-gpt", config)).split.embedding_calls  # in a buffer that is not known


def test_modules_between_which_a_tensor_is_written_to_are_no_steps() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**vision, "vocab_size": 32, "max_position_embeddings": 64}
    config = read_hub_config("git", {**text, "vision_config": {**vision, "image_size": 32}})
    split = find_split(config).split
    assert (split.embedding_calls, split.head_calls) == ((), ("output",))  # positions are added in place


def test_a_row_of_its_own_for_one_token_is_the_same_without_a_mask_of_places() -> None:
    whole = T5Gemma2TextScaledWordEmbedding(8, 4, 0, embed_scale=2.0, eoi_token_index=5)
    with torch.no_grad():
        whole.eoi_embedding.normal_()
    parts = copy.deepcopy(whole)
    prepare(parts, "t5gemma2")
    ids, grads = torch.tensor([[1, 5, 7], [5, 0, 5]]), []
    for model in (whole, parts):
        made = model(ids)
        made.square().sum().backward()
        grads.append([made.detach(), *(each.grad for each in model.parameters())])
    assert type(parts) is not type(whole)
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize(("key", "drops"), [("attn_pdrop", True), ("resid_pdrop", False), ("embd_pdrop", False)])
def test_attention_that_drops_entries_is_told_from_what_drops_beside_it(key: str, drops: bool) -> None:
    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    config |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, key: 0.1}
    found = find_split(read_hub_config("gpt2", config))
    assert found.attention_drops is drops
    assert bool(no_cp(found.split, found.split.kinds[1], attention_drops=found.attention_drops)) is drops


def test_experts_that_every_token_takes_are_divided() -> None:
    styles = split_of("qwen2_moe").kinds[1].styles
    assert styles["block.mlp.shared_expert.up_proj"] == "columns"
    assert styles["block.mlp.shared_expert.down_proj"] == "rows_partial"


def test_what_blocks_are_given_for_every_sample_is_found() -> None:
    assert {name: split_of(name).sides_by_sample for name in ("bloom", "xglm", "phi3")} == {
        "bloom": True,
        "xglm": True,
        "phi3": False,
    }


def test_experts_are_found() -> None:
    assert split_of("qwen2_moe").kinds[1].num_experts == 4


def test_an_architecture_decides_the_task() -> None:
    assert split_of("roberta").task is Task.MASKED_LM


def test_a_model_of_images_splits_into_pieces_that_are_the_whole() -> None:
    split = split_of("dinov2")
    assert (split.task, split.image, split.vocab_size) == (Task.IMAGE_CLASSIFICATION, (3, 32, 32), 10)
    assert [layer_type.name for layer_type in split.kinds] == ["embedding", "block", "head"]
    assert split.layout().max_seq_len == 17
    assert (split.kinds[1].no_tp, split.kinds[1].no_sp) == ("", "the places of an image are not divided")


def test_stages_of_images_may_change_the_shape_of_what_flows() -> None:
    config = split_config("convnext")
    chain = chain_from_config(config, name="c", split=split_of("convnext"))
    assert [chain.flow_shapes(layer, 64) for layer in range(3)] == [((16, 8, 8),), ((16, 8, 8),), ((32, 4, 4),)]
    assert [chain.hidden_shape(layer, 64) for layer in range(3)] == [(64, 16), (64, 16), (16, 32)]
    assert [layer.kind for layer in trace(chain, seq_len=64, precision="bf16", degrees=(1,)).layers] == [
        layer_type.name for layer_type in chain.layer_types
    ]


def test_an_encoder_and_a_decoder_split_into_pieces_that_are_the_whole() -> None:
    split = split_of("bart")
    names = ["embedding", "encoder block", "decoder embedding", "decoder block", "head"]
    assert [layer_type.name for layer_type in split.kinds] == names
    assert [layer_type.num_streams for layer_type in split.layout().layer_types] == [1, 1, 2, 2, 1]
    assert split.layers == (0, 1, 1, 2, 3, 3, 4)
    assert split.modules(2) == {"block": "model.encoder.layers.1"}
    assert split.modules(4) == {"block": "model.decoder.layers.0"}


def test_a_table_of_tokens_that_encoder_decoder_and_head_share_is_found() -> None:
    (copies,) = split_of("bart").shared
    tables = [(0, "model.encoder.embed_tokens.weight"), (3, "model.decoder.embed_tokens.weight")]
    assert list(copies) == [*tables, (6, "lm_head.weight")]


def test_blocks_of_an_encoder_and_a_decoder_are_divided() -> None:
    layer_types = split_of("bart").kinds
    assert [layer_types[place].no_tp for place in (0, 1, 2, 3)] == [""] * 4
    assert layer_types[3].styles["block.encoder_attn"].startswith("enter:+key_value_states:")
    assert {layer_type.no_sp for layer_type in layer_types[:-1]} == {"two sequences flow along the decoder"}


def test_a_class_with_an_encoder_that_is_listed_for_masked_models_too_has_its_encoder() -> None:
    assert split_of("bart").task is Task.SEQ2SEQ_LM


def test_what_is_made_for_each_block_flows_past_those_before_it_and_no_further() -> None:
    chain = chain_from_config(split_config("gemma4_text"), name="gemma4_text", split=SPLITS["gemma4_text"])
    assert [len(chain.split.past(layer)) for layer in range(6)] == [4, 5, 6, 3, 0, 0]
    assert chain.flow_shapes(0, 16) == ((16, 64), *[(16, 24)] * 4)
    assert tuple(each.shape for each in chain.read(3, 16)) == ((16, 64), (16, 24), (2, 16, 16), (2, 16, 16))


def test_keys_and_values_that_blocks_share_are_made_by_one_of_them() -> None:
    shared = [each for each in structure("gemma4_text").streams if each.entry]
    assert [(each.entry, each.maker, each.readers) for each in shared] == [
        (("sliding_attention", 0), 1, (3,)),
        (("sliding_attention", 1), 1, (3,)),
        (("full_attention", 0), 2, (4,)),
        (("full_attention", 1), 2, (4,)),
    ]


def test_blocks_that_make_or_read_otherwise_are_layer_types_of_their_own() -> None:
    assert structure("gemma4_text").layers == (0, 1, 2, 3, 4, 5)
    assert {layer_type.no_sp for layer_type in SPLITS["gemma4_text"].kinds} == {
        "what its blocks share is not divided by tokens"
    }


def test_what_is_read_past_other_blocks_leaves_sequence_parallelism_to_them() -> None:
    config = {**split_config("gemma4_text"), "num_kv_shared_layers": 0, "num_hidden_layers": 2}
    layer_types = split_model("gemma4_text", config | {"layer_types": ["sliding_attention", "full_attention"]}).kinds
    assert [(layer_type.no_tp, layer_type.no_sp) for layer_type in layer_types[1:3]] == [("", "")] * 2


def test_blocks_that_are_given_their_number_are_of_one_type_and_hold_what_they_share() -> None:
    split = structure("zamba2")
    assert split.layers == (0, 1, 2, 1, 2, 3)
    assert split.call.number == 2
    place = "shared_transformer.self_attn.q_proj.weight"
    assert ((2, f"model.layers.1.{place}"), (4, f"model.layers.3.{place}")) in split.shared


def test_matrices_that_blocks_share_begin_alike_and_unlike_others() -> None:
    chain = chain_from_config(split_config("zamba2"), name="zamba2", split=SPLITS["zamba2"])
    model = build_meta_model(chain)
    prepare_model(model, chain)
    for layer in (2, 4):
        materialize_layer(model, chain, layer, seed=0, device=torch.device("cpu"))
    first, second = (model.model.layers[place].shared_transformer.self_attn for place in (1, 3))
    assert first.q_proj.weight is not second.q_proj.weight
    assert first.q_proj.weight.equal(second.q_proj.weight)
    assert not first.q_proj.weight.equal(first.k_proj.weight)


def test_a_matrix_that_an_earlier_layer_shares_and_has_divided_by_now_begins_whole() -> None:
    chain = chain_from_config(split_config("zamba2"), name="zamba2", split=SPLITS["zamba2"])
    model = build_meta_model(chain)
    prepare_model(model, chain)
    first, second = (model.model.layers[place].shared_transformer.self_attn.q_proj for place in (1, 3))
    materialize_layer(model, chain, 2, seed=0, device=torch.device("cpu"))
    whole = first.weight.detach().clone()
    first.weight = torch.nn.Parameter(whole[:2])
    materialize_layer(model, chain, 4, seed=0, device=torch.device("cpu"))
    assert second.weight.equal(whole)


def test_a_width_of_several_hidden_states_stays_one_at_small_width() -> None:
    given = {"hidden_size": 2560, "num_attention_heads": 32, "attention_hidden_size": 5120, "attention_head_dim": 160}
    small = small_config(given)
    assert (small["hidden_size"], small["attention_hidden_size"], small["attention_head_dim"]) == (64, 128, 32)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model_type", ["gemma4_text", "mpnet"])
def test_what_flows_past_blocks_at_another_width_is_what_is_found_there(model_type: str, degree: int) -> None:
    config = read_hub_config(model_type, split_config(model_type)).to_dict()
    small = small_config(config, degree=degree)
    found = find_split(read_hub_config(model_type, small)).split.streams
    assert structure(model_type).resized(config, small, degree).streams == found


def test_a_block_is_traced_with_what_it_reads_and_not_with_what_flows_past_it() -> None:
    layers = trace(
        chain_from_config(split_config("gemma4_text"), name="gemma4_text", split=SPLITS["gemma4_text"]),
        seq_len=16,
        precision="fp32",
        degrees=(1,),
    ).layers
    read = {each.kind: each.input_bytes.at(1) for each in layers}
    assert read["sliding block of kind 1"] == 4 * 16 * (64 + 24)
    assert read["sliding block of kind 2"] == 4 * 16 * (64 + 24 + 2 * 2 * 16)


def _chain_of(model_type: str) -> ModelChain:
    return chain_from_config(split_config(model_type), name=model_type, split=split_of(model_type))


def test_a_bias_that_the_first_block_of_a_stack_makes_for_all_is_made_by_each_of_them() -> None:
    split = split_of("mt5")
    tables = [f"decoder.block.{place}.layer.0.SelfAttention.relative_attention_bias.weight" for place in range(2)]
    assert ((4, tables[0]), (5, tables[1])) in split.shared
    assert split.layers == (0, 1, 1, 2, 3, 3, 4)


def test_a_model_whose_parts_ask_for_its_type_and_device_splits() -> None:
    config = {**_TEXT, "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}}
    config["audio_config"] |= {"encoder_ffn_dim": 32}
    assert len(structure_with("qwen2_audio", {"model_type": "qwen2_audio", **config}).layers) == 4


def test_a_part_of_a_model_whose_class_says_how_it_is_filled_is_filled_so() -> None:
    config = read_hub_config("modernvbert", small_config(read_hub_config("modernvbert", {}).to_dict()))
    model = build_from_config(config, Task.MASKED_LM, fused_attention=False)
    materialize_module(model, model, seed=0, device=torch.device("cpu"))
    assert [name for name, each in model.named_buffers() if each.isnan().any()] == []


_TEXT = {"text_config": {**split_config("phi3"), "model_type": "qwen2"}}


def test_positions_that_are_made_of_sizes_alone_are_blank_where_they_are_not_kept() -> None:
    assert len(structure("blenderbot-small").layers) == 7


def test_a_tied_module_that_is_not_called_belongs_to_no_layer() -> None:
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = {**sizes, "entity_vocab_size": 32, "entity_emb_size": 16, "architectures": ["LukeForMaskedLM"]}
    split = find_split(read_hub_config("luke", config)).split
    assert not [path for copies in split.shared for _, path in copies if "entity" in path]


@cache
def traced(model_type: str) -> Profile:
    """Trace of a type, without its blocks divided."""
    return trace(_chain_of(model_type), seq_len=32, precision="bf16", degrees=(1,))


@pytest.mark.parametrize("model_type", sampled(OTHERWISE_CONFIGS, {"dbrx", "mllama", "xlnet", "albert"}))
def test_blocks_that_are_called_otherwise_split_and_are_traced(model_type: str) -> None:
    assert traced(model_type).layers


def test_blocks_that_text_does_not_reach_lie_with_the_embedding() -> None:
    split = split_of("mllama")
    assert [split.modules(layer) for layer in (1, 2)] == [{"block": f"model.layers.{place}"} for place in (0, 2)]
    assert split.embedding == ("model.embed_tokens", "model.layers.1")


@pytest.mark.nightly
def test_places_that_a_block_chooses_flow_to_those_that_read_them() -> None:
    chosen = split_of("hy_v4").streams[-1]
    assert (chosen.maker, chosen.readers, chosen.shape, chosen.whole) == (2, (3,), (0, 8), "int32")


def test_a_block_chooses_no_more_places_than_there_are() -> None:
    config = read_hub_config("hy_v4", split_config("hy_v4") | {"index_topk": 64})
    chosen = find_split(config, keeps_results=True).split.streams[-1]
    assert [chosen.of_tokens(tokens) for tokens in (32, 128)] == [(32, 32), (128, 64)]


def test_whole_numbers_that_flow_need_no_gradient() -> None:
    chain = chain_from_config(split_config("hy_v4"), name="hy_v4", split=SPLITS["hy_v4"])
    assert [(each.needs_gradient, each.whole) for each in chain.flow(2)] == [(True, ""), (False, "int32")]


def test_blocks_whose_forward_is_called_and_that_return_a_mapping_split() -> None:
    split = structure("squeezebert")
    assert (split.call.result, split.call.order, split.layers) == ("feature_map", (0, 2, 1), (0, 1, 1, 2))


def test_blocks_with_equal_masks_of_their_own_are_of_one_type_and_windows_stay_unlike_at_small_width() -> None:
    assert structure("neomme").layers == (0, 1, 2, 3, 4)
    config = {"sliding_window": 256, "per_layer_config": {"1": {"sliding_window": 1024}}}
    small = small_config(config)
    assert (small["sliding_window"], small["per_layer_config"]["1"]["sliding_window"]) == (16, 64)


def test_a_tied_matrix_that_the_head_reads_without_a_call_is_the_heads() -> None:
    split = structure("neomme")
    assert split.head == ("lm_head", "unembedding_projection")


def test_samples_of_a_model_that_pads_them_have_a_length_that_needs_none() -> None:
    split = split_of("pegasus_x")
    assert split.multiple == 64
    chain = chain_from_config(split_config("pegasus_x"), name="l", split=split)
    chain.check_seq_len(128)
    with pytest.raises(InvalidModelError, match=r"(?s)multiple of 64.*--seq-len 128"):
        chain.check_seq_len(65)
    small = small_config(split_config("pegasus_x"))
    assert split.resized(split_config("pegasus_x"), small, 1).multiple == small["block_size"] == 32


def test_a_second_state_flows_from_each_block_of_an_encoder_to_the_next() -> None:
    split = split_of("pegasus_x")
    assert [(each.maker, each.readers, each.shape) for each in split.streams] == [
        (0, (1,), (8, 64)),
        (1, (2,), (8, 64)),
    ]
    assert split.places(3, 2) == (None, ())


def test_a_plan_warns_of_blocks_that_a_model_would_leave_out_at_random() -> None:
    config = split_config("opt") | {"layerdrop": 0.05}
    split = find_split(read_hub_config("opt", config)).split
    (warning,) = chain_from_config(config, name="opt", split=split).warnings(16)
    assert "every block runs in every step: layerdrop (model.decoder: 0.05)" in warning
    assert not split_of("opt").layerdrop


def test_the_first_token_of_a_small_model_is_not_that_of_padding() -> None:
    assert structure_of({"pad_token_id": 0, "bos_token_id": 2}) == {"pad_token_id": 0, "bos_token_id": 1}
    assert structure_of({"pad_token_id": 255, "bos_token_id": 2}) == {"pad_token_id": 255, "bos_token_id": 0}


def test_samples_hold_no_padding() -> None:
    chain = _chain_of("cpmant")
    samples = samples_of_step(chain, num_samples=32, seq_len=64, step=0)
    assert 0 not in samples.inputs
    assert 0 not in samples.labels


def test_a_router_that_casts_its_weights_leaves_them_of_their_type() -> None:
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "vocab_size": 128}
    config = read_hub_config("switch_transformers", sizes)
    model = build_from_config(config, Task.SEQ2SEQ_LM, fused_attention=False, dtype=torch.bfloat16)
    prepare(model, "switch_transformers")
    routers = [each for each in model.modules() if hasattr(each, "classifier")]
    probabilities = routers[0](torch.zeros((1, 8, 64), dtype=torch.bfloat16, device="meta"))[-1]
    assert (len(routers), probabilities.dtype) == (2, torch.float32)
    assert {each.classifier.weight.dtype for each in routers} == {torch.bfloat16}


def test_a_model_whose_text_part_alone_knows_of_a_cache_keeps_none() -> None:
    config = {"model_type": "voxtral", "text_config": {**split_config("phi3"), "model_type": "llama"}}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    hub = read_hub_config("voxtral", {**config, "audio_config": audio})
    model = build_from_config(hub, Task.SEQ2SEQ_LM, fused_attention=True)
    assert not hasattr(model.config, "use_cache")
    assert forward_options(model) == {"use_cache": False}


def test_a_prompt_before_the_tokens_makes_states_and_what_blocks_share_longer() -> None:
    split = split_of("cpmant")
    assert [layer_type.tokens for layer_type in split.kinds] == [(1, 8), (1, 8), (1, 0)]
    assert [each.of_tokens(16) for each in split.streams] == [(4, 24, 24)]
    assert {layer_type.no_sp for layer_type in split.kinds[:-1]} == {
        "its states are of another length than the samples"
    }
    assert _chain_of("cpmant").flow_shapes(1, 16) == ((24, 64), (4, 24, 24))


def test_a_deep_model_whose_blocks_share_what_is_made_before_them_is_proved_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_model("cpmant", split_config("cpmant"), tmp_path)
    monkeypatch.setattr(split_proof, "_prove", lambda _: pytest.fail("proved again"))
    deep = split_model("cpmant", split_config("cpmant") | {"num_hidden_layers": 12}, tmp_path)
    assert [stream.readers for stream in deep.streams] == [tuple(range(1, 13))]


def test_blocks_that_ask_how_many_tokens_an_expert_has_are_known() -> None:
    assert split_of("dbrx").asks_for_values
    assert not split_of("cohere2").asks_for_values


def test_experts_in_a_loop_cost_what_their_share_of_the_tokens_costs() -> None:
    config = split_config("dbrx")
    twice = {**config, "ffn_config": {**config["ffn_config"], "moe_top_k": 4}}
    of_twice = chain_from_config(twice, name="dbrx", split=split_of("dbrx"))
    profiles = (traced("dbrx"), trace(of_twice, seq_len=32, precision="bf16", degrees=(1,)))
    flop = [each.layers[1].forward.matmul_flop.at(3) for each in profiles]
    assert flop[1] - flop[0] == 3 * 32 * 2 * (3 * 2 * 64 * 96)


def test_a_state_with_its_tokens_first_flows_with_its_samples_first() -> None:
    assert structure("xlnet").call.order == (1, 0, 2)


def test_parameters_that_the_module_of_the_blocks_holds_lie_with_what_reads_them() -> None:
    split = structure("zaya")
    assert split.holders == ("model",)
    assert "model" in split.embedding


@pytest.mark.nightly
def test_a_second_state_flows_from_each_block_to_the_next() -> None:
    streams = split_of("zaya").streams
    assert [(each.maker, each.readers, each.result) for each in streams] == [(1, (2,), 1), (2, (3,), 1)]


def test_buffers_without_which_bf16_does_not_run_are_of_the_type_of_what_flows() -> None:
    config = read_hub_config("openai-gpt", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32})
    assert find_split(config).split.typed_buffers == ("block.attn.bias",)
    assert find_split(read_hub_config("cohere2", split_config("cohere2"))).split.typed_buffers == ()


def test_parameters_that_only_a_constructor_fills_have_first_weights_that_are_numbers() -> None:
    config = read_hub_config("openai-gpt", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32})
    found = []
    for _ in range(2):
        model = build_from_config(config, Task.CAUSAL_LM, fused_attention=True)
        prepare(model, "openai-gpt")
        materialize_module(model, model, seed=0, device=torch.device("cpu"))
        found.append(dict(model.named_parameters()))
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())
    for matrix in ("mlp.c_fc", "attn.c_attn"):
        bias = found[0][f"transformer.h.0.{matrix}.bias"]
        assert torch.equal(bias, torch.zeros_like(bias))
    assert found[0]["transformer.h.0.mlp.c_fc.weight"].detach().std() == pytest.approx(0.02, rel=0.1)


def test_batch_norms_are_refused() -> None:
    with pytest.raises(InvalidModelError, match="batch norms"):
        find_split(read_hub_config("resnet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}))


def test_a_model_without_parameters_before_its_blocks_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="no parameters before its blocks"):
        find_split(read_hub_config("segformer", {}))


def test_what_text_does_not_reach_lies_with_the_embedding() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config = {"model_type": "git", **text, "vision_config": vision}
    split = find_split(read_hub_config("git", config)).split
    assert split.embedding[-2:] == ("git.image_encoder", "git.visual_projection")
    assert split.blocks == "git.encoder.layer"


def test_a_decoder_behind_a_tower_of_sound_is_causal_and_its_batch_norms_are_not_in_the_way() -> None:
    config = {"architectures": ["GraniteSpeechForConditionalGeneration"], "encoder_config": {"num_layers": 1}}
    config |= {"has_lora_adapter": False}
    config |= {"text_config": {"model_type": "granite", **split_config("granite")}}
    split = find_split(read_hub_config("granite_speech", config)).split
    assert (split.task, len(split.layers)) == (Task.CAUSAL_LM, 4)
    assert "model.encoder" in split.embedding


def test_blocks_that_are_left_out_of_the_proof_still_tell_what_they_are() -> None:
    assert [layer_type.no_tp for layer_type in split_model("modernbert-decoder", _MODERN).kinds] == [""] * 4


_MODERN = {"model_type": "modernbert-decoder", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
_MODERN |= {"intermediate_size": 96, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERN |= {"cls_token_id": 1, "sep_token_id": 2, "layer_types": ["full_attention"] + ["sliding_attention"] * 5}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "blt"}, "in BltPatcher."),  # where, depends on whether torch checks what distributions get
        (
            {"model_type": "perceiver", "architectures": ["PerceiverForMaskedLM"], "num_self_attends_per_block": 2},
            "perceiver.input_preprocessor.embeddings, which lies before the blocks but is also read by the head",
        ),
        (
            {"model_type": "cpmant", "num_hidden_layers": 2},
            "its pieces together differ from the whole model: they raise RuntimeError",
        ),
        (
            {"model_type": "vits", "architectures": ["VitsModel"]},
            "no transformers class for text",
        ),
        (
            {"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]},
            "architectures: found WhisperForAudioClassification, a class for another task",
        ),
    ],
)
def test_what_does_not_split_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidModelError) as caught:
        split_model(config["model_type"], config)
    assert reason in str(caught.value)


def test_a_bare_model_is_taken_for_the_first_task_of_its_type() -> None:
    config = read_hub_config("cohere2", {**split_config("cohere2"), "architectures": ["Cohere2Model"]})
    assert task_of(config) is Task.CAUSAL_LM


def test_a_class_for_another_task_is_refused_though_its_name_ends_as_bare_models_do() -> None:
    config = read_hub_config("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]})
    with pytest.raises(InvalidModelError, match="found GPT2DoubleHeadsModel, a class for another task"):
        task_of(config)


def test_a_type_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="'gpt9'"):
        chain_from_config({"model_type": "gpt9"}, name="new")


@pytest.fixture
def folder_of_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of splits, with nothing known of those found before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    any_model.found_once.cache_clear()
    yield tmp_path / "steelyard" / "traces"
    any_model.found_once.cache_clear()


@pytest.mark.usefixtures("folder_of_splits")
def test_a_split_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found(model_type: str, _config: object, _folder: object) -> ModelSplit:
        asked.append(model_type)
        return split_of("cohere2")

    monkeypatch.setattr(split_proof, "split_model", found)
    chains = [chain_from_config(split_config("cohere2"), name="c")]
    any_model.found_once.cache_clear()
    chains.append(chain_from_config(split_config("cohere2"), name="c"))
    assert chains[0].split == chains[1].split
    assert asked == ["cohere2"]


def test_a_damaged_split_is_found_again(folder_of_splits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_proof, "split_model", lambda *_: split_of("cohere2"))
    chain_from_config(split_config("cohere2"), name="c")
    (kept,) = folder_of_splits.glob("split-*.json")
    kept.write_text(kept.read_text()[:-20])
    any_model.found_once.cache_clear()
    assert chain_from_config(split_config("cohere2"), name="c").split == split_of("cohere2")


def test_what_is_proved_of_a_structure_holds_at_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_types = ["sliding_attention", "full_attention"]
    config = split_config("cohere2") | {"num_hidden_layers": 4, "layer_types": layer_types * 2}
    first = split_model("cohere2", config, tmp_path)
    monkeypatch.setattr(split_proof, "_prove", lambda _: pytest.fail("proved again"))
    wider = config | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1000}
    deeper = wider | {"num_hidden_layers": 6, "layer_types": layer_types * 3}
    found = split_model("cohere2", deeper | {"rope_theta": 123.0, "eos_token_id": 7}, tmp_path)
    assert [layer_type.styles for layer_type in found.kinds] == [layer_type.styles for layer_type in first.kinds]
    assert dict(found.kinds[1].tp_divides)["key-value heads"] == 3
    assert (found.hidden_size, found.vocab_size, len(found.layers)) == (96, 1000, 8)


def test_what_is_proved_of_a_structure_is_not_taken_for_another(tmp_path: Path) -> None:
    config = split_config("cohere2")
    shared, single = (split_model("cohere2", config | {"num_key_value_heads": heads}, tmp_path) for heads in (2, 4))
    assert {layer_type.name: layer_type.styles for layer_type in shared.kinds} == {
        layer_type.name: layer_type.styles for layer_type in single.kinds
    }
    assert len([*tmp_path.glob("split-*.json")]) == 2


def test_attention_that_drops_entries_is_not_divided_by_tokens_where_it_is_known_that_others_are(
    tmp_path: Path,
) -> None:
    plain_config = split_config("granite") | {"sliding_window": None}
    plain, dropping = (
        split_model("granite", plain_config | {"attention_dropout": share}, tmp_path) for share in (0.0, 0.1)
    )
    assert not plain.kinds[1].no_cp
    assert "drops entries" in dropping.kinds[1].no_cp


def test_a_plan_that_does_not_say_how_its_model_splits_finds_it() -> None:
    config = {"model_type": "cohere2", **split_config("cohere2")}
    plan = make_plan(config, "fsdp2, tp2, tp2, fsdp2", num_devices=2, seq_len=16)
    assert plan.model.split is None
    assert plan.chain().split == split_of("cohere2")


def test_a_small_config_keeps_what_is_grouped() -> None:
    small = small_config({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, degree=2)
    assert small == {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def test_a_small_config_keeps_how_heads_grow_by_stage() -> None:
    assert small_config({"num_heads": [3, 6, 12], "embed_dim": 96}) == {"num_heads": [4, 8, 16], "embed_dim": 64}


def test_a_small_config_keeps_how_wide_state_space_layers_are() -> None:
    small = small_config({"expand": 2, "num_heads": 128, "head_dim": 64, "hidden_size": 4096})
    assert small["num_heads"] * small["head_dim"] == small["expand"] * small["hidden_size"]


def test_the_configs_of_parts_are_made_small_too() -> None:
    assert small_config({"text_config": {"hidden_size": 4096}}) == {"text_config": {"hidden_size": 64}}


def test_an_embedding_that_is_projected_stays_narrower() -> None:
    assert small_config({"hidden_size": 256, "embedding_size": 128}) == {"hidden_size": 64, "embedding_size": 32}


def test_a_small_config_drops_rotary_scalings_made_for_a_width() -> None:
    assert small_config({"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}) == {}


def test_layer_types_and_windows_are_those_of_the_text_part_of_a_config() -> None:
    sizes = {key: value for key, value in split_config("phi3").items() if key != "model_type"} | {"head_dim": 16}
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96}
    chunked = {"model_type": "llama4_text", **sizes, **experts, "num_hidden_layers": 4, "attention_chunk_size": 32}
    split = structure_with("llama4", {"model_type": "llama4", "text_config": chunked})
    blocks = [each for each in split.kinds if each.role is LayerRole.BLOCK]
    assert [each.name for each in blocks] == ["chunked dense block", "chunked sparse block", "full sparse block"]
    reasons = [no_cp(split, each) for each in blocks]
    assert [each.endswith("its blocks are of chunked_attention") for each in reasons] == [True, True, False]
    text = {**split_config("gemma4_text"), "sliding_window": 8}
    windows = []
    for config in (text, {"model_type": "gemma4", "text_config": text}):
        split = structure_with(config.get("model_type", "gemma4_text"), config)
        chain = chain_from_config(config, name="test", split=split)
        windows.append([chain.window(layer_type) for layer_type in chain.layer_types])
    assert windows[0] == windows[1]
    assert 8 in windows[0]
