"""Tests of the largest size that fits: it fits, the next one does not, and refusals."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.plan.decisions import Decisions
from steelyard.planning.choose import plan_request
from steelyard.planning.job import job_of
from steelyard.planning.largest import MOST_TRIED, kinds, largest
from steelyard.planning.request import PlanRequest, make_request


def ask(levers: Mapping[str, str | None], **changes: object) -> PlanRequest:
    given = {"global_batch": 1, "seq_len": 128, "memory": "2GiB", "levers": levers, **changes}
    return make_request("llama-demo", "1x1xa100-40gb", **given)


def fits(request: PlanRequest) -> bool:
    return plan_request(request, job_of(request)).plan is not None


@pytest.mark.parametrize("levers", [{}, {"optimizer": "sgd"}])
def test_the_largest_batch_fits_and_one_sample_more_does_not(levers: dict[str, str]) -> None:
    tried: list[str] = []
    request = ask(levers)
    found = largest("batch", request, ask, progress=tried.append)
    at_once = replace(request, decisions=Decisions(num_microbatches=1))
    assert fits(replace(at_once, global_batch=found.size))
    assert found.too_large == found.size + 1
    assert not fits(replace(at_once, global_batch=found.too_large))
    assert len(tried) <= MOST_TRIED


def test_the_largest_batch_is_shared_evenly_by_the_devices() -> None:
    request = make_request("llama-demo", "1x4xa100-40gb", global_batch=1, seq_len=128, memory="2GiB")
    found = largest("batch", request, ask)
    assert found.size > 4
    assert (found.size % 4, found.too_large) == (0, found.size + 4)


@pytest.mark.slow
def test_the_largest_rank_fits() -> None:
    levers = {"train": "lora:r=4,alpha=4"}
    found = largest("rank", ask(levers), ask)
    text = found.options.partition("--train ")[2]
    assert f"r={found.size},alpha={found.size}" in text
    assert fits(ask({"train": text}))


def test_the_longest_sequence_fits() -> None:
    longest = largest("seq-len", ask({}), ask)
    assert longest.too_large is not None
    assert fits(replace(ask({}), seq_len=longest.size))
    assert not fits(replace(ask({}), seq_len=longest.too_large))


def test_an_optimizer_that_keeps_less_never_makes_the_largest_smaller() -> None:
    sizes = [largest("batch", ask(levers), ask).size for levers in ({}, {"optimizer": "sgd"})]
    assert sizes == sorted(sizes)


def test_a_rank_needs_adapters() -> None:
    assert kinds() == ("seq-len", "batch", "model", "rank")
    with pytest.raises(UserError, match="rank without --train"):
        largest("rank", ask({}), ask)


def ask_of_type(levers: Mapping[str, str | None], name: str = "gpt2", memory: str = "11GiB") -> PlanRequest:
    return make_request(name, "1x1xa100-40gb", global_batch=1, seq_len=128, memory=memory, levers=levers)


def test_the_largest_model_of_a_type_fits_and_the_next_does_not() -> None:
    tried: list[str] = []
    found = largest("model", ask_of_type({}), ask_of_type, progress=tried.append)
    assert (found.size, found.too_large) == ("gpt2-medium", "gpt2-xl")
    assert fits(ask_of_type({}, str(found.size)))
    assert not fits(ask_of_type({}, "gpt2-xl"))
    assert {*tried} <= {f"trying {name}" for name in ("gpt2", "gpt2-medium", "gpt2-xl", "gpt3-175b")}


def test_a_larger_model_fits_with_its_parameters_on_the_host_as_far_as_that_reaches() -> None:
    levers = {"offload": "parameters"}
    assert largest("model", ask_of_type(levers), ask_of_type).size == "gpt2-xl"
    group = replace(parse_cluster("1x1xa100-40gb").groups[0], host_memory_bytes=8 * 2**30)

    def with_host(levers: Mapping[str, str | None], name: str = "gpt2") -> PlanRequest:
        made = ask_of_type(levers, name)
        return replace(made, cluster=replace(made.cluster, groups=(group,)))

    assert largest("model", with_host(levers), with_host).size == "gpt2-medium"


def test_where_no_size_fits_it_is_said() -> None:
    small = partial(ask, memory="530MiB")
    with pytest.raises(UserError, match="batch 1, which takes"):
        largest("batch", small({}), small)


def test_the_largest_batch_is_found_where_one_sample_has_no_plan() -> None:
    """An engine of data ranks alone needs a sample on each of them."""

    def of_accelerate(levers: Mapping[str, str | None]) -> PlanRequest:
        given = {"global_batch": 2, "seq_len": 128, "memory": "2GiB", "levers": levers}
        return make_request("llama-demo", "1x2xa100-40gb", engine="accelerate", **given)

    size = largest("batch", of_accelerate({}), of_accelerate).size
    assert isinstance(size, int)
    assert size % 2 == 0
    assert fits(replace(of_accelerate({}), global_batch=size))
