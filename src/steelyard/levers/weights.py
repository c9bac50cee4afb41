"""The type of trained parameters: fp32, or bf16 together with their gradients and moments ("pure bf16").

| value | parameter | gradient | AdamW's moments | together, B a parameter |
|-------|-----------|----------|-----------------|-------------------------|
| fp32  | 4         | 4        | 8               | 16                      |
| bf16  | 2         | 2        | 4               | 8                       |

In bf16, layers compute with the parameters themselves rather than copies, and gradients are summed over ranks in bf16.
A step reads and writes half of the bytes. bf16 has 8 significant bits: updates below 1/512 of a parameter are lost, so
it suits fine-tuning at usual learning rates more than long training from scratch. torchtune (``dtype: bf16``),
LLaMA-Factory (``pure_bf16``) and LitGPT (``bf16-true``) have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Effects, Objection, Result, WordLever

_NOT_BESIDE = {
    **dict.fromkeys(("train", "base"), "all parameters trained, without adapters"),
    **{"offload": "states on the device", "float8": "matrix products in bf16"},
}
"""Expectations for levers that do not go with bf16, by name."""
_OTHER_STATES = ("adafactor", "muon")
_STEP_BYTES = 6
"""Bytes by which the traffic of a step shrinks for a parameter and its gradient."""


@dataclass(frozen=True, slots=True)
class Weights(WordLever):
    """The type of trained parameters, their gradients and moments."""

    word: str = "fp32"

    name: ClassVar[str] = "weights"
    values: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    offers: ClassVar[tuple[str, ...]] = ("bf16",)
    help: ClassVar[str] = "Storage of trained parameters, gradients and moments: fp32, or bf16 (half the memory)."
    result: ClassVar[Result] = "rounding"
    tolerances: ClassVar[tuple[float, float]] = (2e-3, 0.1)

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to layers that compute in another type, and to levers that change the stored states."""
        if asked.precision not in (None, "bf16"):
            yield f"for layers that compute in {asked.precision}", "bf16", "write --precision bf16, or leave it out"
        if asked.levers.get("optimizer") in _OTHER_STATES:
            word = asked.levers["optimizer"]
            yield f"with --optimizer {word}", "adamw, adamw-8bit, adamw-4bit or sgd", "leave --optimizer out"
        for other, expected in _NOT_BESIDE.items():
            if other in asked.levers:
                yield f"together with --{other}", expected, f"leave --{other} out"

    def effects(self, effects: Effects) -> Effects:
        """Return the effects with kept and moved bytes halved; quantized moments are unchanged."""
        fewer = effects.state_bytes / 2 if effects.optimizer == "adamw" else 0.0
        return replace(
            effects,
            weight_bytes=2,
            state_bytes=effects.state_bytes - fewer,
            update_bytes=effects.update_bytes - _STEP_BYTES - 2 * fewer,
        )
