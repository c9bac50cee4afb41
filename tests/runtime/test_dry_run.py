"""Tests that a rank on fake tensors holds what a real process holds, and that its terms name it."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from steelyard.errors import UserError
from steelyard.plan.plan import Plan
from steelyard.runtime.dry_run import RankMemory, distinct_ranks, dry_run
from tests.runtime.dry_run_worker import CASES, WORLD_SIZE, plan_of
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import run_ranks

UNSEEN_BYTES = 64
"""The numbers of a mesh's ranks, which are real tensors in both but made outside the dry run."""
SENT_BYTES = 4 * 32 * 64 * 4
"""An activation that one process has sent may still be held while the other takes it."""


def on_host(plan: Plan, rank: int, *, every_microbatch: bool = False) -> RankMemory:
    return dry_run(plan, rank, backend="gloo", every_microbatch=every_microbatch)


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, list[int]]]]:
    """The peaks of every rank and case in a launch of their own."""
    plan_of(next(iter(CASES)))  # splits the model: a proof has ranks of its own
    return lambda: run_ranks(
        "tests.runtime.dry_run_worker:measured_by_rank", WORLD_SIZE, tmp_path_factory.mktemp("dry_run")
    )


@pytest.fixture(scope="module")
def measured(measure: Callable[[], list[dict[str, list[int]]]]) -> list[dict[str, list[int]]]:
    return measure()


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_peaks_are_those_of_real_processes(
    measured: list[dict[str, list[int]]], measure: Callable[[], list[dict[str, list[int]]]], name: str
) -> None:
    plan = plan_of(name)
    slack = UNSEEN_BYTES + (SENT_BYTES if len(plan.stages) > 1 else 0)
    ranks = [stage.ranks[0] for stage in plan.stages]
    found = [(each.first_step, each.later_steps) for each in (on_host(plan, rank) for rank in ranks)]
    expected = [[peak.total_bytes for peak in peaks] for peaks in found]

    def more_bytes(real: list[dict[str, list[int]]]) -> list[int]:
        pairs = zip(expected, (real[rank][name] for rank in ranks), strict=True)
        return [more - bytes_ for peaks, mores in pairs for bytes_, more in zip(peaks, mores, strict=True)]

    more = more_bytes(measured)
    if max(more) > slack:  # a collective ended late (see `measured_bytes`)
        more = [min(pair) for pair in zip(more, more_bytes(measure()), strict=True)]
    assert min(more) >= 0
    assert max(more) <= slack


def small_plan(*stages: str, num_microbatches: int = 3, num_devices: int = 2, **options: str) -> Plan:
    return make_plan(
        "llama-tied",
        *stages,
        num_microbatches=num_microbatches,
        global_batch=4 * num_microbatches,
        num_devices=num_devices,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("stages", [("fsdp2, tp2, dp2, fsdp2 zero2",), ("single, single", "single, single")])
def test_microbatches_that_repeat_others_need_not_run(stages: tuple[str, ...]) -> None:
    plan = small_plan(*stages, num_microbatches=6)
    rank = plan.stages[-1].ranks[0]
    shortened, whole = (on_host(plan, rank, every_microbatch=every) for every in (False, True))
    for few, all_of_them in zip(
        (shortened.first_step, shortened.later_steps), (whole.first_step, whole.later_steps), strict=True
    ):
        assert few.total_bytes == pytest.approx(all_of_them.total_bytes, abs=UNSEEN_BYTES)


@pytest.mark.slow
def test_terms_of_states_are_16_bytes_a_parameter_over_the_shards() -> None:
    plan = small_plan("fsdp2, fsdp2, fsdp2, fsdp2", num_microbatches=1)
    terms = on_host(plan, 0).later_steps.terms
    sizes = CONFIGS["llama-tied"]
    hidden, inner, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    block = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    params = 2 * block + 2 * vocabulary * hidden + hidden
    assert terms["parameters"] == 4 * params / 2
    assert terms["optimizer"] == pytest.approx(8 * params / 2, abs=4 * 30)


@pytest.mark.slow
def test_the_second_step_begins_without_gathered_parameters() -> None:
    stage = ", ".join(["fsdp8 remat=full"] * 8)
    plan = make_plan("llama", stage, num_microbatches=1, global_batch=8, seq_len=8, precision="bf16")
    assert on_host(plan, 0).later_steps.where.startswith("backward")


@pytest.mark.slow
def test_the_first_step_lacks_optimizer_states_alone_until_they_exist() -> None:
    plan = small_plan("fsdp2, fsdp2, fsdp2, fsdp2")  # whose peak is not where the optimizer makes its states
    found = on_host(plan, 0)
    assert found.first_step.terms.get("optimizer", 0) < found.later_steps.terms["optimizer"]
    assert found.first_step.total_bytes < found.later_steps.total_bytes


@pytest.mark.slow
def test_every_rank_of_unlike_stages_runs_on_fake_tensors() -> None:
    plan = make_plan("llama-tied", "fsdp2, tp2", "single, single", sizes=(2, 1))
    first, _, last = (on_host(plan, rank) for rank in range(plan.num_devices))
    assert 1.9 < last.later_steps.terms["optimizer"] / first.later_steps.terms["optimizer"] < 2.1


@pytest.mark.slow
def test_an_embedding_with_a_buffer_has_no_second_table() -> None:
    config = FAMILY_CONFIGS["gemma3_text"] | {"vocab_size": 8192}
    plan = make_plan(config, ", ".join(["single"] * 4), num_devices=1, num_microbatches=2, global_batch=2, seq_len=8)
    table_bytes = 4 * config["vocab_size"] * config["hidden_size"]
    found = on_host(plan, 0).later_steps.terms
    assert table_bytes < found["parameters"] < 2 * table_bytes  # which the head has too
    assert 2 * table_bytes < found["optimizer"] < 3 * table_bytes
    assert found["activations"] < table_bytes


@pytest.mark.slow
def test_gpipe_holds_every_microbatch() -> None:
    activations = {
        schedule: on_host(
            small_plan("single, single, single", "single", num_microbatches=6, schedule=schedule), 0
        ).later_steps.terms["activations"]
        for schedule in ("gpipe", "1f1b")
    }
    assert activations["gpipe"] > 2 * activations["1f1b"]


def test_a_process_with_a_group_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="process group"):
            on_host(small_plan("fsdp2, fsdp2, fsdp2, fsdp2"), 0)
    finally:
        dist.destroy_process_group()


# which ranks stand for all


def test_ranks_that_divide_all_parameters_evenly_are_alike() -> None:
    groups = distinct_ranks(make_plan("llama-tied", "fsdp4, tp2-fsdp2", "fsdp4, dp4"))
    assert [(group.rank, group.stage, group.ranks) for group in groups] == [
        (0, 0, (0, 1, 2, 3)),
        (4, 1, (4, 5, 6, 7)),
    ]


def test_ranks_with_smaller_shards_are_told_apart() -> None:
    config = CONFIGS["llama-tied"] | {"vocab_size": 250}
    groups = distinct_ranks(make_plan(config, "fsdp8, fsdp8, fsdp8, fsdp8"))
    assert [group.ranks for group in groups] == [(0, 1, 2, 3, 4, 5, 6), (7,)]


@pytest.mark.slow
def test_a_rank_with_smaller_shards_holds_no_more() -> None:
    config = CONFIGS["llama-tied"] | {"vocab_size": 250}
    plan = make_plan(config, "fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=1)
    first, last = (on_host(plan, rank).later_steps.terms for rank in (0, 7))
    assert last["parameters"] <= first["parameters"]
    assert sum(last.values()) <= sum(first.values())
