"""Tests of sequences beyond a model's positions: refused for a table, allowed with a warning for others."""

import pytest

from steelyard.errors import InvalidModelError
from steelyard.model.read import load_model


@pytest.mark.parametrize(("name", "longest"), [("gpt2", 1024), ("bert-base", 512), ("gpt3-175b", 2048)])
def test_more_tokens_than_a_table_has_positions_are_refused(name: str, longest: int) -> None:
    chain = load_model(name)
    chain.check_seq_len(longest)
    with pytest.raises(
        InvalidModelError, match=rf"{longest + 1} for {name}\n.*at most {longest}, the number of position embeddings"
    ):
        chain.check_seq_len(longest + 1)


@pytest.mark.parametrize(
    ("name", "longest"), [("llama3-8b", 8192), ("llama3.1-8b", 131_072), ("phi-4", 16_384), ("deepseek-v2", 163_840)]
)
def test_more_tokens_than_a_rotary_model_was_made_for_are_a_warning_that_names_its_length(
    name: str, longest: int
) -> None:
    chain = load_model(name)
    chain.check_seq_len(2 * longest)
    (warning,) = chain.warnings(2 * longest)
    assert f"{2 * longest:,} tokens are longer than the {longest:,} positions that {name} was made for" in warning


@pytest.mark.parametrize(("name", "seq_len"), [("llama3-8b", 8192), ("llama3-8b", 100), ("vit-base", 197)])
def test_what_the_positions_hold_is_no_warning(name: str, seq_len: int) -> None:
    assert load_model(name).warnings(seq_len) == ()


@pytest.mark.parametrize("name", ["gemma2-9b", "falcon-7b"])
def test_attention_that_runs_in_no_kernel_of_its_own_is_a_warning(name: str) -> None:
    chain = load_model(name)
    (warning,) = chain.warnings(2048)
    assert f"attention of {chain.family.model_type} has no fused kernel" in warning
    assert "2,048 × 2,048 scores" in warning
