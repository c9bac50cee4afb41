"""Tests of model types that are refused by name before anything is built."""

import pytest

from steelyard.errors import InvalidModelError
from steelyard.model.read import NOT_PLANNED, PAIRS, chain_from_config


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.model.read.import_module", lambda name: pytest.fail(f"{name} is asked for"))


@pytest.mark.parametrize("model_type", NOT_PLANNED)
def test_a_type_that_nobody_trains_is_refused_with_what_to_use_instead(model_type: str) -> None:
    with pytest.raises(
        InvalidModelError, match=rf"model_type: found {model_type}, which steelyard does not support"
    ) as raised:
        chain_from_config({"model_type": model_type}, name="model")
    assert raised.value.hint == NOT_PLANNED[model_type]


@pytest.mark.parametrize("model_type", PAIRS)
@pytest.mark.parametrize("named", [{}, {"architectures": None}, {"architectures": ["CLIPModel"]}])
def test_a_model_of_pairs_is_refused_with_the_class_of_its_image_tower(
    model_type: str, named: dict[str, object]
) -> None:
    with pytest.raises(InvalidModelError, match="every image of a batch with every text") as raised:
        chain_from_config({"model_type": model_type, **named}, name="model")
    assert PAIRS[model_type] in raised.value.expected + raised.value.hint


def test_quantized_weights_are_refused_with_the_levers_that_plan_them() -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(
        InvalidModelError, match=r"quantization_config: found quantized weights .*bitsandbytes"
    ) as raised:
        chain_from_config(config, name="model")
    assert "--train qlora:r=16" in raised.value.hint
