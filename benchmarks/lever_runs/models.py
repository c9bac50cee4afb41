"""Configs of the models in the table: packaged ones, and others by sizes that their own config files state.

Models with code of their own (Qwen, ChatGLM, Baichuan) are given the form of a model of transformers that has the same
matrices. Where queries, keys and values are one product, as in the first two, that is Phi-3, which makes one of the two
of the gated layer as well; Baichuan's count as separate ones.
DINOv2's gated layer of 4,096 is one of 6,144 that is not gated, with as many parameters.
BERT's head is that of masked words, where its rows classify sequences: 3 % of the parameters, tied but for 1 million.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.model.read import load_model

_FOLDER = Path(__file__).parent / "configs"
"""Configs of newer models, each with its source in the README there."""

_PACKAGED: Mapping[str, str] = {
    "01-ai/Yi-34B-Chat": "yi-34b",
    "01-ai/Yi-6B-Chat": "yi-6b",
    "HuggingFaceTB/SmolLM2-1.7B": "smollm2-1.7b",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-32B": "qwen2.5-32b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-4B-Base": "qwen3-4b",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b-2507",
    "katanemo/Plano-Orchestrator-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "LLaMA-7B (GaLore configuration)": "llama2-7b",
    "google-bert/bert-large-uncased": "bert-large",
    "google-t5/t5-base": "t5-base",
    "google/gemma-2-2b": "gemma2-2b",
    "google/gemma-2-9b": "gemma2-9b",
    "google/gemma-2b": "gemma-2b",
    "google/gemma-7b": "gemma-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama3-405b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1-70b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.2-1B": "llama3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3.2-3b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3.3-70b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3.1-8b",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini",
    "mistralai/Devstral-Small-2507": "mistral-small-24b",
    "mistralai/Magistral-Small-2506": "mistral-small-24b",
    "mistralai/Magistral-Small-2507": "mistral-small-24b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "tiiuae/falcon-40b": "falcon-40b",
    "tiiuae/falcon-7b": "falcon-7b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": "tinyllama-1.1b",
}
_FILES: Mapping[str, str] = {
    "LiquidAI/LFM2-350M": "lfm2-350m",
    "LiquidAI/LFM2-8B-A1B": "lfm2-8b-a1b",
    "arcee-ai/Trinity-Nano-Preview": "trinity-nano-preview",
    "axolotl-ai-co/Mistral-Medium-3.5-128B-BF16": "mistral-medium-3.5-128b",
    "google/gemma-4-12B-it": "gemma-4-12b-it",
    "google/gemma-4-31B": "gemma-4-31b",
    "ibm-granite/granite-4.0-tiny-preview": "granite-4.0-tiny-preview",
    "tencent/Hunyuan-0.5B-Instruct": "hunyuan-0.5b-instruct",
}
_OTHER_VOCABULARY: Mapping[str, tuple[str, int]] = {
    "moonshotai/Moonlight-16B-A3B": ("deepseek-v2-lite", 163840),
    "OpenBuddy/openbuddy-zephyr-7b-v14.1": ("mistral-7b-v0.1", 36608),
    "baichuan-inc/Baichuan2-7B-Chat": ("llama2-7b", 125696),
    "baichuan-inc/Baichuan2-13B-Chat": ("llama2-13b", 125696),
    "unsloth/Mistral-7B-v0.2": ("mistral-7b-v0.1", 32000),
}
"""Models of the sizes of a packaged one with another vocabulary. Baichuan2-13B has ALiBi."""
_OTHER_FFN: Mapping[str, int] = {"baichuan-inc/Baichuan2-13B-Chat": 13696, "moonshotai/Moonlight-16B-A3B": 11264}
"""Widths of feed-forward layers of these, where they differ too; Moonlight's is of its first block alone."""


