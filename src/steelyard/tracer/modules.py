"""Traces a chain of plain `torch.nn.Module` blocks, given as they are: no family, no config, no strategies but remat.

Blocks that are alike (`steelyard.modules.structure`) are one kind and traced once. Each maps one tensor, samples first,
to the tensor that the next one reads. The blocks may be on the meta device; they are not changed.

Not traced: tensor and sequence parallelism, which need a plan of how modules are divided; blocks of several tensors.
"""

import copy
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from steelyard.errors import InvalidModelError
from steelyard.modules.remat import REMAT_CONTEXTS
from steelyard.modules.structure import kinds_by_structure, signature
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import Remat
from steelyard.profiles.profile import LayerProfile, Profile, ProfileIdentity
from steelyard.tracer.counting import Operations
from steelyard.tracer.layer import Observation, count_passes, make_fake, observation
from steelyard.tracer.trace import SIZES, layer_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """The profile of every kind of block, and for each block in order the name of its kind: ``kind 0``, ``kind 1``…"""

    profile: Profile
    kinds: tuple[str, ...]

    def of_block(self, block: int) -> LayerProfile:
        """The profile of one block."""
        found = self.profile.layer(self.kinds[block], {})
        assert found is not None
        return found


def trace_modules(blocks: Sequence[nn.Module], sample: Tensor, *, precision: Precision = "bf16") -> ModuleTrace:
    """The trace of a chain of blocks; ``sample`` is what the first block reads, for one sample, without values.

    Blocks are alike where they have one structure and read tensors of one shape. Raises `InvalidModelError` for no
    blocks, or one that does not return a tensor.
    """
    if not blocks:
        raise InvalidModelError(field="blocks", found="none", expected="one or more modules", hint="give the chain")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    structure = kinds_by_structure(blocks)
    shape, entering = sample, {}
    numbers: dict[tuple[int, torch.Size, torch.dtype], int] = {}
    kinds: list[int] = []
    for place, block in enumerate(blocks):
        key = (structure[place], shape.shape, shape.dtype)
        if key not in numbers:
            numbers[key] = len(numbers)
            entering[numbers[key]] = (block, shape)
        kinds.append(numbers[key])
        shape = _output_of(block, shape, place, dtype)
    layers = []
    operations = Operations()
    for number, (block, given) in entering.items():
        seen = [_observe(block, given, samples, dtype, operations, reads_ids=number == 0) for samples in SIZES]
        layers.append(layer_profile(f"kind {number}", {}, seen))
    identity = _identity(blocks, sample, precision)
    return ModuleTrace(
        profile=Profile(identity=identity, layers=tuple(layers)), kinds=tuple(f"kind {kind}" for kind in kinds)
    )


def _output_of(block: nn.Module, given: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """What a block returns for one sample, on the meta device."""
    module = copy.deepcopy(block)
    with FakeTensorMode(allow_non_fake_inputs=False):
        make_fake(module, dtype)
        output = module(_fake(given, 1, dtype))
    if not isinstance(output, Tensor):
        raise InvalidModelError(
            field=f"blocks[{place}]",
            found=f"a block that returns {type(output).__name__}",
            expected="blocks that map a tensor to a tensor",
            hint="wrap the block in a module that picks the hidden state",
        )
    return torch.empty(output.shape[1:], dtype=output.dtype, device="meta")


def _fake(given: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
    kind = dtype if given.is_floating_point() else given.dtype
    return torch.empty((samples, *given.shape), dtype=kind, device="cpu")


def _observe(
    block: nn.Module, given: Tensor, samples: int, dtype: torch.dtype, operations: Operations, *, reads_ids: bool
) -> Observation:
    module = copy.deepcopy(block)
    with FakeTensorMode(allow_non_fake_inputs=False):
        make_fake(module, dtype)
        runs = []
        for remat in (Remat.NONE, Remat.SELECTIVE):
            inputs = _fake(given, samples, dtype)
            inputs.requires_grad_(inputs.is_floating_point() and not reads_ids)
            runs.append(
                count_passes(module, lambda x=inputs, r=remat: (_run(module, x, r),), inputs=(inputs,), seen=operations)
            )
        return observation(module, *runs)


def _run(module: nn.Module, inputs: Tensor, remat: Remat) -> Tensor:
    if remat is Remat.NONE:
        return module(inputs)
    return checkpoint(module, inputs, use_reentrant=False, context_fn=REMAT_CONTEXTS[remat])


def _identity(blocks: Sequence[nn.Module], sample: Tensor, precision: Precision) -> ProfileIdentity:
    content = repr([signature(block) for block in blocks]).encode()
    return ProfileIdentity(
        method="traced",
        model_name="modules",
        config_hash=hashlib.sha256(content).hexdigest()[:16],
        seq_len=sample.shape[0] if sample.dim() else 1,
        precision=precision,
        device="any",
        num_devices=1,
        torch=torch.__version__,
        transformers=transformers.__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
