"""``steelyard train``: runs a plan on this host, one process per rank, and compares with its prediction."""

import re
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from steelyard.cli.options import AsJson, print_json
from steelyard.errors import UserError
from steelyard.installed import require_training
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.elastic import check_replannable
from steelyard.processes.start import Elastic
from steelyard.report.run_table import comparison_table
from steelyard.runtime.options import DATA_HELP, TrainOptions, flag


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def train(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    data: Annotated[Path | None, typer.Option("--data", help=_sentence(DATA_HELP))] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", help="Start again from the newest checkpoint, when a process fails.", min=0)
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help="With --elastic: the fewest and the most hosts, as in 1:2.", metavar="MIN:MAX"),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option("--rendezvous", help="With --hosts: where they meet, on one of them.", metavar="HOST:PORT"),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Train the plan's model on this host through torchrun.

    For several hosts start torchrun on each: `torchrun --nnodes N --nproc-per-node D --rdzv-backend c10d
    --rdzv-endpoint HOST:PORT -m steelyard.train PLAN --data PATH`.
    """
    plan = read_plan(path)
    require_training("`steelyard train` trains with them")
    from steelyard.runtime.launch import launch

    given = TrainOptions(**options)
    elastic = _elastic(plan, path, given, hosts, rendezvous)
    finished = launch(path, data, given, restarts=restarts, elastic=elastic, stdout_to_stderr=as_json)
    if finished is None:
        Console(stderr=True).print("this host's part is done; the host of rank 0 has the record", highlight=False)
    elif as_json:
        print_json(finished)
    else:
        Console().print(comparison_table(finished))


def _elastic(
    plan: Plan, path: Path, options: TrainOptions, hosts: str | None, rendezvous: str | None
) -> Elastic | None:
    """What an elastic run needs to know; raises `UserError` where it could not find plans, or what belongs to it is
    given without it."""
    if (hosts is None) != (rendezvous is None) or (hosts is not None and not options.elastic):
        raise UserError(
            field="--hosts",
            found=" ".join(
                name
                for name, given in (("--hosts", hosts), ("--rendezvous", rendezvous), ("--elastic", options.elastic))
                if given
            ),
            expected="--elastic --hosts MIN:MAX --rendezvous HOST:PORT together",
            hint="give all three, the same on every host; on one host --elastic is enough",
        )
    if not options.elastic:
        return None
    check_replannable(plan, path.parent, options.pool or "")
    if hosts is None and plan.is_mixed:
        raise UserError(
            field="--elastic",
            found=f"a plan over {len(plan.pools())} pools of unlike devices ({plan.cluster}), and no --hosts",
            expected="a host or more for each pool",
            hint="give on every host --elastic --hosts MIN:MAX --rendezvous HOST:PORT --pool NAME",
        )
    if hosts is None:
        return Elastic()
    counts = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", hosts)
    least, most = (int(counts[1]), int(counts[2])) if counts else (0, 0)
    nodes = sum(pool.num_nodes for pool in plan.pools()) if plan.is_mixed else None
    if not least <= most or most == 0 or (plan.num_devices % most if nodes is None else most != nodes):
        parts = (
            f"equal parts of the plan's {plan.num_devices} devices" if nodes is None else f"the {nodes} nodes of pools"
        )
        raise UserError(
            field="--hosts",
            found=repr(hosts),
            expected=f"MIN:MAX, where MAX hosts have {parts}",
            hint="write for example --hosts 1:2",
        )
    return Elastic(hosts=(least, most), rendezvous=rendezvous)


def _parameters() -> list[Parameter]:
    """Those of the command and, in place of ``**options``, every field of `TrainOptions`: what torchrun's processes
    take is what the command takes."""
    *own, _ = signature(train).parameters.values()
    options = [
        Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[
                list[str] if option.default == () else option.type,
                typer.Option(
                    flag(option),
                    help=_sentence(option.metadata["help"]),
                    min=option.metadata["least"],
                ),
            ],
        )
        for option in fields(TrainOptions)
    ]
    return [*own, *options]


train.__signature__ = signature(train).replace(parameters=_parameters())  # type: ignore[attr-defined]
