"""Public results in notebooks: fragments of the pages, with their style."""

from steelyard.plan.choices import Advice, Explanation, Found, PlanStudy, TradeOffs
from steelyard.plan.plan import Plan, decision, pipeline_text
from steelyard.report.html import markup
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.explore_page import plan_layers
from steelyard.report.html.markup import section, shown, tag
from steelyard.report.html.page import summary
from steelyard.report.html.trade_off import frontier_content
from steelyard.report.tables import advice_table


def fragment(value: object) -> str:
    """Return a plan, trade-offs or advice as HTML with scoped style."""
    if isinstance(value, TradeOffs):
        return markup.fragment(frontier_content(value))
    if isinstance(value, Plan):
        nothing = PlanStudy(scope="", explanation=Explanation(binds=""))
        head = tag("p", f"{decision(value)}. {pipeline_text(value)}") if value.prediction is None else None
        head = head or summary(ReportContents(plan=value, plan_file="", study=nothing))
        return markup.fragment([head, section("layers", "The plan", plan_layers(value))])
    if not isinstance(value, Found | Advice):
        raise TypeError(f"{type(value).__name__} has no view for notebooks")
    found = value if isinstance(value, Found) else Found(value, (), (), ())
    missing = (*found.left_out, *(f"no time was left: {each}" for each in found.untried))
    left_out = [tag("p", each, class_="hint") for each in missing]
    return markup.fragment([shown(advice_table((found.own, *found.changes))), *left_out])
