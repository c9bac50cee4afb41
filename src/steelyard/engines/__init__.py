"""Engines: the software that runs plans, with one module for each.

`engine` defines an engine, from the values in `capabilities`, `execution`, `settings` and `writing`; `peft` has the
levers that several engines share. `native` is our own runtime, whose targets are in `pytorch` and `launch`. A new
engine is one module and one entry of `ENGINES`; software that drives another engine through its own files is one of
`FRONT_ENDS`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from steelyard.engines import (
    accelerate,
    automodel,
    axolotl,
    deepspeed,
    llama_factory,
    megatron,
    megatron_bridge,
    ms_swift,
    native,
    torchtitan,
    transformers,
)
from steelyard.engines.engine import Engine
from steelyard.engines.writing import Target
from steelyard.errors import UserError, nearest
from steelyard.hardware import Device
from steelyard.levers import Asked, Levers
from steelyard.model.chain import ModelChain
from steelyard.precision import Precision

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        native.NATIVE,
        torchtitan.TORCHTITAN,
        megatron.MEGATRON,
        megatron.MEGATRON_FSDP,
        megatron_bridge.MEGATRON_BRIDGE,
        automodel.AUTOMODEL,
        accelerate.ACCELERATE,
        transformers.TRANSFORMERS,
        deepspeed.DEEPSPEED,
    )
}
FRONT_ENDS: Mapping[Target, Engine] = {
    axolotl.TARGET: axolotl.ENGINE,
    llama_factory.TARGET: llama_factory.ENGINE,
    ms_swift.MEGATRON_TARGET: ms_swift.SWIFT,
    ms_swift.TRAINER_TARGET: ms_swift.TRAINER,
}
"""Software that drives an engine through its own files, by the target that writes them."""
READERS: Mapping[str, Engine] = {
    **{engine.name: engine for engine in ENGINES.values() if engine.reader is not None},
    axolotl.TARGET.name: axolotl.ENGINE,
    llama_factory.TARGET.name: llama_factory.ENGINE,
    "megatron in YAML": replace(megatron.MEGATRON, reader=megatron.YAML_READER),
}
"""Engines whose files of settings are read, by the name of the software that the files are for."""
_ENGINES_OF: Mapping[Target, Engine] = {
    **{target: engine for engine in ENGINES.values() for target in engine.targets},
    **FRONT_ENDS,
}
ENGINE_OF_TARGET: dict[str, Engine] = {target.name: engine for target, engine in _ENGINES_OF.items()}
"""Engine that runs the files of a target, by the target's name."""
TARGETS: dict[str, Target] = {target.name: target for target in _ENGINES_OF}

Value = TypeVar("Value")


def engine_of(name: str) -> Engine:
    """Return the engine of a name, with options as in ``megatron+deepep``. Raises `UserError` if it is unknown."""
    plain, *options = name.split("+")
    if plain in TARGETS and plain not in ENGINES:
        raise UserError(
            field="--engine",
            found=f"{plain!r}, which starts {ENGINE_OF_TARGET[plain].name}",
            expected="one of " + ", ".join(ENGINES),
            hint=f"plan with --engine {ENGINE_OF_TARGET[plain].name}, then write the plan with export --to {plain}",
        )
    found = _named(plain, ENGINES, "--engine")
    return found.with_options(options) if options else found


def model_refusal(engine: Engine, chain: ModelChain, seq_len: int) -> UserError | None:
    """Return why the engine cannot train the model, for the option ``--engine``, with others that can; or None."""
    error = _refusal(engine, chain, seq_len)
    if error is None:
        return None
    others = (each for each in ENGINES.values() if each != native.NATIVE)
    able = ", ".join(each.name for each in others if _refusal(each, chain, seq_len) is None)
    return UserError(
        field="--engine",
        found=f"{engine.name} for {error.found.partition(' for ')[2]}",  # of the target whose files it takes
        expected=error.expected,
        hint=f"plan {f'for {able}, or ' if able else ''}without --engine, then {error.hint}",
    )


def check_model(engine: Engine, chain: ModelChain, seq_len: int) -> None:
    """Raise `model_refusal` if there is one."""
    if (error := model_refusal(engine, chain, seq_len)) is not None:
        raise error


def _refusal(engine: Engine, chain: ModelChain, seq_len: int) -> UserError | None:
    try:
        engine.refuse(chain, seq_len)
    except UserError as error:
        return error
    return None


def check_levers(
    levers: Levers,
    chain: ModelChain,
    engine: Engine,
    devices: tuple[Device, ...] = (),
    precision: Precision | None = None,
) -> None:
    """Raise `UserError` for the first lever that the engine, the model or the devices (if known) do not support."""
    known = tuple(ENGINES.values())
    levers.check(
        Asked(chain=chain, engine=engine, engines=known, levers=levers.texts, devices=devices, precision=precision)
    )


def target_of(name: str) -> Target:
    """Return the target of a name. Raises `UserError` if it is unknown."""
    return _named(name, TARGETS, "--to")


def _named(name: str, known: dict[str, Value], field: str) -> Value:
    if name not in known:
        raise UserError(
            field=field,
            found=repr(name),
            expected="one of " + ", ".join(known) + (", or list" if field == "--to" else ""),
            hint=nearest(name, known),
        )
    return known[name]