def _qwen(hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv_heads: int = 0) -> dict[str, Any]:
    """A decoder with one product for queries, keys and values, a gated feed-forward layer and a head of its own."""
    return {
        "model_type": "phi3",
        "pad_token_id": None,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


def _llama(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    """A decoder of a type of transformers with heads of 128 and a head of its own."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }


def _phi(hidden: int, layers: int, ffn: int, rotary: float) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "intermediate_size": ffn,
        "vocab_size": 51200,
        "partial_rotary_factor": rotary,
        "hidden_act": "gelu_pytorch_tanh",  # the same function as gelu_new, in one kernel, as litgpt has it
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def _vit(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    """A vision transformer on images of 224 pixels in patches of 14, with 45 classes (benchmark_low_bit_adam.py)."""
    return {
        "model_type": "vit",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "image_size": 224,
        "patch_size": 14,
        "num_channels": 3,
        "num_labels": 45,
        "qkv_bias": True,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen-1_8B-Chat": _qwen(2048, 24, 16, 5504, 151936),
    "Qwen/Qwen-7B-Chat": _qwen(4096, 32, 32, 11008, 151936),
    "Qwen/Qwen-14B-Chat": _qwen(5120, 40, 40, 13696, 152064),
    "Qwen/Qwen-72B-Chat": _qwen(8192, 80, 64, 24576, 152064),
    "THUDM/chatglm3-6b": _qwen(4096, 28, 32, 13696, 65024, kv_heads=2),
    "XiaomiMiMo/MiMo-7B-RL": _llama("qwen2", 4096, 36, 32, 8, 11008, 151680),
    "allenai/Olmo-3-7B-Instruct-SFT": _llama("olmo3", 4096, 32, 32, 32, 11008, 100278),
    "arcee-ai/AFM-4.5B": _llama("arcee", 2560, 36, 20, 4, 18432, 128004),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _llama("seed_oss", 5120, 64, 80, 8, 27648, 155136),
    "mistralai/Ministral-8B-Instruct-2410": _llama("mistral", 4096, 36, 32, 8, 12288, 131072),
    "swiss-ai/Apertus-8B-Instruct-2509": _llama("apertus", 4096, 32, 32, 8, 21504, 131072),
    # "1B" of torchao's pretrain_llama2.py
    "Llama-2 style, 1B": {**_llama("llama", 1536, 24, 24, 24, 6144, 32000), "head_dim": 64},
    "microsoft/phi-2": _phi(2560, 32, 10240, 0.4),
    "microsoft/phi-1_5": _phi(2048, 24, 8192, 0.5),
    "timm/vit_giant_patch14_dinov2.lvd142m": _vit(1536, 40, 24, 6144),
    "timm/vit_huge_patch14_224.orig_in21k": _vit(1280, 32, 16, 5120),
    "stabilityai/stablelm-base-alpha-3b": {
        "model_type": "gpt_neox",
        "hidden_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
        "vocab_size": 50688,
        "rotary_pct": 0.25,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def config_of(name: str) -> Mapping[str, Any] | None:
    """The config of a model of the table, None where it is not known."""
    if name in _PACKAGED:
        return dict(load_model(_PACKAGED[name]).config)
    if name in _OTHER_VOCABULARY:
        base, vocab = _OTHER_VOCABULARY[name]
        more = {"intermediate_size": _OTHER_FFN[name]} if name in _OTHER_FFN else {}
        return {**load_model(base).config, "vocab_size": vocab, **more}
    if name in _FILES:
        content: dict[str, Any] = json.loads((_FOLDER / f"{_FILES[name]}.json").read_text(encoding="utf-8"))
        return content
    return _CONFIGS.get(name)


_LLAMA: Mapping[str, tuple[str, ...]] = {part: (f"{part}_proj",) for part in ("q", "k", "v", "o", "gate", "up", "down")}
_PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{key: {**_LLAMA, "gate": ()} for key in ("apertus", "arcee")},
    "lfm2_moe": {part: (f"{part}_proj",) for part in "qkv"},
    "phi": {
        **{"q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "o": ("dense",)},
        **{"gate": ("fc1",), "up": ("fc1",), "down": ("fc2",)},
    },
    "gpt_neox": {
        **{"q": ("query_key_value",), "k": ("query_key_value",), "v": ("query_key_value",), "o": ("attention.dense",)},
        **{"gate": ("dense_h_to_4h",), "up": ("dense_h_to_4h",), "down": ("dense_4h_to_h",)},
    },
    "phi3": {
        **{"q": ("qkv_proj",), "k": ("qkv_proj",), "v": ("qkv_proj",), "o": ("o_proj",)},
        **{"gate": ("gate_up_proj",), "up": ("gate_up_proj",), "down": ("down_proj",)},
    },
    "falcon": {
        **{"q": ("query_key_value",), "k": ("query_key_value",), "v": ("query_key_value",)},
        **{"o": ("self_attention.dense",)},
        **{"gate": ("dense_h_to_4h",), "up": ("dense_h_to_4h",), "down": ("dense_4h_to_h",)},
    },
}
"""Linear layers of transformers' models that are not named as Llama's; peft adapts what is there of the named ones."""
_WORDS: Mapping[str, tuple[str, ...]] = {
    **{"query": ("q",), "key": ("k",), "value": ("v",), "projection": ("o",), "mlp": ("gate", "up", "down")},
    **{f"{part}_proj": (part,) for part in _LLAMA},
    **{"output_proj": ("o",), "c_attn": ("q", "k", "v"), "c_proj": ("o", "down"), "w1": ("up",), "w2": ("gate",)},
}
"""What publications call the linear layers of a block; Qwen's two layers named c_proj both match."""
_PATTERN = "(up|down|gate|q|k|v|o)_proj"
"""The end of expressions for all seven of a language model."""
_ALL = ("all", "all linear layers", "all projections (*_proj)")
_ATTENTION = "default (attention qkv of the model)"


def targets_of(text: str, config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Ends of paths of the linear layers that a row adapts, in transformers' names; None where it does not say.

    Adapters of the head are left out: they are small, and no lever has them.
    """
    if text in _ALL:
        return ("all-linear",)
    words = ("query", "key", "value") if text == _ATTENTION else [each for each in text.split() if each != "head"]
    words = [f"{part}_proj" for part in _LLAMA] if text.endswith(_PATTERN) else words
    if not words or any(word not in _WORDS for word in words):
        return None
    names = _PARTS.get(config["model_type"], _LLAMA)
    found = (name for word in words for part in _WORDS[word] for name in names.get(part, ()))
    return tuple(dict.fromkeys(found))
