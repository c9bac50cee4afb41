"""Tests of transformers' tensor-parallel plans: the styles that are read, and that others are named."""

from collections.abc import Mapping

import pytest
from transformers import CONFIG_MAPPING
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from steelyard.model.family import LayerRole
from steelyard.model.split import SplitLayerType
from steelyard.modules.build import read_hub_config
from steelyard.modules.split_proof import divided_types, split_model
from steelyard.modules.split_tp import Block, Styles, block_of
from steelyard.modules.splitting import Found, find_split
from tests.modules.split_configs import split_config
from tests.runtime.models import FAMILY_CONFIGS

pytestmark = pytest.mark.slow

SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "vocab_size": 128},
}
PATH = "mlp.up_proj"
GATHERED = ("colwise_gather_output", "colwise_rep")
OF_WHOLE = ("rowwise_split_input", "rowwise_rep")
WHOLE = ("mla_kv_a_proj", "replicated_with_grad_allreduce", "replicate")
READ = {"colwise": "columns", "rowwise": "rows"}
READ |= dict.fromkeys(GATHERED, "columns_gathered") | dict.fromkeys(OF_WHOLE, "rows_of_whole")
READ |= dict.fromkeys(WHOLE, "whole")
OF_EXPERTS = {"moe_tp_experts", "moe_identity_expert", "packed_colwise", "packed_rowwise", "all_reduce"}
"""Styles of tp plans for experts and their parts, which steelyard derives from structure."""
LOCAL = "local_params"
"""The style of a module that reads parameters of its own, which regions divide with the heads."""
UNREAD = OF_EXPERTS | {"embedding_rowwise", "embedding_colwise", "sequence_parallel"}


def _blocks(found: Found) -> list[tuple[SplitLayerType, Block]]:
    """The block types, with the first block of each."""
    layers, given = found.split.layers, (found.model, found.split)
    return [
        (layer_type, block_of(*given, layers.index(number), found.keywords))
        for number, layer_type in enumerate(found.split.kinds)
        if layer_type.role is LayerRole.BLOCK
    ]


def _with_style(style: str) -> Found:
    """A small model whose own plan has this style for one of its matrices."""
    found = find_split(read_hub_config("olmo2", split_config("olmo2")))
    found.model.tp_plan = {
        f"model.layers.*.{PATH}": style,
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    return found


def test_every_style_that_a_plan_of_transformers_has_is_known_here() -> None:
    plans = (getattr(config, "base_model_tp_plan", None) for config in CONFIG_MAPPING.values())
    styles = {style for plan in plans if plan for style in plan.values()}
    assert styles <= {*READ, *UNREAD, LOCAL}
    assert set(ALL_PARALLEL_STYLES) - {*READ, *UNREAD, LOCAL} == {"ep_dispatch_experts", "grouped_gemm"}  # of ep


@pytest.mark.parametrize("style", READ)
def test_a_style_that_is_read_is_supposed(style: str) -> None:
    found = _with_style(style)
    ((_, block),) = _blocks(found)
    assert not block.unread_plan()
    supposed = block.suppositions()
    assert READ[style] in [styles.get(f"block.{PATH}") for styles in supposed]


@pytest.mark.parametrize("style", sorted(UNREAD))
def test_a_style_that_is_not_read_is_named(style: str) -> None:
    found = _with_style(style)
    ((_, block),) = _blocks(found)
    unread = block.unread_plan()
    assert unread == f"styles of its own tp plan are not supported: {style} (of {PATH})"
    assert next(block.suppositions())[f"block.{PATH}"] == "columns"


def test_parameters_of_a_module_that_reads_them_locally_are_divided_with_the_heads() -> None:
    found = find_split(read_hub_config("granite_swa", {"model_type": "granite_swa", **SIZES}))
    assert LOCAL in found.model.tp_plan.values()
    _, block = _blocks(found)[0]
    assert not block.unread_plan()
    first = next(block.suppositions())
    assert first["block.self_attn"].endswith(":sinks")


def test_styles_of_experts_are_not_asked_of_a_plan() -> None:
    found = find_split(read_hub_config("qwen3_moe", FAMILY_CONFIGS["qwen3_moe"]))
    assert OF_EXPERTS & set(found.model.tp_plan.values())
    assert not any(block.unread_plan() for _, block in _blocks(found))


def test_the_plan_of_a_part_of_a_model_is_that_of_its_blocks() -> None:
    found = find_split(read_hub_config("llava", split_config("llava")))
    follow = {layer_type.name: block.follows(next(block.suppositions())) for layer_type, block in _blocks(found)}
    assert follow == {"image block": False, "text block": True}  # CLIP's config has no plan, Llama's has one


def test_why_a_layer_type_has_no_tp_names_the_styles_that_were_not_read() -> None:
    config = {**SIZES, "is_moe": True, "num_experts": 64, "num_experts_per_tok": 4}
    block = split_model("doge", {"model_type": "doge", **config, "hidden_dropout": 0.0}).kinds[1]
    assert not block.unread_plan
    assert block.no_tp.startswith("styles of its own tp plan are not supported: embedding_rowwise (of mlp.up_embed); ")


def test_a_plan_that_two_ranks_do_not_prove_is_told_where_the_structure_is_taken_in_its_place() -> None:
    block = split_model("doge", {"model_type": "doge", **SIZES, "hidden_dropout": 0.0}).kinds[1]
    assert block.styles
    assert block.unread_plan.startswith(
        "its own tp plan is not proved on two ranks: it raises RuntimeError (The size of"
    )


@pytest.mark.parametrize("unproved", ["rows", "columns"])
def test_a_plan_is_told_only_where_it_is_tried_and_not_taken(unproved: str) -> None:
    found = _with_style("rowwise")

    def prove(styles: Mapping[str, Styles], sp: bool) -> str:
        return "it differs" if styles.get("block", {}).get(f"block.{PATH}") == unproved else ""

    block = divided_types(found.model, found.split, found.keywords, prove)[1]
    assert block.styles[f"block.{PATH}"] == {"rows": "columns", "columns": "rows"}[unproved]
    told = "its own tp plan is not proved on two ranks: it differs"
    assert block.unread_plan == (told if unproved == "rows" else "")
