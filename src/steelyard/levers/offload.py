r"""Offload: tensors in host memory, because device memory is too small.

| word            | in host memory                            | over the link                              |
|-----------------|-------------------------------------------|--------------------------------------------|
| ``optimizer``   | both moments of AdamW in fp32, 8 B a      | 16 B a trained parameter, once a step      |
|                 | trained parameter                         |                                            |
| ``activations`` | tensors that blocks save for the backward | the same there and back, every microbatch  |
|                 | pass, of microbatches in flight           |                                            |
| ``parameters``  | parameters, gradients and moments, 16 B a | 4 B for the forward and for the backward   |
|                 | trained parameter; others in compute type | pass, a gradient of 4 B, every microbatch  |

``optimizer+activations`` is both; ``parameters`` includes the optimizer.

**optimizer.** Parameters and gradients stay in fp32 on the device, which computes the step: `CHUNK` entries of both
moments at a time are copied to it, updated by the same kernel as without offload, and copied back. Parameters are
identical to the last bit. The time is that of the step, plus

$$t = 16 N / W, \qquad W \text{ of one direction: `Device.host\_bytes\_per\_s`}$$

because copies and updates follow one another in one stream. Nothing hides them, because the norm that clips gradients
is known only after the backward pass. A CPU, whose memory is the host's, copies within it and reads and writes every
byte.

DeepSpeed steps on the host instead (ZeRO-Offload, `stepping_on_host`). The device keeps parameters in compute
precision, under ZeRO-3 a shard of them. On the host are fp32 parameters, gradients and moments, and a buffer in compute
precision. Gradients cross the link alongside the backward pass, 4 B in every microbatch: in fp32 once per step, and in
16 bits there and back to be added on the device; under ZeRO-1, which reduces them once per step, in the last
microbatch. The host clips and steps as with ``parameters``. New parameters go back in compute precision, 2 B that
nothing hides, before ZeRO-1 and 2 gather them. With several devices on a host this is no faster than to stream moments:
per billion parameters on two Xeon 8168, DeepSpeed's CPUAdam needs 0.22 to 0.30 s and torch's of that time 1.4 s.

**activations.** The saved tensors of a block (all without remat, its input under full remat) are copied to the host in
its forward pass and back in its backward pass, during which the device holds them as without offload; embedding and
head keep theirs. Copies follow the work of the block in one stream, so that none is hidden: $2 b / W$ per microbatch,
with $b$ the saved bytes. Selective remat is refused, because it keeps tensors in a cache inside torch that no hook
sees. torchtune and Megatron copy in separate streams alongside other blocks; the device then holds more, and waits
less.

**parameters.** All layers use FSDP2 with its ``CPUOffloadPolicy``, also on a single device: parameters are copied to
the device before they are gathered, and are freed after each pass (ZeRO-3 only); reduced gradients go to the host,
which clips them and steps. Copies run alongside the previous layer and are exposed as far as it does not hide them; on
one device FSDP copies in line. The CPUs of a node update the parameters of all its devices at
`compute.HOST_BYTES_PER_S`: 28 bytes per parameter for AdamW and 12 for clipping and, from the second microbatch on, 12
for adding gradients. Layers of dp are refused, also outside fsdp: the host would have their states several times, and
gradients would stay on the device until the last microbatch. Quantized weights are refused, because FSDP does not move
them.

Not modelled: the start of a copy, a few microseconds for each tensor; devices of a node that share a PCIe switch or
host memory bandwidth while they copy; the gain of both directions at once.

Source: Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840), table 4; `torch.distributed.fsdp.CPUOffloadPolicy`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Divided, Effects, Objection, WordLever
from steelyard.levers.optimizer import Optimizer

NONE = "none"
CHUNK = 2**22
"""Entries of a moment per copy to the device: 16 MiB, at which a copy reaches the rate of the link."""
_MOMENT_BYTES = 4
_MOMENTS = 2
_OPTIMIZER, _ACTIVATIONS, _PARAMETERS = "optimizer", "activations", "parameters"


@dataclass(frozen=True, slots=True)
class Offload(WordLever):
    """Tensors in host memory."""

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
    def moves_optimizer(self) -> bool:
        """Whether optimizer states lie in host memory."""
        return _OPTIMIZER in self.word.split("+")

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters, their gradients and optimizer states lie in host memory."""
        return _PARAMETERS in self.word.split("+")

    @property
    def moves_activations(self) -> bool:
        """Whether the tensors that blocks save lie in host memory."""
        return _ACTIVATIONS in self.word.split("+")

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to another optimizer, to quantized weights, and to a GPU whose link to the host is not known."""
        if (self.moves_optimizer or self.moves_parameters) and Optimizer.name in asked.levers:
            adamw = "AdamW with fp32 moments, the only one that offload copies in parts or updates on the host"
            yield "together with another optimizer", adamw, "leave --optimizer or --offload out"
        if self.moves_parameters and "base" in asked.levers:
            sharded = "unquantized weights, because FSDP does not shard and copy quantized ones"
            yield "together with --base", sharded, "leave --base or --offload out"
        for device in asked.devices:
            if device.is_gpu and device.host_bytes_per_s is None:
                yield (
                    f"on {device.name!r}, whose link to the host is unknown",
                    "a device with a known bandwidth to and from the host",
                    "add host_GBps to the device in the cluster file: 24.8 for PCIe 4, 55 for PCIe 5",
                )

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse dp and ZeRO-1 or 2 for parameters, and selective remat for activations, which no hook sees."""
        if self.moves_parameters and strategy.replicas > 1:
            return "parameters on the host need fsdp: dp would keep a host copy per rank, and gradients on the device"
        if self.moves_parameters and strategy.state_shards > 1 and strategy.keeps_gathered:
            return "parameters on the host need ZeRO-3, because they leave the device after every pass"
        if self.moves_activations and strategy.remat == "selective":
            return "activations on the host need no remat or full remat: tensors kept by selective remat are not copied"
        return None

    def weight_pass_refusal(self) -> str | None:
        """Refuse weight passes: pending tensors stay on the device, and FSDP's hooks own gradients on the host."""
        if self.moves_activations or self.moves_parameters:
            return f"--{self.name} {self}: tensors that wait for a weight pass stay on the device"
        return None

    def effects(self, effects: Effects) -> Effects:
        """Return the effects with the bytes in host memory and the traffic of a step."""
        effects = replace(effects, saves_on_host=self.moves_activations)
        if self.moves_parameters:
            host_bytes = effects.state_bytes
            return replace(
                effects,
                state_bytes=0.0,
                layer_state_bytes=0,
                host_bytes=host_bytes,
                steps_on_host=True,
                parameters_on_host=True,
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


def stepping_on_host(effects: Effects) -> Effects:
    """Return the effects of an offloaded optimizer in an engine that updates parameters on the host."""
    return replace(effects, moved_bytes=0.0, buffer_bytes=0, steps_on_host=True)
