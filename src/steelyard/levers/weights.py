"""The type that trained parameters are kept in: fp32, or bf16 with all that training keeps of them ("pure bf16").

| value | parameter | gradient | AdamW's moments | together, B a parameter |
|-------|-----------|----------|-----------------|-------------------------|
| fp32  | 4         | 4        | 8               | 16                      |
| bf16  | 2         | 2        | 4               | 8                       |

In bf16 layers compute on the parameters themselves, not on copies of them, and gradients are summed over ranks in bf16.
A step reads and writes half of the bytes. bf16 has 8 significant bits: of a parameter an update of less than 1/512 is
lost, so that it suits fine-tuning at usual rates more than long training from scratch. torchtune (``dtype: bf16``),
LLaMA-Factory (``pure_bf16``) and LitGPT (``bf16-true``) have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Effects, Objection, Result, WordLever

_NOT_BESIDE = ("train", "base", "offload", "float8")
_OTHER_STATES = ("adafactor", "muon")
_STEP_BYTES = 6
"""What a step moves less of a parameter and its gradient."""


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
        """Layers that compute in another type, and levers that keep states in other ways."""
        if asked.precision not in (None, "bf16"):
            yield f"for layers that compute in {asked.precision}", "bf16", "write --precision bf16, or leave it out"
        if asked.levers.get("optimizer") in _OTHER_STATES:
            word = asked.levers["optimizer"]
            yield f"with --optimizer {word}", "adamw, adamw-8bit, adamw-4bit or sgd", "leave --optimizer out"
        for other in (each for each in _NOT_BESIDE if each in asked.levers):
            yield f"beside --{other}", "parameters that are all trained, on the device", f"leave --{other} out"

    def effects(self, effects: Effects) -> Effects:
        """Half of what is kept and moved; moments in fewer bits stay as they are."""
        fewer = effects.state_bytes / 2 if effects.optimizer == "adamw" else 0.0
        return replace(
            effects,
            weight_bytes=2,
            state_bytes=effects.state_bytes - fewer,
            update_bytes=effects.update_bytes - _STEP_BYTES - 2 * fewer,
        )
