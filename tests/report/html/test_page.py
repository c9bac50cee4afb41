"""Tests of a report page as text: its content, that it loads nothing, and that no text becomes markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from rich.console import Console, RenderableType

from steelyard.cost.efficiency import catalogue_rates
from steelyard.cost.predict import predict
from steelyard.hardware import parse_cluster
from steelyard.plan.choices import Explanation, PlanStudy
from steelyard.plan.prediction import ONE_STRATEGY, Baseline, gain_text, layers_text
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning.price import with_price
from steelyard.report.explain_view import explain_view
from steelyard.report.html import ReportContents, frontier_page, report_page
from steelyard.report.html.assumptions import _job_facts, _plan_facts
from steelyard.report.html.bars import stage_seconds, time_section
from steelyard.report.html.chart import Chart, Line, chart, staircase
from steelyard.report.html.markup import VOID
from steelyard.report.html.page import result_text
from steelyard.report.html.palette import HUES, MEMORY_COLOURS, colours, strategy_classes, time_colours
from steelyard.report.html.strategies import describe_strategy
from steelyard.report.html.timeline import MOST_PASSES, timeline_section
from steelyard.report.html.trade_off import trade_off_charts
from steelyard.report.plan_table import answer_view, gain_sentence
from steelyard.units import format_bytes, format_days, format_money, format_seconds
from tests.cost.examples import cluster, job, plan
from tests.report.html.examples import HOSTILE, measured, pipelined, single, trade_offs

SECTIONS = ("strategies", "time", "memory", "timeline", "frontier", "rivals", "assumptions", "glossary")


class Balance(HTMLParser):
    """Complains about an element that is not closed where it was opened, and collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.text, self.scripts = [], [], [], 0

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for key, value in attrs if key == "id"]
        self.scripts += name == "script"
        if name not in VOID and name not in ("meta", "link"):
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def read(page: str) -> Balance:
    found = Balance()
    found.feed(page)
    found.close()
    assert not found.open
    return found


@pytest.mark.parametrize("found", [pipelined(), single(), single(with_job=False), measured(pipelined())])
def test_every_element_is_closed_and_every_name_is_there_once(found: ReportContents) -> None:
    page = read(report_page(found))
    assert len(set(page.ids)) == len(page.ids)


def test_no_text_of_a_file_becomes_markup() -> None:
    page = report_page(measured(pipelined()))
    assert "<script>alert" not in page
    assert read(page).scripts == 2  # the data of the timeline, and the script of the page
    assert HOSTILE in "".join(read(page).text)


@pytest.mark.parametrize("page", [report_page(pipelined()), frontier_page(trade_offs())])
def test_a_page_loads_nothing_from_elsewhere(page: str) -> None:
    assert re.findall(r"<(?:script|link|img|iframe|object)[^>]*(?:src|href|data)=", page) == []
    assert "@import" not in page
    assert "url(" not in page


def test_a_page_of_trade_offs_is_whole_and_no_text_of_it_becomes_markup() -> None:
    page = read(frontier_page(trade_offs()))
    assert page.scripts == 0
    assert HOSTILE in "".join(page.text)
    assert {"panel-0", "panel-1", "panel-2", "panel-3", "numbers"} <= set(page.ids)
    assert "cost of 10⁹ tokens" in "".join(page.text)


def test_offers_are_drawn_over_what_they_cost_from_zero_on() -> None:
    found = trade_offs()
    offers = tuple(each.model_copy(update={"is_worth_having": True}) for each in found.devices if each.step_time_s)
    page = frontier_page(found.model_copy(update={"points": (), "devices": (), "offers": offers}))
    assert "Least time for the money" in page
    first = re.search(r'class="tick x"[^>]*>([^<]+)<', page)
    assert first is not None
    assert first[1] == "0"


def test_all_sections_are_there() -> None:
    assert [name for name in read(report_page(pipelined())).ids if name in SECTIONS] == list(SECTIONS)


