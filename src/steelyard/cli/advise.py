"""``steelyard advise``: what to change where nothing fits, with what each change saves; and the largest that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from steelyard.cli.levers import with_levers
from steelyard.cli.options import (
    AsJson,
    ClusterOption,
    EngineOption,
    GlobalBatch,
    Memory,
    MemoryMargin,
    Model,
    NetworkOption,
    PrecisionOption,
    SeqLen,
    check_choice,
    complete_one_of,
    parse_precision,
    print_json,
    progress,
)
from steelyard.output import command
from steelyard.planning.advise import Advice
from steelyard.planning.advise import advise as advice_of
from steelyard.planning.largest import MODEL, SEQ_LEN, Largest, kinds, largest
from steelyard.planning.request import PlanRequest, make_request
from steelyard.report.tables import number, plain_table
from steelyard.units import format_bytes, format_seconds


@with_levers
def advise(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    seq_len: SeqLen = None,
    network: NetworkOption = None,
    memory: Memory = None,
    memory_margin: MemoryMargin = None,
    precision: PrecisionOption = "bf16",
    engine: EngineOption = None,
    most: Annotated[
        str | None,
        typer.Option(
            "--max",
            help=f"Find the largest that fits instead: {', '.join(kinds())} (batch: computed at once, one microbatch; "
            "model: of the packaged ones of MODEL's type).",
            autocompletion=complete_one_of(kinds()),
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Say what to change to fit, or to fit more: each lever alone and two together, the cheapest GiB first."""

    def ask(levers: Mapping[str, str | None], name: str = model) -> PlanRequest:
        return make_request(
            name,
            cluster,
            global_batch=global_batch,
            seq_len="max" if most == SEQ_LEN else seq_len,
            network=network,
            memory=memory,
            memory_margin=memory_margin,
            precision=parse_precision(precision),
            engine=engine,
            levers=levers,
        )

    with progress("counting the model's layers", silent=as_json) as show:
        if most is not None:
            size = largest(check_choice("--max", most, kinds()), ask(levers), ask, progress=show)
        else:
            own, found, left_out, untried = advice_of(ask(levers), progress=show)
    asked = {"--cluster": cluster, "--global-batch": global_batch, "--seq-len": seq_len, "--network": network}
    asked |= {"--memory": memory, "--precision": None if precision == "bf16" else precision, "--engine": engine}
    asked |= {f"--{name}": text for name, text in levers.items()}

    def plan_with(options: str, name: str = model) -> str:
        words = options.split()
        given = asked | dict(zip(words[::2], words[1::2], strict=True))
        return command(
            "plan", name, *(word for each, text in given.items() if text is not None for word in (each, text))
        )

    if most is not None:
        name = str(size.size) if size.what == MODEL else model
        print_json(size) if as_json else print(f"{_size_text(size)}: {plan_with(size.options, name)}")
        return
    if as_json:
        changes = [_content(each) for each in found]
        print_json({"asked": _content(own), "changes": changes, "left_out": left_out, "untried": untried})
        return
    Console().print(_table(own, found))
    for each in left_out:
        print(f"not tried: {each}")
    if untried:
        print(f"no time was left for: {', '.join(untried)} (run it again: traces of the model are kept)")
    if found and found[0].fits:
        print(f"take the first: {plan_with(found[0].options)}")


def _size_text(found: Largest) -> str:
    beyond = "" if found.too_large is None else f"; {found.too_large} does not fit"
    return (
        f"largest {found.what}: {found.size}, which needs {format_bytes(found.least_bytes)} of "
        f"{format_bytes(found.budget_bytes)} per device{beyond}\n"
        f"its fastest plan takes {format_seconds(found.step_s)} a step"
    )


def _content(advice: Advice) -> dict[str, object]:
    """Fields for JSON, with nothing in the place of what is infinite."""
    never = {} if advice.fits else {"step_s": None, "slowdown": None}
    return asdict(advice) | never | {"fits": advice.fits}


def _table(own: Advice, found: Sequence[Advice]) -> Table:
    numbers = [number(name) for name in ("least memory", "saves", "step")]
    table = plain_table("What to change", Column("change", no_wrap=True), *numbers, Column("result", min_width=10))
    table.caption, table.caption_justify = "%: change of the step from what is asked, without a memory limit", "left"
    for each in (own, *found):
        saved = format_bytes(each.saved_bytes) if each.saved_bytes > 0 else "–"
        table.add_row(
            each.options.replace(" --", "\n--") or "as asked",
            "no plan" if each.least_bytes is None else format_bytes(each.least_bytes),
            saved,
            f"{format_seconds(each.step_s)} {round(100 * each.slowdown):+4d} %"
            if each.fits
            else f"{format_bytes(each.missing_bytes)} short",
            each.result if each is not own else "",
        )
    return table
