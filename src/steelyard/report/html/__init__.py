"""A plan as one self-contained page: no network, no library, readable without JavaScript, in light, dark and print.

| module        | section of the page                                                          |
|---------------|------------------------------------------------------------------------------|
| `markup`      | elements whose text is escaped by construction, and the frame of a page      |
| `palette`     | colours that the colour-blind can tell apart, one for each term and strategy |
| `contents`    | all that a page shows, as one value, and what the names mean                 |
| `strategies`  | stages × layers, coloured by strategy                                        |
| `bars`        | where the time of a step goes, and what fills the memory, per stage          |
| `timeline`    | the schedule of a step, pass by pass                                         |
| `chart`       | axes, lines and points that stretch with the page                            |
| `trade_off`   | time against memory, with this plan and the others                           |
| `baselines`   | why the others lost                                                          |
| `measured`    | what a run measured beside what was predicted                                |
| `assumptions` | what the figures rest on, and what is not modelled                           |
| `page`        | the decision in a sentence with its figures, then all of them                |

`frontier_page` makes a page of trade-offs alone, `compare_page` one of two plans.
"""

from steelyard.report.html.compare_page import compare_page
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.page import report_page
from steelyard.report.html.trade_off import frontier_page

__all__ = ["ReportContents", "compare_page", "frontier_page", "report_page"]
