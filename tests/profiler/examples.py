"""Profiles made by hand: a small model whose layers were traced to nothing."""

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.profiles.profile import Affine, LayerProfile, Profile, ProfileIdentity, Recomputation, Work
from tests.shapes import tp_shape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SEQ_LEN = 16


def tiny_chain() -> ModelChain:
    return chain_from_config(CONFIG, name="tiny")


def empty_layer(layer_type: str, tp: int = 1, sp: bool = False, **changes: object) -> LayerProfile:
    nothing = Affine()
    work = Work(matmul_flop=nothing, attention_flop=nothing, matmul_bytes=nothing, memory_bytes=nothing, num_kernels=0)
    fields = {
        "num_params": 1,
        "forward": work,
        "backward": work,
        "saved_bytes": nothing,
        "input_bytes": nothing,
        "forward_transient_bytes": nothing,
        "backward_transient_bytes": nothing,
        "recomputations": tuple(
            Recomputation(
                remat=remat,
                work=work,
                saved_bytes=nothing,
                forward_transient_bytes=nothing,
                backward_transient_bytes=nothing,
            )
            for remat in ("full", "selective")
        ),
    }
    return LayerProfile(kind=layer_type, degrees=tp_shape(tp, sp), **(fields | changes))


def identity(**changes: object) -> ProfileIdentity:
    fields = {
        "method": "traced",
        "model_name": "tiny",
        "config_hash": tiny_chain().config_hash,
        "seq_len": SEQ_LEN,
        "precision": "fp32",
        "device": "any",
        "num_devices": 1,
        "torch": "2",
        "transformers": "5",
        "created": "2026-11-21T00:00:00+00:00",
    }
    return ProfileIdentity(**(fields | changes))


def empty_trace(configs: tuple[tuple[int, bool], ...] = ((1, False),), **identity_changes: object) -> Profile:
    """A traced profile of the tiny model at these tp degrees, with sp on or off, without any work."""
    layer_types = ("embedding", "block", "head")
    layers = tuple(empty_layer(layer_type, tp, sp) for tp, sp in configs for layer_type in layer_types)
    return Profile(identity=identity(**identity_changes), layers=layers)
