r"""Offload: what lies in the memory of the host, because a device has too little of its own.

| word          | in host memory, B a trained parameter | over the link, B a step | what                             |
|---------------|---------------------------------------|-------------------------|----------------------------------|
| ``optimizer`` | 8                                     | 16                      | both moments of AdamW, in fp32   |

**optimizer.** Parameters and gradients stay in fp32 on the device, which computes the step: `CHUNK` entries of both
moments at a time are copied to it, updated by the same kernel as without offload, and copied back, so that parameters
are the same to the last bit. Seconds are those of the step, and

$$t = 16 N / W, \qquad W \text{ of one direction: `Device.host\_bytes\_per\_s`}$$

since copies and updates follow one another in one stream; nothing hides them, since the norm that clips gradients is
known only when the backward pass has ended. A CPU, whose memory is the host's, copies within it, which reads and writes
every byte.

The other way, as of DeepSpeed's ZeRO-Offload and torchao's ``CPUOffloadOptimizer``, is to step on the host: 8 bytes a
parameter over the link, and 28 of the host's memory, which the devices of a node share (DeepSpeed's CPUAdam takes 0.22
to 0.30 s a billion parameters on two Xeon 8168, torch's then 1.4). It needs copies of parameters and gradients on the
host, and no fewer seconds where several devices share one.

Not modelled: devices of a node that share a PCIe switch or the memory of the host as they copy at the same time; what
both directions at once would gain.

Source: Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840), table 4.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from steelyard.errors import UserError, nearest
from steelyard.levers.lever import Asked, Effects, Lever

NONE = "none"
CHUNK = 2**22
"""Entries of a moment that are copied to the device at a time: 16 MiB, at which a copy reaches the rate of the link."""
_MOMENT_BYTES = 4
_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Offload(Lever):
    """What lies in host memory."""

    word: str = NONE

    name: ClassVar[str] = "offload"
    values: ClassVar[tuple[str, ...]] = (NONE, "optimizer")
    offers: ClassVar[tuple[str, ...]] = ("optimizer",)
    help: ClassVar[str] = "What lies in the memory of the host: none, or optimizer (the moments of AdamW)."

    @classmethod
    def parse(cls, text: str) -> Self:
        """What this word says; raises `UserError` for an unknown one."""
        if text not in cls.values:
            raise UserError(
                field="--offload",
                found=repr(text),
                expected="one of " + ", ".join(cls.values),
                hint=nearest(text, cls.values),
            )
        return cls(text)

    def __str__(self) -> str:
        return self.word

    @property
    def is_default(self) -> bool:
        """Whether all lies on the device."""
        return self.word == NONE

    def check(self, asked: Asked) -> None:
        """Raises `UserError` for another optimizer, and for a GPU whose link to the host is not known."""
        Lever.check(self, asked)
        if "optimizer" in asked.levers:
            raise UserError(
                field="--offload",
                found=f"{self} beside another optimizer",
                expected="AdamW in fp32, whose moments are copied in parts",
                hint="leave --optimizer or --offload out",
            )
        for device in asked.devices:
            if device.is_gpu and device.host_bytes_per_s is None:
                raise UserError(
                    field="--offload",
                    found=f"{self} on {device.name!r}, whose link to the host is not known",
                    expected="a device of which the cluster file says what copies from and to the host reach",
                    hint="add host_GBps to the device in the cluster file: 24.8 over PCIe 4, 55 over PCIe 5",
                )

    def effects(self, effects: Effects) -> Effects:
        """The moments lie in host memory, and a step moves them there and back."""
        return replace(
            effects,
            state_bytes=0.0,
            layer_state_bytes=0,
            host_bytes=effects.state_bytes,
            moved_bytes=2 * effects.state_bytes,
            buffer_bytes=_MOMENTS * _MOMENT_BYTES * CHUNK,
        )
