"""Plans that the plain PyTorch script trains on a few processes, compared with the runtime in one process.

``python -m tests.engines.script_cases FOLDER RESULT.json`` trains every case whose file is in the folder, all in one
launch and one world of `NUM_RANKS` forks.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from steelyard.engines import target_of
from steelyard.engines.pytorch import SCRIPT
from steelyard.engines.writing import Request, export_plan
from steelyard.model.read import load_config
from steelyard.model.small import small_config, without_dropout
from steelyard.plan.plan import Plan
from tests.modules.split_configs import split_config
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

NUM_RANKS = 4
TOKENS, IMAGES = "tokens.npy", "images"


def _plan(config: dict[str, Any], *stages: str, **configs: Any) -> Callable[[], Plan]:
    """Build the plan on demand, because its model is split then, which collecting does not wait for."""
    options = {"num_devices": NUM_RANKS, "num_microbatches": 2, "global_batch": 8} | configs
    return cache(partial(make_plan, config, *stages, **options))


def _small(name: str) -> dict[str, Any]:
    """A packaged model at small width, with two blocks."""
    config = without_dropout(small_config(load_config(name)[1]))
    config |= {key: 2 for key in ("num_hidden_layers", "n_layer") if key in config}
    return config | {key: value[:2] for key, value in config.items() if key == "layer_types"}


_DROPPED = ("attention_dropout", "attention_probs_dropout_prob", "dropout", "dropout_rate", "hidden_dropout_prob")


def _unpackaged(name: str) -> dict[str, Any]:
    """A small model of a type that is not packaged: the script knows it by its structure alone."""
    return split_config(name) | dict.fromkeys(_DROPPED, 0.0)


_LLAMA = CONFIGS["llama"] | {"num_hidden_layers": 4}
_TIED = CONFIGS["llama-tied"]
_SLIDES_ONCE = _small("command-r7b") | {"layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, Callable[[], Plan]] = {
    "one stage": _plan(
        _LLAMA,
        "fsdp4, dp4 remat=full, tp4+sp, fsdp2-tp2+sp remat=selective, tp2-fsdp2, dp2-tp2",
        num_microbatches=1,
    ),
    "microbatches": _plan(_LLAMA, "dp4, fsdp4 zero2, dp2-tp2, tp2-dp2 remat=selective, fsdp4, tp4", num_microbatches=2),
    "hybrid sharding": _plan(
        _LLAMA,
        "dp2-fsdp2, dp2-fsdp2 remat=full, dp2-fsdp2 zero2, fsdp4 zero1, dp2-fsdp2 zero1 remat=selective, dp2-fsdp2",
    ),
    "1f1b": _plan(
        _LLAMA, "fsdp2 zero1, tp2+sp, dp2 remat=full", "dp2, tp2 remat=selective, tp2+sp", num_microbatches=4
    ),
    "gpipe": _plan(_LLAMA, "single", "single, single", "single, single", "single", schedule="gpipe"),
    "interleaved": _plan(
        _TIED, "fsdp2", "tp2+sp", "dp2", "fsdp2", num_chunks=2, schedule="interleaved-1f1b", num_microbatches=4
    ),
    "tied, alike": _plan(_TIED, "fsdp2-tp2, dp4, fsdp4, fsdp2-tp2+sp"),
    "tied, unlike": _plan(_TIED, "tp4+sp, dp4, fsdp4, tp2-dp2"),
    "tied, two stages": _plan(_TIED, "fsdp2, dp2", "tp2, tp2+sp"),
    "tied, two stages, alike": _plan(_TIED, "fsdp2, dp2", "tp2, fsdp2"),
    "bf16": _plan(_LLAMA, "dp4, fsdp4, fsdp2-tp2+sp remat=selective, dp4, tp4 remat=full, fsdp4", precision="bf16"),
    **{
        name: _plan(FAMILY_CONFIGS[name], "fsdp4, tp2-dp2, tp4+sp remat=full, fsdp2-tp2+sp")
        for name in ("gpt_neox", "gemma", "gemma2", "gemma3_text", "mistral", "qwen2", "qwen3")
    },
    **{name: _plan(FAMILY_CONFIGS[name], "dp4, fsdp4, dp4 remat=full, fsdp4") for name in ("mixtral", "qwen3_moe")},
    **{
        name: _plan(_small(name), "fsdp2, tp2+sp", "tp2 remat=full, dp2")
        for name in ("command-r-35b", "granite-3.3-8b", "olmo2-1b", "phi-3-mini", "starcoder2-3b")
    },
    "glm-4-9b-0414": _plan(_small("glm-4-9b-0414"), "tp2+sp, fsdp2", "tp2+sp remat=full, tp2+sp"),
    "command-r7b": _plan(_SLIDES_ONCE, "fsdp2, tp2+sp", "tp2 remat=full, dp2"),
    "smollm3-3b": _plan(_small("smollm3-3b") | {"no_rope_layers": [1, 0]}, "fsdp2, tp2+sp", "tp2 remat=full, dp2"),
    "bert": _plan(FAMILY_CONFIGS["bert"], "tp2, fsdp2", "tp2+sp remat=full, tp2+sp"),
    "vit": _plan(FAMILY_CONFIGS["vit"], "fsdp4, tp2-dp2, fsdp2-tp2 remat=full, tp2-fsdp2", seq_len=17),
    "t5": _plan(
        FAMILY_CONFIGS["t5"],
        *("fsdp2, tp2", "dp2 remat=full, tp2 remat=full", "tp2, fsdp2 remat=selective", "tp2"),
        num_chunks=2,
        schedule="interleaved-1f1b",
    ),
    "swin": _plan(
        FAMILY_CONFIGS["swin"], "fsdp2, tp2, dp2 remat=full, fsdp2", "tp2, dp2, tp2", seq_len=64, schedule="gpipe"
    ),
    "gpt2": _plan(_small("gpt2"), "tp2+sp, dp2", "fsdp2 remat=full, tp2+sp"),
    **{
        name: _plan(_small(name), "fsdp2, dp2", "fsdp2 remat=full, dp2")
        for name in ("deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "olmoe-1b-7b")
    },
    "falcon-7b": _plan(
        _small("falcon-7b"), "fsdp4, tp2-dp2+sp, dp2-tp2 remat=full, tp4"
    ),  # writes into what tp returns
    **{name: _plan(_unpackaged(name), "tp2, fsdp2", "tp2+sp remat=full, tp2+sp") for name in ("codegen", "electra")},
    "opt": _plan(_unpackaged("opt"), "fsdp2, dp2", "fsdp2 remat=full, dp2"),
    "dinov2": _plan(_unpackaged("dinov2"), "fsdp2, dp2 remat=full", "fsdp2, dp2", seq_len=17),
    **{
        name: _plan(_unpackaged(name), "fsdp2, fsdp2 remat=full, dp2, fsdp2", "dp2, fsdp2, dp2")
        for name in ("bart", "switch_transformers")  # of the last, ranks choose other experts
    },
}

NIGHTLY = {
    *("gemma", "gemma2", "mistral", "qwen2", "qwen3", "mixtral", "command-r-35b", "olmo2-1b", "starcoder2-3b"),
    *("smollm3-3b", "deepseek-v2-lite", "olmoe-1b-7b", "codegen", "opt", "microbatches", "tied, two stages, alike"),
    *("dinov2", "electra", "granite-3.3-8b", "bart", "gpipe", "tied, two stages", "tied, alike", "glm-4-9b-0414"),
    *("gpt-oss-20b", "1f1b", "command-r7b", "phi-3-mini", "gpt_neox", "deepseek-v3", "swin"),
}
"""The script knows models by their structure, of which others have each part; others divide as these do, and tie as
they do ("interleaved", "tied, unlike"). Those of two stages run under 1f1b."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
STRATEGIES = [*CASES][: [*CASES].index("bf16") + 1]
"""The cases that differ in what divides a model; a second step finds nothing of the others, which differ in the model.
"""


