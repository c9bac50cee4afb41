"""Load a model by packaged name, by the path of a ``config.json``, or from the config itself as a mapping.

A packaged config holds the keys that shape a model, as published at its address on the Hugging Face hub. Tests compare
the resulting parameter counts with the published ones (tests/model/test_packaged_models.py).

The package also contains precomputed splits of these models, by the hash of the config. A split is valid for the
version of transformers that it was made with; with another version, or an older `SPLIT_VERSION`, it counts as missing.
The package also contains proved splits of the small models of the same structures, so that other models of these
structures need no proof.

Some model types are refused by name before anything is built, each with a hint on what to use instead.

Values of a config that no layout reads, but that the modules of transformers are built from, are checked here too: a
wrong one would show only while the model is built or traced, as an error in foreign code. A key may be absent.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from steelyard.errors import InvalidModelError, nearest
from steelyard.files import read_json
from steelyard.installed import is_as_made, require_training
from steelyard.limits import MOST_LAYERS, MOST_SIZE
from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS, Family
from steelyard.model.own import OwnSplit, Split
from steelyard.model.split import SPLIT_VERSION, TEXT_PART, ModelSplit

NOT_PLANNED = {
    "albert": "use roberta or modernbert, whose blocks have separate weights",
    "flaubert": "use camembert, whose blocks need no special case",
    "hrm_text": "write a function that builds it, with a sample: docs/how-to/your-own-model.md",
    "ibert": "use roberta, whose blocks are equal but not quantized",
    "longcat_flash": "use deepseek_v3, which has no zero-computation experts",
    "longformer": "use led, or modernbert for a masked model",
    "prophetnet": "use bart or t5",
    "reformer": "use led, or a causal model of long sequences with cp",
    "xlm": "use xlm-roberta",
}
"""Model types that are refused, because nobody trains them and their blocks need special code; with hints."""
PAIRS = {
    "clip": "CLIPForImageClassification",
    "clipseg": "",
    "metaclip_2": "MetaClip2ForImageClassification",
    "siglip": "SiglipForImageClassification",
}
"""Model types whose loss compares all image-text pairs of a batch, with the class of the image tower alone."""


def check_type(config: Mapping[str, Any]) -> None:
    """Raise `InvalidModelError` for a refused type, or for image-text pairs if the image tower is not named alone."""
    model_type, named = str(config.get("model_type")), config.get("architectures")
    if model_type in NOT_PLANNED:
        raise InvalidModelError(
            field="model_type",
            found=f"{model_type}, which steelyard does not support",
            expected="a supported type: `steelyard models` lists examples",
            hint=NOT_PLANNED[model_type],
        )
    tower = PAIRS.get(model_type)
    if tower is not None and (not tower or named != [tower]):
        raise InvalidModelError(
            field="model_type",
            found=f"{model_type}, whose contrastive loss compares every image of a batch with every text",
            expected=f"the image tower only: {tower}" if tower else "a model with one tower",
            hint=f'write "architectures": ["{tower}"] into the config' if tower else "plan the image tower of clip",
        )


def model_source(name: str) -> str:
    """Return the address of a packaged model's config, or the other source that it was made from."""
    return _sources()[name]


@cache
def hub_names() -> dict[str, str]:
    """Return packaged names of models by their hub ID, such as ``Qwen/Qwen3-14B``."""
    found = {name: _ON_THE_HUB.fullmatch(source) for name, source in _sources().items()}
    return {match[1]: name for name, match in found.items() if match}


def _sources() -> dict[str, str]:
    text = resources.files("steelyard.model").joinpath("sources.json").read_text(encoding="utf-8")
    known: dict[str, str] = json.loads(text)
    return known


_ON_THE_HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/blob/main/config\.json")


def packaged_split(config_hash: str, *, must_hold: bool = True) -> ModelSplit | None:
    """Return the packaged split of a model or small model, by the hash of its config; None if there is none.

    With ``must_hold`` a split that is not valid for the installed versions counts as missing. Pass False if the split
    is only shown.
    """
    content = _content(config_hash)
    if content is None:
        return None
    holds = content["split_version"] == SPLIT_VERSION and is_as_made(content["made_with"])
    return ModelSplit.model_validate(content["split"]) if holds or not must_hold else None


def packaged_structure(config_hash: str) -> str:
    """Return the identity of the small model of a packaged model's structure; empty if no split is packaged."""
    content = _content(config_hash)
    return content["structure"] if content else ""


def _content(config_hash: str) -> dict[str, Any] | None:
    file = resources.files("steelyard.model") / "splits" / f"{config_hash}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


