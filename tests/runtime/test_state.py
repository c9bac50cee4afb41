"""Tests that every parameter of every family keeps the name of the unmodified model under any plan."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steelyard
from steelyard.errors import InvalidCheckpointError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model
from steelyard.modules.own_proof import Built, own_model
from steelyard.runtime import checkpoint
from steelyard.runtime.state import parameter_names
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import one_process

ALL = FAMILY_CONFIGS | {"llama-tied": CONFIGS["llama-tied"]}


def chain_of(name: str) -> ModelChain:
    return chain_from_config(ALL[name], name=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_layers_hold_exactly_what_the_model_saves(name: str) -> None:
    chain = chain_of(name)
    model = build_meta_model(chain)
    without_ties = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    expected = model.state_dict().keys() & without_ties
    assert set(parameter_names(chain).by_path.values()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_of_what_layers_share_all_but_the_first_are_copies(name: str) -> None:
    chain = chain_of(name)
    names = parameter_names(chain)
    copies = {path: names.by_path[path] for path, number in names.copy_of_path.items() if number}
    expected = {}
    for shared in chain.shared:
        (first_layer, first_path), *others = shared.copies
        expected |= {f"{layer}.{path}": names.by_path[f"{first_layer}.{first_path}"] for layer, path in others}
    assert copies == expected


def test_a_tied_head_is_a_copy_of_the_embedding() -> None:
    names = parameter_names(chain_of("llama-tied"))
    assert (
        names.by_path["0.model__embed_tokens.weight"]
        == names.by_path["3.lm_head.weight"]
        == "model.embed_tokens.weight"
    )
    assert names.copy_of_path["3.lm_head.weight"] == 1
    assert names.num_copies == 2


class Forgetful(nn.Module):
    """Module that does not use the result of one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.forgotten, self.head = (nn.Linear(8, 8) for _ in range(3))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.forgotten(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_a_parameter_without_a_gradient_has_a_state_in_a_checkpoint(tmp_path: Path) -> None:
    sample = torch.randn(4, 8), torch.randn(4, 8)
    own = own_model(Built(module=Forgetful(), sample=sample, loss=functional.mse_loss)).split
    sizes: dict[str, Any] = {"num_devices": 1, "num_microbatches": 1, "seq_len": own.seq_len, "global_batch": 4}
    sizes |= {"levers": {"offload": "parameters"}}  # under FSDP
    plan = make_plan(None, "single, single, single, single", split=own, **sizes)
    with one_process():
        trainer = steelyard.parallelize(Forgetful(), plan, loss=functional.mse_loss)
        optimizers = trainer.make_optimizers(partial(torch.optim.Adam, lr=0.1))
        trainer.train_step(lambda samples: (sample[0][samples], sample[1][samples]))
        for optimizer in optimizers:
            optimizer.step()
        steelyard.save_checkpoint(trainer, optimizers, tmp_path / "checkpoint")
        assert dict(trainer.named_parameters())["0.model.forgotten.weight"].grad is None
        steelyard.load_checkpoint(trainer, optimizers, tmp_path / "checkpoint")
        states = {path: optimizers[0].state[each]["step"].item() for path, each in trainer.named_parameters()}
        assert {path for path, step in states.items() if step == 0} == {
            "0.model.forgotten.weight",
            "0.model.forgotten.bias",
        }


TOKENS = torch.arange(2 * 17).view(2, 17) % 64


def _tiny(num_layers: int, optimizer: Any = torch.optim.AdamW) -> tuple[steelyard.ParallelModel, list[Any]]:
    plan = make_plan(
        CONFIGS["llama"] | {"num_hidden_layers": num_layers},
        ", ".join(["single"] * (num_layers + 2)),
        num_devices=1,
        num_microbatches=1,
        seq_len=16,
        global_batch=2,
    )
    trainer = steelyard.parallelize(build_meta_model(plan.chain()), plan)
    optimizers = trainer.make_optimizers(partial(optimizer, lr=0.1))
    trainer.train_step(lambda samples: TOKENS[samples])
    for each in optimizers:
        each.step()
    return trainer, optimizers


def test_a_checkpoint_of_a_larger_model_or_another_optimizer_is_refused(tmp_path: Path) -> None:
    with one_process():
        steelyard.save_checkpoint(*_tiny(2), tmp_path)
        steelyard.load_checkpoint(*_tiny(2), tmp_path)
        steelyard.load_checkpoint(_tiny(2, torch.optim.SGD)[0], [], tmp_path)  # only its weights
        with pytest.raises(InvalidCheckpointError, match=r"found optimizer\.lm_head\.weight\.exp_avg, "):
            steelyard.load_checkpoint(*_tiny(2, torch.optim.SGD), tmp_path)
        with pytest.raises(InvalidCheckpointError, match=r"found model\.model\.layers\.1\."):
            steelyard.load_checkpoint(*_tiny(1), tmp_path)


def test_an_interrupted_save_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_process():
        trainer, optimizers = _tiny(1)
        steelyard.save_checkpoint(trainer, optimizers, tmp_path)
        (tmp_path / "mine").touch()
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        trainer.num_steps = 5
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "_replace_files", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                steelyard.save_checkpoint(trainer, optimizers, tmp_path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
        steelyard.save_checkpoint(trainer, optimizers, tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == before.keys()
        trainer.num_steps = 0
        steelyard.load_checkpoint(trainer, optimizers, tmp_path)
        assert trainer.num_steps == 5


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_process(), pytest.raises(InvalidCheckpointError, match=r"could not be written to .*file"):
        steelyard.save_checkpoint(*_tiny(1), tmp_path / "file")
