"""Tests of packaged traces: equal to fresh ones at other lengths, and never used where invalid."""

from typing import Any

import pytest
from package_traces import PRECISIONS, difference, further_lengths, spans_of

from steelyard import installed
from steelyard.errors import UserError
from steelyard.installed import NotInstalledError, require_training
from steelyard.model.read import load_model, model_names, packaged_split, packaged_structure
from steelyard.precision import Precision
from steelyard.tracer import cache
from steelyard.tracer.cache import cached_trace, counted_at, packaged_lengths, packaged_trace, profile_at
from steelyard.tracer.trace import trace

LLAMA = "llama3-8b"


def check(name: str) -> str:
    """Differences of a model's packaged trace from a fresh one, at an odd length where any is packaged."""
    chain = load_model(name)
    span = max(spans_of(chain), key=len)
    for seq_len in (further_lengths(span)[0], 512, span.start):
        found = packaged_trace(chain, seq_len=seq_len, precision=PRECISIONS[0], degrees=(1,))
        if found is not None:
            return difference(
                trace(chain, seq_len=seq_len, precision=PRECISIONS[0], degrees=(1,), gpu_kernels=True), found
            )
    return "no length is packaged"


def one_of_each_structure() -> list[str]:
    """Models whose layers do operations that no other one's do; models of one structure differ in sizes alone."""
    return list({packaged_structure(load_model(name).config_hash): name for name in model_names()}.values())


LIKE_OTHERS = (
    *("cohere", "gemma", "gemma2", "mistral", "olmoe", "qwen2", "qwen3", "deepseek_v2", "glm4", "granite", "olmo2"),
    *("phi3", "smollm3", "starcoder2", "qwen3_moe", "cohere2"),
)
"""Types whose layers do what those of deepseek_v3, gemma3, llama and mixtral do, or nearly."""


def sample_of_structures() -> list[str]:
    """The first structure of every other type."""
    first = {load_model(name).family.model_type: name for name in reversed(one_of_each_structure())}
    return [name for model_type, name in first.items() if model_type not in LIKE_OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("is_sample", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_packaged_trace_of_every_structure_equals_a_fresh_one(is_sample: bool) -> None:
    names = [name for name in one_of_each_structure() if (name in sample_of_structures()) is is_sample]
    found = {name: check(name) for name in names}
    assert found
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_model_has_a_packaged_trace_that_holds(precision: Precision) -> None:
    assert [name for name in model_names() if not packaged_lengths(load_model(name), precision)] == []


def packaged_llama(**changes: Any) -> object:
    arguments = {"seq_len": 4096, "precision": "bf16", "degrees": (1, 2, 4, 8)} | changes
    return packaged_trace(load_model(LLAMA), **arguments)


def test_any_length_and_fewer_degrees_are_packaged() -> None:
    assert packaged_llama() is not None
    odd = packaged_llama(seq_len=3001, degrees=(1, 2))
    assert {tuple(layer.degrees) for layer in odd.layers} == {(), ("tp",)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [{"seq_len": 2}, {"degrees": (1, 16)}, {"precision": "fp32"}])
def test_what_is_not_packaged_is_missing(change: dict[str, Any]) -> None:
    assert packaged_llama(**change) is None


def test_a_trace_of_an_older_tracer_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "TRACER_VERSION", cache.TRACER_VERSION + 1)
    assert packaged_llama() is None


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_trace_of_other_versions_counts_as_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    known = installed.installed_version
    monkeypatch.setattr(installed, "installed_version", lambda each: "9.9" if each == name else known(each))
    assert packaged_llama() is None


def test_a_split_of_another_transformers_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config_hash = load_model("phi-4").config_hash
    assert packaged_split(config_hash) is not None
    monkeypatch.setattr(installed, "installed_version", lambda _: "9.9")
    assert packaged_split(config_hash) is None
    assert packaged_split(config_hash, must_hold=False) is not None


def test_a_packaged_trace_needs_neither_package_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda _: None)
    assert packaged_llama() is not None


def test_a_packaged_trace_is_taken_where_the_cache_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(cache, "require_training", pytest.fail)
    folder = tmp_path_factory.mktemp("empty")
    assert cached_trace(load_model(LLAMA), seq_len=4096, precision="bf16", degrees=(1, 2), folder=folder)
    assert list(folder.iterdir()) == []


def test_without_torch_a_trace_that_is_nowhere_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda _: None)
    with pytest.raises(
        NotInstalledError, match=r"(?s)llama3-8b at 2 tokens in bf16.*packaged: 128–.*steelyard\[train\]"
    ) as caught:
        cached_trace(load_model(LLAMA), seq_len=2, precision="bf16", degrees=(1,))
    assert isinstance(caught.value, UserError)
    assert caught.value.exit_code == 2


def test_what_trains_may_go_on_where_torch_is() -> None:
    require_training("this test has it")


@pytest.mark.parametrize("seq_len", [4, 7, 100])
def test_between_three_lengths_every_count_lies_on_the_parabola(seq_len: int) -> None:
    def counts(length: int) -> dict[str, Any]:
        whole = packaged_llama(seq_len=4096, degrees=(1,)).layers[0].model_dump(mode="json")  # type: ignore[attr-defined]
        line = {"constant": 0.5 * length, "per_sample": 3.0 * length**2 - length}
        return counted_at(whole | {"saved_bytes": line, "num_params": 5}, (2, 8))

    lengths = [8, 16, 32]
    span = {"first": 1, "last": 100, "lengths": lengths, "layers": [[counts(each)] for each in lengths]}
    content = {"degrees": [1], "sizes": [2, 8], "spans": [span | {"identity": IDENTITY}]}
    found = profile_at(content, load_model(LLAMA), seq_len=seq_len, degrees=[1])
    assert found is not None
    saved = found.layers[0].saved_bytes
    assert (saved.constant, saved.per_sample) == (0.5 * seq_len, 3.0 * seq_len**2 - seq_len)
    assert (found.layers[0].num_params, found.identity.seq_len) == (5, seq_len)


IDENTITY = {
    "method": "traced",
    "model_name": "any",
    "config_hash": "0",
    "seq_len": 8,
    "precision": "bf16",
    "device": "any",
    "num_devices": 1,
    "torch": "2",
    "transformers": "5",
    "created": "now",
}
