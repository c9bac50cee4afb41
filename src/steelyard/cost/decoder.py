r"""Layer profiles in closed form, for engines that have their own modules and kernels for decoders.

The quantities are those of `steelyard.tracer`, per rank and sample, with hidden size $h$, query and key-value widths
$q$ and $k$ of a rank, feed-forward width $f$ and vocabulary $V$ of a rank, heads $a$ of a rank, length $s$, and
$\sigma = 1/\text{tp}$ with sequence parallelism, else 1. Bytes per token:

| quantity              | eager (as traced from transformers' Llama)         | fused kernels                        |
|-----------------------|-----------------------------------------------------|--------------------------------------|
| norms, forward        | 72 σh                                               | 8 σh                                 |
| norms, backward       | 184 σh + 18 h                                       | 12 σh                                |
| of queries, keys, fwd | 36 (q + k)                                          | 4 (q + k)                            |
| of queries, keys, bwd | 92 (q + k)                                          | 6 (q + k)                            |
| residual, both        | 12 σh                                               | 12 σh                                |
| rotary, forward       | 20 (q + k)                                          | 4 (q + k)                            |
| rotary, backward      | 32 (q + k)                                          | 4 (q + k)                            |
| activation, forward   | 10 f gated, 4 f plain                               | 6 f gated, 4 f plain                 |
| activation, backward  | 18 f gated, 6 f plain                               | 10 f gated, 6 f plain                |
| softmax, unfused      | fused kernel 4 as + 5 as dropout; eager 17 as       | backward 6 as + 5 as; eager 19 as    |
| head, forward         | norm + 18 V (42 V where tp divides V)               | norm + 18 V (24 V)                   |
| head, backward        | norm + 26 V (50 V where tp divides V)               | norm + 16 V (16 V)                   |

Matmul FLOP are 2 per weight and token forward, twice that backward. Attention takes 4 s q FLOP per token, half of it if
a fused kernel skips masked scores, and 2.5 times that backward because the kernel recomputes the scores.

With LoRA only the adapters are trained: other weights have no gradients, and inputs that only these gradients need are
not saved. Adapters of rank $r$ for $n$ inputs and $m$ outputs take 2 r (n + m) FLOP per token, and 10 m bytes to scale
and add their outputs; with dropout 5 n bytes more and 3 n saved.

Source: Korthikanti et al. 2022 (saved activations); Dao 2023 (flash attention). Not modelled: biases in bytes,
alignment, memory of kernels, and that with LoRA the first block needs no gradient of its input.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steelyard.cost.decoder_experts import HALF, Experts, with_experts
from steelyard.engines.execution import Kernels
from steelyard.levers.lever import Adapters, LowPrecision
from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.model.family import Routing
from steelyard.profiles.profile import Collective, CollectiveCount, LayerProfile, Recomputation, Work
from steelyard.profiles.shapes import Affine, AttentionCall

ALIGNED_BYTES = 16
"""Row alignment in bytes that tensor cores need (cuBLAS, "Tensor Core Usage")."""
MISALIGNED_RATE = 0.4
"""Rate of a head with misaligned vocabulary rows relative to an aligned one: vTrain's layers reach 200 TFLOP/s with
25,128 entries per rank, 104 with 12,564, 74 with 6,282 and 76 with 50,257."""
_PLAIN_ACTIVATIONS = ("gpt2", "gpt_neox", "nemotron", "opt", "bloom", "falcon", "phi", "starcoder2")
"""Model types whose feed-forward layer has two matrices and no gate."""
_HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Model types with norms of queries and keys, which their configs do not state."""
_PLAIN, _LATENT = ("q_proj", "k_proj", "v_proj"), ("kv_a_proj_with_mqa", "kv_b_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of a block, named as in transformers' Llama and DeepSeek."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Widths of multi-head latent attention.

    ``queries`` (0: not compressed) and ``keys`` (and values) are the compressed widths; ``plain`` and ``rotary`` the
    parts of a head's queries and keys without and with positions; ``values`` the width of a head's values.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder-only Transformer; ``ffn`` is that of blocks without experts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    seq_len: int
    rotary: bool
    head_norms: bool = False
    """Whether queries and keys have norms."""
    own_head: bool = True
    """Whether the head has its own matrix instead of sharing the embedding's on the same rank."""
    latent: Latent | None = None
    window: int = 0
    """Sliding window in tokens; 0 for full attention."""
    experts: Experts | None = None
    shared_ffn: int = 0
    """Width of the shared experts."""

    @classmethod
    def of(cls, chain: ModelChain, seq_len: int) -> "DecoderShape | None":
        """Read the sizes of the text from a model's config, for ``seq_len`` tokens; None without attention heads.

        `steelyard.cost.kernels` checks by the parameters whether the model has this form.
        """
        config = chain.text_config
        heads = _first(config, "num_attention_heads", "n_head")
        if not heads:
            return None
        num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        width = _first(config, "moe_intermediate_size", "intermediate_size")
        has_latent = bool(config.get("kv_lora_rank"))
        return cls(
            hidden=chain.hidden_size,
            heads=heads,
            kv_heads=_first(config, "num_key_value_heads", default=heads),
            head_dim=_first(config, "head_dim", default=chain.hidden_size // heads),
            ffn=_first(config, "intermediate_size", "n_inner", default=4 * chain.hidden_size),
            gated=chain.family.model_type not in _PLAIN_ACTIVATIONS,
            vocab=chain.vocab_size,
            seq_len=seq_len,
            rotary=bool(chain.rotary_size),
            head_norms=chain.family.model_type in _HEAD_NORMS,
            latent=Latent(
                queries=config.get("q_lora_rank") or 0,
                keys=config["kv_lora_rank"],
                plain=config["qk_nope_head_dim"],
                rotary=config["qk_rope_head_dim"],
                values=config["v_head_dim"],
            )
            if has_latent
            else None,
            window=int(config.get("sliding_window") or 0),
            experts=Experts(count=num_experts, top_k=Routing.of(config).top_k, ffn=width) if num_experts else None,
            shared_ffn=config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0),
        )


def _first(config: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """Return the first of these keys that a config has as a nonzero integer."""
    return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key]), default)


