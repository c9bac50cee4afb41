"""Tests of prediction intervals and of candidates within prediction error, as shown."""

from dataclasses import replace

from rich.console import Console, RenderableType

from steelyard.plan.file import dump_json
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Alternative, Interval
from steelyard.report.explain_view import explain_view
from steelyard.report.html import ReportContents, report_page
from steelyard.report.plan_table import answer_view
from tests.report.html.examples import pipelined


def shown(view: RenderableType) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def contents(*, as_good: float = 0.1, slower: float = 0.05) -> ReportContents:
    """A report of a plan with one alternative and one baseline, both slower by as much."""
    found = pipelined()
    step_s = found.prediction.step_time_s
    interval = Interval(low_s=0.8 * step_s, high_s=1.4 * step_s, typical=0.08, like="catalogue", as_good=as_good)
    other = Alternative(description="another", step_time_s=(1 + slower) * step_s, reason="lost")
    prediction = found.prediction.model_copy(update={"interval": interval, "alternatives": (other,)})
    explanation = found.study.explanation
    baseline = explanation.rivals[0].model_copy(update={"name": "baseline", "step_time_s": (1 + slower) * step_s})
    study = found.study.model_copy(update={"explanation": explanation.model_copy(update={"rivals": (baseline,)})})
    return replace(found, plan=found.plan.model_copy(update={"prediction": prediction}), study=study)


def without_interval(plan: Plan) -> Plan:
    assert plan.prediction is not None
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"interval": None})})


def test_the_first_lines_of_a_plan_say_where_such_runs_lie() -> None:
    plan = contents().plan
    assert plan.prediction is not None
    assert str(plan.prediction.interval) in "\n".join(shown(answer_view(plan, lost=5)).splitlines()[:4])


def test_explain_and_report_say_the_same_of_the_prediction() -> None:
    found = contents()
    sentence = str(found.prediction.interval)
    assert sentence in shown(explain_view(found.plan, found.study.explanation))
    assert sentence in report_page(found)


def test_a_candidate_within_the_error_is_as_good_in_plan_and_report() -> None:
    found = contents()
    assert "within prediction error: lost" in shown(answer_view(found.plan, lost=5))
    assert "within prediction error: lost" in report_page(found)


def test_a_candidate_beyond_it_lost() -> None:
    assert "within prediction error" not in shown(answer_view(contents(slower=0.2).plan, lost=5))


def test_explain_and_report_name_the_baselines_that_are_as_good() -> None:
    found = contents()
    line = "Within prediction error of this plan (within 10%, so either may be faster): baseline."
    assert line in shown(explain_view(found.plan, found.study.explanation))
    assert line in report_page(found)
    for slower in (0.2, -0.2):  # faster than a plan that is pinned, or made by hand
        other = contents(slower=slower)
        assert "Within prediction error of" not in shown(explain_view(other.plan, other.study.explanation))


def test_a_candidate_without_a_step_time_is_never_as_good() -> None:
    assert not contents().prediction.is_as_good(None)


def test_a_plan_file_keeps_the_interval() -> None:
    plan = contents().plan
    assert Plan.model_validate_json(dump_json(plan)).prediction == plan.prediction


def test_a_plan_that_was_written_without_an_interval_reads_and_shows_none() -> None:
    plan = Plan.model_validate_json(dump_json(without_interval(contents().plan)))
    assert plan.prediction is not None
    assert plan.prediction.interval is None
    assert "9 in 10" not in shown(answer_view(plan, lost=5))
    assert "within prediction error" not in shown(answer_view(plan, lost=5))
    assert "error unknown: no published runs like this one" in shown(answer_view(plan, lost=5))
    assert "error unknown: no published runs like this one" in report_page(replace(contents(), plan=plan))
