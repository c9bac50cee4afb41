"""Tests of the YAML for axolotl: the plan as settings of a front end of accelerate."""

from typing import Any

import pytest
import yaml

from steelyard.engines import ENGINE_OF_TARGET
from steelyard.plan.plan import Plan
from tests.engines.examples import exported, text_of, uniform
from tests.engines.known import known_names

HYBRID = uniform("dp2-fsdp4", devices=8, remat="full")


def content_of(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(plan, "axolotl", ".yaml"))
    return found


def test_accelerate_runs_it() -> None:
    assert ENGINE_OF_TARGET["axolotl"].name == "accelerate"


def test_degrees_batch_and_remat_are_those_of_the_plan() -> None:
    content = content_of(HYBRID)
    sizes = (content["dp_replicate_size"], content["dp_shard_size"])
    assert sizes == (2, 4)
    batch = content["micro_batch_size"] * content["gradient_accumulation_steps"] * sizes[0] * sizes[1]
    assert (batch, content["sequence_len"]) == (64, 4096)
    assert content["fsdp_config"]["activation_checkpointing"] is True


@pytest.mark.parametrize(("zero", "reshards"), [(2, False), (3, True)])
def test_it_shards_as_far_as_zero_says(zero: int, reshards: bool) -> None:
    config = content_of(uniform("fsdp8", devices=8, zero=zero))["fsdp_config"]
    assert config["reshard_after_forward"] is reshards


def test_plain_replication_is_ddp() -> None:
    content = content_of(uniform("dp8", devices=8, remat="full"))
    assert content["gradient_checkpointing"] is True
    assert not any("fsdp" in key or "shard" in key for key in content)


def test_weights_are_of_the_type_that_axolotl_loads() -> None:
    plain = uniform("dp8", devices=8)
    assert "fp32 weights" in "".join(exported(plain, "axolotl").left_out)
    in_bf16 = plain.model_copy(update={"levers": {"weights": "bf16"}})
    assert "fp32 weights" not in "".join(exported(in_bf16, "axolotl").left_out)
    assert yaml.safe_load(text_of(in_bf16, "accelerate", ".yaml"))["mixed_precision"] == "no"


def test_names_are_those_of_its_schemas() -> None:
    for plan in (HYBRID, uniform("dp8", devices=8)):
        content = content_of(plan)
        used = set(content) | {f"fsdp_config.{key}" for key in content.get("fsdp_config", ())}
        assert used <= known_names("axolotl-0.19.0.txt")
