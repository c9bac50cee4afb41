"""Tests of freezing: named, stored in the plan, reported, and refused if impossible."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import steelyard
from steelyard.engines import ENGINES
from steelyard.errors import InvalidModelError, InvalidProfileError, UserError
from steelyard.model.chain import Freeze, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.freezing import check_frozen, find_freeze
from steelyard.modules.own_proof import Built, own_model
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.request import make_request
from steelyard.report.plan_table import answer_view
from tests.cost.examples import CONFIG, measured_profile
from tests.jobs import make_job
from tests.modules.own_models import BLOCKS, CASES, VOCABULARY, WIDTH
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS

FROZEN = ("model.embed_tokens", "model.layers.0")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return steelyard.find_plan(
        CONFIG, "1x2xa100-80gb", global_batch=8, seq_len=32, freeze=[*FROZEN, "model.layers.2.mlp"]
    )


def _chain() -> ModelChain:
    return chain_from_config(CONFIG, name="small")


def _found(*patterns: str) -> Freeze:
    found = find_freeze(_chain(), patterns)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_plan_keeps_what_is_frozen_as_a_value(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    frozen = plan.model.frozen
    assert frozen is not None
    assert [(each.layers, each.paths) for each in frozen.parts] == [((0, 1), ()), ((3, 3), ("block.mlp",))]
    assert frozen.num_params == 16384 + 41088 + 3 * 64 * 128
    assert frozen.of_params == 16384 + 4 * 41088 + 16448


@pytest.mark.slow
def test_a_plan_says_what_is_frozen(plan: Plan) -> None:
    console = Console(width=200, record=True, quiet=False)
    console.print(answer_view(plan))
    what = "model.embed_tokens and model.layers.0 and model.layers.2.mlp, 82.0 K of 197 K parameters"
    assert f"frozen: {what}" in console.export_text()


@pytest.mark.slow
def test_layers_keep_their_names(plan: Plan) -> None:
    chain = plan.chain()
    assert [chain.layer_name(layer) for layer in range(3)] == ["embedding", "block 0", "block 1"]


def test_a_plan_of_which_nothing_is_frozen_says_nothing_of_it() -> None:
    whole = steelyard.find_plan(CONFIG, "1x1xa100-80gb", global_batch=2, seq_len=32)
    assert whole.model.frozen is None
    assert whole.chain().layer_types == _chain().layer_types


@pytest.mark.parametrize("pattern", ["model.layers.*.mlp", "model.layers.[0-3].mlp"])
def test_a_star_stands_for_anything(pattern: str) -> None:
    assert _found(pattern).parts == _found(*(f"model.layers.{number}.mlp" for number in range(4))).parts


def test_a_name_is_no_beginning_of_another() -> None:
    chain = chain_from_config(CONFIG | {"num_hidden_layers": 11}, name="small")
    found = find_freeze(chain, ["model.layers.1"])
    assert found is not None
    assert [each.layers for each in found.parts] == [(2, 2)]


def test_a_name_that_matches_nothing_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(InvalidModelError) as error:
        _found("model.layer")
    assert "'model.layer', which matches nothing" in str(error.value)
    assert "model, lm_head, model.embed_tokens, model.layers" in str(error.value)
    assert "did you mean model.layers" in str(error.value)


def test_something_must_be_left_to_train() -> None:
    with pytest.raises(InvalidModelError, match="some parameters are trained"):
        _found("model", "lm_head")


def test_what_no_sample_trains_is_nothing_left() -> None:
    chain = chain_from_config(split_config("llava"), name="small llava", split=SPLITS["llava"])
    resting = chain.split.resting[0]  # type: ignore[union-attr]
    every = {name.rpartition(".")[0] for name, _ in build_meta_model(chain).named_parameters()}
    with pytest.raises(InvalidModelError, match="some parameters are trained"):
        find_freeze(chain, [name for name in every if not f"{name}.".startswith(f"{resting}.")])


def test_a_tied_matrix_is_frozen_in_both_places() -> None:
    chain = chain_from_config(CONFIG | {"tie_word_embeddings": True}, name="small")
    assert {*find_freeze(chain, ["lm_head"]).parts} == {*find_freeze(chain, ["model.embed_tokens"]).parts}  # type: ignore[union-attr]
    frozen = make_request(chain, "1x1xa100-80gb", global_batch=1, seq_len=32, freeze=["lm_head"]).chain
    assert frozen.shared == chain.shared
    assert (frozen.summed, frozen.sums_tied) == ((), False)


def test_a_measured_profile_is_of_a_model_that_is_trained_whole() -> None:
    whole = _chain()
    given: dict[str, Any] = {"global_batch": 4, "seq_len": 32, "precision": "bf16", "memory": "1GiB"}
    with pytest.raises(InvalidProfileError, match="found all of the model trained"):
        make_job(whole, "1x4xcpu", freeze=FROZEN, profile=measured_profile(whole), **given)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_other_engines_are_refused_by_name(engine: Any, plan: Plan) -> None:
    if engine.name == "native":
        engine.refuse(plan.chain(), plan.seq_len)
        return
    with pytest.raises(UserError, match=r"for a plan that freezes model\.embed_tokens"):
        engine.refuse(plan.chain(), plan.seq_len)


@pytest.mark.slow
def test_layers_that_the_model_does_not_have_are_an_error(plan: Plan) -> None:
    content = plan.model_dump(mode="json", exclude={"prediction", "fallbacks", "next_best"})
    content["model"]["frozen"]["parts"][0]["layers"] = [0, 9]
    with pytest.raises(InvalidModelError, match="layers within 0 to 5"):
        Plan.model_validate(content)


@pytest.mark.slow
def test_a_module_that_trains_less_than_its_plan_is_refused(plan: Plan) -> None:
    model = build_meta_model(plan.chain())
    prepare_model(model, plan.chain())
    check_frozen(model, plan.chain())
    model.model.layers[1].mlp.requires_grad_(False)
    with pytest.raises(InvalidModelError, match=r"model.layers.1.mlp.gate_proj.weight without a gradient"):
        check_frozen(model, plan.chain())


def _own(module: torch.nn.Module, **options: Any) -> Plan:
    case = CASES["nanogpt"]
    asked: dict[str, Any] = {"sample": case.sample, "loss": case.loss, "global_batch": 16, "precision": "fp32"}
    return steelyard.find_plan(module, "1x2xa100-80gb", **asked, **options)


@pytest.mark.slow
def test_what_a_module_of_ones_own_has_without_gradients_is_frozen() -> None:
    module = CASES["nanogpt"].module()
    module.transformer.h[0].requires_grad_(False)
    frozen = _own(module).model.frozen
    assert frozen is not None
    assert [(each.layers, each.paths) for each in frozen.parts] == [((1, 1), ())]
    assert _own(CASES["nanogpt"].module(), freeze="transformer.h.0").model.frozen == Freeze(
        **frozen.model_dump() | {"patterns": ("transformer.h.0",)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["transformer.wte", "lm_head"])
def test_a_tied_matrix_of_ones_own_is_frozen_by_either_of_its_names(pattern: str) -> None:
    case = CASES["nanogpt"]
    own = own_model(Built(module=case.module(), sample=case.sample))
    found = find_freeze(own.chain, [pattern], own)
    assert found is not None
    paths = ("model.transformer.wte.weight", "model.lm_head.weight")
    assert all(found.holds(layer, path) for layer in (0, BLOCKS + 1) for path in paths)
    assert (found.num_params, found.of_params) == (VOCABULARY * WIDTH, own.split.num_params)


def test_what_hides_what_flows_is_to_be_frozen_by_name() -> None:
    module = CASES["nanogpt"].module()
    module.transformer.wte.requires_grad_(False)
    module.transformer.wpe.requires_grad_(False)
    with pytest.raises(InvalidModelError, match="everywhere, and name them in freeze="):
        _own(module)