NO_IMAGES: Final = "none"
ImageSize = tuple[int, int] | Literal["none"] | None
"""Height and width of all images, `NO_IMAGES` for the text of the model alone, or None for those of the config."""


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the packaged configs, sorted."""
    folder = resources.files("steelyard.model") / "configs"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_model(name_or_path: str | Path, *, image_size: ImageSize = None) -> ModelChain:
    """Return the chain of a packaged model, or of the config at a path (a file, or a folder with ``config.json``).

    Raises the errors of `chain_with_images`, and `InvalidModelError` if there is no such model.
    """
    name, config = load_config(name_or_path)
    return chain_with_images(config, name=name, image_size=image_size)


def chain_with_images(config: Mapping[str, Any], *, name: str, image_size: ImageSize) -> ModelChain:
    """Return the chain of a Hugging Face config whose images have this height and width.

    Without a size, the config gives it; `NO_IMAGES` means the text of a model of images and text alone. Raises the
    errors of `chain_from_config`, and `InvalidModelError` if the model does not read images of this size.
    """
    if image_size is None:
        return chain_from_config(config, name=name)
    if image_size == NO_IMAGES:
        text = config.get(TEXT_PART)
        if not isinstance(text, Mapping) or "model_type" not in text:
            raise InvalidModelError(
                field="--image-size",
                found=f"none for {config.get('model_type')}, whose config has no {TEXT_PART} with a model_type",
                expected="a model of images and text",
                hint="leave the option out",
            )
        chain = chain_from_config(text, name=name)
        split = chain.split.model_copy(update={"text_alone": f"--image-size {NO_IMAGES}"})
        return replace(chain, split=split)
    vision = config.get("vision_config")
    own = vision.get("image_size") if isinstance(vision, Mapping) else None
    if (
        not isinstance(vision, Mapping)
        or "spatial_merge_size" not in vision
        or own not in (None, image_size[0], [*image_size])
    ):
        raise InvalidModelError(
            field="--image-size",
            found=f"{image_size[0]}x{image_size[1]} for {config.get('model_type')}"
            + (f", whose images are {own}" if own else ""),
            expected="a model that reads images of any size: its vision_config has a spatial_merge_size and no "
            "image_size",
            hint="leave the option out, or write vision_config.image_size into the config",
        )
    size = image_size[0] if image_size[0] == image_size[1] else [*image_size]
    return chain_from_config({**config, "vision_config": {**vision, "image_size": size}}, name=name)


def load_config(name_or_path: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the config of a packaged model, or of the config at a path.

    You can also pass a Hugging Face hub ID: of a packaged model, in any case, or of another one, whose config is then
    downloaded or read from the hub's cache. An existing path of that name takes precedence. Raises `InvalidModelError`
    if there is no such model or the file is not JSON.
    """
    text = str(name_or_path)
    path = Path(text)
    by_id = {hub_id.lower(): name for hub_id, name in hub_names().items()}
    name = text if os.path.exists(path) else by_id.get(text.lower(), text)
    if name in model_names():
        source = resources.files("steelyard.model") / "configs" / f"{name}.json"
        return name, json.loads(source.read_text())
    is_on_hub = not os.path.exists(path) and _HUB_ID.fullmatch(text) is not None
    if is_on_hub:
        path = _downloaded(text)
    elif os.path.isdir(path):
        path = path / "config.json"
    if not os.path.isfile(path):
        raise InvalidModelError(
            field="model",
            found=repr(text[:200]),
            expected="a packaged model, a Hugging Face hub ID, or the path of a config.json",
            hint=nearest(text, model_names()),
        )
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidModelError(
            field="model", found=f"{path}: {error}", expected="a JSON file", hint="check that the file is complete"
        ) from error
    name = text.rpartition("/")[2] if is_on_hub else path.parent.name if path.name == "config.json" else path.stem
    return name or "model", config


_HUB_ID = re.compile(r"(?!\.)[\w.-]{1,96}/[\w.-]{1,96}(?<!\.json)")


def folder_hint(path: Path) -> str:
    """Return what to do about a folder of the hub that is missing: download it, if its path looks like a hub ID."""
    if os.path.exists(path) or _HUB_ID.fullmatch(str(path)) is None:
        return "check the path"
    return f"check the path; a model of the hub is downloaded first: hf download {path} --local-dir {path}"


