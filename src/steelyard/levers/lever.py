"""The interface of a lever: one change of training that a user may make in addition to the strategies of layers.

Each lever is a value in its own module, written as one word or text: the same in a plan file, after its option on the
command line, and in Python. The methods of `Lever` give its effects on a step; search, prices, memory, files and
commands know no lever by name.

`steelyard.modules.levers` has the implementation of each lever, and each engine lists the values that it supports
(`steelyard.engines.engine.Engine.levers`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, Self

from steelyard.errors import UserError, nearest
from steelyard.hardware import Device, DeviceType
from steelyard.model.chain import ModelChain

Result = Literal["exact", "rounding", "other updates", "fewer trained parameters"]
"""Effect of a lever on the training result: identical numbers, identical except for rounding, another update rule, or
fewer trained parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate:
    r"""Bytes and FLOP of an optimizer for a whole matrix of $m \times n$ entries, $m \le n$.

    Pairs are the coefficients of the terms that each field names.
    """

    state_bytes: float
    """Bytes kept per parameter."""
    update_bytes: float
    """Bytes moved per parameter and step, without those of matrix products."""
    flop: tuple[float, float]
    """FLOP of a step in bf16: coefficients of $m^2 n$ and $m^3$."""
    product_bytes: tuple[float, float]
    """Bytes of operands and results of the products: coefficients of $m n$ and $m^2$."""
    buffer_bytes: tuple[float, float]
    """Bytes of buffers while one matrix is updated: coefficients of $m n$ and $m^2$."""
    gathered_bytes: float
    """Bytes per entry of the update, which ranks that share a matrix gather and get back."""

    def flop_of(self, m: float, n: float) -> float:
        """Return the FLOP of a step for one matrix."""
        return self.flop[0] * m**2 * n + self.flop[1] * m**3

    def product_bytes_of(self, m: float, n: float) -> float:
        """Return the bytes of operands and results of a step for one matrix."""
        return self.product_bytes[0] * m * n + self.product_bytes[1] * m**2

    def buffer_bytes_of(self, m: float, n: float) -> float:
        """Return the bytes of buffers in a step for one matrix, in addition to the kept ones."""
        return self.buffer_bytes[0] * m * n + self.buffer_bytes[1] * m**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """Products of linear layers whose operands are cast to 8 bits."""

    peak: str
    """Data type of the peak rate; products reach the same fraction of it as others of the bf16 peak."""
    forward: tuple[tuple[float, int], ...]
    """Casts of a forward pass, each as bytes moved per entry and number of kernels: those of a layer's inputs, which
    layers share, and of its weights. Used in closed forms of compiled blocks; a trace counts them itself."""
    backward: tuple[tuple[float, int], ...]
    """Casts of a backward pass in the same form, with those of the gradients of outputs."""
    before_gather: bool = False
    """Whether sequence parallelism casts a rank's own tokens and gathers them in 8 bits, in closed forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA in linear layers of blocks, with everything else frozen."""

    rank: int
    targets: frozenset[str]
    """Path suffixes of linear layers; empty for all."""
    has_dropout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Memory and traffic of training outside the work of layers, as changed by levers; by default AdamW in fp32."""

    weight_bytes: int = 4
    """Bytes of a trained parameter, and of its gradient as it is summed and kept."""
    state_bytes: float = 8.0
    """Bytes of optimizer state per trained parameter."""
    layer_state_bytes: int = 0
    """Upper bound of additional optimizer bytes per layer; the total is at most that of AdamW."""
    optimizer: str = "adamw"
    """Name of the optimizer in a profile."""
    update_bytes: float = 28.0
    """Bytes that the optimizer step moves per trained parameter: AdamW reads 16 and writes 12."""
    host_bytes: float = 0.0
    """Bytes per trained parameter in host memory."""
    moved_bytes: float = 0.0
    """Bytes copied from and to the host per trained parameter and step, both directions together."""
    buffer_bytes: int = 0
    """Upper bound of the bytes of a layer in host memory that are on the device at a time during a step."""
    matrices: MatrixUpdate | None = None
    """Update of hidden block matrices (`LayerType.has_matrix`), if it differs; None if it does not."""
    low_precision: LowPrecision | None = None
    """Products of 8-bit operands; None if layers have none."""
    adapters: Adapters | None = None
    """Plain LoRA, for closed forms; a trace includes the adapters."""
    steps_on_host: bool = False
    """Whether the host updates parameters: fp32 parameters, gradients and optimizer states lie in its memory, and
    gradients are copied there in every backward pass."""
    parameters_on_host: bool = False
    """Whether, with ``steps_on_host``, parameters are copied to the device for every pass of a layer, instead of
    resting there in compute precision."""
    saves_on_host: bool = False
    """Whether the tensors that blocks save for their backward passes lie in host memory."""

    @property
    def uses_host(self) -> bool:
        """Whether anything lies in host memory."""
        return self.host_bytes > 0 or self.steps_on_host or self.saves_on_host


class Runner(Protocol):
    """An engine, as levers see it."""

    @property
    def name(self) -> str:
        """Name of the engine."""

    def lever_refusal(self, lever: "Lever", /) -> str | None:
        """Return why the engine does not run this value, in words after its name; None if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Context of a lever: the model, engine, devices and other levers."""

    chain: ModelChain
    engine: Runner | None = None
    """Engine that runs the lever; None if it is checked elsewhere."""
    engines: tuple[Runner, ...] = ()
    """All known engines."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Texts of all levers, by name."""
    precision: str | None = None
    """Precision in which layers compute; None if it is checked elsewhere."""
    devices: tuple[Device, ...] = ()
    """Types of the devices, if known."""


