"""Tests that cached operations match PyTorch's own rules, and are dropped if they would not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.fake_op_cache import FakeOpCache, look
from steelyard.plan.strategy import parse_strategy
from steelyard.tracer.counting import OpCounter, Operations
from steelyard.tracer.layer import TracedLayer, fake_world, observe
from tests.runtime.family_chain import chain_of, length_of

aten = torch.ops.aten


class Forgetful(FakeOpCache[Any]):
    """Runs every operation."""

    def find(self, key: Any) -> None:
        return None


def answered_twice(func: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the result of an operation when run, when answered from memory (None if it is not), and of what."""
    seen: FakeOpCache[str] = FakeOpCache()
    with FakeTensorMode():
        first, second = make(), make()
        looks = look(func, first, {})
        out = func(*first)
        if looks is None:
            return out, None, second
        seen.remember(looks, (func, first, {}), out, "note")
        again = look(func, second, {})
        assert again is not None
        found = seen.find(again[0])
        return out, found.again(again[1]) if found is not None else None, second


def same_look(one: Tensor, other: Tensor) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("shape", "dtype", "device", "layout", "requires_grad")
    ) and (one.stride(), one.storage_offset(), one.untyped_storage().nbytes()) == (
        other.stride(),
        other.storage_offset(),
        other.untyped_storage().nbytes(),
    )


def tensor() -> Tensor:
    return torch.empty(4, 6, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.mm.default, lambda: (tensor(), tensor().t())),
        (aten.add.Tensor, lambda: (tensor(), 1.5)),
        (aten.div.Tensor, lambda: (torch.empty(3, dtype=torch.long), 2)),
        (aten.native_layer_norm.default, lambda: (tensor(), [6], None, None, 1e-5)),
        (aten.cat.default, lambda: ([tensor(), tensor()], 1)),
        (aten.sum.dim_IntList, lambda: (tensor().expand(3, 4, 6), [0, 1])),
        (aten._to_copy.default, lambda: (tensor()[1:],)),
    ],
)
def test_a_result_from_memory_looks_like_the_first_and_has_a_storage_of_its_own(
    func: Any, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    first, again, given = answered_twice(func, arguments)
    pairs = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
    storages = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
    for expected, found in pairs:
        assert same_look(expected, found)
        assert found.untyped_storage()._cdata not in storages


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.view.default, lambda: (tensor(), [24])),
        (aten.t.default, lambda: (tensor(),)),
        (aten.slice.Tensor, lambda: (tensor(), 0, 1, 3)),
        (aten.split.Tensor, lambda: (tensor(), 2)),
        (aten.expand.default, lambda: (tensor()[:1], [5, 6])),
        (aten._unsafe_view.default, lambda: (tensor(), [2, 12])),
    ],
)
def test_a_view_from_memory_lies_on_the_storage_of_its_argument(
    func: Any, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    first, again, given = answered_twice(func, arguments)
    for expected, found in zip(first, again, strict=True) if isinstance(first, list) else [(first, again)]:
        assert same_look(expected, found)
        assert found.untyped_storage()._cdata == given[0].untyped_storage()._cdata


def test_an_operation_in_place_returns_its_argument() -> None:
    _, again, given = answered_twice(aten.add_.Tensor, lambda: (tensor(), tensor()))
    assert again is given[0]


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.t_.default, lambda: (tensor(),)),
        (aten.resize_.default, lambda: (tensor(), [2])),
        (aten.add_.Tensor, lambda: (x := tensor(), x)),
        (aten.ones.default, lambda: ([3],)),
        (aten.add.Tensor, lambda: (torch.tensor(2), 1)),
    ],
    ids=["changes its argument", "changes a storage", "the same argument twice", "no tensor", "a known value"],
)
def test_what_does_not_follow_from_looks_is_not_remembered(func: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
    _, again, _ = answered_twice(func, arguments)
    assert again is None


def test_a_result_that_depends_on_values_has_no_look() -> None:
    with FakeTensorMode():
        assert look(aten.nonzero.default, (tensor(),), {}) is None
        assert look(aten._local_scalar_dense.default, (tensor(),), {}) is None


def test_calls_that_return_unlike_results_look_unlike() -> None:
    with FakeTensorMode():
        whole = torch.empty(4, 6, dtype=torch.long)
        others = [
            (whole, 1),
            (whole, 1.0),
            (whole, True),
            (whole.t(), 1),
            (whole[:2], 1),
            (whole[2:], 1),
            (torch.empty(2, 6, dtype=torch.long), 1),
            (whole.float(), 1),
        ]
        looks = [look(aten.add.Tensor, each, {}) for each in others]
        named = look(aten.add.Tensor, others[0], {"alpha": 2})
    keys = [each[0] for each in [*looks, named] if each is not None]
    assert len(set(keys)) == len(others) + 1


def test_an_operation_seen_before_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Operations()
    with FakeTensorMode():
        left, right = tensor(), tensor().t()
        with OpCounter(seen) as first:
            torch.mm(left, right)
        monkeypatch.setattr(FakeTensorMode, "dispatch", _refuse)
        with OpCounter(seen) as second:
            assert torch.mm(left, right).shape == (4, 4)
    assert first.counts == second.counts
    assert [size for _, size in first.log] == [size for _, size in second.log]


def _refuse(*_: Any) -> None:
    raise AssertionError("the operation is run again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "sp"),
    [("llama", 2, True), ("mixtral", 2, True), ("t5", 1, False)],
)
def test_a_layer_answered_from_memory_is_observed_as_one_that_is_run(name: str, tp: int, sp: bool) -> None:
    chain = chain_of(name)
    model = build_meta_model(chain)
    prepare_model(model, chain)
    remembering = Operations()
    with fake_world(tp) as mesh:
        run, again, answered = (
            observe(
                TracedLayer(
                    chain=chain,
                    layer=chain.num_layers - 2,
                    seq_len=length_of(chain),
                    precision="bf16",
                    mesh=mesh,
                    strategy=parse_strategy("single" if tp == 1 else f"tp{tp}" + "+sp" * sp),
                    model=model,
                    seen=seen,
                ),
                (2,),
            )
            for seen in (Forgetful(), remembering, remembering)
        )
    assert run == again == answered
