"""A lever: one thing about training that a user may change beside the strategies of layers.

Each is a value in a module of its own, written as one word or text: the same in a plan file, behind its option on the
command line, and in Python. What it changes of a step is asked of it by the methods of `Lever`; search, prices,
memory, files and commands know no lever by name.

How it is run is said by its twin in `steelyard.modules.levers`, and by each engine which of its values it takes
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
"""What a lever makes of what is trained: the same numbers, the same but for rounding, another rule of updates, or less
that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate:
    r"""Bytes and FLOP of an optimizer for a whole matrix of $m \times n$ entries, $m \le n$.

    Pairs are coefficients, as each field says.
    """

    state_bytes: float
    """Bytes that it keeps of a parameter."""
    update_bytes: float
    """Bytes that a step moves for a parameter, beside those of products."""
    flop: tuple[float, float]
    """FLOP of a step in bf16: of $m^2 n$ and of $m^3$."""
    product_bytes: tuple[float, float]
    """Bytes of the operands and results of its products: of $m n$ and of $m^2$."""
    buffer_bytes: tuple[float, float]
    """Bytes that it has while it updates a matrix, one at a time: of $m n$ and of $m^2$."""
    gathered_bytes: float
    """Bytes of an entry of the update, which ranks that share a matrix gather, and get back."""

    def flop_of(self, m: float, n: float) -> float:
        """FLOP of a step."""
        return self.flop[0] * m**2 * n + self.flop[1] * m**3

    def product_bytes_of(self, m: float, n: float) -> float:
        """Bytes of operands and results of a step."""
        return self.product_bytes[0] * m * n + self.product_bytes[1] * m**2

    def buffer_bytes_of(self, m: float, n: float) -> float:
        """Bytes that a step has beside what is kept."""
        return self.buffer_bytes[0] * m * n + self.buffer_bytes[1] * m**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """Products of linear layers whose operands are cast to 8 bits."""

    peak: str
    """Type whose peak they reach the same part of as others of bf16's."""
    forward: tuple[tuple[float, int], ...]
    """Of casts in a forward pass, bytes that they move of an entry and their kernels: of a layer's inputs, which layers
    share, and of its weights. For closed forms of compiled blocks: a trace counts them."""
    backward: tuple[tuple[float, int], ...]
    """In a backward pass, and of the gradients of outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA beside linear layers of blocks, of which nothing else is trained."""

    rank: int
    targets: frozenset[str]
    """Ends of the paths of linear layers; empty for all."""
    has_dropout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What training keeps and moves beside the work of layers, as levers change it; without any as AdamW in fp32."""

    weight_bytes: int = 4
    """Bytes of a trained parameter, and of its gradient as it is summed and kept."""
    state_bytes: float = 8.0
    """Bytes that the optimizer keeps of a trained parameter."""
    layer_state_bytes: int = 0
    """What it keeps of a layer besides, at most; together no more than AdamW keeps."""
    optimizer: str = "adamw"
    """What updates parameters, as a profile names it."""
    update_bytes: float = 28.0
    """Bytes that a step of it moves for a trained parameter: AdamW reads 16 and writes 12."""
    host_bytes: float = 0.0
    """Bytes that training keeps of a trained parameter in the memory of the host."""
    moved_bytes: float = 0.0
    """Bytes that a step copies from and to the host for a trained parameter, both directions together."""
    buffer_bytes: int = 0
    """What of a layer's bytes in host memory a step has on the device at a time, at most."""
    matrices: MatrixUpdate | None = None
    """What is otherwise for hidden matrices of blocks (`LayerType.has_matrix`); None where nothing is."""
    low_precision: LowPrecision | None = None
    """Rate of products of 8-bit operands, where layers have some."""
    adapters: Adapters | None = None
    """Of plain LoRA, for closed forms: a trace has them."""
    parameters_on_host: bool = False
    """Whether all that is kept of parameters lies in the memory of the host, which updates them: they are copied to the
    device for every pass of a layer, and their gradients back."""
    saves_on_host: bool = False
    """Whether what blocks save for their backward passes lies in the memory of the host."""

    @property
    def uses_host(self) -> bool:
        """Whether anything lies in the memory of the host."""
        return self.host_bytes > 0 or self.parameters_on_host or self.saves_on_host


class Runner(Protocol):
    """What runs levers: an engine."""

    @property
    def name(self) -> str:
        """Its name."""

    def lever_refusal(self, lever: "Lever", /) -> str | None:
        """Why it does not run this value, in words behind its name; None where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a lever is asked for, beside other levers."""

    chain: ModelChain
    engine: Runner | None = None
    """What runs it; None where that is asked elsewhere."""
    engines: tuple[Runner, ...] = ()
    """All that are known."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Texts of all levers, by name."""
    precision: str | None = None
    """What layers compute in; None where that is asked elsewhere."""
    devices: tuple[Device, ...] = ()
    """Types of the devices, where they are known."""


