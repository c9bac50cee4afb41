"""Families of decoder-only language models: embedding, equal or almost equal blocks, final norm and projection.

`decoder` makes a `Family` from the names of the parts in the unmodified ``…ForCausalLM`` module of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.errors import InvalidModelError
from steelyard.model.family import (
    KV_HEADS,
    Context,
    Family,
    Layer,
    LayerKind,
    LayerRole,
    Layout,
    Run,
    SharedWeight,
    Sizes,
    Task,
    Tensor,
)

DENSE = "dense"
"""What `kind_of_block` says of blocks without experts where others have some."""
ATTENTION_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of config.json that hold the sizes, and what transformers takes where a key is missing."""

    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    blocks: str = "num_hidden_layers"
    positions: str = "max_position_embeddings"
    ffn_width: str = "intermediate_size"
    kv_heads: str | None = "num_key_value_heads"
    """None where every query head has a key and value head of its own."""
    default_kv_heads: int | None = None
    """Where the key is missing; None for as many as query heads, which null always means."""
    head_dim: str = "head_dim"
    """Of what positions rotate."""
    default_head_dim: int | None = None
    default_tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the blocks that strategies must divide, under the names of messages."""

    hidden: int
    heads: int
    head_dim: int
    divides: tuple[tuple[str, int], ...]


Attention = Callable[[Sizes, int], str]
"""The kind of attention of a block: its place among the blocks to an entry of `ATTENTION_TYPES`."""


def decoder(
    model_type: str,
    *,
    keys: Keys | None = None,
    body: str = "model",
    embedding: str = "embed_tokens",
    blocks: str = "layers",
    final_norm: str = "norm",
    output: str = "lm_head",
    block_tp: Mapping[str, str] | None = None,
    more_embedding: Mapping[str, str] | None = None,
    run: Mapping[str, Run] | None = None,
    rotary: str | None = "rotary_emb",
    rotary_by_attention: bool = False,
    attention: Attention | None = None,
    ffn: Callable[[Sizes, Keys], tuple[tuple[str, int], ...]] | None = None,
    no_sp_embedding: str = "",
    kind_of_block: Callable[[Sizes, int], str] | None = None,
    fused_attention: bool = True,
    attention_dropout: Mapping[str, float] | None = None,
    apart: Mapping[str, int] | None = None,
) -> Family:
    """A family of decoders; names of modules are below ``body``, but for ``output``, which is the model's own.

    ``block_tp`` holds the styles of a block's modules. ``attention`` and ``ffn`` are for families whose blocks differ
    in what they attend to or whose feed-forward part is of another shape; ``attention_dropout`` has the key and the
    default of dropout inside attention; ``kind_of_block`` names what else tells blocks apart (nothing: an empty text).
    ``apart`` is as in `Family`.
    """
    keys = keys or Keys()
    attends = attention or uniform_attention
    embedding_modules = {"embedding": f"{body}.{embedding}"} | {
        name: f"{body}.{path}" for name, path in (more_embedding or {}).items()
    }

    def layout(sizes: Sizes) -> Layout:
        block = _block_sizes(sizes, keys)
        vocabulary = (("vocabulary", sizes.size("vocab_size")),)
        num_blocks = sizes.size(keys.blocks)
        divides = block.divides + (ffn or dense_ffn)(sizes, keys)
        names = [
            (attends(sizes, index), kind_of_block(sizes, index) if kind_of_block else "") for index in range(num_blocks)
        ]
        distinct = list(dict.fromkeys(names))
        tied = sizes.flag("tie_word_embeddings", default=keys.default_tied)
        no_cp = "" if fused_attention else "its attention runs step by step, with a mask of the whole sequence"
        if any(
            sizes.config.get(key, default) for key, default in (attention_dropout or {"attention_dropout": 0.0}).items()
        ):
            no_cp = "attention drops entries at random, which ranks with parts of a sequence cannot do alike"
        kinds = (
            LayerKind(
                name="embedding",
                role=LayerRole.EMBEDDING,
                tp_divides=vocabulary,
                no_sp=no_sp_embedding,
                no_cp=no_cp,
            ),
            *(
                LayerKind(
                    name=_block_name(attending, extra, distinct),
                    role=LayerRole.BLOCK,
                    tp_divides=divides,
                    tp_shares=(KV_HEADS,),
                    no_cp=no_cp,
                    num_experts=0 if extra == DENSE else dict(divides).get("experts", 0),
                    attention=attending,
                )
                for attending, extra in distinct
            ),
            LayerKind(name="head", role=LayerRole.HEAD, tp_divides=vocabulary, no_cp=no_cp),
        )
        copies = SharedWeight(copies=((0, "embedding.weight"), (num_blocks + 1, "output.weight")))
        return Layout(
            kinds=kinds,
            layers=(0, *(1 + distinct.index(name) for name in names), len(kinds) - 1),
            hidden_size=block.hidden,
            vocab_size=vocabulary[0][1],
            max_seq_len=sizes.size(keys.positions),
            tied_embeddings=tied,
            shared=(copies,) if tied else (),
            rotary_size=block.head_dim if rotary else 0,
            learned_positions=rotary is None,
        )

    def modules(chain: Layout, layer: int) -> Mapping[str, str]:
        if layer == 0:
            return embedding_modules
        if layer == len(chain.layers) - 1:
            return {"norm": f"{body}.{final_norm}", "output": output}
        return {"block": f"{body}.{blocks}.{layer - 1}"}

    return Family(
        model_type=model_type,
        task=Task.CAUSAL_LM,
        layout=layout,
        modules=modules,
        run={"embedding": embed, "block": run_block, "head": project} | dict(run or {}),
        tp={
            "embedding": {"embedding": "vocabulary"},
            "block": {f"block.{path}": style for path, style in (block_tp or {}).items()} | {"*": f"{blocks}.*."},
            "head": {"norm": "sequence", "output": "logits"},
        },
        rotary=f"{body}.{rotary}" if rotary else None,
        rotary_by_attention=rotary_by_attention,
        fused_attention=fused_attention,
        apart={f"block.{path}": parts for path, parts in (apart or {}).items()},
    )


LLAMA_BLOCK = {
    "self_attn": "gather:hidden_states",
    "mlp": "gather",
    "input_layernorm": "sequence",
    "post_attention_layernorm": "sequence",
}
"""Styles of a block that norms its input, attends, norms again and computes; the matrices are in the config's plan."""


