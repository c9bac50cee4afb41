"""Tests of when a diverging run is reported, and when it ends."""

import math
from unittest import mock

import pytest

from steelyard.runtime import divergence
from steelyard.runtime.divergence import MOST_STEPS, DivergedError, Divergence
from steelyard.runtime.options import TrainOptions


@pytest.fixture(autouse=True)
def _first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "dist", mock.Mock(get_rank=lambda: 0))


def steps(losses: list[float], norms: list[float], *, keep_going: bool = False, is_cross_entropy: bool = True) -> int:
    """Steps until the run ends; -1 where it does not."""
    watch = Divergence(TrainOptions(keep_going=keep_going), is_cross_entropy=is_cross_entropy)
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        try:
            watch.check(number + 1, loss, norm, is_skipped=norm < 0)
        except DivergedError:
            return number + 1
    return -1


MANY = 3 * MOST_STEPS


def test_a_loss_or_norm_that_is_not_finite_ends_the_run_at_its_step() -> None:
    assert steps([2.0, math.nan], [1.0, 1.0]) == 2
    assert steps([2.0, 2.0], [1.0, math.inf]) == 2


def test_steps_in_a_row_without_a_gradient_or_with_a_high_loss_end_it_after_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert steps([2.0] * MANY, [0.0] * MANY) == MOST_STEPS
    assert capsys.readouterr().out == (
        "warning: step 1: the gradient norm is 0, so nothing is trained (loss 2); the run ends after 10 such steps\n"
    )
    assert steps([2.0, *[4.1] * MANY], [1.0] * (MANY + 1)) == 1 + MOST_STEPS
    assert "step 2: the loss is 4.1, more than twice the loss of the first step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "norms", "of"),
    [
        ([2.0, 3.9], [1.0, 1.0], {}),
        ([0.01, 1.9], [1.0, 1.0], {}),
        ([2.0, 40.0], [1.0, 1.0], {"is_cross_entropy": False}),
        ([2.0, 2.0], [0.0, 1.0], {}),
        ([2.0, 2.0], [-1.0, -1.0], {}),
        ([2.0, math.nan], [1.0, math.nan], {"keep_going": True}),
        ([2.0, 40.0], [0.0, 0.0], {"keep_going": True}),
    ],
    ids=["some", "from-little", "own-loss", "now-and-then", "skipped", "nan-kept-going", "kept-going"],
)
def test_other_runs_go_on(losses: list[float], norms: list[float], of: dict[str, bool]) -> None:
    assert steps([losses[0], *losses * MANY][:MANY], [norms[0], *norms * MANY][:MANY], **of) == -1
