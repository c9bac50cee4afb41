"""What fraction of a data sheet's rates a device reaches: a few numbers per device generation, fitted to public runs.

The numbers stand in ``efficiency.yaml`` beside this file, with what they were fitted on, when and how well;
`benchmarks/calibrate.py` writes it. A measured profile takes the place of all of them.
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
    """Fractions of a link's rate that collectives and transfers reach, and multiples of its latency that they take."""

    intra: float
    """Of the link inside a node."""
    inter: float
    """Of the link between nodes."""
    intra_latency: float
    inter_latency: float


IDEAL_LINKS = LinkEfficiency(intra=1.0, inter=1.0, intra_latency=1.0, inter_latency=1.0)
"""Links at the rate and the latency that the cluster states."""


class AttentionShape(BaseModel):
    r"""How the seconds of fused attention depend on its shape, apart from its FLOP $F$ and the rate.

    They are in proportion to $F (1 + d_0/d)(1 + s_0/s)(1 + b_0/b)$ with head dim $d$, $s$ keys and $b$ blocks of
    `QUERIES_OF_A_BLOCK` queries of a head, and backward `backward` times that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    head_dim: float = Field(ge=0)
    """The softmax of a score costs what so many products of it do."""
    keys: float = Field(ge=0)
    """A block of queries starts and ends in the time of so many keys."""
    blocks: float = Field(ge=0)
    """So many blocks more would fill what the last ones leave idle."""
    backward: float = Field(ge=1)

    def flop(self, work: Work, samples: Amount) -> Amount:
        """The FLOP of attention that take as long at `REFERENCE_HEAD_DIM`, `REFERENCE_KEYS` and any number of blocks.

        What was counted without its shapes is taken as it is.
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
"""Of generations of which no kernels were measured."""
QUERIES_OF_A_BLOCK = 128
REFERENCE_HEAD_DIM = 128
REFERENCE_KEYS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How near a device comes to its data sheet, and what it spends on what no data sheet states."""

    matmul: float
    """Of the dense peak, on matmuls so large that their operands do not count."""
    operands: float
    """Part of the operands' traffic that the matrix units wait for."""
    attention: float
    """Of the dense peak, in fused (flash) attention of head dim 128 over 4,096 keys, forward."""
    attention_shape: AttentionShape
    memory: float
    """Of the memory's rate, in kernels that only move bytes."""
    ramp_s: float
    """From the end of one kernel to the full rate of the next."""
    launch_s: float
    """Of the host, per kernel of a decoder's closed form (`steelyard.cost.decoder`) launched one by one."""
    traced_launch_s: float
    """Per kernel of a trace, which finds more of them in the same layer."""
    collective_launch_s: float
    """Of the host, per collective."""
    links: LinkEfficiency
    jitter_s: float
    """Of a tensor-parallel collective, for each step of its ring and each rank that may be late for it."""
    straggling: float
    """Part that compute takes longer for each doubling of the number of nodes: the slowest rank sets the pace."""
    step_s: float
    """Once a step, whatever its size: loop, data, loss and gradient norm."""
    step_per_node_s: float
    """Once a step for each node: what all ranks do together, one after another."""


STAND_IN = "other"
"""The generation whose rates are assumed for devices that no other generation names, and the network likewise."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _Row(_Part):
    devices: tuple[str, ...]
    """Names of the catalogue's devices, or what stands before a hyphen in them."""
    matmul: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    assumed: bool = False
    """Whether no run of such a device was among those that were fitted."""


class _NetworkRow(_Part):
    links: tuple[str, ...]
    """Words in the names of links between nodes."""
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
    """The efficiency of a device and of the link between nodes, by their names.

    That of its generation or network. For a device of no known generation the rates of `STAND_IN` are assumed, which
    `catalogue_rates` says.
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
    """Which generation's rates `efficiency_of` takes for a device, and whether they are fitted or assumed."""
    name = _generation(device_name)
    return CatalogueRates(generation=name, is_assumed=_file().generations[name].assumed, is_stand_in=name == STAND_IN)


def _generation(device_name: str) -> str:
    """The name of the generation of a device, or `STAND_IN` where none names it."""
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
