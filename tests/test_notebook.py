"""Test that the examples' notebook runs cell by cell without Jupyter, with displayed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.levers import Levers
from steelyard.plan.choices import Advice, Found
from steelyard.plan.plan import notebook_html
from tests.cost.examples import cluster, job, plan
from tests.report.html.examples import HOSTILE, pipelined, trade_offs

NOTEBOOK = Path(__file__).parents[1] / "examples" / "plan.ipynb"
CONTENT = json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def advice(options: str = "") -> Advice:
    return Advice(
        options=options, result="exact", least_bytes=2**30, saved_bytes=2**20, step_s=2.0, slowdown=0.5, missing_bytes=0
    )


def test_it_has_the_format_of_notebooks() -> None:
    assert (CONTENT["nbformat"], CONTENT["nbformat_minor"]) == (4, 5)
    assert {*CONTENT} == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert len({cell["id"] for cell in CONTENT["cells"]}) == len(CONTENT["cells"])
    for cell in CONTENT["cells"]:
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert {*cell} == {"cell_type", "id", "metadata", "source"} | own
        assert all(each["output_type"] in ("execute_result", "stream") for each in cell.get("outputs", []))


@pytest.mark.slow
def test_every_cell_runs_in_order() -> None:
    names: dict[str, Any] = {}
    for cell in CONTENT["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["plan"].step_s > 0


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (pipelined().plan, "Train it in 2 pipeline stages"),
        (
            plan(job(cluster(1, 4)), "fsdp4, fsdp4, fsdp4, fsdp4, fsdp4, fsdp4", num_microbatches=4),
            "<b>fsdp4</b> on 6 layers",
        ),
        (trade_offs(), "Least step time within a memory budget"),
        (Found(advice(), (advice("--loss chunked"),), (HOSTILE,), ()), "--loss chunked"),
        (Found(advice(), (), (), ("--compile blocks",)), "no time was left: --compile blocks"),
        (advice("--loss chunked"), "2.00 s"),
    ],
    ids=["plan", "plan without prediction", "trade-offs", "found", "untried", "advice"],
)
def test_results_show_themselves_with_a_style_of_their_own(value: Any, holds: str) -> None:
    shown = value._repr_html_()
    assert holds in shown
    assert "<script>alert" not in shown
    assert shown.startswith('<div class="steelyard"><style>@scope {')
    assert ":root" not in shown
    assert "\nbody {" not in shown


def test_a_value_without_a_view_is_an_error() -> None:
    with pytest.raises(TypeError, match="Levers has no view"):
        notebook_html(Levers.of({}))
