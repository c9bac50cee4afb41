"""Of every type of transformers with a class for a task: what becomes of it, and why.

Split (the pieces give logits and gradients of the whole model, at small width), traced at its own size, and divided by
tensor and sequence parallelism as proved on two ranks: nearly all (`NEARLY` of the parameters of its blocks) or a part.
Configs are those that transformers takes for a type where nothing is given, and what `CONFIGS` adds, with `NUM_BLOCKS`
blocks. Every type has a
process and limits of its own.

    python benchmarks/model_types.py                          # every type: about 90 minutes on one core
    python benchmarks/model_types.py --task causal --types phi3,opt --json
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from steelyard.errors import UserError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.model.small import is_part
from steelyard.modules.build import build_meta_model, hub_config, read_hub_config
from steelyard.modules.split_proof import split_model
from steelyard.modules.splitting import find_split
from steelyard.tracer.trace import trace

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
NEARLY = 0.9
NUM_BLOCKS = 6
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
LIMIT_S = 120
LIMIT_BYTES = 24 * 2**30
DIVIDING = ("columns", "columns_entering", "columns_gathered", "rows", "rows_of_whole", "rows_partial", "own_experts")
"""The styles of matrices that ranks divide."""
GLM_TEXT = {
    "head_dim": 128,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]},
}
QWEN_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
QWEN4_INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("ministral", "hunyuan_v1_dense")},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "modernbert-decoder": {"pad_token_id": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "cpmant": {"pad_token_id": 0},
    "bamba": {"attn_layer_indices": [1, 4]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "cohere2_moe": {"rms_norm_eps": 1e-5},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "qwen3_asr": {"pad_token_id": 0},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "bert-generation": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 38},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 1}},
    **{name: {"decoder_start_token_id": 0} for name in ("t5", "longt5")},
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    **{name: {"decoder_start_token_id": 0, "expert_capacity": 4096} for name in ("switch_transformers", "nllb-moe")},
    **{
        f"{name}ForConditionalGeneration": {"text_config": GLM_TEXT}
        for name in ("Glm4v", "Glm46V", "Glm4vMoe", "GlmOcr")
    },
    **{
        f"{name}ForConditionalGeneration": {"text_config": {"rope_parameters": QWEN_ROTARY}}
        for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen2_5OmniThinker", "PaddleOCRVL")
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        "text_config": {"rope_parameters": QWEN_ROTARY, "head_dim": 128, "num_attention_heads": 16}
    },
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
}
"""What some types, or classes of one, need where their own defaults do not make a model."""


def outcome(model_type: str, architecture: str) -> dict[str, Any]:
    """What becomes of a type: ``reason`` is why it does not split or trace, ``tp`` and ``sp`` why blocks do not."""
    found: dict[str, Any] = {"split": False, "traced": False}
    try:
        config = shallow_config(model_type, architecture, NUM_BLOCKS)
        split = split_model(model_type, config)
        blocks = [layer_type for layer_type in split.kinds if layer_type.role is LayerRole.BLOCK]
        found |= {
            "split": True,
            "tp": sorted({kind.no_tp for kind in blocks} - {""}),
            "sp": sorted({kind.no_tp or kind.no_sp for kind in blocks} - {""}),
        }
        chain = chain_from_config(config, name=model_type, split=split)
        found["share"] = round(divided_share(chain), 3)
        found |= traced(chain)
    except UserError as error:
        found["reason"] = error.found
    except Exception as error:  # what transformers raises for a type's own defaults is of every kind
        found["reason"] = _first_line(error)
    if not found["split"] and (why := no_model(model_type, architecture)):
        found |= {"no_model": True, "reason": why}
    return found


def traced(chain: ModelChain) -> dict[str, Any]:
    """That a chain is traced, in bf16 or, where its own code knows no such numbers, in fp32."""
    length = max(128 + (chain.features.places if chain.features else 0), chain.split.multiple)
    try:
        trace(chain, seq_len=length, precision="bf16", degrees=(1,))
    except RuntimeError as error:
        trace(chain, seq_len=length, precision="fp32", degrees=(1,))
        return {"traced": True, "in_fp32": _first_line(error)}
    return {"traced": True}


def no_model(model_type: str, architecture: str) -> str:
    """Why transformers itself makes no model of a type's defaults; empty where it does."""
    try:
        with torch.device("meta"):
            getattr(transformers, architecture)(CONFIG_MAPPING[model_type]())
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    words = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(words or [''])[0][:160]}"


def shallow_config(model_type: str, architecture: str, num_blocks: int) -> dict[str, Any]:
    """The config of a type with so many blocks, and lists with an entry for each as long."""
    given = {"model_type": model_type, "architectures": [architecture]}
    given |= CONFIGS.get(model_type, {}) | CONFIGS.get(architecture, {})
    config = json.loads(read_hub_config(model_type, given).to_json_string(use_diff=False))
    return _shallow(_with_images(config), num_blocks)