def _downloaded(hub_id: str) -> Path:
    """Return the config of a model that is not packaged, from the hub's cache or downloaded into it.

    Raises `InvalidModelError` if the hub does not give it, and `NotInstalledError` without the packages for training.
    """
    similar = get_close_matches(hub_id, hub_names(), n=2, cutoff=0.7)
    missing = "is not packaged" + (f" (similar packaged models: {', '.join(similar)})" if similar else "")
    require_training(f"{hub_id} {missing}, and is downloaded and split")
    hub = import_module("huggingface_hub")
    try:
        cached = hub.try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(cached, str):
            hub.get_hf_file_metadata(hub.hf_hub_url(hub_id, "config.json"))  # fails at once; a download is tried again
            cached = hub.hf_hub_download(hub_id, "config.json")
    except Exception as error:  # of the HTTP library behind the hub, which differs by version
        raise InvalidModelError(
            field="model",
            found=f"{hub_id!r}, which {missing} and could not be downloaded ({type(error).__name__})",
            expected="a packaged model, a Hugging Face hub ID that can be downloaded, or the path of a config.json",
            hint=f"save https://huggingface.co/{hub_id}/resolve/main/config.json and pass its path; gated models need "
            "hf auth login",
        ) from error
    return Path(cached)


_SPLITS_ANY_MODEL = "steelyard.modules.any_model"
"""Module that splits any model. It imports this module, so it is imported only when a model is read."""


def chain_from_config(config: Mapping[str, Any], *, name: str, split: ModelSplit | None = None) -> ModelChain:
    """Return the chain of a Hugging Face config, split by ``split`` or by the structure of its model.

    A split that is not packaged is found and proved once, which needs torch and takes seconds, and is cached with the
    traces. Raises `InvalidModelError` for a missing or wrong key (which it names), a type that transformers does not
    know, or a model that cannot be split, and `NotInstalledError` if transformers is needed but not installed.
    """
    if not isinstance(config, Mapping):
        raise InvalidModelError(field="config", found=type(config).__name__, expected="a JSON object")
    check_values(config)
    check_type(config)
    if config.get("quantization_config"):
        settings = config["quantization_config"]
        method = settings.get("quant_method", "unnamed") if isinstance(settings, Mapping) else type(settings).__name__
        raise InvalidModelError(
            field="quantization_config",
            found=f"quantized weights (quant_method: {method})",
            expected="a config without quantization",
            hint="remove the entry; for adapters on quantized weights use --train qlora:r=16, or lora:r=16 with "
            "--base int8; for 8-bit compute use --precision fp8",
        )
    identity = config_hash(config)
    model_type = str(config.get("model_type", ""))
    if split is None:
        any_model = import_module(_SPLITS_ANY_MODEL)
        split = any_model.split_of(config)
        if split is None:
            raise _unknown(model_type, any_model.type_of_class(config))
    if split.text_alone and model_type != split.model_type:
        text = config.get(TEXT_PART)
        if not isinstance(text, Mapping):
            raise InvalidModelError(
                field=TEXT_PART,
                found="nothing",
                expected=f"the config of the {split.model_type} text model: {split.text_alone}",
                hint="give the config.json that the model was published with",
            )
        return chain_from_config({**text, "model_type": split.model_type}, name=name, split=split)
    return _chain_of(split, name, dict(config), identity)


def planned_model(name: str, config: Mapping[str, Any] | None, split: Split | None) -> ModelChain:
    """Return the chain of a plan's model; without a config, the packaged model of that name."""
    if isinstance(split, OwnSplit):
        return _chain_of(split, name, {}, split.structure)
    return load_model(name) if config is None else chain_from_config(config, name=name, split=split)


def _chain_of(split: Split, name: str, config: dict[str, Any], identity: str) -> ModelChain:
    family = Family(
        model_type=split.model_type,
        task=split.task,
        modules=split.modules,
        tp={layer_type.name: dict(layer_type.styles) for layer_type in split.kinds},
        rotary_by_attention=split.rotary_by_attention,
        fused_attention=split.fused_attention and config.get("attn_implementation") != "eager",
    )
    return ModelChain(
        **split.layout().fields(),
        name=name,
        family=family,
        config=config,
        config_hash=identity,
        sizes={key: config[key] for key in _SIZES if _is_count(config.get(key))},
        split=split,
    )


