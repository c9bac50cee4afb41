"""Fractions of data-sheet rates that devices reach: a few numbers per device generation, fitted to published runs.

``efficiency.yaml`` in this directory has the numbers, with the data, date and quality of the fit;
`benchmarks/calibrate.py` writes it. A measured profile replaces all of them.
"""

from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel, ConfigDict, Field

from steelyard.errors import InvalidProfileError
from steelyard.files import read_packaged_yaml
from steelyard.plan.prediction import CatalogueRates
from steelyard.profiles.profile import Work
from steelyard.units import Amount, is_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEfficiency:
    """Fractions of a link's rate, and multiples of its latency, of collectives and transfers."""

    intra: float
    """Fraction of the rate of the link inside a node."""
    inter: float
    """Fraction of the rate of the link between nodes."""
    intra_latency: float
    inter_latency: float


IDEAL_LINKS = LinkEfficiency(intra=1.0, inter=1.0, intra_latency=1.0, inter_latency=1.0)
"""Efficiency of links at the stated rate and latency."""


class AttentionShape(BaseModel):
    r"""Dependence of fused attention's time on its shape, beyond its FLOP $F$ and the rate.

    The time is proportional to $F (1 + d_0/d)(1 + s_0/s)(1 + b_0/b)$ with head dim $d$, $s$ keys and $b$ blocks of
    `QUERIES_OF_A_BLOCK` queries of a head, and `backward` times that in the backward pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    head_dim: float = Field(ge=0)
    """Cost of the softmax of a score, in head dims ($d_0$)."""
    keys: float = Field(ge=0)
    """Time to start and end a block of queries, in keys ($s_0$)."""
    blocks: float = Field(ge=0)
    """Idle time at the end of the kernel, in blocks ($b_0$)."""
    backward: float = Field(ge=1)

    def flop(self, work: Work, samples: Amount) -> Amount:
        """Attention FLOP that take as long at `REFERENCE_HEAD_DIM`, `REFERENCE_KEYS` and many blocks.

        FLOP that were counted without shapes are returned unchanged.
        """
        counted = sum(call.flop(samples) for call in work.attention)
        if not is_positive(counted):
            return work.attention_flop.at(samples)
        slower: Amount = 0.0
        for call in work.attention:
            blocks = call.heads * samples * call.queries / QUERIES_OF_A_BLOCK
            shape = (1 + self.head_dim / call.head_dim) * (1 + self.keys / call.keys) * (1 + self.blocks / blocks)
            slower = slower + call.flop(samples) * (shape * (self.backward if call.backward else 1.0))
        reference = (1 + self.head_dim / REFERENCE_HEAD_DIM) * (1 + self.keys / REFERENCE_KEYS)
        return work.attention_flop.at(samples) * slower / counted / reference


SAME_FOR_EVERY_SHAPE = AttentionShape(head_dim=0, keys=0, blocks=0, backward=1)
"""Shape dependence of generations without measured kernels: none."""
QUERIES_OF_A_BLOCK = 128
REFERENCE_HEAD_DIM = 128
REFERENCE_KEYS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of data-sheet rates that a device reaches, and overheads that data sheets do not state."""

    matmul: float
    """Fraction of the dense peak in matmuls so large that operand traffic is negligible."""
    operands: float
    """Fraction of operand traffic that the matrix units wait for."""
    attention: float
    """Fraction of the dense peak in fused (flash) attention of head dim 128 over 4,096 keys, forward."""
    attention_shape: AttentionShape
    memory: float
    """Fraction of the memory bandwidth in kernels that only move bytes."""
    ramp_s: float
    """Seconds from the end of one kernel to the full rate of the next."""
    launch_s: float
    """Host seconds to launch a kernel of a decoder's closed form (`steelyard.cost.decoder`)."""
    traced_launch_s: float
    """Host seconds to launch a kernel of a trace, which has more kernels for the same layer."""
    traced_backward_launch_s: float
    """Host seconds to launch a kernel of a traced backward pass, where autograd runs without Python."""
    collective_launch_s: float
    """Host seconds to launch a collective."""
    links: LinkEfficiency
    jitter_s: float
    """Delay of a tensor-parallel collective, per step of its ring and per rank that may be late."""
    straggling: float
    """Fractional slowdown of compute per doubling of the number of nodes, because the slowest rank sets the pace."""
    step_s: float
    """Fixed seconds per step: loop, data, loss and gradient norm."""
    step_per_node_s: float
    """Seconds per step and node: operations that all ranks do together, one after another."""