def test_a_run_adds_measured_values_beside_predicted_ones() -> None:
    found = measured(pipelined())
    text = "".join(read(report_page(found)).text)
    assert "Predicted and measured" in text
    assert "predicted 50% less" in text
    assert "memory of rank 7 (stage 1)" in text
    assert "stage 1 at work" in text
    assert "400 ms" in text  # of the busiest rank of stage 1


def test_of_many_ranks_the_fullest_of_each_stage_is_shown() -> None:
    text = "".join(read(report_page(measured(pipelined(), num_ranks=64))).text)
    assert "memory of rank 31 (stage 0)" in text
    assert "memory of rank 63 (stage 1)" in text
    assert "memory of rank 5 " not in text


def test_without_the_job_the_file_still_makes_a_page() -> None:
    page = read(report_page(single(with_job=False)))
    assert "timeline" not in page.ids
    assert {"time", "memory", "frontier"} <= set(page.ids)


def test_the_first_sentence_names_another_engine() -> None:
    found = single()
    assert "Train it without a pipeline" in str(result_text(found))
    other = replace(found, plan=found.plan.model_copy(update={"engine": "torchtitan+compile"}))
    assert "Train it with torchtitan+compile without a pipeline" in str(result_text(other))


def on(device: str) -> ReportContents:
    """A page of a plan for eight of these devices."""
    of = job(parse_cluster(f"1x8x{device}"))
    planned = with_price(plan(of, "fsdp8, fsdp8, fsdp8, fsdp8, fsdp8, fsdp8", num_microbatches=4), of)
    nothing = PlanStudy(scope="", explanation=Explanation(binds=""))
    return ReportContents(plan=planned, plan_file="plan.json", job=of, study=nothing)


@pytest.mark.parametrize("device", ["b200-180gb", "mi250x", "rtx-4090"])
def test_assumed_rates_are_said_to_be_assumed_wherever_rates_are_shown(device: str) -> None:
    found, rates = on(device), str(catalogue_rates(device))
    assert rates.startswith("assumed")
    facts = dict(_plan_facts(found)) | dict(_job_facts(found.job))
    assert rates in facts["costs"]
    assert rates in facts["reached"].split(";")[0]
    assert rates in printed(answer_view(found.plan, lost=5))
    assert rates in printed(explain_view(found.plan, found.study.explanation))


def test_rates_that_were_fitted_are_said_to_be_fitted() -> None:
    found = on("h100-80gb")
    facts = dict(_plan_facts(found)) | dict(_job_facts(found.job))
    assert "fitted to published runs of hopper" in facts["reached"].split(";")[0]
    assert "assumed" not in facts["costs"]


def test_the_rates_of_a_device_that_is_not_known_are_said_to_be_assumed() -> None:
    found = single()
    assert "unknown device generation" in dict(_job_facts(found.job))["reached"]
    assert "unknown device generation" in printed(answer_view(found.plan, lost=5))


def printed(view: RenderableType) -> str:
    """Terminal output of a view, on lines that are long enough."""
    console = Console(width=400)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_two_pages_of_one_plan_are_equal() -> None:
    assert report_page(pipelined()) == report_page(pipelined())


def test_baselines_without_time_are_named() -> None:
    assert "No time was left for without remat" in "".join(read(report_page(pipelined())).text)


# where time and memory go


@pytest.mark.parametrize("found", [pipelined(), pipelined(num_microbatches=2), single(), single(with_job=False)])
def test_the_terms_of_every_stage_add_up_to_the_step(found: ReportContents) -> None:
    for stage in stage_seconds(found):
        assert sum(stage.values()) == pytest.approx(found.prediction.step_time_s)


def test_no_two_terms_share_a_colour() -> None:
    for known in (time_colours(), MEMORY_COLOURS):
        assert len(set(known.values())) == len(known)


