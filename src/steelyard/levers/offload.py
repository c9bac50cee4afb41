r"""Offload: what lies in the memory of the host, because a device has too little of its own.

| word            | in host memory                            | over the link                              |
|-----------------|-------------------------------------------|--------------------------------------------|
| ``optimizer``   | both moments of AdamW in fp32, 8 B a      | 16 B a trained parameter, once a step      |
|                 | trained parameter                         |                                            |
| ``activations`` | what blocks save for the backward pass,   | the same there and back, every microbatch  |
|                 | of microbatches in flight                 |                                            |
| ``parameters``  | parameters, gradients and moments, 16 B a | 4 B for the forward and for the backward   |
|                 | trained parameter; others as they compute | pass, a gradient of 4 B, every microbatch  |

``optimizer+activations`` is both; ``parameters`` has the optimizer in it.

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

**activations.** What a block saves (all without remat, its input under full remat) is copied to the host as it works
forward and back as it works backwards, and is then on the device as without offload; embedding and head keep theirs.
Copies follow the work of the block in one stream, so that none is hidden: $2 b / W$ a microbatch, with $b$ the bytes
that it saves. Selective remat keeps what it chose in a cache of torch's own, which no hook sees, so that it is refused.
torchtune and Megatron copy in streams of their own, beside other blocks; then a device has more, and waits less.

**parameters.** All layers are FSDP2's with its ``CPUOffloadPolicy``, on a single device too: parameters come to the
device before they are gathered, and are freed after each pass (ZeRO-3 alone); reduced gradients go to the host, which
clips them and steps. Copies run beside the layer before and are exposed as far as it does not hide them; on one device
FSDP copies in line. The CPUs of a node update the parameters of all its devices at `compute.HOST_BYTES_PER_S`, with 28
bytes of AdamW for each and 12 of clipping, and from the second microbatch on add gradients there, 12 bytes each. Layers
of dp are refused, also outside fsdp: the host would have their states several times, and gradients would stay on the
device until the last microbatch. So are quantized weights, which FSDP does not move.

Not modelled: what starting a copy takes, a few microseconds for each tensor; devices of a node that share a PCIe switch
or the memory of the host as they copy at the same time; what both directions at once would gain.

Source: Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840), table 4; `torch.distributed.fsdp.CPUOffloadPolicy`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Divided, Effects, Objection, Result, WordLever
from steelyard.levers.optimizer import Optimizer

NONE = "none"
CHUNK = 2**22
"""Entries of a moment that are copied to the device at a time: 16 MiB, at which a copy reaches the rate of the link."""
_MOMENT_BYTES = 4
_MOMENTS = 2
_OPTIMIZER, _ACTIVATIONS, _PARAMETERS = "optimizer", "activations", "parameters"


@dataclass(frozen=True, slots=True)
class Offload(WordLever):
    """What lies in host memory."""

    word: str = NONE

    name: ClassVar[str] = "offload"
    values: ClassVar[tuple[str, ...]] = (
        *(NONE, _OPTIMIZER, _ACTIVATIONS, f"{_OPTIMIZER}+{_ACTIVATIONS}"),
        *(_PARAMETERS, f"{_PARAMETERS}+{_ACTIVATIONS}"),
    )
    offers: ClassVar[tuple[str, ...]] = values[1:]
    searched: ClassVar[bool] = True
    help: ClassVar[str] = (
        "Tensors kept in host memory: none, optimizer (AdamW moments), activations (saved by blocks), parameters (with "
        "gradients and moments, updated on the host), optimizer+activations, parameters+activations; for steelyard "
        "plan also auto: the fastest of these, none if none gains."
    )

    @property
    def result(self) -> Result:  # type: ignore[override]
        """Its updates on the host are those of the device but for rounding."""
        return "rounding" if self.moves_parameters else "exact"

    @property
    def moves_optimizer(self) -> bool:
        """Whether the states of the optimizer lie in host memory."""
        return _OPTIMIZER in self.word.split("+")

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters, their gradients and the states of the optimizer lie in host memory."""
        return _PARAMETERS in self.word.split("+")

    @property
    def moves_activations(self) -> bool:
        """Whether what blocks save lies in host memory."""
        return _ACTIVATIONS in self.word.split("+")

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Another optimizer, and a GPU whose link to the host is not known."""
        if (self.moves_optimizer or self.moves_parameters) and Optimizer.name in asked.levers:
            adamw = "AdamW in fp32, whose moments are copied in parts or updated on the host"
            yield "beside another optimizer", adamw, "leave --optimizer or --offload out"
        if self.moves_parameters and "base" in asked.levers:
            sharded = "weights that FSDP shards and copies, which quantized ones are not"
            yield "beside --base", sharded, "leave --base or --offload out"
        for device in asked.devices:
            if device.is_gpu and device.host_bytes_per_s is None:
                yield (
                    f"on {device.name!r}, whose link to the host is not known",
                    "a device of which the cluster file says what copies from and to the host reach",
                    "add host_GBps to the device in the cluster file: 24.8 over PCIe 4, 55 over PCIe 5",
                )

    def refusal(self, strategy: Divided) -> str | None:
        """Hooks do not see what selective remat keeps; parameters on the host are of one rank, and leave the device."""
        if self.moves_parameters and strategy.replicas > 1:
            return "dp would keep parameters on the host once for each of its ranks, and gradients on the device: fsdp"
        if self.moves_parameters and strategy.state_shards > 1 and strategy.keeps_gathered:
            return "parameters on the host leave the device after every pass: ZeRO-3"
        if self.moves_activations and strategy.remat == "selective":
            return "what selective remat keeps is not copied to the host: no or full remat"
        return None

    def weight_pass_refusal(self) -> str | None:
        """Reason against weight passes: what waits lies on the device, gradients on the host belong to FSDP's hooks."""
        if self.moves_activations or self.moves_parameters:
            return f"--{self.name} {self}: what waits for a weight pass stays on the device"
        return None

    def effects(self, effects: Effects) -> Effects:
        """What lies in host memory, and what a step moves there and back."""
        effects = replace(effects, saves_on_host=self.moves_activations)
        if self.moves_parameters:
            host_bytes = effects.state_bytes
            return replace(
                effects, state_bytes=0.0, layer_state_bytes=0, host_bytes=host_bytes, parameters_on_host=True
            )
        if not self.moves_optimizer:
            return effects
        return replace(
            effects,
            state_bytes=0.0,
            layer_state_bytes=0,
            host_bytes=effects.state_bytes,
            moved_bytes=2 * effects.state_bytes,
            buffer_bytes=_MOMENTS * _MOMENT_BYTES * CHUNK,
        )
