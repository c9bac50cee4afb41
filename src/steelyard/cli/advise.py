"""``steelyard advise``: changes that make a job fit, with the memory that each saves; and the largest job that fits."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.cli.job_options import JobOptions
from steelyard.output import command
from steelyard.plan.choices import Advice
from steelyard.planning.advise import advise as advice_of
from steelyard.planning.largest import MODEL, SEQ_LEN, Largest, kinds, largest
from steelyard.planning.request import SIMPLIFY, PlanRequest
from steelyard.report.tables import advice_table, console
from steelyard.units import format_bytes, format_seconds


class Change(TypedDict):
    """One of `Advice`, with null for a step that is never done."""

    options: str
    result: str
    least_bytes: int | None
    saved_bytes: int
    step_s: float | None
    slowdown: float | None
    missing_bytes: int
    fits: bool


class Changes(TypedDict):
    """The request as it is, and under each change."""

    asked: Change
    changes: list[Change]
    left_out: tuple[str, ...]
    untried: tuple[str, ...]


_LARGEST = (
    f"Find the largest that fits: {', '.join(kinds())} (batch: one microbatch; model: packaged models of MODEL's type)."
)
Most = Annotated[str | None, options.option("--max", "NAME", _LARGEST, autocompletion=options.complete_one_of(kinds()))]


@options.prints(Changes | Largest)
@options.with_levers
def advise(
    job: JobOptions,
    memory_margin: options.MemoryMargin = None,
    most: Most = None,
    as_json: options.AsJson = False,
) -> None:
    """Find changes that make a job fit, or fit more: each lever alone and in pairs, the cheapest GiB first."""

    def ask(levers: Mapping[str, str | None], of: str = job.model) -> PlanRequest:
        seq_len = "max" if most == SEQ_LEN else job.seq_len
        return job.request(model=of, seq_len=seq_len, memory_margin=memory_margin, levers=levers)

    with options.progress("counting the model's layers", silent=as_json) as show:
        if most is not None:
            size = largest(options.check_choice("--max", most, kinds()), ask(job.levers), ask, progress=show)
        else:
            own, found, left_out, untried = advice_of(ask(job.levers), progress=show)
    asked = job.flags() | {"--memory-margin": memory_margin}

    def plan_with(change: str, of: str = job.model) -> str:
        words = change.split()
        given = asked | dict(zip(words[::2], words[1::2], strict=True))
        return command("plan", of, *(word for each, text in given.items() if text is not None for word in (each, text)))

    if most is not None:
        largest_model = str(size.size) if size.what == MODEL else job.model
        options.print_json(size) if as_json else print(f"{_size_text(size)}: {plan_with(size.options, largest_model)}")
        return
    if as_json:
        changes = [_content(each) for each in found]
        options.print_json(Changes(asked=_content(own), changes=changes, left_out=left_out, untried=untried))
        return
    console().print(advice_table((own, *found)))
    for each in left_out:
        console().print(each)
    if untried:
        again = " Run it again: traces of the model are kept." * any(
            not each.startswith("--engine") for each in untried
        )
        console().print(f"No time was left for {', '.join(untried)}.{again}")
    if own.fits and not (found and found[0].step_s < (1 - SIMPLIFY) * own.step_s):
        print(f"The job fits as asked: {plan_with('')}")
    elif found and found[0].fits:
        print(f"Take the first: {plan_with(found[0].options)}")


def _size_text(found: Largest) -> str:
    beyond = "" if found.too_large is None else f"; {found.too_large} does not fit"
    return (
        f"largest {found.what}: {found.size}, needs {format_bytes(found.least_bytes)} of "
        f"{format_bytes(found.budget_bytes)} per device{beyond}\n"
        f"its fastest plan takes {format_seconds(found.step_s)} per step"
    )


def _content(advice: Advice) -> Any:
    never = {} if advice.fits else {"step_s": None, "slowdown": None}
    return {**asdict(advice), **never, "fits": advice.fits}
