"""Definition of an engine, the software that runs a plan: its models, capabilities, execution, files and levers.

Each engine is one value in one module of this package. Search, prices and exports take an engine and know none by name.
Every engine with settings files has a `Reader` in addition to its writer. It reads the degrees, the batch and the
precision, and reports the rest of the file as not read.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from steelyard.engines.capabilities import Capabilities, Dimensions
from steelyard.engines.execution import OURS, Execution
from steelyard.engines.writing import Target
from steelyard.errors import UserError, nearest
from steelyard.files import read_text
from steelyard.levers import Lever, Levers
from steelyard.levers.lever import Effects, Result
from steelyard.model.chain import ModelChain
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Degrees of parallelism and related settings; the data degree follows from the number of devices."""

    tp: int = 1
    cp: int = 1
    cp_method: str = "gather"
    """Method by which attention sees the whole sequence under cp: gather or ulysses."""
    pp: int = 1
    vpp: int = 1
    """Number of chunks of the model on every stage."""
    ep: int = 1
    """Ranks of a stage over which whole experts are divided, those of tp included."""
    replicas: int = 1
    """Groups of data ranks, each of which shards states among its own ranks (hybrid sharding)."""
    schedule: str | None = None
    """Name of the pipeline schedule; None: 1F1B, or interleaved 1F1B with several chunks."""
    micro_batch: int = 1
    """Samples of a microbatch on a data rank."""
    zero: int = 1
    """0: all replicated; 1: optimizer states sharded; 2: gradients too; 3: parameters too (FSDP)."""
    sp: bool = True
    """Sequence parallelism with tp."""
    remat: Remat = Remat.NONE
    remat_blocks: int | None = None
    """Number of blocks recomputed at the start of every stage or chunk; None for all."""
    blocks: tuple[int, ...] | None = None
    """Number of blocks in each part of the pipeline; None for parts as even as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """Settings in an engine's file."""

    settings: Settings
    micro_batch: int | None
    """Samples of a microbatch on a data rank; None if the file does not give them."""
    global_batch: int | None
    """Samples of a step; None if the file does not give them."""
    seq_len: int | None
    precision: str
    unread: tuple[str, ...]
    """Names of entries that were not read."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Values of levers as text, by name."""
    options: tuple[str, ...] = ()
    """Options of the engine; those that change nothing of its execution do not count."""
    engine: "Engine | None" = None
    """Engine that the file gives the training to; None for the one that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of an engine's settings files."""

    suffixes: tuple[str, ...]
    """File name suffixes."""
    values: Callable[[str], Mapping[str, Any]]
    """Function that returns the named values in a file's text. Raises `ValueError` or `SyntaxError` if it has another
    form."""
    read: Callable[["Entries", ModelChain, int], FileSettings]
    """Function that returns the settings that these values are, given the model and the number of devices. Raises
    `UserError` if they are invalid."""
    mark: Callable[[str], object] | None = None
    """Function that tells, from a file's text, whether it is for this engine and no other with the same suffix."""
    untold: tuple[str, ...] = ()
    """Names of levers that such files cannot state; a note says the assumed values."""


def literal(node: ast.expr) -> Any:
    """Return the value of an expression in Python, or its text if it is not a literal."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def python_function(text: str, name: str | None) -> str:
    """Return the code of one function of a Python file that configures a run, with those of the file that it calls and
    values in place of the file's constants; the whole file without a name.

    Raises `UserError` if the file has several such functions and the name is none of them, and `SyntaxError`.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = {
        each: [
            call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        ]
        for each, node in functions.items()
    }
    called = {each for names in calls.values() for each in names}
    known = [each for each, node in functions.items() if each not in called and _configures(node)]
    if name is None and len(known) < 2:
        return text
    if name not in functions:
        raise UserError(
            field="--from",
            found=f"{name or 'no name'} for one of {len(known)} functions",
            expected="FILE.py:FUNCTION",
            hint=f"name one of {', '.join(known[:5])}{', …' * (len(known) > 5)}"
            if name is None
            else nearest(name, known),
        )
    chosen, waiting = list[str](), [name]
    while waiting:
        chosen.append(waiting.pop())
        waiting += [each for each in calls[chosen[-1]] if each in functions and each not in (*chosen, *waiting)]
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    module = ast.Module(body=[*kept, *(functions[each] for each in reversed(chosen))], type_ignores=[])
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    constants = {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node.value.value
        for node in assigned
        if isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        for field_name, value in ast.iter_fields(node):
            if isinstance(value, ast.Name) and isinstance(value.ctx, ast.Load) and value.id in constants:
                setattr(node, field_name, ast.Constant(constants[value.id]))
    return ast.unparse(module)


def _configures(function: ast.FunctionDef) -> bool:
    """Return whether a function assigns to attributes or returns an object that it makes with keywords."""
    return any(
        (isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute))
        or (isinstance(each, ast.Return) and isinstance(each.value, ast.Call) and bool(each.value.keywords))
        for each in ast.walk(function)
    )