def test_every_colour_of_a_term_is_in_the_style() -> None:
    style = resources.files("steelyard.report.html").joinpath("style.css").read_text(encoding="utf-8")
    classes = {name for known in (time_colours(), MEMORY_COLOURS) for each in known.values() for name in each.split()}
    assert {name for name in classes | set(HUES) if f".{name} {{" not in style} == set()


def test_a_colour_that_time_and_memory_share_has_one_meaning() -> None:
    pairs = {
        (time, size) for time, one in time_colours().items() for size, other in MEMORY_COLOURS.items() if one == other
    }
    assert pairs == {
        ("compute", "working set"),
        ("remat", "activations"),
        ("pipeline", "pipeline buffers"),
        ("optimizer", "optimizer"),
        ("waiting", "allocator slack"),
        ("fixed", "context"),
        ("fsdp", "gathered parameters"),
    }


@pytest.mark.parametrize("name", ["fsdp", "tp", "dp"])
def test_layers_have_the_colour_of_the_time_that_their_dimension_takes(name: str) -> None:
    strategy = parse_strategy(f"{name}4")
    assert strategy_classes((strategy,))[strategy] == time_colours()[name]


def test_strategies_of_one_dimension_differ_in_shade() -> None:
    found = [parse_strategy(text) for text in ("fsdp8", "fsdp8", "fsdp8 zero2", "fsdp4-tp2", "single")]
    classes = strategy_classes(found)
    assert [classes[each] for each in found[1:]] == ["vermilion", "vermilion lighter", "vermilion darker", "blue"]


@pytest.mark.parametrize("look", ["line", "mark.step", "mark.here", "slower", "faster"])
def test_charts_have_no_colour_of_a_term(look: str) -> None:
    style = resources.files("steelyard.report.html").joinpath("style.css").read_text(encoding="utf-8")
    rule = re.search(rf"^\.{re.escape(look)}(?:,[^{{]*)? {{([^}}]*)}}", style, flags=re.MULTILINE)
    assert rule
    assert not {name for name in HUES if f"--{name}" in rule.group(1)}


def test_legends_say_how_much_each_term_is_and_which_share() -> None:
    found = single()
    (stage,) = found.prediction.stages
    share = stage.memory_bytes["activations"] / stage.total_bytes
    text = "".join(read(report_page(found)).text)
    assert f"activations {format_bytes(stage.memory_bytes['activations'])} ({share:.1%})" in text
    assert "compute mean " in "".join(read(report_page(pipelined())).text)
    assert re.search(r"backward \d+\.\d%", text)


def test_a_name_is_explained_where_it_stands_and_in_the_glossary() -> None:
    page = report_page(pipelined())
    glossary = page[page.index('id="glossary"') :]
    for name in ("MFU", "working set", "fixed", "switch", "fsdp", "microbatch"):
        assert f"<dt>{name}</dt>" in glossary, name
    for name in ("MFU", "working set", "fixed", "switch"):
        assert re.search(rf'<b title="[^"]+">{name}</b>', page), name


def test_names_that_a_page_does_not_use_are_not_explained() -> None:
    page = report_page(single())
    assert "<dt>bubble</dt>" not in page[page.index('id="glossary"') :]


# what is decided and gained


def test_the_network_is_named_with_its_rate() -> None:
    assert "Between nodes inter: 10 GB/s for a device and direction" in report_page(pipelined())
    text = report_page(single())
    assert "Inside a node intra: 100 GB/s for a device and direction" in text
    assert "etween nodes" not in text[: text.index('id="decision"')]


