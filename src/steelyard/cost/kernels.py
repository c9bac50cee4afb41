r"""Changes of a traced profile for an engine whose kernels and remat are not those of transformers and torch.

Per token of a block, with hidden size $h$, query and key-value widths $q$ and $k$ and feed-forward width $f$ of a rank
(of routed experts that of all whose rows it computes), and $\sigma = 1/\text{tp}$ with sequence parallelism, else 1.
What fused kernels take away, in bytes:

| quantity          | norms                 | sp           | rotary     | gated activation |
|-------------------|-----------------------|--------------|------------|------------------|
| forward, moved    | $64\sigma h$          | $16 h$       | $16 (q+k)$ | $4 f$            |
| backward, moved   | $(172\sigma + 18) h$  | $16 h$       | $28 (q+k)$ | $8 f$            |
| saved             | $10\sigma h$          | $4(1-\sigma)h$ |          | $2 f$            |

and of the head, with $V$ entries of the vocabulary on a rank: $32\sigma h + 18 V$ forward, $80\sigma h + 34 V$ backward
($10 V$ where tp does not divide it), $6\sigma h$ saved. A selective remat that keeps every second product of q, k, v,
o, gate, up and down repeats k, o and up.

Source: the closed forms of `benchmarks/published_runs/shapes.py`, whose eager column is what is traced. Not modelled:
layers that are not of this form (no RMS norm, no rotary embedding, latent attention), which stay as traced; that tokens
are put in the order of their experts in fewer kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steelyard.cost.job import Job
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution
from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.model.family import Routing
from steelyard.profiles.profile import LayerProfile, Recomputation, Work
from steelyard.profiles.shapes import Affine, Product

HALF = 2
"""Bytes of an activation or a weight in bf16."""
_FUSED_LAUNCHES = 21
"""Kernels of a block's forward pass that fusing leaves out: 10 of two norms, 10 of rotary, 1 of the activation."""


def job_under(job: Job, engine: Engine) -> Job:
    """The job as an engine runs it; a measured profile stays as it was measured."""
    profile, execution = job.profile, engine.execution
    if not profile.identity.is_measured and job.precision != "fp32":
        layer_types = {layer_type.name: layer_type for layer_type in job.chain.layer_types}
        layers = (_under(execution, each, layer_types[each.kind], job) for each in profile.layers)
        profile = profile.model_copy(update={"layers": tuple(layers)})
    imbalance = 1.0 if execution.balances_experts else job.imbalance
    return replace(job.on(profile=profile), engine=engine, imbalance=imbalance)


