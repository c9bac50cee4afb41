"""Reads a model: a name from the packaged list, a path to a ``config.json``, or the config itself as a mapping."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidModelError, nearest
from steelyard.model.chain import LayerKind, LayerRole, ModelChain
from steelyard.model.families import Family, family_of


@cache
def model_names() -> tuple[str, ...]:
    """Names of the packaged configs, sorted."""
    folder = resources.files("steelyard.model") / "configs"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_model(name_or_path: str | Path) -> ModelChain:
    """The chain of a packaged model, or of the config at a path (a file, or a folder that holds ``config.json``).

    Raises `InvalidModelError` if there is no such model, or the config is not of a known family or lacks a size.
    """
    text = str(name_or_path)
    if text in model_names():
        source = resources.files("steelyard.model") / "configs" / f"{text}.json"
        return chain_from_config(json.loads(source.read_text()), name=text)
    path = Path(text)
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.isfile(path):
        raise InvalidModelError(
            field="model",
            found=repr(text[:200]),
            expected="a packaged model or the path of an existing config.json",
            hint=nearest(text, model_names()),
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModelError(
            field="model", found=f"{path}: {error}", expected="a JSON file", hint="check that the file is complete"
        ) from error
    name = path.parent.name if path.name == "config.json" else path.stem
    return chain_from_config(config, name=name or "model")


def chain_from_config(config: Mapping[str, Any], *, name: str) -> ModelChain:
    """The chain of a Hugging Face config; raises `InvalidModelError` naming the key that is missing or wrong."""
    if not isinstance(config, Mapping):
        raise InvalidModelError(field="config", found=type(config).__name__, expected="a JSON object")
    family = family_of(str(config.get("model_type", "")))
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    vocab = _size(config, "vocab_size")
    num_blocks = _size(config, "num_hidden_layers")
    if config.get("head_dim") is not None:
        _size(config, "head_dim")
    elif hidden % heads:
        raise InvalidModelError(
            field="num_attention_heads",
            found=str(heads),
            expected=f"a divisor of hidden_size {hidden}",
            hint="or give head_dim",
        )
    return ModelChain(
        name=name,
        family=family,
        config=dict(config),
        config_hash=config_hash(config),
        kinds=(
            LayerKind(name="embedding", role=LayerRole.EMBEDDING, tp_divides=(("vocabulary", vocab),)),
            LayerKind(name="block", role=LayerRole.BLOCK, tp_divides=_block_sizes(config, family, heads)),
            LayerKind(name="head", role=LayerRole.HEAD, tp_divides=(("vocabulary", vocab),)),
        ),
        layers=(0, *([1] * num_blocks), 2),
        hidden_size=hidden,
        vocab_size=vocab,
        max_seq_len=_size(config, "max_position_embeddings"),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """A short identity of a config: equal for equal content, whatever the order of its keys.

    Raises `InvalidModelError` if a value of the config has no form in JSON.
    """
    try:
        canonical = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidModelError(
            field="config",
            found=str(error),
            expected="values that JSON can hold",
            hint="give the content of config.json",
        ) from error
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _block_sizes(config: Mapping[str, Any], family: Family, heads: int) -> tuple[tuple[str, int], ...]:
    sizes = [("attention heads", heads)]
    if family.kv_heads_key and config.get(family.kv_heads_key) is not None:
        kv_heads = _size(config, family.kv_heads_key)
        if heads % kv_heads:
            raise InvalidModelError(
                field=family.kv_heads_key,
                found=str(kv_heads),
                expected=f"a divisor of num_attention_heads {heads}",
                hint="use the complete config that the model was published with",
            )
        sizes.append(("key-value heads", kv_heads))
    sizes.append(("feed-forward width", _size(config, family.ffn_width_key)))
    return tuple(sizes)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidModelError(
            field=key,
            found="nothing" if value is None else repr(value),
            expected="a whole number of 1 or more in config.json",
            hint="use the complete config that the model was published with",
        )
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """A switch that is off unless given; null counts as not given."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidModelError(field=key, found=repr(value), expected="true or false in config.json")
    return bool(value)