def test_what_is_gained_over_plain_plans_is_said_in_days_and_money() -> None:
    found = single()
    step_s = found.prediction.step_time_s
    baselines = (
        Baseline(name="plain DDP", missing_bytes=2**30),
        Baseline(name="plain FSDP", step_time_s=step_s / 0.8, setting="1 stage", strategies="fsdp4 ×3"),
        Baseline(name="plain FSDP again", step_time_s=step_s / 0.8, setting="1 stage", strategies="fsdp4 ×3"),
        Baseline(name="plain 3D", step_time_s=step_s, setting="2 stages", strategies="fsdp2 ×3"),
    )
    prediction = found.prediction.model_copy(update={"baselines": baselines})
    planned = found.plan.model_copy(update={"prediction": prediction})
    assert gain_sentence(planned) == (
        "It is 20.0% faster than plain FSDP, as fast as plain 3D; plain DDP does not fit (1.00 GiB short)"
    )
    faster = (baselines[1].model_copy(update={"step_time_s": step_s / 1.1}),)
    worse = planned.model_copy(update={"prediction": prediction.model_copy(update={"baselines": faster})})
    assert gain_sentence(worse) == "It is 10.0% slower than plain FSDP"
    for has_decisions, within in ((False, ""), (True, " within your options")):
        text = gain_text(worse.prediction, has_decisions=has_decisions)
        assert text.startswith(
            f"10.0% slower than the baseline, the best plan with {ONE_STRATEGY}{within}, plain FSDP ("
        )
    none = (Baseline(name="plain DDP"), Baseline(name="plain FSDP"), *baselines[2:])
    other = planned.model_copy(update={"prediction": prediction.model_copy(update={"baselines": none})})
    assert gain_sentence(other).endswith("; plain DDP and plain FSDP have no legal strategy")
    long = planned.with_training(10**15, price=2.0)
    assert long.training is not None
    assert long.training.cost is not None
    saved = f"({format_days(long.training.days / 4)}, {format_money(long.training.cost / 4)})"
    assert f"20.0% faster than plain FSDP {saved}" in gain_sentence(long)
    page = "".join(read(report_page(replace(found, plan=long))).text)
    assert gain_sentence(long) in page
    assert long.training.brief[1] in page
    assert gain_sentence(found.plan) == ""


# charts of trade-offs


def test_every_chart_begins_at_zero() -> None:
    for drawn in trade_off_charts(trade_offs()):
        ticks = re.findall(r'class="tick y"[^>]*>([^<]+)<', str(chart(drawn)))
        assert float(ticks[0].replace(",", "")) == 0, drawn.y_label


def test_throughput_has_its_ideal() -> None:
    drawn = {each.y_label: each for each in trade_off_charts(trade_offs())}
    ideal = next(line for line in drawn["tokens/s"].lines if line.look == "ideal")
    assert ideal.points == ((4, 400.0), (8, 800.0))
    assert "as many tokens/s for every device as on 4" in str(chart(drawn["tokens/s"]))


def test_a_term_that_is_not_known_gets_a_colour_that_no_other_has() -> None:
    found = colours(("compute", "expert", "tp"), time_colours())
    assert len(set(found.values())) == 3


def test_strategies_that_differ_in_remat_alone_share_the_hue_and_not_the_pattern() -> None:
    plain, striped, other = (parse_strategy(text) for text in ("fsdp4", "fsdp4 remat=full", "tp4"))
    classes = strategy_classes((plain, striped, other))
    assert classes[plain].split()[0] == classes[striped].split()[0] != classes[other].split()[0]
    assert len({classes[plain], classes[striped], classes[other]}) == 3


# words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("single", "on a single device; keeps all activations"),
        ("fsdp4", "parameters and samples over 4 ranks; keeps"),
        ("fsdp4 zero2", "parameters and samples over 4 ranks, gathered once and kept until the backward pass (ZeRO-2)"),
        (
            "fsdp4 zero1",
            "optimizer states and samples over 4 ranks, parameters and gradients whole throughout the step",
        ),
        ("tp2-dp4", "every matrix over 2 strided ranks"),
        (
            "dp4-tp2+sp remat=selective",
            "every matrix over 2 neighbouring ranks, and the sequence (sp); keeps matrix products",
        ),
    ],
)
def test_a_strategy_in_words(text: str, expected: str) -> None:
    assert expected in describe_strategy(parse_strategy(text))


