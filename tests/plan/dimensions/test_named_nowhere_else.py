"""Tests that only a dimension's own module and its implementation name it; others ask the registry."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import steelyard
from steelyard.plan.dimensions import DIMENSIONS, modes

SOURCE = Path(steelyard.__file__).parent
HOMES = ("plan/dimensions", "modules/dimensions")
LANGUAGE = "speaks a framework's own language"
MAY_NAME = {
    "cli/frontier.py": "--max-tp, the short form of a largest degree",
    "cli/plan.py": "--zero, the short form of a mode",
    "cli/price.py": LANGUAGE,
    "planning/settings.py": LANGUAGE,
    "engines/execution.py": "optimizers of other frameworks have ZeRO stages of their own",
    "cost/decoder.py": "has the sizes of a tensor-parallel rank's layers in closed form",
    "cost/decoder_experts.py": "the same of its experts",
    "cost/kernels.py": "changes traces of tensor parallelism into those of other frameworks' kernels",
    "engines/automodel.py": LANGUAGE,
    "engines/axolotl.py": LANGUAGE,
    "engines/deepspeed.py": LANGUAGE,
    "engines/llama_factory.py": LANGUAGE,
    "engines/accelerate.py": LANGUAGE,
    "engines/transformers.py": LANGUAGE,
    "engines/megatron.py": LANGUAGE,
    "engines/megatron_arguments.py": LANGUAGE,
    "engines/megatron_bridge.py": LANGUAGE,
    "engines/ms_swift.py": LANGUAGE,
    "engines/peft.py": LANGUAGE,
    "engines/pytorch.py": "says what its script can run",
    "engines/scripts/train_plan.py": "stands alone, without this package",
    "engines/torchtitan.py": LANGUAGE,
    "engines/writing.py": "has the degrees of one strategy by the names that frameworks give them",
    "integrations/training_arguments.py": LANGUAGE,
    "model/family.py": "has the styles of modules, as data, and looks them up",
    "model/read.py": "makes a chain of data that say how layers are divided",
    "modules/context_attention.py": "has the methods of attention over divided tokens, by name",
    "modules/own_proof.py": "proves how the blocks of a user's own module divide",
    "modules/two_ranks.py": "proves on two ranks how the modules of a split model divide",
    "runtime/observed_strategies.py": "reads back from the modules of a model what has made them so",
}
"""The modules that may, each with the reason."""

DATA = "has or reads, as data, how and why not the layers of a model divide (`LayerType`)"
THEIRS = "uses what torch, transformers or a config call so"
MAY_HOLD = {
    "engines/__init__.py": THEIRS,
    "engines/config_entries.py": THEIRS,
    "engines/engine.py": "has settings as frameworks name them",
    "integrations/planned_trainer.py": THEIRS,
    "levers/compiled_blocks.py": "says that compiled blocks with dropout are not divided",
    "levers/quantized_base.py": DATA,
    "levers/train.py": "says which layers of a model with adapters divide, and why others do not",
    "model/own.py": DATA,
    "model/split.py": DATA,
    "modules/host_memory.py": THEIRS,
    "modules/own_split.py": DATA,
    "modules/split_layer_types.py": DATA,
    "modules/split_proof.py": DATA,
    "modules/split_tp.py": THEIRS,
    "modules/replicated.py": THEIRS,
    "plan/shrink.py": DATA,
    "runtime/dry_run.py": THEIRS,
    "runtime/weights.py": THEIRS,
    "tracer/trace.py": DATA,
}
"""Other modules that may have a dimension as a part of a longer name, such as ``no_tp``, each with the reason."""

TEXTS = {text.lstrip("+") for _, mode in modes().values() for text in mode.texts.values()} - {""}
NAMES = {*DIMENSIONS, *modes(), *TEXTS}
VALUES = {name.upper() for name in DIMENSIONS}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names in a module: texts, attributes, arguments, and imports from the packages of dimensions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            package, _, home = node.module.rpartition(".")
            if package.endswith(".dimensions"):
                yield home
            if node.module.endswith(".dimensions"):
                yield from (alias.name.lower() for alias in node.names if alias.name in VALUES)


def parts_in(tree: ast.AST) -> Iterator[str]:
    """The words that a module's names are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield from node.id.lower().split("_")
        elif isinstance(node, ast.Attribute):
            yield from node.attr.lower().split("_")
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield from node.arg.split("_")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield from node.value.split("_")
        elif isinstance(node, ast.FunctionDef | ast.alias):
            yield from node.name.lower().rpartition(".")[2].split("_")


def held(source: str) -> set[str]:
    return {*DIMENSIONS, "sp"} & set(parts_in(ast.parse(source)))


def named(source: str) -> set[str]:
    return NAMES & set(names_in(ast.parse(source)))


def outside() -> dict[str, str]:
    """The modules that are no dimension's own, with their text."""
    paths = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")]
    return {path: (SOURCE / path).read_text(encoding="utf-8") for path in paths if not path.startswith(HOMES)}


@pytest.mark.slow
def test_only_modules_with_a_reason_name_a_dimension() -> None:
    found = {path: named(source) for path, source in outside().items()}
    assert {path for path, names in found.items() if names} == set(MAY_NAME), found


@pytest.mark.slow
def test_only_modules_with_a_reason_hold_a_dimension_in_a_longer_name() -> None:
    found = {path: held(source) for path, source in outside().items() if path not in MAY_NAME}
    assert {path for path, names in found.items() if names} == set(MAY_HOLD), found


def test_all_ways_to_name_a_dimension_are_seen() -> None:
    ways = {
        'degrees["tp"]': "tp",
        "view.fsdp": "fsdp",
        "Strategy.of(levels, zero=2)": "zero",
        "def style(*, sp): ...": "sp",
        "from steelyard.plan.dimensions import CP": "cp",
        "from steelyard.modules.dimensions.ep import expert_degree": "ep",
        'text.endswith("ulysses")': "ulysses",
    }
    assert {source: named(source) for source in ways} == {source: {name} for source, name in ways.items()}


def test_names_that_only_look_alike_are_not_seen() -> None:
    assert named('"data parallel", mesh.step, "cpu"; from torch.distributed import fsdp') == set()


def test_a_dimension_in_a_longer_name_is_seen() -> None:
    ways = {"kind.no_tp": "tp", "def hold(max_cp): ...": "cp", 'read("fsdp_size")': "fsdp", "NO_SP = 1": "sp"}
    assert {source: held(source) for source in ways} == {source: {name} for source, name in ways.items()}