AUTO = "auto"
"""Leaves a value to the search: the word of levers that are ``searched``, in the place of a value."""
Objection = tuple[str, str, str]
"""What was found, in words behind the lever's text, what is expected, and what to do."""


class Divided(Protocol):
    """What a strategy makes of a layer's parameters."""

    @property
    def state_shards(self) -> int:
        """Ranks that share its states."""

    @property
    def replicas(self) -> int:
        """Ranks with other samples that have the same states."""

    @property
    def keeps_gathered(self) -> bool:
        """Whether its parameters are whole from its forward to its backward pass."""

    @property
    def tensor_degree(self) -> int:
        """Ranks that divide its matrices."""

    @property
    def token_degree(self) -> int:
        """Ranks that divide the sequence of every sample."""

    @property
    def expert_degree(self) -> int:
        """Ranks that divide its experts."""

    @property
    def remat(self) -> str:
        """What of it is computed again in the backward pass: none, selective or full."""


class Lever(ABC):
    """One value of a lever, frozen and hashable."""

    name: ClassVar[str]
    """Its key in a plan file, and its option on the command line behind two dashes."""
    values: ClassVar[tuple[str, ...]] = ()
    """What may be asked for, where that is one of a few words."""
    offers: ClassVar[tuple[str, ...]] = ()
    """What advice tries of it."""
    offered_with: ClassVar[Mapping[str, str]] = {}
    """Texts of other levers beside which alone advice tries it."""
    help: ClassVar[str]
    """What the option is, in a sentence."""
    result: ClassVar[Result] = "exact"
    takes_long: ClassVar[bool] = False
    """Whether a model is traced for up to a minute with it, so that advice tries it last, and not unasked."""
    searched: ClassVar[bool] = False
    """Whether a search may choose among its ``values``, asked for by `AUTO`; none of them changes the model."""
    adds_parameters: ClassVar[bool] = False
    """Whether it adds parameters to a model, and leaves all else untrained."""

    tolerances: ClassVar[tuple[float, float]] = (0.0, 0.0)
    """Relative differences of losses and of gradients between two plans with it, where they are above those of the
    precision."""
    precisions: ClassVar[tuple[str, ...]] = ()
    """Precisions in the place of which engines have it."""
    size: ClassVar[str] = ""
    """What is called its size, if it has one: advice finds the largest that fits."""

    @classmethod
    def said(cls, text: str) -> dict[str, str]:
        """What a text behind the option says: of this lever, by its name, and where it is short for several of all."""
        return {cls.name: text}

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """The value that a text says; raises `UserError` for one that says none."""

    @abstractmethod
    def __str__(self) -> str:
        """The text that says it."""

    @property
    def is_default(self) -> bool:
        """Whether it changes nothing, so that no plan names it."""
        return False

    def check(self, asked: Asked) -> None:
        """Raises `UserError` where it cannot be had for this."""
        refused = asked.engine and asked.engine.lever_refusal(self)
        objections = self.objections(asked)
        if asked.engine is not None and refused is not None:
            others = ", ".join(sorted(each.name for each in asked.engines if each.lever_refusal(self) is None))
            found = f"with the engine {asked.engine.name}" + f", {refused}" * bool(refused)
            objections = iter([(found, f"one of the engines {others}", f"leave --engine or --{self.name} out")])
        for found, expected, hint in objections:
            raise UserError(field=f"--{self.name}", found=f"{self} {found}", expected=expected, hint=hint)

    def objections(self, _asked: Asked) -> Iterator[Objection]:
        """Reasons why it cannot be had by itself, whatever runs it: the first one is told."""
        return iter(())

    def sized(self, _size: int) -> "Lever":
        """The same of another size, if it has one."""
        return self

    def check_host(self, _device_type: DeviceType) -> None:
        """Raises `UserError` where this host cannot run it on its devices of this type."""
        return

    @property
    def without_chance(self) -> "Lever":
        """The same with nothing drawn at random."""
        return self

    def change(self, chain: ModelChain) -> ModelChain:
        """What it makes of a model."""
        return chain

    def warning(self, _chain: ModelChain) -> str:
        """A warning about the model as this has changed it; empty where there is none."""
        return ""

    def refusal(self, _strategy: Divided) -> str | None:
        """Why no layer may be trained so, None where it may."""
        return None

    def weight_pass_refusal(self) -> str | None:
        """Why gradients of weights have no passes of their own beside it, None where they may."""
        return None

    def effects(self, effects: Effects) -> Effects:
        """What it makes of the effects."""
        return effects


@dataclass(frozen=True, slots=True)
class WordLever(Lever):
    """One of a few words, its ``values``; the first of them changes nothing."""

    word: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The value of this word; raises `UserError` for an unknown one."""
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
