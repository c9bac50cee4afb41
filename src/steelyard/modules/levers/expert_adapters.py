"""Adapters of stacked experts, in peft's modules, as grouped products of the rows of each expert.

Peft adds $B_e A_e$ to the matrix of every expert, so a layer keeps its whole matrices twice until its backward pass.
Here $(x A_e^T) B_e^T$ is added to the product, which also works with matrices in few bits.

Legend of shapes: E experts, A inputs, B outputs of a matrix, R rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from steelyard.modules.experts import ADDED, IMPLEMENTATION


class ExpertAdapters(ParamWrapper):
    """Adapters of one of the stacked matrices of experts; state and names are those of its base class."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        config = getattr(self.get_base_layer(), "config", None)
        if getattr(config, "_experts_implementation", IMPLEMENTATION) != IMPLEMENTATION:  # outside of our runtime
            with super()._activate_lora(active_adapters):
                yield
            return
        (name,) = active_adapters
        wide, narrow = self.lora_A[name].weight, self.lora_B[name].weight
        inner_EAR = wide.view(self.num_experts, -1, wide.size(1)).transpose(1, 2)  # noqa: N806
        outer_ERB = narrow.view(narrow.size(0), -1, self.num_experts).permute(2, 1, 0)  # noqa: N806
        added = self.get_base_layer().__dict__.setdefault(ADDED, {})
        added[self.parameter_name] = (inner_EAR, outer_ERB, self.scaling[name])
        try:
            yield
        finally:
            del added[self.parameter_name]


def put_in(module: nn.Module) -> None:
    """Let peft's wrappers of stacked matrices in a module compute as here, in place."""
    for each in module.modules():
        if type(each) is ParamWrapper:
            each.__class__ = ExpertAdapters