STAND_IN = "other"
"""Generation whose rates are assumed for devices of no other generation; also the name of the default network."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _Row(_Part):
    devices: tuple[str, ...]
    """Device names of the catalogue, or their prefixes before a hyphen."""
    matmul: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    assumed: bool = False
    """Whether the fit has no run on such a device."""


class _NetworkRow(_Part):
    links: tuple[str, ...]
    """Words that occur in names of links between nodes."""
    rate: float = Field(gt=0, le=1)


class _EfficiencyFile(_Part):
    version: int
    fitted: dict[str, str]
    generations: dict[str, _Row]
    attention_shapes: dict[str, AttentionShape]
    operands: float = Field(ge=0)
    memory: float = Field(gt=0, le=1)
    ramp_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    traced_launch_us: float = Field(ge=0)
    traced_backward_launch_us: float = Field(ge=0)
    collective_launch_us: float = Field(ge=0)
    jitter_us: float = Field(ge=0)
    intra: float = Field(gt=0, le=1)
    networks: dict[str, _NetworkRow]
    intra_latency: float = Field(gt=0)
    inter_latency: float = Field(gt=0)
    straggling: float = Field(ge=0)
    step_ms: float = Field(ge=0)
    step_per_node_ms: float = Field(ge=0)


@cache
def efficiency_of(device_name: str, network: str) -> Efficiency:
    """Return the efficiency of a device's generation and of the network between nodes, by name.

    For a device of no known generation the rates of `STAND_IN` are assumed; `catalogue_rates` reports this.
    """
    file = _file()
    reached = next(
        (row for row in file.networks.values() if any(word in network.lower() for word in row.links)),
        file.networks[STAND_IN],
    )
    generation = _generation(device_name)
    row = file.generations[generation]
    return Efficiency(
        matmul=row.matmul,
        attention=row.attention,
        attention_shape=file.attention_shapes.get(generation, SAME_FOR_EVERY_SHAPE),
        operands=file.operands,
        memory=file.memory,
        ramp_s=file.ramp_us * 1e-6,
        launch_s=file.launch_us * 1e-6,
        traced_launch_s=file.traced_launch_us * 1e-6,
        traced_backward_launch_s=file.traced_backward_launch_us * 1e-6,
        collective_launch_s=file.collective_launch_us * 1e-6,
        links=LinkEfficiency(
            intra=file.intra,
            inter=reached.rate,
            intra_latency=file.intra_latency,
            inter_latency=file.inter_latency,
        ),
        jitter_s=file.jitter_us * 1e-6,
        straggling=file.straggling,
        step_s=file.step_ms * 1e-3,
        step_per_node_s=file.step_per_node_ms * 1e-3,
    )


def catalogue_rates(device_name: str) -> CatalogueRates:
    """Return the generation whose rates `efficiency_of` uses for a device, and whether they are fitted or assumed."""
    name = _generation(device_name)
    return CatalogueRates(generation=name, is_assumed=_file().generations[name].assumed, is_stand_in=name == STAND_IN)


def _generation(device_name: str) -> str:
    """Return the generation of a device, or `STAND_IN` if it is in none."""
    name = device_name.lower()
    found = (
        generation
        for generation, row in _file().generations.items()
        if any(name == device or name.startswith(f"{device}-") for device in row.devices)
    )
    return next(found, STAND_IN)


@cache
def _file() -> _EfficiencyFile:
    file = _EfficiencyFile.model_validate(read_packaged_yaml("steelyard.cost", "efficiency.yaml"))
    if STAND_IN not in file.generations or STAND_IN not in file.networks:
        raise InvalidProfileError(
            field="efficiency.yaml", found=f"no row named {STAND_IN}", expected="one in generations and one in networks"
        )
    return file
