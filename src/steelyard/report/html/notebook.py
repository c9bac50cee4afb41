"""Public results in notebooks: fragments of the pages, with their style."""

from functools import singledispatch

from steelyard.plan.choices import Advice, Explanation, Found, PlanStudy, TradeOffs
from steelyard.plan.plan import Plan, headline
from steelyard.report.html import markup
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.explore_page import plan_layers
from steelyard.report.html.markup import Child, section, table, tag
from steelyard.report.html.page import summary
from steelyard.report.html.trade_off import frontier_content
from steelyard.report.tables import advice_cells

_ADVICE = ("change", "least memory", "saves", "step", "result")


def fragment(value: object) -> str:
    """Return a plan, trade-offs or advice as HTML with scoped style."""
    return markup.fragment(_content(value))


@singledispatch
def _content(value: object) -> Child:
    raise TypeError(f"{type(value).__name__} has no view for notebooks")


@_content.register
def _(value: Plan) -> Child:
    nothing = PlanStudy(scope="", explanation=Explanation(binds=""))
    head = tag("p", headline(value)) if value.prediction is None else None
    shown = head or summary(ReportContents(plan=value, plan_file="", study=nothing))
    return [shown, section("layers", "The plan", plan_layers(value))]


@_content.register
def _(value: TradeOffs) -> Child:
    return frontier_content(value)


@_content.register
def _(value: Found) -> Child:
    rows = [advice_cells(each) for each in (value.own, *value.changes)]
    missing = [*value.left_out, *(f"{each} (no time was left)" for each in value.untried)]
    left_out = [tag("p", f"not tried: {each}", class_="hint") for each in missing]
    return [table(_ADVICE, rows, numeric=(1, 2, 3)), *left_out]


@_content.register
def _(value: Advice) -> Child:
    return table(_ADVICE, [advice_cells(value)], numeric=(1, 2, 3))
