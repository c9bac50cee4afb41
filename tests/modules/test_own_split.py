"""Tests of the split of users' own modules, and of errors that name the place and the operation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import steelyard
from steelyard.errors import InvalidModelError
from steelyard.modules.own_proof import Built, own_model
from steelyard.modules.own_split import check_same_module, find_own_split
from steelyard.plan.decisions import Decisions
from tests.modules.own_models import CASES, NanoBlock, NanoGPT, TitanLlama, TwoTowers, UNet

pytestmark = pytest.mark.slow


def split_of(name: str) -> Any:
    case = CASES[name]
    return own_model(Built(module=case.module(), sample=case.sample, loss=case.loss, blocks=case.blocks)).split


def error_of(module: nn.Module, sample: Any, loss: Any = functional.mse_loss, blocks: Any = None) -> str:
    with pytest.raises(InvalidModelError) as caught:
        own_model(Built(module=module, sample=sample, loss=loss, blocks=blocks))
    return str(caught.value)


def test_a_tied_table_is_shared_by_embedding_and_head() -> None:
    assert split_of("nanogpt").shared == (((0, "model.transformer.wte.weight"), (5, "model.transformer.wte.weight")),)


def test_blocks_in_a_dictionary_that_know_their_place_are_of_one_type() -> None:
    own = split_of("titan")
    assert own.blocks == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert own.layers == (0, 1, 1, 1, 1, 2)


def test_a_rotary_table_is_given_to_blocks_and_does_not_flow() -> None:
    own = split_of("titan")
    assert own.kinds[1].shapes == ((16, 32),)
    assert own.side_bytes == (16 * 4 * 8, 0)
    assert not own.kinds[1].reads_samples


def test_attention_and_mlp_of_plain_matrices_take_tensor_parallelism() -> None:
    for name in ("titan", "dit"):
        layer_type = split_of(name).kinds[1]
        assert {"columns", "rows"} <= set(layer_type.styles.values())
        assert 4 in dict(layer_type.tp_divides).values()
    assert dict(split_of("titan").kinds[1].tp_divides)["n_kv_heads of attention"] == 2


def test_of_fused_attention_only_the_mlp_takes_tensor_parallelism() -> None:
    styles = split_of("nanogpt").kinds[1].styles
    assert {path for path, style in styles.items() if style in ("columns", "rows")} == {
        "block.mlp.c_fc",
        "block.mlp.c_proj",
    }


def test_of_a_sequence_the_like_items_are_blocks() -> None:
    own = split_of("sequential")
    assert own.blocks == ("1", "2", "3", "4")
    assert own.embedding == ("0.weight", "0.bias")


def test_a_condition_flows_beside_the_hidden_state_into_every_block_and_the_head() -> None:
    own = split_of("dit")
    assert [layer_type.shapes for layer_type in own.kinds] == [((16, 32), (32,)), ((16, 32), (32,)), ()]
    assert own.last_made == (("made", 3, 0), ("given", 0, 1))


def test_long_skips_flow_through_the_blocks_between() -> None:
    assert [len(layer_type.shapes) for layer_type in split_of("unet").kinds] == [1, 1, 2, 2, 1, 0]


def test_two_towers_are_one_chain_along_which_the_finished_and_the_waiting_flow() -> None:
    own = split_of("towers")
    assert own.blocks == ("vision.0", "vision.1", "text.0", "text.1")
    image, text = (16, 32), (16, 16)
    assert [sorted(own.type_of(layer).shapes) for layer in range(6)] == [*[sorted((image, text))] * 5, []]


def test_a_second_tower_that_begins_between_blocks_is_refused_by_its_operation() -> None:
    case = CASES["towers"]
    error = error_of(TwoTowers(text_before_blocks=False), case.sample, blocks=case.blocks)
    assert "text.0: found an argument that is made by embedding in tokens between two blocks" in error


def test_a_second_tower_that_is_not_named_is_refused_with_what_to_name() -> None:
    error = error_of(TwoTowers(), CASES["towers"].sample)
    assert "text.0.norm: found layer_norm after the blocks" in error
    assert "belongs to another list of blocks, name every list: blocks=(…, …)" in error


def test_a_skip_that_is_joined_between_blocks_is_refused_by_its_operation() -> None:
    case = CASES["unet"]
    error = error_of(UNet(joins_in_block=False), case.sample)
    assert "blocks.2: found an argument that is made by add in the module itself between two blocks" in error
    assert "move the operation into the block" in error


class Stack(nn.Module):
    """Blocks, and whatever a test does around them."""

    def __init__(self, around: Callable[[Any, Any], Any] | None = None, **modules: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.blocks = nn.ModuleList([NanoBlock() for _ in range(2)])
        self.head = nn.Linear(32, 3)
        self.around = around
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        if self.around is not None:
            h = self.around(self, h)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


SAMPLE = CASES["sequential"].sample


def with_branch(_module: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h


calls = iter(range(1000))


def with_other_operations(_module: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if next(calls) % 2 else h + 1


class Scale(nn.Module):
    """A module with one parameter."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)


def with_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("mean", torch.zeros(()))
    return module