def decoder_layer(
    shape: DecoderShape,
    kernels: Kernels,
    layer_type: LayerType,
    *,
    tp: int,
    sp: bool,
    imbalance: float = 1.0,
    slowdown: float = 1.0,
    low: LowPrecision | None = None,
    adapters: Adapters | None = None,
) -> LayerProfile:
    """Return the profile of a layer of this type on one of ``tp`` ranks.

    ``imbalance``: token-expert pairs of the busiest tensor-parallel rank relative to the mean; ``slowdown``: time of
    expert matmuls relative to the rate of other linear layers; ``low``: 8-bit linear layers of blocks; ``adapters``:
    adapters of layers in `linear_names`, which are then the only trained parameters.
    """
    if not (shape.window and layer_type.attention == "sliding_attention"):
        shape = replace(shape, window=0)
    local = _Local(
        shape=shape, kernels=kernels, kind=layer_type.name, tp=tp, sp=sp and tp > 1, low=low, adapters=adapters
    )
    if layer_type.role is LayerRole.EMBEDDING:
        return local.embedding()
    if layer_type.role is LayerRole.HEAD:
        return local.head()
    if not layer_type.num_experts or shape.experts is None:
        return local.block()
    if isinstance(kernels.selective, tuple):  # "mlp" does not include the shared expert
        modules = tuple(each for each in kernels.selective if each != "mlp")
        local = replace(local, kernels=replace(kernels, selective=modules))
    return with_experts(
        replace(local, shape=replace(shape, ffn=shape.shared_ffn)).block(),
        shape.experts,
        kernels,
        tokens=shape.seq_len,
        hidden=shape.hidden,
        gated=shape.gated,
        tp=tp,
        imbalance=imbalance,
        slowdown=slowdown,
        trains=adapters is None,
    )