def _unknown(model_type: str, of_class: str) -> InvalidModelError:
    """Return the error for a type that transformers does not know; ``of_class``: type of the class in the config."""
    known = {load_config(name)[1]["model_type"] for name in model_names()}
    return InvalidModelError(
        field="model_type",
        found=repr(model_type) if model_type else "nothing",
        expected=f"a model type of the installed transformers, for example {', '.join(sorted(known))}",
        hint=f'write "model_type": "{of_class}" into the config, whose architectures name a class of that type'
        if of_class
        else nearest(model_type, known),
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a short hash of a config: equal for equal content, regardless of the order of keys.

    Raises `InvalidModelError` if a value of the config cannot be represented in JSON.
    """
    try:
        canonical = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidModelError(
            field="config",
            found=str(error),
            expected="values that JSON supports",
            hint="give the content of config.json",
        ) from error
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
"""Names of activation functions in ``transformers.activations``."""
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "use_cache", "use_parallel_residual")
_NUMBERS = (
    *("initializer_factor", "layer_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar", "rms_norm_eps"),
    *("rope_local_base_freq", "rope_theta", "rotary_emb_base", "routed_scaling_factor"),
)
_SHARES = (
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "drop_path_rate", "dropout_rate"),
    *("embd_pdrop", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "rotary_pct"),
)
_ACTIVATIONS = ("activation_function", "hidden_act")
_DTYPES = ("dtype", "torch_dtype")
_OBJECTS = ("id2label", "rope_parameters", "rope_scaling")
_LISTS = ("layer_types", "mlp_only_layers")
_HINT = "use the complete config that the model was published with"
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = "num_experts_per_tok"
_MOST = 1e15
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    *("head_dim", "n_embd", "n_head", "n_inner", "n_layer", "n_positions"),
    *("vocab_size", "max_position_embeddings", *_EXPERTS),
)
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "depths")
"""Config keys for the number of layers."""
_POSITIONS = ("max_position_embeddings", "n_positions")
"""Sizes that some configs give as a float: in Music Flamingo's, 1200.0 is the base of its rotary embedding."""
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_values(config: Mapping[str, Any]) -> None:
    """Raise `InvalidModelError` naming the first key whose value no model can be built with."""
    for keys, is_right, expected in _RULES:
        for key in keys:
            if key in config and not is_right(config[key]):
                raise _wrong(key, config[key], expected)
    for key in _SIZES:
        value = config.get(key)
        if key in _POSITIONS and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_known = value is None or isinstance(value, list) or (value == 0 and key in _EXPERTS)
        if not (is_known or (_is_count(value) and value <= (MOST_LAYERS if key in _LAYERS else MOST_SIZE))):
            raise wrong_size(key, value)
    heads, shared = (config.get(key) for key in _HEADS)
    if _is_count(heads) and _is_count(shared) and heads % shared:
        raise _wrong(_HEADS[1], shared, f"a divisor of {_HEADS[0]} {heads}")
    for keys, known in ((_ACTIVATIONS, ACTIVATIONS), (_DTYPES, DTYPES)):
        for key in keys:
            value = config.get(key, known[0])
            if not (value in known if isinstance(value, str) else value is None and keys is _DTYPES):
                raise _wrong(key, value, "one of " + ", ".join(known), nearest(str(value), known))
    experts = next((config[key] for key in _EXPERTS if _is_count(config.get(key))), None)
    top_k = config.get(_TOP_K)
    if top_k is not None and not (_is_count(top_k) and (experts is None or top_k <= experts)):
        most = "" if experts is None else f", at most the {experts} experts"
        raise _wrong(_TOP_K, top_k, f"a whole number of 1 or more{most}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_FLAGS, lambda value: isinstance(value, bool), "true or false"),
    ((ROUTER_LOSS,), lambda value: value is None or isinstance(value, bool), "true or false, or null"),
    (_NUMBERS, lambda value: _is_number(value) and 0 < value <= _MOST, "a number above 0"),
    (_SHARES, lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    (_OBJECTS, lambda value: value is None or isinstance(value, dict), "an object, or null"),
    (("tie_word_embeddings",), lambda value: value is None or isinstance(value, bool), "true or false"),
    (_LISTS, lambda value: value is None or isinstance(value, list), "a list, or null"),
    (
        ("architectures",),
        lambda value: value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)),
        "a list of class names, or null",
    ),
)


def wrong_size(key: str, value: object) -> InvalidModelError:
    """Return the error for a missing or wrong size."""
    most = MOST_LAYERS if key in _LAYERS else MOST_SIZE
    found = "nothing" if value is None else repr(value)
    return InvalidModelError(
        field=key, found=found, expected=f"a whole number of 1 or more in config.json, at most {most}", hint=_HINT
    )


def _wrong(key: str, value: object, expected: str, hint: str = "") -> InvalidModelError:
    return InvalidModelError(
        field=key,
        found=repr(value),
        expected=f"{expected} in config.json",
        hint=hint or _HINT,
    )