def test_every_kind_of_remat_has_words() -> None:
    words = {
        describe_strategy(parse_strategy("tp4" + ("" if each is Remat.NONE else f" remat={each}"))) for each in Remat
    }
    assert len(words) == len(Remat)


def test_layers_by_name() -> None:
    chain = job().chain
    assert layers_text(chain, 0, 5) == "embedding, blocks 0–3, head"
    assert layers_text(chain, 2, 2) == "block 1"
    assert layers_text(chain, 0, 1) == "embedding, block 0"
    assert layers_text(chain, 4, 5) == "block 3, head"


# the schedule


def slices_of(found: ReportContents) -> dict:
    text = str(timeline_section(found))
    content = re.search(r'<script type="application/json">(.*?)</script>', text)
    assert content
    return json.loads(content.group(1))


def test_passes_and_bubbles_fill_the_step_of_every_stage() -> None:
    data = slices_of(pipelined())
    assert len(data["lanes"]) == 2
    for lane in data["lanes"]:
        starts, widths = lane[2::4], lane[3::4]
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        assert starts[0] == 0
        assert abs(ends[-1] - data["width"]) <= 2
        assert all(abs(end - start) <= 2 for end, start in zip(ends, starts[1:], strict=False))


def test_what_a_step_takes_beside_its_passes_is_said() -> None:
    found = single()
    assert found.fixed_s > 0
    assert f"After the passes come {format_seconds(found.fixed_s)} that are fixed." in str(timeline_section(found))


def test_a_bar_of_a_whole_step_ends_with_the_time_of_the_step() -> None:
    found = single()
    ends = re.findall(r'class="end">([^<]*)<', str(time_section(found)))
    assert ends == [format_seconds(found.prediction.step_time_s)]
    assert format_seconds(found.prediction.step_time_s - found.fixed_s) not in ends


def test_every_pass_is_there_and_bubbles_have_names() -> None:
    data = slices_of(pipelined())
    names = data["names"]
    for lane in data["lanes"]:
        found = [(names[name], microbatch) for name, microbatch in zip(lane[::4], lane[1::4], strict=True)]
        assert {microbatch for name, microbatch in found if name == "forward"} == set(range(8))
        assert {microbatch for name, microbatch in found if name == "backward"} == set(range(8))
    assert any(name.startswith("bubble: ") for name in names)


@pytest.mark.slow
def test_a_very_long_step_is_drawn_in_part_and_says_so() -> None:
    of = job(cluster(1, 2), global_batch=4096)
    planned = with_price(plan(of, "single, single, single", "single, single, single", num_microbatches=4096), of)
    found = pipelined()
    timeline = predict(planned, of).timeline
    shown = ReportContents(plan=planned, plan_file="p", job=of, timeline=timeline, study=found.study)
    data = slices_of(shown)
    assert sum(len(lane) // 4 for lane in data["lanes"]) < 3 * MOST_PASSES
    assert "are drawn as one block" in str(timeline_section(shown))


# charts


def test_a_staircase_is_level_until_the_next_point() -> None:
    assert staircase([(1, 9), (2, 5)]) == ((1, 9), (2, 9), (2, 5))


@pytest.mark.parametrize("points", [((1.0, 1.0),), ((1.0, 0.0), (2.0, 0.0)), ((5.0, 155.16), (6.0, 155.45))])
def test_ticks_of_an_axis_are_never_the_same(points: tuple[tuple[float, float], ...]) -> None:
    drawn = str(chart(Chart(title="t", x_label="x", y_label="y", lines=(Line(points=points),))))
    for axis in ("x", "y"):
        ticks = re.findall(rf'class="tick {axis}"[^>]*>([^<]+)<', drawn)
        assert len(set(ticks)) == len(ticks) > 1
