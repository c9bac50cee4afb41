"""Tests of trained parameters in bf16: half the memory and traffic of training, and incompatible settings."""

from typing import Any

import pytest
import yaml

from steelyard.engines import ENGINES
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.planning.choose import NothingFitsError
from steelyard.planning.complete import find_plan
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import make_request
from steelyard.units import GIB
from tests.engines.examples import text_of, uniform

ONE: dict[str, Any] = {"cluster": "1x1xh100-80gb", "seq_len": 2048, "global_batch": 4}


@pytest.mark.parametrize(
    ("optimizer", "kept", "moved"),
    [("adamw", 4, 14), ("adamw-8bit", 2 * (1 + 4 / 256), 6 + 4 * (1 + 4 / 256)), ("sgd", 0, 6)],
)
def test_a_parameter_is_kept_and_moved_in_two_bytes(optimizer: str, kept: float, moved: float) -> None:
    effects = Levers.of({"weights": "bf16", "optimizer": optimizer}).effects
    assert (effects.weight_bytes, effects.state_bytes, effects.update_bytes) == (2, kept, pytest.approx(moved))


def test_a_7b_is_fine_tuned_in_full_on_one_card_of_80_gb() -> None:
    """torchtune's full_finetune_single_device trains 6.74 billion parameters of 8 bytes."""
    with pytest.raises(NothingFitsError):
        find_plan("llama2-7b", **ONE)
    plan = find_plan("llama2-7b", **ONE, levers={"weights": "bf16"})
    assert 6.74e9 * 8 / GIB < peak_bytes(plan) / GIB < 70
    assert plan.levers == {"weights": "bf16"}


@pytest.mark.parametrize(
    ("changed", "levers", "found"),
    [
        ({"precision": "fp32"}, {}, "for layers that compute in fp32"),
        ({"precision": "fp16", "cluster": "1x1xv100-32gb"}, {}, "for layers that compute in fp16"),
        ({}, {"optimizer": "muon"}, "with --optimizer muon"),
        ({}, {"optimizer": "adafactor"}, "with --optimizer adafactor"),
        ({}, {"train": "lora"}, "together with --train"),
        ({}, {"offload": "optimizer"}, "together with --offload"),
        ({}, {"float8": "rowwise"}, "together with --float8"),
        ({"engine": "megatron"}, {}, "with the engine megatron"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changed: dict[str, Any], levers: dict[str, str], found: str) -> None:
    with pytest.raises(UserError) as caught:
        make_request("llama2-7b", **ONE | changed, levers={"weights": "bf16", **levers})
    assert (caught.value.field, caught.value.found) == ("--weights", f"--weights bf16 {found}")


def test_automodel_loads_and_reduces_in_bf16() -> None:
    assert ENGINES["automodel"].lever_refusal(Levers.of({"weights": "bf16"}).chosen[0]) is None
    for levers, word in (({}, "float32"), ({"weights": "bf16"}, "bfloat16")):
        content = yaml.safe_load(text_of(uniform("fsdp8", devices=8, levers=levers), "automodel", ".yaml"))
        assert content["model"]["torch_dtype"] == word
        assert content["distributed"]["mp_policy"]["reduce_dtype"] == word