def _under(
    execution: Execution, layer: LayerProfile, layer_type: LayerType, job: Job, *, rows: float = 1.0
) -> LayerProfile:
    """The layer so; ``rows`` of its experts for every pair of a token and an expert."""
    is_changed = execution.fused_kernels or (execution.keeps_every_second_product and not layer_type.num_experts)
    sizes = _Sizes.of(layer_type, layer, job.chain, tokens=job.seq_len, rows=rows) if is_changed else None
    is_block = layer_type.role is LayerRole.BLOCK
    if sizes is not None and execution.fused_kernels:
        layer = _fused(layer, sizes, *(sizes.of_block() if is_block else sizes.of_head()), is_block=is_block)
    if execution.repeats_whole_blocks and is_block:
        whole = {"work": layer.forward, "collectives": layer.forward_collectives}
        layer = _with_recomputation(layer, "full", lambda _: whole)
    if sizes is not None and execution.keeps_every_second_product and is_block and not layer_type.num_experts:
        layer = _with_recomputation(layer, "selective", sizes.every_second_product)
    if layer.divided_experts is not None:
        mean = 1 / layer.degrees.get("tp", 1)
        even, twice = (
            _under(execution, each, layer_type, job, rows=times * mean)
            for times, each in zip((1, 2), layer.divided_experts, strict=True)
        )
        layer = layer.model_copy(update={"divided_experts": (even, twice)})
    return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of a layer on one rank, as in the table above."""

    tokens: int
    h: int
    q: float
    k: float
    f: float
    vocab: float
    tp: int
    has_sp: bool

    @classmethod
    def of(
        cls, layer_type: LayerType, layer: LayerProfile, chain: ModelChain, *, tokens: int, rows: float
    ) -> "_Sizes | None":
        config = chain.config
        is_of_form = "rms_norm_eps" in config and "intermediate_size" in config and "kv_lora_rank" not in config
        if not is_of_form or not chain.rotary_size or layer_type.role is LayerRole.EMBEDDING:
            return None
        tp, heads = layer.degrees.get("tp", 1), config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
        width = head_dim or config["hidden_size"] // heads
        f = config["intermediate_size"] / tp
        if layer_type.num_experts:  # of all experts of a token, of three matrices each
            own = layer_type.num_experts / tp
            f = rows * (Routing.of(config).top_k * layer.expert_params / (own * 3 * chain.hidden_size))
        return cls(
            tokens=tokens,
            h=config["hidden_size"],
            q=heads * width / tp,
            k=max(1.0, kv_heads / tp) * width,
            f=f,
            vocab=chain.vocab_size / tp,
            tp=tp,
            has_sp="sp" in layer.degrees,
        )

    @property
    def sigma(self) -> float:
        return 1 / self.tp if self.has_sp else 1.0

    def of_block(self) -> tuple[float, float, float]:
        """Bytes per token that fusing saves: moved forward and backward, and kept."""
        h, sigma, gathered = self.h, self.sigma, 16 * self.h * self.has_sp
        forward = 64 * sigma * h + gathered + 16 * (self.q + self.k) + 4 * self.f
        backward = (172 * sigma + 18) * h + gathered + 28 * (self.q + self.k) + 8 * self.f
        return forward, backward, 10 * sigma * h + 4 * (1 - sigma) * h + 2 * self.f

    def of_head(self) -> tuple[float, float, float]:
        """The same of a head with its norm and loss."""
        divided, norm = self.tp > 1, self.sigma * self.h
        forward = 32 * norm + (18 if divided else 0) * self.vocab
        return forward, 80 * norm + (34 if divided else 10) * self.vocab, 6 * norm

    def every_second_product(self, selective: Recomputation) -> Mapping[str, Any]:
        """What changes in a selective remat that kept every product of a block."""
        repeated = [(self.h, self.k), (self.q, self.h), (self.h, self.f)]
        weights = sum(inputs * outputs for inputs, outputs in repeated)
        operands = HALF * self.tokens * sum(inputs + outputs for inputs, outputs in repeated)
        freed = HALF * self.tokens * sum(outputs for _, outputs in repeated)
        work = selective.work.model_copy(
            update={
                "matmul_flop": _more(selective.work.matmul_flop, 2 * self.tokens * weights),
                "matmul_bytes": _more(selective.work.matmul_bytes, operands, constant=HALF * weights),
                "num_kernels": selective.work.num_kernels + len(repeated),
                "products": selective.work.products
                + tuple(Product(m=self.tokens, n=outer, k=inner, grows="m") for inner, outer in repeated if outer),
            }
        )
        return {
            "work": work,
            "saved_bytes": _more(selective.saved_bytes, -freed),
            "backward_transient_bytes": _more(selective.backward_transient_bytes, freed),
        }


def _fused(
    layer: LayerProfile, sizes: _Sizes, forward: float, backward: float, saved: float, *, is_block: bool
) -> LayerProfile:
    """The layer with so many bytes per token less, moved forward and backward, and kept."""
    launches = _FUSED_LAUNCHES if is_block else 0
    fewer = layer.model_copy(
        update={
            "forward": _less_moved(layer.forward, sizes.tokens * forward, launches),
            "backward": _less_moved(layer.backward, sizes.tokens * backward, 2 * launches),
            "saved_bytes": _more(layer.saved_bytes, -sizes.tokens * saved),
        }
    )
    return _with_recomputation(
        fewer,
        "full",
        lambda full: {
            "work": _less_moved(full.work, sizes.tokens * forward, launches),
            "backward_transient_bytes": _more(full.backward_transient_bytes, -sizes.tokens * saved),
        },
    )


def _less_moved(work: Work, num_bytes: float, launches: int) -> Work:
    moved = _more(work.memory_bytes, -num_bytes)
    return work.model_copy(update={"memory_bytes": moved, "num_kernels": max(0, work.num_kernels - launches)})


def _more(line: Affine, per_sample: float, *, constant: float = 0.0) -> Affine:
    return Affine(constant=line.constant + constant, per_sample=max(0.0, line.per_sample + per_sample))


def _with_recomputation(layer: LayerProfile, remat: str, change: Any) -> LayerProfile:
    changed = tuple(
        each.model_copy(update=change(each)) if each.remat == remat else each for each in layer.recomputations
    )
    return layer.model_copy(update={"recomputations": changed})
