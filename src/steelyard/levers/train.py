r"""Trained parameters: all of a model, or adapters of any kind in peft, in layers that stay frozen.

    lora:r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,rslora
    oft:oft_block_size=32,targets=all-linear

With LoRA a linear layer $W$ of the ``targets`` computes $W x + s\, B A x$, with $A$ of shape $r \times n$ and $B$ of
shape $m \times r$. Only $A$ and $B$ are trained, and $s = \alpha / r$, or $\alpha / \sqrt r$ with rslora. Initially $B
= 0$, so that the output of the layer is unchanged.

| part         | default      | in peft          |
|--------------|--------------|------------------|
| ``r``        | 16           | ``r``            |
| ``alpha``    | 2 r          | ``lora_alpha``   |
| ``targets``  | all-linear   | ``target_modules``: ends of paths, joined by +, or all linear layers but the head |
| ``dropout``  | 0            | ``lora_dropout`` |
| ``rslora``   | not          | ``use_rslora``   |

Any other part is a field of peft's ``LoraConfig``; for other kinds all parts are fields of the kind's config, with
peft's names and defaults. Lists are joined by +. Fields are checked by peft when the model is read. ``dora:…`` is short
for ``lora:…,use_dora=true``. ``target_parameters`` names stacked matrices of routed experts, which get an $A$ and a $B$
for each expert; the product is added to all of them in every pass.

Frozen parameters have no gradient and no optimizer state, and are stored in compute precision. tp divides only LoRA.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rslora); Liu et al. 2024 (DoRA); peft 0.21.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from steelyard.errors import UserError, nearest
from steelyard.levers.lever import Adapters, Asked, Divided, Effects, Lever, Objection, Result
from steelyard.model.chain import LayerType, ModelChain

ALL_LINEAR = "all-linear"
FULL, LORA = "full", "lora"
KINDS = (
    *("lora", "beft", "c3a", "deft", "delora", "fourierft", "glora", "gralora", "hira", "hra", "ia3"),
    *("ln_tuning", "loha", "lokr", "miss", "oft", "peanut", "pvera", "randlora", "road", "trainable_tokens", "vera"),
)
"""Kinds of adapters in peft, by peft's names."""
_DECOMPOSED = "whose initialization decomposes the weights, but the model is built without values"
_SHARED = "whose trained parameters are shared by all layers"
_PROMPT = "which adds virtual tokens or prefixes rather than adapters in layers"
REFUSED = {
    "adalora": "whose ranks the training loop has to update",
    **dict.fromkeys(("adamss", "frod", "osf", "psoft"), _DECOMPOSED),
    "boft": "whose result depends on whether its CUDA kernel compiles",
    "shira": "which trains randomly chosen entries of the base weights",
    "supertuning": "which trains entries of the base weights, chosen by their values",
    **dict.fromkeys(("lily", "tinylora", "unilora", "vblora"), _SHARED),
    **dict.fromkeys(("adaption_prompt", "cartridge", "cpt", "multitask_prompt_tuning"), _PROMPT),
    **dict.fromkeys(("p_tuning", "prefix_tuning", "prompt_tuning"), _PROMPT),
    "waveft": "whose tensor sizes depend on values",
    "poly": "which needs a task id for each sample",
    "shadow": "which is a separate model",
    "xlora": "which mixes other adapters",
}
"""Kinds of adapters that peft has and the runtime cannot train, with the reason."""
_FIRST_VALUES = ("pissa", "olora", "loftq", "eva", "corda", "lora_ga", "mica")
"""Initializations of LoRA that need data, or a decomposition of the weights."""
_MOST_RANK = 2**16
_DIVIDED = frozenset({"columns", "rows", "whole", "on_part", "vocabulary", "positions", "logits", "enter", "region"})
"""Styles of tp (`steelyard.modules.dimensions.tp`) whose adapters are divided too, or that have no adapters."""
_LENT = 3
_APART = "split_size"
"""Number that a module has if several matrices give its one result; tp divides each (`steelyard.modules.prepared`)."""
_STACKED = "target_parameters"
_KEYS = ("r", "alpha", "targets", "dropout", "rslora")
_SHORT = {"target_modules": "targets", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora"}
"""Short names of peft's parameters; those of LoRA apply only to LoRA."""


@dataclass(frozen=True, slots=True)
class Train(Lever):
    """Training of the whole model, or of adapters of a kind."""

    kind: str = FULL
    r: int = 0
    """Rank of LoRA; ``alpha``, ``dropout`` and ``rslora`` also apply only to LoRA."""
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    """Target modules; empty for peft's defaults for the model and the kind."""
    dropout: float = 0.0
    rslora: bool = False
    more: tuple[tuple[str, str], ...] = ()
    """Other settings, by name, sorted."""

    name: ClassVar[str] = "train"
    offers: ClassVar[tuple[str, ...]] = ("lora:r=16", "qlora:r=16")
    help: ClassVar[str] = (
        "Trained parameters: full, or adapters: lora:r=16,targets=all-linear (also alpha=, dropout=, rslora; "
        "targets: ends of module paths, joined by +), qlora:r=16 (base in nf4), dora:r=16, or another PEFT "
        "method with its settings, such as oft:oft_block_size=32."
    )
    result: ClassVar[Result] = "fewer trained parameters"
    adds_parameters: ClassVar[bool] = True
    size: ClassVar[str] = "rank"

    @classmethod
    def said(cls, text: str) -> dict[str, str]:
        """Expand ``qlora`` to adapters with a base in nf4, and ``dora`` to LoRA with magnitudes."""
        kind, colon, rest = text.partition(":")
        if kind == "dora":
            return {"train": f"lora:{rest}{',' if rest else ''}use_dora=true"}
        return {"train": f"lora{colon}{rest}", "base": "nf4"} if kind == "qlora" else {"train": text}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text. Raise `UserError` for another form, an unknown kind, or a number out of range."""
        kind, _, rest = text.partition(":")
        if kind in REFUSED:
            raise _wrong(f"{kind}, {REFUSED[kind]}", "one of " + ", ".join(KINDS), "write for example dora:r=16")
        if kind not in (FULL, *KINDS) or (kind == FULL and rest):
            raise _wrong(
                text,
                "full, lora, qlora or dora with r=, alpha=, targets=, dropout=, rslora; or another PEFT method: "
                + ", ".join(KINDS),
                nearest(kind, (FULL, "qlora", "dora", *KINDS)),
            )
        if kind == FULL:
            return cls()
        given: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            key = _SHORT.get(key, key) if kind == LORA or key == "target_modules" else key
            if not key.isidentifier() or key in given or (key != "rslora" and not (equals and value)):
                raise _wrong(part, "settings as KEY=VALUE, each once", "write for example lora:r=16,alpha=32")
            given[key] = value
        targets = tuple(filter(None, given.pop("targets", ALL_LINEAR if kind == LORA else "").split("+")))
        if kind != LORA:
            return cls(kind=kind, targets=targets, more=tuple(sorted(given.items())))
        if given.get("init_lora_weights", "").startswith(_FIRST_VALUES):
            raise _wrong(
                f"init_lora_weights={given['init_lora_weights']}, {_DECOMPOSED}, or needs data",
                "an initialization without weights or data: true, false, gaussian, orthogonal",
                "leave it out",
            )
        if given.get("rslora", "") not in ("", "true", "false"):
            raise _wrong(f"rslora={given['rslora']}", "rslora alone", "write for example lora:r=16,rslora")
        rank = int(_number("r", given.get("r", "16"), 1, _MOST_RANK, whole=True))
        return cls(
            kind=kind,
            r=rank,
            alpha=_number("alpha", given.get("alpha", str(2 * rank)), 0, 1e6),
            targets=targets,
            dropout=_number("dropout", given.get("dropout", "0"), 0, 0.99),
            rslora="rslora" in given and given["rslora"] != "false",
            more=tuple(sorted((key, value) for key, value in given.items() if key not in _KEYS)),
        )

    def __str__(self) -> str:
        if self.kind == FULL:
            return FULL
        parts = [f"r={self.r}", f"alpha={self.alpha:g}"] if self.kind == LORA else []
        parts += [f"targets={'+'.join(self.targets)}"] if self.targets else []
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += ["rslora"] if self.rslora else []
        parts += [f"{key}={value}" for key, value in self.more]
        return f"{self.kind}:{','.join(parts)}" if parts else self.kind

    @property
    def is_default(self) -> bool:
        """Whether the whole model is trained."""
        return self.kind == FULL

    @property
    def is_plain(self) -> bool:
        """Whether this is LoRA with only $A$ and $B$: tp divides it, and its initialization ignores the weights."""
        return self.kind == LORA and not self.more

    @property
    def settings(self) -> Iterator[tuple[str, str]]:
        """All settings except the targets, by name."""
        if self.kind == LORA:
            yield from (("r", str(self.r)), ("lora_alpha", f"{self.alpha:g}"))
            yield from (("lora_dropout", f"{self.dropout:g}"), ("use_rslora", str(self.rslora).lower()))
        yield from self.more

    def sized(self, size: int) -> "Train":
        """Return the adapters with another rank, and alpha in proportion."""
        return replace(self, r=size, alpha=self.alpha * size / self.r)

    @property
    def without_chance(self) -> "Train":
        """Adapters without dropout."""
        return replace(
            self, dropout=0.0, more=tuple((key, value) for key, value in self.more if not key.endswith("dropout"))
        )

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to a module of the user's own, whose linear layers peft does not see, and to kinds that peft does not
        support with quantized weights, or not identically."""
        if asked.chain.split.module:
            own = f"for {asked.chain.split.module}, your own module"
            yourself = "put adapters into the module yourself: parameters with requires_grad=False are not trained"
            yield own, "a transformers model", yourself
        if "base" in asked.levers and not (
            self.kind == LORA and {key for key, _ in self.more} <= {"use_dora", _STACKED}
        ):
            plain = f"lora or dora with r=, alpha=, targets=, dropout=, rslora, {_STACKED}="
            yield "together with a quantized base", plain, "leave --base out"

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model with adapters; tp divides layers with LoRA if it divides their whole matrices."""

        def changed(layer_type: LayerType) -> LayerType:
            if not self.is_plain:
                return replace(layer_type, no_tp=layer_type.no_tp or f"{self._word} adapters do not support tp")
            styles = set(chain.family.styles(layer_type).values())
            others = sorted(each.partition(":")[0] for each in styles if not _divides(each))
            return replace(layer_type, no_tp=f"no tp for adapters with {others[0]}") if others else layer_type

        layer_types = tuple(map(changed, chain.layer_types))
        return replace(chain, changes=(*chain.changes, self), layer_types=layer_types)

    def effects(self, effects: Effects) -> Effects:
        """Return the effects with the sizes of plain LoRA."""
        if not self.is_plain:
            return effects
        targets = frozenset(() if self.targets == (ALL_LINEAR,) else self.targets)
        return replace(effects, adapters=Adapters(rank=self.r, targets=targets, has_dropout=self.dropout > 0))

    def warning(self, chain: ModelChain) -> str:
        """Return a warning if routed experts have no adapters."""
        if chain.has_experts and _STACKED not in dict(self.more):
            return f"routed experts have no adapters: name their stacked matrices with {_STACKED}="
        return ""

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse ep with adapters other than plain LoRA."""
        return f"{self._word} adapters do not support ep" if strategy.expert_degree > 1 and not self.is_plain else None

    @property
    def _word(self) -> str:
        return self.kind if self.kind != LORA else f"lora with {', '.join(key for key, _ in self.more)}"


def _divides(style: str) -> bool:
    """Return whether tp divides adapters of a module with this style.

    It does not if an uncalled module lends its parameters, or if matrices are stored separately.
    """
    word, *arguments = style.split(":")
    lends = word in ("enter", "region") and len(arguments) > _LENT and arguments[_LENT]
    return word in _DIVIDED and not lends and _APART not in style


def _number(key: str, text: str, least: float, most: float, *, whole: bool = False) -> float:
    try:
        found = float(int(text) if whole else text)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        kind = "a whole number" if whole else "a number"
        raise _wrong(f"{key}={text}", f"{kind} of {least:g} to {most:g}", "write for example lora:r=16")
    return found


def _wrong(found: str, expected: str, hint: str) -> UserError:
    return UserError(field="--train", found=repr(found), expected=expected, hint=hint)