def embed(layer: Layer, ids: Tensor, _context: Context) -> Tensor:
    """Looks the tokens up."""
    return layer.embedding(ids)


def run_block(layer: Layer, hidden: Tensor, context: Context) -> Tensor:
    """Runs a block that reads rotary positions and a mask."""
    side = context.side
    return layer.block(
        hidden,
        attention_mask=side.masks[layer.kind.attention],
        position_ids=side.position_ids,
        position_embeddings=side.position_embeddings[layer.kind.attention],
        use_cache=False,
    )


def project(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    """Norms and projects to the vocabulary."""
    return layer.output(layer.norm(hidden))


def project_capped(layer: Layer, hidden: Tensor, context: Context) -> Tensor:
    """As `project`, with logits squeezed into ±cap by a hyperbolic tangent where the config says so."""
    logits = project(layer, hidden, context)
    cap = context.config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


def uniform_attention(sizes: Sizes, block: int) -> str:
    """The entry of ``layer_types`` where there are any; else sliding in all blocks or in none."""
    return listed_attention(sizes, block) or ("sliding_attention" if sizes.config.get("sliding_window") else FULL)


def listed_attention(sizes: Sizes, block: int) -> str | None:
    """The entry of ``layer_types`` for a block; None without a list. An unknown one is an error."""
    listed = sizes.config.get("layer_types")
    if not listed:
        return None
    found = listed[block] if isinstance(listed, list) and block < len(listed) else None
    if found not in ATTENTION_TYPES:
        raise InvalidModelError(
            field=f"layer_types[{block}]",
            found=repr(found),
            expected="one of " + ", ".join(ATTENTION_TYPES),
            hint="this kind of attention is not supported yet",
        )
    return str(found)


FULL = "full_attention"


def dense_ffn(sizes: Sizes, keys: Keys) -> tuple[tuple[str, int], ...]:
    """The width of a feed-forward part that every token takes."""
    return (("feed-forward width", sizes.size(keys.ffn_width)),)


def _block_name(attending: str, extra: str, distinct: list[tuple[str, str]]) -> str:
    """``block`` where all blocks are alike; else what tells the kind apart before it."""
    words = []
    if len({other for other, _ in distinct}) > 1:
        words.append(attending.removesuffix("_attention"))
    if len({other for _, other in distinct}) > 1:
        words.append(extra)
    return " ".join([*filter(None, words), "block"])


def _block_sizes(sizes: Sizes, keys: Keys) -> BlockSizes:
    hidden, heads = sizes.size(keys.hidden), sizes.size(keys.heads)
    if sizes.config.get(keys.head_dim) is not None:
        head_dim = sizes.size(keys.head_dim)
    elif keys.default_head_dim is not None:
        head_dim = keys.default_head_dim
    elif hidden % heads:
        raise InvalidModelError(
            field=keys.heads, found=str(heads), expected=f"a divisor of {keys.hidden} {hidden}", hint="or give head_dim"
        )
    else:
        head_dim = hidden // heads
    divides = [("attention heads", heads)]
    if keys.kv_heads is not None:
        missing = keys.default_kv_heads if keys.kv_heads not in sizes.config else None
        kv_heads = sizes.size(keys.kv_heads, default=missing or heads)
        divides.append((KV_HEADS, sizes.divisor(keys.kv_heads, kv_heads, (keys.heads, heads))))
    return BlockSizes(hidden=hidden, heads=heads, head_dim=head_dim, divides=tuple(divides))


def config_value(sizes: Sizes, key: str, default: Any) -> Any:
    """A value of the config as it is; ``default`` where it is missing or null."""
    value = sizes.config.get(key)
    return default if value is None else value
