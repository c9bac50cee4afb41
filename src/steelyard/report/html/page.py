"""The page itself: all sections, with style and script inside."""

from importlib.metadata import version

from steelyard.plan.plan import headline
from steelyard.report.html.assumptions import assumption_section
from steelyard.report.html.bars import memory_section, time_section
from steelyard.report.html.baselines import baseline_section
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.glossary import glossary_section
from steelyard.report.html.markup import Html, document, tag
from steelyard.report.html.measured import measured_section
from steelyard.report.html.strategies import strategy_section
from steelyard.report.html.summary import summary
from steelyard.report.html.timeline import timeline_section
from steelyard.report.html.trade_off import trade_off_section


def report_page(found: ReportContents) -> str:
    """The complete page as the text of one file that loads nothing from anywhere."""
    sections = (
        measured_section(found),
        strategy_section(found),
        time_section(found),
        memory_section(found),
        timeline_section(found),
        None if found.plan.is_mixed else trade_off_section(found),
        baseline_section(found),
        assumption_section(found),
        glossary_section(found),
    )
    title = f"{found.plan.model.name} on {found.plan.cluster}"
    content = (summary(found), *sections, _footer(found))
    return document(title, headline(found.plan), content, script="timeline.js")


def _footer(found: ReportContents) -> Html:
    name = found.plan_file
    commands = (
        ("why this plan", f"steelyard explain {name}"),
        ("does it fit, on the real runtime", f"steelyard check {name}"),
        ("run it", f"steelyard train {name} --data PATH"),
    )
    return tag(
        "footer",
        tag(
            "dl",
            [tag("div", tag("dt", what), tag("dd", tag("code", command)), class_="fact") for what, command in commands],
        ),
        tag("p", f"Written by steelyard {version('steelyard')} from {name}."),
    )