def content_of(plan: Plan) -> dict[str, Any]:
    """Content that the script reads, as exported for a plan."""
    files = dict(export_plan(target_of("pytorch"), Request(plan=plan, headline="the plan", unsupported=())).files)
    return next(json.loads(content) for name, content in files.items() if name.endswith(".json"))


def write_contents(folder: Path, names: Collection[str]) -> None:
    """Write the files that the script reads, for these cases."""
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(content_of(CASES[name]())))


def script() -> ModuleType:
    """The script as a module."""
    spec = spec_from_file_location("train_plan", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_data(folder: Path) -> None:
    """Token ids, and images of two classes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    np.save(folder / TOKENS, generator.integers(0, 64, 32 * 60 + 1).astype(np.uint16))
    for number in range(12):
        place = folder / IMAGES / f"class {number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(place / f"{number}.png")


def num_steps(name: str) -> int:
    """The steps of a case."""
    return 2 if name in STRATEGIES else 1


def options(plan: Plan, folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Training options of a case, for the script and the runtime."""
    data, metrics = folder / (TOKENS if plan.chain().family.task.reads_text else IMAGES), folder / f"{name}.jsonl"
    rate: Mapping[str, Any] = {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 1.0, "seed": 3}
    return {"data": data, "metrics": metrics, "steps": steps, "mask_token": 5, **rate}


def train_cases(_rank: int, names: Sequence[str], folder: Path) -> None:
    """Train some cases on this rank."""
    import torch

    from tests.runtime.processes import one_of_many_cases

    module = script()
    for name in names:
        read = module.Plan(folder / f"{name}.json")
        with one_of_many_cases():
            chosen = options(CASES[name](), folder, name, num_steps(name))
            module.train(read, torch.device("cpu"), Namespace(**chosen))


def main(folder: Path, result: Path) -> None:
    """Train every case whose file is in the folder, leave metrics there, and return the names."""
    from steelyard.modules.build import build_meta_model
    from tests.runtime.processes import run_world

    names = [name for name in CASES if (folder / f"{name}.json").is_file()]
    for name in names:  # so that the forks find imported what that takes
        build_meta_model(CASES[name]().chain())
    run_world(NUM_RANKS, partial(train_cases, names=names, folder=folder))
    result.write_text(json.dumps(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
