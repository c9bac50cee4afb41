"""A plan as one self-contained page: no network, no library, readable without JavaScript, in light, dark and print.

`page` joins its sections in order, one module each. `frontier_page` builds a page of trade-offs alone, `compare_page`
one of two plans, and `explore_page` one of solved plans to choose from.
"""

from steelyard.report.html.compare_page import compare_page
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.explore_page import explore_page
from steelyard.report.html.page import report_page
from steelyard.report.html.trade_off import frontier_page

__all__ = ["ReportContents", "compare_page", "explore_page", "frontier_page", "report_page"]