AUTO = "auto"
"""Word that leaves the value of a ``searched`` lever to the search."""
Objection = tuple[str, str, str]
"""Fault found (in words after the lever's text), expectation, and hint."""


class Divided(Protocol):
    """Division of a layer's parameters and work by a strategy."""

    @property
    def state_shards(self) -> int:
        """Number of ranks that share the layer's states."""

    @property
    def replicas(self) -> int:
        """Number of ranks with other samples that have the same states."""

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay whole from the forward to the backward pass."""

    @property
    def tensor_degree(self) -> int:
        """Number of ranks that divide the layer's matrices."""

    @property
    def token_degree(self) -> int:
        """Number of ranks that divide the sequence of every sample."""

    @property
    def expert_degree(self) -> int:
        """Number of ranks that divide the layer's experts."""

    @property
    def remat(self) -> str:
        """Recomputation in the backward pass: none, selective or full."""


class Lever(ABC):
    """One value of a lever, frozen and hashable."""

    name: ClassVar[str]
    """Key in a plan file; with two dashes in front, the command-line option."""
    values: ClassVar[tuple[str, ...]] = ()
    """Allowed words, if the lever is one of a few."""
    offers: ClassVar[tuple[str, ...]] = ()
    """Values that advice tries, for every model (`offered_for`)."""
    offered_with: ClassVar[Mapping[str, str]] = {}
    """Texts of other levers that advice requires before it tries this one."""
    help: ClassVar[str]
    """Description of the option, in a sentence."""
    result: ClassVar[Result] = "exact"
    takes_long: ClassVar[bool] = False
    """Whether tracing a model with it takes up to a minute, so that advice tries it last, and only on request."""
    searched: ClassVar[bool] = False
    """Whether a search may choose among its ``values``, requested by `AUTO`; none of them changes the model."""
    adds_parameters: ClassVar[bool] = False
    """Whether it adds parameters to a model and freezes all others."""

    tolerances: ClassVar[tuple[float, float]] = (0.0, 0.0)
    """Relative tolerances of losses and gradients between two plans with it, if above those of the precision."""
    precisions: ClassVar[tuple[str, ...]] = ()
    """Precisions by which engines name it."""
    size: ClassVar[str] = ""
    """Name of its size, if it has one; advice finds the largest size that fits."""

    @classmethod
    def offered_for(cls, _chain: ModelChain) -> tuple[str, ...]:
        """Return the values that advice tries for a model."""
        return cls.offers

    @classmethod
    def said(cls, text: str) -> dict[str, str]:
        """Return the texts, by lever name, that an option's text stands for; a short form may set several levers."""
        return {cls.name: text}

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Parse a text. Raise `UserError` if it is invalid."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the text of the value."""

    @property
    def is_default(self) -> bool:
        """Whether it changes nothing, so that plans leave it out."""
        return False

    def check(self, asked: Asked) -> None:
        """Raise `UserError` if the lever is not possible in this context."""
        refused = asked.engine and asked.engine.lever_refusal(self)
        objections = self.objections(asked)
        if asked.engine is not None and refused is not None:
            others = ", ".join(sorted(each.name for each in asked.engines if each.lever_refusal(self) is None))
            found = f"with the engine {asked.engine.name}" + f", {refused}" * bool(refused)
            expected, hint = f"an engine that runs it: {others}", "give one of these as --engine"
            objections = iter([(found, expected, f"{hint}, or leave --{self.name} out")])
        for found, expected, hint in objections:
            option = f"--{self.name}"
            raise UserError(field=option, found=f"{option} {self} {found}", expected=expected, hint=hint)

    def objections(self, _asked: Asked) -> Iterator[Objection]:
        """Yield reasons why the lever is not possible, regardless of the engine; only the first one is reported."""
        return iter(())

    def sized(self, _size: int) -> "Lever":
        """Return the lever with another size, if it has one."""
        return self

    def check_host(self, _device_type: DeviceType) -> None:
        """Raise `UserError` if this host cannot run the lever on its devices of this type."""
        return

    @property
    def without_chance(self) -> "Lever":
        """The lever without randomness."""
        return self

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model as changed by the lever."""
        return chain

    def warning(self, _chain: ModelChain) -> str:
        """Return a warning about the changed model; empty if there is none."""
        return ""

    def refusal(self, _strategy: Divided) -> str | None:
        """Return why no layer can be trained with the lever under a strategy; None if it can."""
        return None

    def weight_pass_refusal(self) -> str | None:
        """Return why weight passes are not possible with the lever; None if they are."""
        return None

    def effects(self, effects: Effects) -> Effects:
        """Return the effects as changed by the lever."""
        return effects


@dataclass(frozen=True, slots=True)
class WordLever(Lever):
    """One of a few words, its ``values``; the first one changes nothing."""

    word: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a word. Raise `UserError` if it is unknown."""
        if text not in cls.values:
            raise UserError(
                field=f"--{cls.name}",
                found=repr(text),
                expected="one of " + ", ".join(cls.values),
                hint=nearest(text, cls.values),
            )
        return cls(text)

    def __str__(self) -> str:
        return self.word

    @property
    def is_default(self) -> bool:
        """Whether it changes nothing."""
        return self.word == self.values[0]
