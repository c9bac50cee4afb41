"""Tests of predicted bytes against the live tensor storages of the real runtime, in one process."""

import gc
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.plan.plan import Plan
from steelyard.precision import Precision
from steelyard.runtime.parallel_model import parallelize_plan
from steelyard.runtime.peak_memory import LiveStorages
from steelyard.tracer.cache import cached_trace
from tests.cost.examples import chain, cluster, plan
from tests.cost.examples import job as made_up_job

LARGER = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 512}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def _job(precision: Precision, *, tied: bool = False) -> Job:
    config = LARGER | ({"tie_word_embeddings": True, "vocab_size": 8192} if tied else {})
    samples = 4 if tied else 16
    traced = cached_trace(chain(**config), seq_len=32, precision=precision, degrees=(1,))
    return made_up_job(cluster(1, 1), precision=precision, global_batch=samples, **config).on(profile=traced)


def _measured_bytes(candidate: Plan) -> int:
    model = parallelize_plan(candidate)
    optimizers = model.make_optimizers(lambda parameters: AdamW(parameters, lr=1e-3))

    def step() -> None:
        model.train_step(lambda samples: torch.zeros((len(samples), candidate.seq_len + 1), dtype=torch.long))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    gc.collect()
    states = (state.values() for optimizer in optimizers for state in optimizer.state.values())
    held = [tensor for values in states for tensor in values if isinstance(tensor, Tensor)]
    with LiveStorages([*model.parameters(), *model.chunks[0].buffers(), *held]) as meter:
        step()
    return meter.peak_bytes


_CASES = [*product(("fp32", "bf16"), ("none", "selective", "full"), (2,)), ("bf16", "none", 8)]


def _held(candidate: Plan, of: Job) -> int:
    terms = dict(predict(candidate, of).stages[0].memory_bytes)
    return sum(terms.values()) - terms["allocator slack"] - terms["context"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(("precision", "remat", "num_microbatches"), _CASES)
def test_predicted_bytes_are_an_upper_bound_and_close(
    precision: Precision, remat: str, num_microbatches: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    of = _job(precision)
    edge = "single" if remat == "selective" else f"single remat={remat}"
    blocks = [f"single remat={remat}"] * (of.chain.num_layers - 2)
    candidate = plan(of, ", ".join([edge, *blocks, edge]), num_microbatches=num_microbatches)
    predicted = _held(candidate, of)
    request.getfixturevalue("one_process")
    measured = _measured_bytes(candidate)
    assert 1.0 <= predicted / measured <= 1.2, f"{predicted / measured:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "num_microbatches"), [*product(("fp32", "bf16"), (1, 4))])
def test_a_tied_matrix_is_held_once_with_the_gradients_that_wait_for_their_sum(
    precision: Precision, num_microbatches: int, one_process: None
) -> None:
    """With one sample at once the matrix and its gradients are most of what the process holds."""
    of = _job(precision, tied=True)
    candidate = plan(of, ", ".join(["single"] * of.chain.num_layers), num_microbatches=num_microbatches)
    predicted, measured = _held(candidate, of), _measured_bytes(candidate)
    assert 1.0 <= predicted / measured <= 1.2, f"{predicted / measured:.3f}"