def flattened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the entries of its inner mappings by ``name.key``."""
    return {
        f"{name}.{key}" if key else str(name): value
        for name, part in content.items()
        for key, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def yaml_values(software: str) -> Callable[[str], Mapping[str, Any]]:
    """Return a function that reads the named values in YAML for this software, without empty ones."""

    def values(text: str) -> Mapping[str, Any]:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
        if not isinstance(content, dict):
            raise ValueError(f"not a mapping with the keys of {software}")
        return {name: value for name, value in flattened(content).items() if value is not None and value != ""}

    return values


_FILLED = "write the number that the trainer fills in, or give the trainer's file that names this one"
_SET = "write the value into the file, or set its variable there to one value"


class Entries:
    """Named values of a file that record which of them were read."""

    def __init__(self, values: Mapping[str, Any], path: Path | None = None) -> None:
        self.values, self._path, self._read, self._skipped = values, path, set[str](), set[str]()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these names that the file has."""
        self._read |= {*names}
        return next((self.values[name] for name in names if name in self.values), default)

    def skip(self, *names: str) -> None:
        """Note names whose values change neither settings nor price."""
        self._skipped |= {*names}

    def skip_like(self, pattern: str) -> None:
        """Note as `skip` all names that match a regular expression."""
        self.skip(*(name for name in self.values if re.fullmatch(pattern, name)))

    def refuse(self, refused: Mapping[str, tuple[str, str]]) -> None:
        """Raise `UserError` for the first entry that is set: these map it to what was expected, and to a hint."""
        for name, (expected, hint) in refused.items():
            found = {each: value for each, value in self.values.items() if each.partition(".")[0] == name and value}
            if found:
                value = found.get(name, ", ".join(each.partition(".")[2] for each in found))
                raise UserError(field=name, found=str(value), expected=expected, hint=hint)

    def text_of(self, name: str) -> str:
        """Return the text of the file that an entry names: in a folder of this file's path, or the working directory.

        Raises `UserError` if there is none.
        """
        named = str(self.get(name))
        folders = [] if self._path is None else self._path.resolve().parents
        try:
            return read_text(next(filter(Path.is_file, (folder / named for folder in (Path(), *folders)))))
        except (StopIteration, OSError, ValueError):
            raise UserError(
                field=name,
                found=named,
                expected="a file in the working directory, the folder of the settings file or one above it",
                hint="copy it there, or write its path into the file",
            ) from None

    def number(self, *names: str, default: int = 1, least: int = 1) -> int:
        """Return that value as a whole number of ``least`` or more. Raises `UserError` if it is none."""
        value = self.get(*names, default=default)
        text = "" if isinstance(value, bool) else str(value)
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            raise UserError(
                field=names[0],
                found=repr(value),
                expected=f"a whole number of {least} or more",
                hint=_FILLED if value == "auto" else _SET,
            )
        return int(text)

    def text(self, *names: str, default: str = "") -> str:
        """Return that value as text. Raises `UserError` for a variable of a shell that has no value."""
        value = str(self.get(*names, default=default))
        if "$" in value:
            raise UserError(field=names[0], found=repr(value), expected="a value", hint=_SET)
        return value

    def number_or_none(self, *names: str) -> int | None:
        """Return that value as a whole number, or None if the file does not have it or leaves it open."""
        value = self.get(*names)
        return None if value is None or str(value) in ("auto", "-1") else self.number(*names)

    def is_skipped(self, name: str) -> bool:
        """Return whether `skip` noted a name."""
        return name in self._skipped

    @property
    def are_unknown(self) -> bool:
        """Whether no value was read, as in a file of other software."""
        return self._read.isdisjoint(self.values)

    @property
    def unread(self) -> tuple[str, ...]:
        """Entries that were not read, by name, in the order of the file."""
        return tuple(name for name in self.values if name not in self._read | self._skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A lever as an engine runs it; the engine's writer translates it."""

    refuse: Callable[[Any], str | None] = lambda lever: None
    """Function that returns why the engine does not run a value, in words that follow its name; None if it does."""
    dimensions: frozenset[Dimensions] | None = None
    """Sets of parallelism dimensions that may share a layer with this lever; None: all that the engine has."""
    execution: Callable[[Execution], Execution] = lambda execution: execution
    """Function that returns the execution with this lever."""
    effects: Callable[[Effects], Effects] = lambda effects: effects
    """Function that returns the lever's effects as they are in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of an engine that users set in addition to a plan."""

    change: "Callable[[Engine], Engine]"
    """Function that returns the engine with the option."""
    result: Result | None = None
    """Effect on the training result; None if `advise` does not propose the option: a usual default, or for benchmarks
    only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Software that runs plans."""

    name: str
    capabilities: Capabilities
    """Plans that it can run."""
    execution: Execution = OURS
    """Execution of plans, as far as it changes time or memory; the default is that of `steelyard.runtime`."""
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    dimensions_in: Mapping[Precision, frozenset[Dimensions]] = field(default_factory=dict)
    """Sets of parallelism dimensions that may share a layer in a precision; all of the engine if it is missing."""
    refuse: Callable[[ModelChain, int], None] = lambda chain, seq_len: None
    """Function that raises `UserError` if the engine cannot train a model or length; called before any search."""
    targets: tuple[Target, ...] = ()
    """Ways to write a plan for it."""
    reader: Reader | None = None
    """Reader of its settings files; None if they are not supported."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options by name. They are part of the engine's name, ``megatron+deepep``, and therefore recorded in the plan."""
    levers: Mapping[str, Taken] = field(default_factory=dict)
    """Supported levers by name; an engine that ``mixes_layers`` runs all others as our runtime does."""

    def lever_refusal(self, lever: Lever) -> str | None:
        """Return why the engine does not run this value of a lever, in words that follow its name; None if it does."""
        taken = self.levers.get(lever.name)
        if taken is None:
            return None if self.capabilities.mixes_layers else ""
        return taken.refuse(lever)

    def running(self, levers: Levers, precision: Precision) -> "Engine":
        """Return the engine as it runs these levers in this precision."""
        taken = [self.levers[lever.name] for lever in levers if lever.name in self.levers]
        dimensions, execution = self.capabilities.dimensions, self.execution
        for each in (self.dimensions_in.get(precision), *(each.dimensions for each in taken)):
            dimensions = dimensions if each is None else dimensions & each
        for lever in taken:
            execution = lever.execution(execution)
        return replace(self, capabilities=replace(self.capabilities, dimensions=dimensions), execution=execution)

    def effects(self, levers: Levers) -> Effects:
        """Return the memory and traffic of these levers outside the work of layers."""
        taken = (self.levers[lever.name] for lever in levers if lever.name in self.levers)
        return reduce(lambda found, lever: lever.effects(found), taken, levers.effects)

    def with_options(self, chosen: Sequence[str]) -> "Engine":
        """Return the engine with these of its options. Raises `UserError` if it does not have one of them, or if a
        later one undoes it."""
        found = self
        for name in chosen:
            if name not in self.options:
                raise UserError(
                    field="--engine",
                    found=f"{self.name}+{name}",
                    expected=f"{self.name} without options"
                    + (", or with + and any of: +" + ", +".join(self.options)) * bool(self.options),
                    hint=nearest(name, self.options) if self.options else "leave the option out",
                )
            found = self.options[name].change(found)
        if undone := [name for name in chosen if self.options[name].change(found) != found]:
            raise UserError(
                field="--engine",
                found="+".join([self.name, *chosen]),
                expected=f"+{undone[0]} without an option that undoes it",
                hint=f"leave +{undone[0]} out, or the other one",
            )
        return replace(found, name="+".join([self.name, *chosen]))

    def executing(self, **changes: Any) -> "Engine":
        """Return the engine with these fields of its execution changed."""
        return replace(self, execution=replace(self.execution, **changes))

    def with_kernels(self, **changes: Any) -> "Engine":
        """Return the engine with these fields of its kernels changed."""
        assert self.execution.kernels is not None, "an engine with its own modules"
        return self.executing(kernels=replace(self.execution.kernels, **changes))


BALANCED = "balanced"
"""Name of `BALANCING`."""
BALANCING = Option(change=lambda engine: engine.executing(balances_experts=True))
"""Option that makes routers distribute tokens evenly, for benchmarks."""


def options_in(engine: str | None) -> tuple[str, ...]:
    """Return the options in the name of an engine."""
    return tuple((engine or "").split("+")[1:])
