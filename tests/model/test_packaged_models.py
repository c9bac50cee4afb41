"""Tests of packaged models: each has the published parameter count, its split and trace, and a hub name."""

import re
from pathlib import Path

import pytest

import steelyard
from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain, SharedWeight
from steelyard.model.read import hub_names, load_config, load_model, model_names, model_source, packaged_structure
from steelyard.tracer.cache import packaged_trace

SOURCE = Path(steelyard.__file__).parent

# Trained parameters as the hub states them with the weights (those of tied matrices once).
PUBLISHED_PARAMS = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "command-r-35b": 34_980_831_232,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "falcon3-7b": 7_455_550_464,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-27b": 27_227_128_320,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-12b": 12_187_325_040,
    "gemma3-1b": 999_885_952,
    "gemma3-27b": 27_432_406_640,
    "gemma3-4b": 4_300_079_472,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4.7-flash": 29_943_390_976,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "kimi-k2": 1_026_408_209_408,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "minimax-m2": 228_689_748_992,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-large-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "olmo2-13b": 13_716_198_400,
    "olmo2-1b": 1_484_916_736,
    "olmo2-32b": 32_234_279_936,
    "olmo2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-medium": 13_960_238_080,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-15b": 15_957_889_024,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "t5-11b": 11_307_321_344,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "tinyllama-1.1b": 1_100_048_384,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "whisper-large-v3": 1_543_490_560,
    "xlm-roberta-large": 560_142_482,
    "yi-1.5-9b": 8_829_407_232,
    "yi-34b": 34_388_917_248,
    "yi-6b": 6_061_035_520,
}


def num_params(chain: ModelChain) -> int:
    """Parameters of a model, from its packaged trace; what layers share once."""
    seq_len = min(chain.max_seq_len, 512)
    trace = packaged_trace(chain, seq_len=seq_len, precision="bf16", degrees=(1,))
    assert trace is not None
    counts = {layer.kind: layer.num_params for layer in trace.layers}
    again = sum((len(each.copies) - 1) * shared_size(chain, each) for each in chain.shared)
    return sum(counts[chain.type_of(layer).name] for layer in range(chain.num_layers)) - again


def shared_size(chain: ModelChain, weight: SharedWeight) -> int:
    """Entries of a weight that several layers hold: T5's bias of relative positions, or the embedding."""
    if "relative_attention_bias" in weight.copies[0][1]:
        return int(chain.config["relative_attention_num_buckets"] * chain.config["num_heads"])
    return chain.hidden_size * chain.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_a_packaged_model_has_the_published_parameters(name: str) -> None:
    assert num_params(load_model(name)) == PUBLISHED_PARAMS[name]


def test_the_package_holds_the_traces_and_splits_of_its_models_and_no_others() -> None:
    chains = [load_model(name) for name in model_names()]
    traces = {f"{chain.config_hash}-bf16.json.gz" for chain in chains}
    assert {file.name for file in (SOURCE / "tracer" / "traces").iterdir()} == traces
    split = [chain.config_hash for chain in chains if chain.split is not None]
    splits = {f"{name}.json" for name in (*split, *map(packaged_structure, split))}
    assert {file.name for file in (SOURCE / "model" / "splits").iterdir()} == splits


def test_what_is_packaged_beside_the_configs_is_small() -> None:
    files = [*(SOURCE / "tracer" / "traces").iterdir(), *(SOURCE / "model" / "splits").iterdir()]
    assert sum(file.stat().st_size for file in files) < 2.5 * 2**20


@pytest.mark.parametrize("name", model_names())
def test_every_packaged_model_names_its_source(name: str) -> None:
    assert re.match(r"https://huggingface\.co/|made for|Brown et al", model_source(name))


def test_a_model_goes_by_its_id_on_the_hub() -> None:
    assert load_config("Qwen/Qwen3-14B") == load_config("qwen/qwen3-14b") == load_config("qwen3-14b")
    assert len(hub_names()) >= 40


def test_a_folder_of_that_name_goes_before_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-14B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert load_config("Qwen/Qwen3-14B") == ("Qwen3-14B", {"model_type": "llama"})


def test_the_config_of_an_id_that_is_not_packaged_is_that_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--Qwen--QwQ-14B"
    (kept / "snapshots" / "1a2b").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1a2b")
    (kept / "snapshots" / "1a2b" / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_config("Qwen/QwQ-14B") == ("QwQ-14B", {"model_type": "qwen2"})


def test_an_id_that_cannot_be_downloaded_says_how_to_get_its_config() -> None:
    with pytest.raises(
        InvalidModelError,
        match=r"(?s)not packaged \(similar packaged models: .*Qwen/Qwen3-14B.*not be downloaded \(OfflineModeIsEnabled",
    ):
        load_config("Qwen/QwQ-14B")
    with pytest.raises(InvalidModelError, match=r"huggingface\.co/no/such/resolve/main/config\.json"):
        load_config("no/such")


@pytest.mark.parametrize("path", ["./nothing", "configs/nothing.json"])
def test_a_path_that_is_not_there_is_no_id_on_the_hub(path: str) -> None:
    with pytest.raises(InvalidModelError, match=r"(?s)the path of a config\.json") as caught:
        load_config(path)
    assert "huggingface.co" not in str(caught.value)