def linear_names(shape: DecoderShape) -> tuple[str, ...]:
    """Linear layers of a block by name, without routed experts."""
    queries = ("q_a_proj", "q_b_proj") if shape.latent and shape.latent.queries else ("q_proj",)
    attention = (*queries, *_LATENT) if shape.latent else _PLAIN
    return (*attention, "o_proj", *(_FEED_FORWARD if shape.gated else _FEED_FORWARD[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """Sizes on one rank. ``sigma``: fraction of the sequence on the rank outside the tensor-parallel blocks."""

    shape: DecoderShape
    kernels: Kernels
    kind: str
    tp: int
    sp: bool
    low: LowPrecision | None
    adapters: Adapters | None

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees that divide the layer's shape."""
        return ({"tp": self.tp} if self.tp > 1 else {}) | ({"sp": self.tp} if self.sp else {})

    @property
    def sigma(self) -> float:
        return 1 / self.tp if self.sp else 1.0

    @property
    def tokens(self) -> int:
        return self.shape.seq_len

    @property
    def seen(self) -> int:
        """Number of keys for a causal kernel with the same FLOP: all, or twice the sliding window."""
        return min(self.tokens, 2 * self.shape.window or self.tokens)

    @property
    def heads(self) -> float:
        return self.shape.heads / self.tp

    @property
    def q(self) -> float:
        """Width of queries or of values over all heads of the rank; their mean with latent attention."""
        latent = self.shape.latent
        width = self.shape.head_dim if latent is None else (latent.plain + latent.rotary + latent.values) / 2
        return self.heads * width

    @property
    def k(self) -> float:
        """Width of keys or of values. Key-value heads are replicated if fewer than ranks; latent attention has all."""
        return self.q if self.shape.latent else max(1.0, self.shape.kv_heads / self.tp) * self.shape.head_dim

    @property
    def f(self) -> float:
        return self.shape.ffn / self.tp

    @property
    def vocab(self) -> float:
        return self.shape.vocab / self.tp

    @property
    def hidden_bytes(self) -> float:
        """Bytes of one sample's undivided hidden state."""
        return HALF * self.tokens * self.shape.hidden

    def _linears(self) -> list[tuple[float, float]]:
        """Return input and output widths of each linear layer of a block on this rank."""
        h = float(self.shape.hidden)
        up = [(h, self.f)] * (2 if self.shape.gated else 1)
        if self.shape.latent is None:
            attention = [(h, self.q), (h, self.k), (h, self.k), (self.q, h)]
        else:
            attention = self._latent_linears(self.shape.latent)
        return [*attention, *up, (self.f, h)]

    def _latent_linears(self, latent: Latent) -> list[tuple[float, float]]:
        """Return the widths in latent attention: down-projections replicated, up-projections and output divided."""
        h, width = float(self.shape.hidden), latent.plain + latent.rotary
        queries = self.heads * width
        down = [(h, float(latent.queries)), (float(latent.queries), queries)] if latent.queries else [(h, queries)]
        keys = [(h, float(latent.keys + latent.rotary))]
        keys += [(float(latent.keys), self.heads * (latent.plain + latent.values))]
        return [*down, *keys, (self.heads * latent.values, h)]

    def _adapted(self) -> dict[str, tuple[float, float]]:
        """Return input and output widths of the linear layers with adapters, by name."""
        if self.adapters is None:
            return {}
        names = linear_names(self.shape)
        sizes = dict(zip(names, self._linears(), strict=True))
        return {name: sizes[name] for name in names if all(sizes[name]) and name in (self.adapters.targets or names)}

    def _beside_adapters(self, forward: Work, backward: Work) -> tuple[Work, Work]:
        """Return the work of both passes of a block in which only the adapters are trained."""
        assert self.adapters is not None, "asked for with adapters"
        adapted, linears, tokens = self._adapted().values(), self._linears(), self.tokens
        weights = self.adapters.rank * sum(inputs + outputs for inputs, outputs in adapted)
        entries = sum(inputs + 2 * self.adapters.rank + outputs for inputs, outputs in adapted)
        dropped = 5 * sum(inputs for inputs, _ in adapted) if self.adapters.has_dropout else 0
        results, count = sum(outputs for _, outputs in adapted), len(adapted)
        base = sum(inputs * outputs for inputs, outputs in linears)
        operands = HALF * tokens * sum(inputs + outputs for inputs, outputs in linears)

        def of_pass(work: Work, times: int, less: int, moved: float, kernels: int) -> Work:
            """Add ``times`` the forward products of adapters, and subtract ``less`` times those of linear layers."""
            products = times * weights - less * base
            samples = times * HALF * tokens * entries - less * operands
            more = {
                "matmul_flop": Affine(per_sample=2 * tokens * products),
                "matmul_bytes": Affine(constant=HALF * products, per_sample=samples),
                "memory_bytes": Affine(per_sample=tokens * (moved + dropped)),
            }
            launched = work.num_kernels + count * (kernels + (dropped > 0)) - less * len(linears)
            lines = {name: getattr(work, name) + line for name, line in more.items()}
            return work.model_copy(update=lines | {"num_kernels": launched})

        summed = 6 * sum(inputs for inputs, _ in adapted)
        return of_pass(forward, 1, 0, 10 * results, 4), of_pass(backward, 2, 1, 4 * results + summed, 6)

    def _saved_for_adapters(self) -> float:
        """Additional saved bytes per token of a block with adapters; negative if it saves fewer inputs."""
        if self.adapters is None:
            return 0.0
        adapted, has_dropout = self._adapted(), self.adapters.has_dropout
        norm = 2 * self.shape.hidden * (self.sigma if self.kernels.norm and not self.kernels.keeps_gathered else 1)
        own: float = HALF * self.adapters.rank * len(adapted)
        own += 3 * sum(inputs for inputs, _ in adapted.values()) if has_dropout else 0
        attention, feed_forward = {*linear_names(self.shape)} - {"o_proj", *_FEED_FORWARD}, {*_FEED_FORWARD[:2]}
        readers = (attention, norm), (feed_forward, norm), ({_FEED_FORWARD[2]}, 2 * self.f)
        return own - sum(kept for names, kept in readers if has_dropout or not names & adapted.keys())

    @property
    def _gathers_in_8_bits(self) -> bool:
        """Whether what sequence parallelism gathers for a block, hidden states and gradients, is cast before.

        Source: torchao 0.18, float8_tensor_parallel.py (PrepareFloat8ModuleInput, Float8RowwiseParallel), which
        torchtitan applies to scales of whole tensors (``enable_float8_tensorwise_tp``). Gathered inputs are kept so,
        and not cast again. The ranks agree on each scale by an all-reduce of one fp64 number: of weights, of inputs
        (those of attention and of the feed-forward layer once for all), and backwards of weights and gradients. Latent
        attention has no such form there.
        """
        return self.low is not None and self.low.before_gather and self.sp and self.shape.latent is None

    def _cast_bytes(self, casts: tuple[tuple[float, int], ...]) -> Affine:
        """Bytes moved by the casts of a pass to 8 bits; ``casts`` has the bytes per entry."""
        (of_inputs, _), (of_weights, _), (of_outputs, _) = (*casts, (0.0, 0))[:3]
        linears, attention = self._linears(), self._linears()[: -3 if self.shape.gated else -2]
        inputs = sum({each for each, _ in attention[:-1]}) + attention[-1][0] + self.shape.hidden + self.f
        outputs = sum(each for _, each in linears)
        if self._gathers_in_8_bits:  # inputs of attention and feed-forward layer, and gradients of their outputs
            inputs, outputs = (each - 2 * self.shape.hidden * (1 - self.sigma) for each in (inputs, outputs))
        return Affine(
            constant=of_weights * sum(inputs * outputs for inputs, outputs in linears),
            per_sample=self.tokens * (of_inputs * inputs + of_outputs * outputs),
        )

    def _in_8_bits(self, work: Work, casts: tuple[tuple[float, int], ...]) -> Work:
        """Return the work of a pass with 8-bit linear layers: all matmuls except attention, with half the bytes."""
        linears, backward = self._linears(), len(casts) > 2
        entries = sum(inputs + 2 * outputs * backward for inputs, outputs in linears)
        weights = sum(inputs * outputs for inputs, outputs in linears)
        fewer = Affine(constant=weights, per_sample=self.tokens * entries) * (1 - HALF)
        flop = work.matmul_flop.per_sample - (2 if backward else 1) * self._score_flop()
        return work.model_copy(
            update={
                "low_precision_flop": Affine(per_sample=flop),
                "matmul_bytes": work.matmul_bytes + fewer,
                "memory_bytes": work.memory_bytes + self._cast_bytes(casts),
                "num_kernels": work.num_kernels + len(linears) * sum(kernels for _, kernels in casts),
            }
        )

    def block(self) -> LayerProfile:
        weights = sum(inputs * outputs for inputs, outputs in self._linears())
        operands = HALF * self.tokens * sum(inputs + outputs for inputs, outputs in self._linears())
        forward = Work(
            matmul_flop=Affine(per_sample=2 * self.tokens * weights + self._score_flop()),
            attention_flop=Affine(per_sample=self._flash_flop()),
            matmul_bytes=Affine(constant=HALF * weights, per_sample=operands + self._attention_operands()),
            memory_bytes=Affine(per_sample=self.tokens * self._elementwise_forward()),
            num_kernels=self._num_kernels(),
            attention=self._flash_calls(backward=False),
        )
        backward = Work(
            matmul_flop=Affine(per_sample=2 * forward.matmul_flop.per_sample),
            attention_flop=Affine(per_sample=2.5 * self._flash_flop()),
            matmul_bytes=Affine(constant=2 * HALF * weights, per_sample=2 * forward.matmul_bytes.per_sample),
            memory_bytes=Affine(per_sample=self.tokens * self._elementwise_backward()),
            num_kernels=2 * forward.num_kernels,
            attention=self._flash_calls(backward=True),
        )
        if self.low is not None:
            forward = self._in_8_bits(forward, self.low.forward)
            backward = self._in_8_bits(backward, self.low.backward)
        if self.adapters is not None:
            forward, backward = self._beside_adapters(forward, backward)
        return self._profile(
            LayerRole.BLOCK,
            num_params=weights + 2 * self.shape.hidden,
            forward=forward,
            backward=backward,
            calls=2,
            saved=self.tokens * self._saved_per_token(),
            input_bytes=self.hidden_bytes * self.sigma,
            transient=(
                self.tokens * max(6 * self.shape.hidden, 2 * HALF * self.f),
                self.tokens * (4 * self.shape.hidden + 4 * self.f + self._score_transient()),
            ),
        )

    def _score_flop(self) -> float:
        """FLOP of the scores and their products with the values without a fused kernel."""
        return 0.0 if self.kernels.attention == "flash" else 4.0 * self.tokens**2 * self.q

    def _flash_flop(self) -> float:
        return 2.0 * self.tokens * self.seen * self.q if self.kernels.attention == "flash" else 0.0

    def _flash_calls(self, *, backward: bool) -> tuple[AttentionCall, ...]:
        if self.kernels.attention != "flash":
            return ()
        return (
            AttentionCall(
                heads=self.heads,
                head_dim=self.q / self.heads,
                queries=self.tokens,
                keys=self.seen,
                is_causal=True,
                backward=backward,
            ),
        )

    def _attention_operands(self) -> float:
        streams = HALF * self.tokens * (2 * self.q + 2 * self.k)
        if self.kernels.attention == "flash":
            return streams + 4 * self.heads * self.tokens
        return streams + 2 * HALF * self.heads * self.tokens**2

    def _num_kernels(self) -> int:
        kernels = self.kernels
        count = 9 + kernels.copies + (2 if kernels.norm else 12) + (3 if kernels.dropout else 0)
        count += 2 if kernels.activation else 3
        if self.shape.rotary:
            count += 2 if kernels.rotary else 12
        if self.shape.head_norms:
            count += 2 if kernels.norm else 12
        return count + {"flash": 1, "fused softmax": 5, "eager": 9}[kernels.attention]

    def _elementwise_forward(self) -> float:
        shape, kernels = self.shape, self.kernels
        total = self._norms_moved() + self.sigma * shape.hidden * (12 + (2 if kernels.dropout else 0))
        if self.sp:
            total += (0 if kernels.norm else 16) * shape.hidden
        if shape.rotary:
            total += (4 if kernels.rotary else 20) * (self.q + self.k)
        if shape.head_norms:
            total += (4 if kernels.norm else 36) * (self.q + self.k)
        return total + self._activation_moved() + self._softmax_per_token(forward=True)

    def _norms_moved(self) -> float:
        """Bytes per token that the two norms of a block move in the forward pass."""
        return self.sigma * self.shape.hidden * (8 if self.kernels.norm else 72)

    def _activation_moved(self) -> float:
        """Bytes per token that the activation function moves in the forward pass."""
        return self.f * ((6 if self.kernels.activation else 10) if self.shape.gated else 4)

    def _elementwise_backward(self) -> float:
        shape, kernels = self.shape, self.kernels
        total = self.sigma * shape.hidden * ((12 if kernels.norm else 184) + 12 + (4 if kernels.dropout else 0))
        total += shape.hidden * ((0 if kernels.norm else 18) + (16 if self.sp and not kernels.norm else 0))
        if shape.rotary:
            total += (4 if kernels.rotary else 32) * (self.q + self.k)
        if shape.head_norms:
            total += (6 if kernels.norm else 92) * (self.q + self.k)
        total += self.f * ((10 if kernels.activation else 18) if shape.gated else 6)
        return total + self._softmax_per_token(forward=False)

    def _softmax_per_token(self, *, forward: bool) -> float:
        scores = self.heads * self.tokens
        if self.kernels.attention == "flash":
            return 0.0
        if self.kernels.attention == "eager":
            return (17 if forward else 19) * scores
        return ((4 if forward else 6) + (5 if self.kernels.dropout else 0)) * scores

    def _selective_work(self, forward: Work) -> Work:
        """Return the forward work that the backward pass repeats under the framework's selective remat."""
        if isinstance(self.kernels.selective, str):
            part = 0.5 if self.kernels.selective == "half of the matmuls" else 0.0
            halves = {
                name: Affine(per_sample=part * getattr(forward, name).per_sample)
                for name in ("matmul_flop", "low_precision_flop", "matmul_bytes")
            }
            if self.low is not None:
                halves["memory_bytes"] = forward.memory_bytes + self._cast_bytes(self.low.forward) * (part - 1)
            return forward.model_copy(update=halves | {"attention_flop": Affine()})
        modules, shape, tokens = self.kernels.selective, self.shape, self.tokens
        linears = dict(zip(linear_names(shape), self._linears(), strict=True))
        names = {"mlp": _FEED_FORWARD, "mla_up_proj": ("q_b_proj", "kv_b_proj")}
        again = [linears[name] for each in modules for name in names.get(each, ()) if name in linears]
        products, entries = sum(m * n for m, n in again), sum(m + n for m, n in again)
        moved, kernels, core = 0.0, len(again), "core_attn" in modules
        if core:
            moved, kernels = self._softmax_per_token(forward=True), kernels + 5
        if "layernorm" in modules:
            moved, kernels = moved + self._norms_moved(), kernels + (2 if self.kernels.norm else 12)
        if "mla_up_proj" in modules and shape.latent is not None:
            moved, kernels = moved + 4 * (self.q + self.k), kernels + 2
        if "mlp" in modules:
            moved, kernels = moved + self._activation_moved(), kernels + 1
        operands = self._attention_operands() if core else 0.0
        return Work(
            matmul_flop=Affine(per_sample=2 * tokens * products + core * self._score_flop()),
            low_precision_flop=Affine(per_sample=2 * tokens * products if self.low is not None else 0.0),
            attention_flop=Affine(per_sample=core * self._flash_flop()),
            matmul_bytes=Affine(constant=HALF * products, per_sample=HALF * tokens * entries + operands),
            memory_bytes=Affine(per_sample=tokens * moved),
            num_kernels=kernels,
            attention=self._flash_calls(backward=False) if core else (),
        )

    def _fully_again(self, role: LayerRole, forward: Work) -> Work:
        """Return the forward work that the backward pass repeats under full remat."""
        if role is not LayerRole.BLOCK or self.kernels.full == "block" or self.low is not None:
            return forward
        inputs, outputs = self._linears()[-1]
        operands = HALF * self.tokens * (inputs + outputs)
        return forward.model_copy(
            update={
                "matmul_flop": Affine(per_sample=forward.matmul_flop.per_sample - 2 * self.tokens * inputs * outputs),
                "matmul_bytes": Affine(
                    constant=forward.matmul_bytes.constant - HALF * inputs * outputs,
                    per_sample=forward.matmul_bytes.per_sample - operands,
                ),
                "num_kernels": forward.num_kernels - 1,
            }
        )

    def _selectively_saved_per_token(self) -> float:
        h = self.shape.hidden
        if self.kernels.selective == "half of the matmuls":
            return self.sigma * 4 * h + 4 * self.q + 2 * self.k + 2 * self.f
        if self.kernels.selective == "no matmul":
            return self.sigma * 4 * h + 4 * self.q + 4 * self.k + 4 * self.f
        made = {
            "core_attn": self._scores_saved_per_token() + (2 * self.q if self.kernels.attention == "flash" else 0),
            "layernorm": self._norms_saved_per_token(),
            "mla_up_proj": (2 * self.q + 4 * self.k) if self.shape.latent else 0.0,
            "mlp": self._feed_forward_saved_per_token(),
        }
        return self._saved_per_token() - sum(made.get(each, 0.0) for each in self.kernels.selective)

    def _norms_saved_per_token(self) -> float:
        """Saved bytes per token of the inputs of attention and the feed-forward layer."""
        return 4 * self.shape.hidden * (1 if not self.kernels.norm or self.kernels.keeps_gathered else self.sigma)

    def _feed_forward_saved_per_token(self) -> float:
        gated = 2 + 2 * self.kernels.activation_bytes if self.kernels.activation else 8
        return self.f * (gated if self.shape.gated else 4)

    def _scores_saved_per_token(self) -> float:
        if self.kernels.attention == "flash":
            return 4 * self.heads
        each = 5 if self.kernels.dropout else 2 if self.kernels.attention == "fused softmax" else 8
        return each * self.heads * self.tokens

    def _saved_per_token(self) -> float:
        h, kernels = self.shape.hidden, self.kernels
        entering = self.sigma * h * ((4 if kernels.norm else kernels.norm_bytes) + (4 if kernels.dropout else 0))
        attention = 4 * self.q + 4 * self.k + self._scores_saved_per_token()
        if self.shape.head_norms:
            attention += (2 if kernels.norm else 6) * (self.q + self.k)
        if self.shape.latent:
            attention += 4 * (self.shape.latent.queries + self.shape.latent.keys)
        inputs = self._norms_saved_per_token() + self._feed_forward_saved_per_token()
        return inputs + entering + attention + self._saved_for_adapters()

    def _score_transient(self) -> float:
        return 0.0 if self.kernels.attention == "flash" else 8 * self.heads * self.tokens

    def head(self) -> LayerProfile:
        h, divided, pieces = self.shape.hidden, self.tp > 1, self.kernels.loss_pieces
        weights = h * self.vocab
        rate = 1.0 if self.shape.vocab // self.tp * HALF % ALIGNED_BYTES == 0 else MISALIGNED_RATE
        forward_logits = (24 if divided else 18) if self.kernels.loss else (42 if divided else 18)
        backward_logits = 16 if self.kernels.loss else (50 if divided else 26)
        norm_forward, norm_backward = (4, 12) if self.kernels.norm else (36, 92)
        operands = HALF * self.tokens * (h + self.vocab)
        forward = Work(
            matmul_flop=Affine(per_sample=2 * self.tokens * weights / rate),
            attention_flop=Affine(),
            matmul_bytes=Affine(constant=HALF * weights, per_sample=operands),
            memory_bytes=Affine(per_sample=self.tokens * (norm_forward * self.sigma * h + forward_logits * self.vocab)),
            num_kernels=(33 if divided else 13) * pieces,
        )
        backward = Work(
            matmul_flop=Affine(per_sample=4 * self.tokens * weights / rate),
            attention_flop=Affine(),
            matmul_bytes=Affine(constant=2 * HALF * weights, per_sample=2 * operands),
            memory_bytes=Affine(
                per_sample=self.tokens * (norm_backward * self.sigma * h + backward_logits * self.vocab)
            ),
            num_kernels=(37 if divided else 22) * pieces,
        )
        if self.adapters is not None:  # no gradient of the matrix
            update = {name: getattr(backward, name) * 0.5 for name in ("matmul_flop", "matmul_bytes")}
            backward = backward.model_copy(update=update)
        kept = 4 if self.kernels.norm else 10
        entries = self.shape.vocab if self.kernels.gathers_logits else self.vocab
        peak_bytes, saved_bytes = (self.tokens // pieces * each * entries for each in self.kernels.loss_bytes)
        if divided and not (self.kernels.loss or self.kernels.gathers_logits):
            peak_bytes += self.tokens // pieces * 4 * entries  # fp32 tensor that ranks sum over
        if pieces > 1:
            saved_bytes = 4 * self.tokens * h
            peak_bytes += saved_bytes
        return self._profile(
            LayerRole.HEAD,
            num_params=weights + h if self.shape.own_head else h,
            forward=forward,
            backward=backward,
            calls=1,
            saved=self.tokens * kept * self.sigma * h + saved_bytes,
            input_bytes=self.hidden_bytes * self.sigma,
            transient=(peak_bytes - saved_bytes, peak_bytes - saved_bytes),
        )

    def embedding(self) -> LayerProfile:
        h = self.shape.hidden
        weights = h * self.vocab
        moved = (2 if self.tp == 1 else 6) * self.tokens * h

        def work(line: Affine, kernels: int) -> Work:
            return Work(
                matmul_flop=Affine(),
                attention_flop=Affine(),
                matmul_bytes=Affine(),
                memory_bytes=line,
                num_kernels=kernels,
            )

        trains = self.adapters is None
        return self._profile(
            LayerRole.EMBEDDING,
            num_params=weights,
            forward=work(Affine(per_sample=moved), 1 if self.tp == 1 else 8),
            backward=work(Affine(constant=HALF * weights, per_sample=moved), 2) if trains else work(Affine(), 0),
            calls=1,
            saved=8.0 * self.tokens * trains,
            input_bytes=8.0 * self.tokens,
            transient=(6.0 * self.tokens * h, 8.0 * self.tokens * h),
        )

    def _profile(
        self,
        role: LayerRole,
        *,
        num_params: float,
        forward: Work,
        backward: Work,
        calls: int,
        saved: float,
        input_bytes: float,
        transient: tuple[float, float],
    ) -> LayerProfile:
        passes = (Affine(per_sample=transient[0]), Affine(per_sample=transient[1]))
        streams = HALF * self.tokens if role is LayerRole.BLOCK else 0.0
        into, out = role is not LayerRole.EMBEDDING, role is not LayerRole.HEAD
        there, back = (
            self._collectives(role, calls, into=each, out=other) for each, other in ((into, out), (out, into))
        )
        if role is LayerRole.BLOCK and self._gathers_in_8_bits:
            weights = len(self._linears())
            scales = (
                CollectiveCount(kind="all_reduce", count=count, tensor_bytes=Affine(constant=8 * count))
                for count in (weights + 4, 2 * weights)
            )
            there, back = ((*found, each) for found, each in zip((there, back), scales, strict=True))
        if role is LayerRole.EMBEDDING and (not self.sp or self.adapters is not None):
            back = ()
        added = 0.0
        if self.adapters is not None and role is LayerRole.BLOCK:
            added = self.adapters.rank * sum(inputs + outputs for inputs, outputs in self._adapted().values())
        return LayerProfile(
            kind=self.kind,
            degrees=self.degrees,
            num_params=round(num_params + added),
            frozen_params=0 if self.adapters is None else round(num_params),
            forward=forward,
            backward=backward,
            forward_collectives=there,
            backward_collectives=back,
            saved_bytes=Affine(per_sample=saved),
            input_bytes=Affine(per_sample=input_bytes),
            forward_transient_bytes=passes[0],
            backward_transient_bytes=passes[1],
            key_value_bytes=Affine(per_sample=2 * self.k * streams),
            attention_bytes=Affine(per_sample=2 * (self.q + self.k) * streams),
            square_flop=Affine(per_sample=4.0 * self.tokens**2 * self.q if streams else 0.0),
            recomputations=self._recomputations(role, forward, there, saved, input_bytes, transient),
        )

    def _recomputations(
        self,
        role: LayerRole,
        forward: Work,
        collectives: tuple[CollectiveCount, ...],
        saved: float,
        input_bytes: float,
        transient: tuple[float, float],
    ) -> tuple[Recomputation, ...]:
        choices = [("full", self._fully_again(role, forward), collectives, input_bytes)]
        if role is LayerRole.BLOCK:
            kept = self.tokens * self._selectively_saved_per_token()
            again = self._collectives(role, 1, into=True, out=True) if "mlp" in self.kernels.selective else ()
            choices.append(("selective", self._selective_work(forward), again, kept))
        return tuple(
            Recomputation(
                remat="full" if remat == "full" else "selective",
                work=work,
                collectives=again,
                saved_bytes=Affine(per_sample=kept),
                forward_transient_bytes=Affine(per_sample=max(transient[0], saved - kept)),
                backward_transient_bytes=Affine(per_sample=transient[1] + saved - kept),
            )
            for remat, work, again, kept in choices
        )

    def _collectives(self, role: LayerRole, calls: int, *, into: bool, out: bool) -> tuple[CollectiveCount, ...]:
        """Return the collectives of a pass: an all-reduce at the end of a tensor-parallel block, or with sp an
        all-gather at its beginning and a reduce-scatter at its end."""
        if self.tp == 1:
            return ()
        gathered = self.hidden_bytes / (HALF if role is LayerRole.BLOCK and self._gathers_in_8_bits else 1)
        sizes: dict[Collective, float] = {}
        if self.sp:
            sizes |= {"all_gather": gathered} if into else {}
            sizes |= {"reduce_scatter": self.hidden_bytes} if out else {}
        elif out:
            sizes = {"all_reduce": self.hidden_bytes}
        return tuple(
            CollectiveCount(kind=collective, count=calls, tensor_bytes=Affine(per_sample=calls * size))
            for collective, size in sizes.items()
        )