def with_mean(module: Any, h: torch.Tensor) -> torch.Tensor:
    module.mean.lerp_(h.detach().mean(), 0.1)
    return h - module.mean


def with_unused(_module: Any, h: torch.Tensor) -> torch.Tensor:
    return h


class Tied(Stack):
    """Module whose head reads an attribute of the embedding's matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) + functional.linear(h, self.stem.weight.T)[..., :3]


def test_a_matrix_that_the_head_reads_transposed_is_shared() -> None:
    own = own_model(Built(module=Tied(), sample=SAMPLE, loss=functional.mse_loss)).split
    assert own.shared == (((0, "model.stem.weight"), (3, "model.stem.weight")),)


class Turned(Stack):
    """Module that transposes the activation between two blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h.mT.mT)
        return self.head(h)


class Doubled(Stack):
    """Module whose blocks return their result twice."""

    class Block(NanoBlock):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = super().forward(x)
            return x, x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h, _ = block(h)
        return self.head(h)


class Remembering(NanoBlock):
    """Block that passes a tensor on in a dictionary, or as an attribute."""

    def forward(self, x: torch.Tensor, kept: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        x = super().forward(x)
        if kept is None:
            self.size = x.square().mean(dim=(1, 2))
        else:
            x = x + kept.pop("x", 0)
            kept["x"] = x * 2
        return x


class Leaking(Stack):
    """Module whose blocks have results that they do not return."""

    def __init__(self, *, by_attribute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering() for _ in range(2)])
        self.by_attribute = by_attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, kept = self.stem(x), None if self.by_attribute else {}
        for block in self.blocks:
            h = block(h, kept)
        added = sum(block.size for block in self.blocks) if self.by_attribute else torch.zeros(len(h), device=h.device)
        return self.head(h) + added[:, None, None]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Doubled, ("blocks.0: found a block that returns a tensor twice", "return it once")),
        (lambda: Leaking(by_attribute=True), ("mean in blocks.0 inside a block", "return the tensor from that block")),
        (lambda: Leaking(by_attribute=False), ("mul in blocks.0 inside a block", "return the tensor from that block")),
        (Turned, ("made by mT in the module itself between two blocks", "move the operation into the block")),
        (lambda: Stack(with_branch), ("needs tensor values", "torch.where")),
        (lambda: Stack(with_other_operations), ("in one pass but", "in every pass")),
        (lambda: with_buffer(Stack(with_mean)), ("mean: found a buffer", "changes in place")),
        (lambda: Stack(with_unused, extra=nn.Linear(2, 2)), ("extra.weight", "does not use")),
        (lambda: Stack(norm=nn.BatchNorm1d(4)), ("norm: found BatchNorm1d", "GroupNorm")),
        (lambda: nn.Linear(8, 3), ("Linear without a list of modules", "blocks=")),
        (lambda: Stack(norm=Scale(torch.tensor(1.0))), ("norm.scale", "a parameter of shape []", "reshape(1)")),
        (lambda: Stack(norm=Scale(torch.ones(3, 2).mT)), ("norm.scale", "strides [1, 2]", ".contiguous()")),
        (lambda: Stack(lambda _, h: h + torch.ones(32)), ("device cpu", "constant.to(x.device)")),
        (lambda: Stack().half(), ("parameter of torch.float16", "float32")),
    ],
)
def test_what_does_not_split_is_named(module: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    error = error_of(module(), SAMPLE)
    assert all(each in error for each in words), error


class Gated(Stack):
    """Module whose part after the blocks reads a tensor made from parameters before them, without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        gate = (h.detach().mean(-1, keepdim=True) > 0).float()
        for block in self.blocks:
            h = block(h)
        return self.head(h * gate)


def test_what_is_read_past_the_blocks_without_gradient_is_refused() -> None:
    assert "a loss that reads a tensor computed from parameters before the blocks" in error_of(Gated(), SAMPLE)


def test_a_tensor_that_is_an_attribute_is_named() -> None:
    module = Stack()
    module.table = torch.zeros(3)
    assert 'self.register_buffer("table"' in error_of(module, SAMPLE)


def test_a_block_that_is_called_twice_is_named() -> None:
    module = NanoGPT()
    module.transformer.h[1] = module.transformer.h[0]
    case = CASES["nanogpt"]
    assert "called" in error_of(module, case.sample, case.loss, blocks="transformer.h")


def test_a_loss_that_is_no_mean_over_samples_is_told_with_both_figures() -> None:
    error = error_of(Stack(), SAMPLE, lambda outputs, targets: (outputs - targets).square().sum())
    assert "loss: found" in error
    assert "mean over independently computed samples" in error


def test_a_module_is_proved_again_with_another_loss() -> None:
    own_model(Built(module=Stack(), sample=SAMPLE, loss=functional.l1_loss))
    assert "loss: found" in error_of(Stack(), SAMPLE, partial(functional.l1_loss, reduction="sum"))


def test_operations_of_blocks_and_their_numbers_are_part_of_a_split() -> None:
    class Louder(NanoBlock):
        gain = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * type(self).gain)

    def work() -> str:
        module = nn.Sequential(nn.Linear(8, 32), Louder(), Louder(), nn.Linear(32, 3))
        return find_own_split(module, SAMPLE, loss=functional.mse_loss, blocks=None).model.split.work

    first = work()
    assert work() == first
    Louder.gain = 3
    assert work() != first


def test_a_module_that_returns_no_loss_needs_one() -> None:
    error = error_of(Stack(), SAMPLE[0], None)
    assert "forward: found a tensor of shape [4, 16, 3]: 0 losses" in error
    assert "pass loss=" in error


def test_one_sample_is_not_enough_to_find_the_dim_of_samples() -> None:
    assert "2 or more" in error_of(Stack(), (SAMPLE[0][:1], SAMPLE[1][:1]))


def test_an_unknown_list_of_blocks_names_the_known_ones() -> None:
    assert "'layers'" in error_of(TitanLlama(), CASES["titan"].sample, CASES["titan"].loss, blocks="layer")


def test_a_file_that_is_run_gives_the_module_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = split_of("titan")
    for each in {type(module) for module in TitanLlama().modules() if type(module).__module__.endswith("own_models")}:
        monkeypatch.setattr(each, "__module__", "__main__")
    check_same_module(CASES["titan"].module(), planned)


def test_another_setting_of_a_block_is_refused_with_its_path() -> None:
    planned, module = split_of("titan"), CASES["titan"].module()
    module.layers["2"].attention.n_heads = 2
    with pytest.raises(InvalidModelError, match=r"found block layers\.2 of structure"):
        check_same_module(module, planned)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("place", ["", "layers.1"])
def test_what_torch_compile_returned_is_refused_with_what_to_give(place: str) -> None:
    case = CASES["titan"]
    module = case.module()
    if place:
        module.set_submodule(place, torch.compile(module.get_submodule(place)))
    else:
        module = torch.compile(module)
    expected = rf"^{place or 'model'}: found a compiled Titan\w*(?s:.*)to fix: .*_orig_mod"
    with pytest.raises(InvalidModelError, match=expected):
        own_model(Built(module=module, sample=case.sample, loss=case.loss))
    with pytest.raises(InvalidModelError, match=expected):
        check_same_module(module, split_of("titan"))


class Stock(nn.Module):
    """A module that asks its first block for settings, as `nn.TransformerEncoder` does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.stem, self.encoder, self.head = nn.Linear(8, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert all(isinstance(layer, nn.TransformerEncoderLayer) for layer in self.encoder.layers)
        weight = self.encoder.layers[0].linear1.weight
        assert all(next(each.parameters()).device == x.device for each in (self, self.encoder, self.encoder.layers[1]))
        return self.head(self.encoder(self.stem(x.to(weight.dtype))))


def test_what_a_module_asks_of_its_blocks_is_known_where_they_are_not() -> None:
    own = own_model(Built(module=Stock(), sample=SAMPLE, loss=functional.mse_loss)).split
    assert own.blocks == tuple(f"encoder.layers.{number}" for number in range(3))
    assert own.no_bf16 == ""


def test_parametrized_modules_split() -> None:
    module = Stack()
    for each in (module.stem, module.blocks[0].mlp.c_fc, module.head):
        nn.utils.parametrizations.weight_norm(each)
    own = own_model(Built(module=module, sample=SAMPLE, loss=functional.mse_loss)).split
    assert "head.parametrizations.weight.original0" in own.head


def test_a_stage_of_blocks_without_parameters_is_planned() -> None:
    module = nn.Sequential(
        nn.Linear(8, 32), NanoBlock(), nn.ReLU(), nn.ReLU(), nn.ReLU(), NanoBlock(), nn.Linear(32, 3)
    )
    asked: Any = {"sample": SAMPLE, "loss": functional.mse_loss, "global_batch": 16}
    plan = steelyard.find_plan(module, "1x4xa100-80gb", **asked, decisions=Decisions(num_stages=4))
    assert plan.num_stages == 4


def test_a_module_is_planned_in_a_process_with_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that it is proved and traced here
    module = nn.Sequential(nn.Linear(8, 32), NanoBlock(), NanoBlock(), nn.Linear(32, 3))
    asked: Any = {"sample": SAMPLE, "loss": functional.mse_loss, "global_batch": 16}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        plan = steelyard.find_plan(module, "1x2xa100-80gb", **asked)
        summed = torch.ones(1)
        dist.all_reduce(summed)
    finally:
        dist.destroy_process_group()
    assert plan.strategies == steelyard.find_plan(module, "1x2xa100-80gb", **asked).strategies


def test_a_model_of_transformers_that_is_refused_is_to_be_planned_by_its_config() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64)
    )
    error = error_of(model, CASES["nanogpt"].sample, lambda outputs, _targets: outputs.logits.sum())
    assert "for a transformers model, plan its config" in error


def test_a_module_on_the_meta_device_splits_alike() -> None:
    case = CASES["titan"]
    with torch.device("meta"):
        module = case.build()
    found = find_own_split(module, case.sample, loss=case.loss, blocks=None).model.split
    assert found.kinds == find_own_split(case.module(), case.sample, loss=case.loss, blocks=None).model.split.kinds
