r"""What is trained: all of a model, or adapters beside linear layers that stay as they are (LoRA).

    lora:r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,rslora

A linear layer $W$ of ``targets`` computes $W x + s\, B A x$ with $A$ of $r \times n$ and $B$ of $m \times r$, of which
$A$ and $B$ are trained, $s = \alpha / r$, or $\alpha / \sqrt r$ under rslora. The layers are those of `peft`, put into
the model; at first $B = 0$, so that it computes what it did.

| part         | default      | in peft          |
|--------------|--------------|------------------|
| ``r``        | 16           | ``r``            |
| ``alpha``    | 2 r          | ``lora_alpha``   |
| ``targets``  | all-linear   | ``target_modules``: ends of paths, joined by +, or all linear layers but the head |
| ``dropout``  | 0            | ``lora_dropout`` |
| ``rslora``   | not          | ``use_rslora``   |

What is not trained has no gradient and no optimizer state, and lies in the precision that layers compute in.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rslora).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from steelyard.errors import UserError, nearest
from steelyard.levers.lever import Asked, Lever, Result
from steelyard.model.chain import LayerType, ModelChain

ALL_LINEAR = "all-linear"
_MOST_RANK = 2**16
_DIVIDED = frozenset({"columns", "rows", "whole", "on_part", "sequence", "vocabulary", "logits", "enter", "region"})
"""Styles of tp (`steelyard.modules.dimensions.styles`) beside which adapters are divided too, or do not stand."""
_LENT = 3
_KEYS = ("r", "alpha", "targets", "dropout", "rslora")


@dataclass(frozen=True, slots=True)
class Train(Lever):
    """All of the model, or adapters of rank ``r`` beside linear layers."""

    r: int = 0
    """0 where all is trained."""
    alpha: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    rslora: bool = False

    name: ClassVar[str] = "train"
    offers: ClassVar[tuple[str, ...]] = ("lora:r=16", "qlora:r=16")
    help: ClassVar[str] = (
        "What is trained: full, or adapters as in lora:r=16,targets=all-linear (alpha=, dropout=, rslora; targets are "
        "ends of paths joined by +), or qlora:r=16, beside a base in nf4."
    )
    result: ClassVar[Result] = "fewer trained parameters"
    adds_parameters: ClassVar[bool] = True
    size: ClassVar[str] = "rank"

    @classmethod
    def said(cls, text: str) -> dict[str, str]:
        """``qlora`` is short for adapters beside a base in nf4."""
        kind, colon, rest = text.partition(":")
        return {"train": f"lora{colon}{rest}", "base": "nf4"} if kind == "qlora" else {"train": text}

    @classmethod
    def parse(cls, text: str) -> Self:
        """What a text says; raises `UserError` for another form, an unknown key, or a number out of range."""
        kind, _, rest = text.partition(":")
        if kind not in ("full", "lora") or (kind == "full" and rest):
            raise _wrong(
                text, "full, lora or qlora with r=, alpha=, targets=, dropout=, rslora", nearest(kind, ("full", "lora"))
            )
        if kind == "full":
            return cls()
        given: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in _KEYS or key in given:
                raise _wrong(part, "each once of " + ", ".join(_KEYS), nearest(key, _KEYS))
            given[key] = value
        if given.get("rslora", "") not in ("", "true", "false"):
            raise _wrong(f"rslora={given['rslora']}", "rslora alone", "write for example lora:r=16,rslora")
        rank = int(_number("r", given.get("r", "16"), 1, _MOST_RANK, whole=True))
        targets = tuple(filter(None, given.get("targets", ALL_LINEAR).split("+")))
        if not targets:
            raise _wrong("targets=", "ends of paths joined by +, or all-linear", "leave it out for all linear layers")
        return cls(
            r=rank,
            alpha=_number("alpha", given.get("alpha", str(2 * rank)), 0, 1e6),
            targets=targets,
            dropout=_number("dropout", given.get("dropout", "0"), 0, 0.99),
            rslora="rslora" in given and given["rslora"] != "false",
        )

    def __str__(self) -> str:
        if not self.r:
            return "full"
        parts = [f"r={self.r}", f"alpha={self.alpha:g}", f"targets={'+'.join(self.targets)}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        return "lora:" + ",".join([*parts, *(["rslora"] if self.rslora else [])])

    @property
    def is_default(self) -> bool:
        """Whether all is trained."""
        return not self.r

    @property
    def scale(self) -> float:
        """What the product of $B$ and $A$ is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def sized(self, size: int) -> "Train":
        """The same of another rank, with alpha in proportion."""
        return replace(self, r=size, alpha=self.alpha * size / self.r)

    @property
    def without_chance(self) -> "Train":
        """The same without dropout."""
        return replace(self, dropout=0.0)

    def check(self, asked: Asked) -> None:
        """Raises `UserError` for a module of the user's own, whose linear layers peft is not shown."""
        Lever.check(self, asked)
        if asked.chain.split.module:
            raise UserError(
                field="--train",
                found=f"{self} for {asked.chain.split.module}, a module of your own",
                expected="a model of transformers",
                hint="put adapters into the module yourself: what has no gradient is not trained",
            )

    def change(self, chain: ModelChain) -> ModelChain:
        """The model with adapters in it, whose layers tp divides where it does so by whole matrices."""

        def changed(layer_type: LayerType) -> LayerType:
            styles = set((chain.family.of_type(chain.family.tp, layer_type) or {}).values())
            others = sorted(each for each in styles if not _divides(each))
            return replace(layer_type, no_tp=f"adapters are not divided beside {others[0]}") if others else layer_type

        layer_types = tuple(map(changed, chain.layer_types))
        return replace(chain, changes=(*chain.changes, self), layer_types=layer_types)


def _divides(style: str) -> bool:
    """Whether tp divides adapters beside a module of a style; not where one that is not called lends its parameters."""
    word, *arguments = style.split(":")
    lends = word in ("enter", "region") and len(arguments) > _LENT and arguments[_LENT]
    return word in _DIVIDED and not lends


def _number(key: str, text: str, least: float, most: float, *, whole: bool = False) -> float:
    try:
        found = float(int(text) if whole else text)
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        kind = "a whole number" if whole else "a number"
        raise _wrong(f"{key}={text}", f"{kind} of {least:g} to {most:g}", "write for example lora:r=16")
    return found


def _wrong(found: str, expected: str, hint: str) -> UserError:
    return UserError(field="--train", found=repr(found), expected=expected, hint=hint)