def _with_images(config: dict[str, Any]) -> dict[str, Any]:
    """The config with images of 16 × 16 patches, and a tower that ends as wide as the text, where its patches merge."""
    vision, text = config.get("vision_config"), config.get("text_config")
    if (
        not isinstance(vision, dict)
        or not isinstance(text, dict)
        or not isinstance(vision.get("spatial_merge_size"), int)
    ):
        return config
    width = next((key for key in ("out_hidden_size", "embed_dim") if key in vision), "")
    ends = {"": {}, "embed_dim": {"hidden_size": text["hidden_size"]}}.get(width, {width: text["hidden_size"]})
    size = {"image_size": 16 * vision["patch_size"]} if isinstance(vision.get("patch_size"), int) else {}
    return {**config, "vision_config": {**vision, **ends, **size}}


def _shallow(config: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    deep = {config[key] for key in COUNTS if isinstance(config.get(key), int)}
    found = {
        key: min(value, num_blocks) if key in COUNTS and isinstance(value, int) else value
        for key, value in config.items()
    }
    found |= {k: v[:num_blocks] for k, v in config.items() if isinstance(v, list) and len(v) in deep}
    found = {k: v for k, v in found.items() if k not in ("out_features", "out_indices", "stage_names")}
    by_block = config.get("per_layer_config") or {}
    if by_block:
        found["per_layer_config"] = {k: v for k, v in by_block.items() if int(k) < num_blocks}
    parts = {k: v for k, v in config.items() if k != "per_layer_config" and isinstance(v, dict) and is_part(k, v)}
    return found | {k: _shallow(v, num_blocks) for k, v in parts.items()}


def divided_share(chain: ModelChain) -> float:
    """The part of the parameters that a chain's blocks compute with which tensor-parallel ranks divide.

    A decoder alone does not compute with the attention to an encoder that its blocks hold.
    """
    model, divided, whole = build_meta_model(chain), 0, 0
    called = set(find_split(hub_config(chain)).keywords)
    for layer in (place for place in range(chain.num_layers) if chain.type_of(place).role is LayerRole.BLOCK):
        (path,) = chain.family.modules(layer).values()
        block = model.get_submodule(path)
        for inner, module in block.named_modules(prefix=path):
            if {inner, inner.rpartition(".")[0]} & called:  # or read by the module that holds it
                whole += sum(each.numel() for each in module.parameters(recurse=False))
        for path, style in chain.family.styles(chain.type_of(layer)).items():
            if style.split(":")[0] in DIVIDING:
                module = block.get_submodule(path.removeprefix("block").removeprefix("."))
                divided += sum(each.numel() for each in module.parameters(recurse=False))
    return divided / whole


def _send(pipe: Connection, model_type: str, architecture: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    pipe.send(outcome(model_type, architecture))


def watched(model_type: str, architecture: str) -> dict[str, Any]:
    """The outcome in a process of its own, which ends at `LIMIT_S`."""
    context, started = multiprocessing.get_context("fork"), time.monotonic()
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, model_type, architecture))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"split": False, "traced": False}
    try:
        found = mine.recv()
    except EOFError:
        found["reason"] = f"takes more than {LIMIT_S} s of CPU, or {LIMIT_BYTES >> 30} GiB"
    process.join()
    return {"type": model_type, **found, "wall_s": round(time.monotonic() - started, 1)}


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts and shares: of all, and of those of whose defaults transformers makes a model."""
    counts = Counter[str]()
    for row in rows:
        share = row.get("share", 0.0)
        counts.update(key for key in ("split", "traced") if row[key])
        counts.update(["tp nearly all"] if share >= NEARLY else ["tp a part"] if share > 0.0 else [])
        counts.update(["sp"] if row["split"] and not row["sp"] else [])
    keys = ("split", "traced", "tp nearly all", "tp a part", "sp")
    made = len(rows) - sum(row.get("no_model", False) for row in rows)
    shares = (f"{key} {counts[key]} ({counts[key] / len(rows):.0%}; {counts[key] / made:.0%})" for key in keys)
    return f"{len(rows)} types, of {made} transformers makes a model by their defaults: " + ", ".join(shares)


def misses(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every miss with its reason."""
    for row in rows:
        if "reason" in row:
            yield f"  {row['type']}: {'no model by its defaults: ' if row.get('no_model') else ''}{row['reason']}"
        elif row.get("share", 0.0) < NEARLY:
            yield f"  {row['type']}: tp divides {row['share']:.0%}" + "".join(f"; {why}" for why in row["tp"][:1])


def class_of(names: Mapping[str, Any], model_type: str) -> str:
    """The first class that a task's table names for a type."""
    named = names[model_type]
    return named if isinstance(named, str) else named[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, help="one task; all where left out")
    parser.add_argument("--types", help="separated by commas; all where left out")
    parser.add_argument("--json", dest="as_json", action="store_true", help="one line for each type, as it is found")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = options.types.split(",") if options.types else None
    for task in [options.task] if options.task else TASKS:
        names = TASKS[task]
        rows = []
        for name in (name for name in names if name in CONFIG_MAPPING and (chosen is None or name in chosen)):
            rows.append(watched(name, class_of(names, name)))
            if options.as_json:
                print(json.dumps({"task": task, **rows[-1]}), flush=True)
        if rows and not options.as_json:
            print("\n".join([task, summary(rows), *misses(rows)]), flush=True)


if __name__ == "__main__":
    main()
