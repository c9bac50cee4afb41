"""steelyard: the fastest way to train a Transformer on the available GPUs, with proof that it fits.

>>> plan = steelyard.find_plan("llama3-8b", "1x8xa100-80gb", global_batch=64, seq_len=4096)
>>> trainer = steelyard.parallelize(model, plan)      # in each process that torchrun started
>>> loss = trainer.train_step(read)

Importing this package imports no torch; `find_plan` does if the model has to be traced, `parallelize` always.
"""

import logging
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.plan.decisions import Decisions
    from steelyard.plan.file import read_plan, write_plan
    from steelyard.planning.choose import NothingFitsError
    from steelyard.planning.complete import find_plan
    from steelyard.runtime.checkpoint import load_checkpoint, save_checkpoint
    from steelyard.runtime.parallel_model import ParallelModel, parallelize
    from steelyard.runtime.weights import save_weights

__version__ = version("steelyard")

for _name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
    # no warnings about missing kernels when transformers imports them
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = [
    "Decisions",
    "NothingFitsError",
    "ParallelModel",
    "find_plan",
    "load_checkpoint",
    "parallelize",
    "read_plan",
    "save_checkpoint",
    "save_weights",
    "write_plan",
]

_HOMES = {
    "Decisions": "steelyard.plan.decisions",
    "NothingFitsError": "steelyard.planning.choose",
    "ParallelModel": "steelyard.runtime.parallel_model",
    "find_plan": "steelyard.planning.complete",
    "load_checkpoint": "steelyard.runtime.checkpoint",
    "parallelize": "steelyard.runtime.parallel_model",
    "read_plan": "steelyard.plan.file",
    "save_checkpoint": "steelyard.runtime.checkpoint",
    "save_weights": "steelyard.runtime.weights",
    "write_plan": "steelyard.plan.file",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
    if _HOMES[name].startswith("steelyard.runtime"):
        from steelyard.installed import require_training

        require_training(f"`steelyard.{name}` runs on them")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, loaded or not, so that ``dir`` and ``help`` show them."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
