"""``steelyard train``: run a plan on this host, one process per rank, and compare with its prediction."""

import re
import sys
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

from steelyard.cli.options import OUTPUT, AsJson, PlanFile, count, option, print_json, prints
from steelyard.errors import UserError
from steelyard.installed import require_training
from steelyard.limits import MOST_STEPS
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.elastic import check_replannable
from steelyard.processes.start import Elastic
from steelyard.profiles.record import RunRecord
from steelyard.report.run_table import comparison_table
from steelyard.report.tables import console
from steelyard.runtime.options import DATA_HELP, TrainOptions, flag

FAULTS = "Failures"
_GROUPS = {
    "Optimizer": ("warmup_steps", "schedule", "min_lr", "betas", "optimizer", "weight_decay", "max_grad_norm", "seed"),
    "Data": (
        *("dataset", "sft", "packing", "tokenizer", "text_key"),
        *("max_data_bytes", "eval_data", "eval_every", "mask_token"),
    ),
    "Checkpoints and weights": (
        *("checkpoint_every", "keep_last", "no_resume", "allow_change"),
        *("init", "export_hf", "merge"),
    ),
    FAULTS: (
        *("restarts", "hosts", "rendezvous", "keep_going", "elastic", "pool"),
        *("enforce_memory", "timeout_s", "slow_share", "slow_steps"),
    ),
    "Logs": ("metrics", "tensorboard", "report_to"),
    OUTPUT: ("as_json",),
}
"""Groups of options in the help; options in no group are common and come first."""
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_METAVARS = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
_RESTARTS = "Number of restarts from the newest checkpoint after a failed process."
_HOSTS = "For --elastic: minimum and maximum number of hosts, as in 1:2."
_RENDEZVOUS = "For --hosts: address of the rendezvous on one of the hosts."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


@prints(RunRecord)
def train(
    path: PlanFile,
    data: Annotated[Path | None, option("--data", "PATH", _sentence(DATA_HELP))] = None,
    restarts: Annotated[int, count("--restarts", _RESTARTS, FAULTS, most=MOST_STEPS, least=0)] = 0,
    hosts: Annotated[str | None, option("--hosts", "MIN:MAX", _HOSTS, FAULTS)] = None,
    rendezvous: Annotated[str | None, option("--rendezvous", "HOST:PORT", _RENDEZVOUS, FAULTS)] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Train the plan's model on this host through torchrun.

    On several hosts run on each: `torchrun --nnodes N --nproc-per-node D --rdzv-backend c10d
    --rdzv-endpoint HOST:PORT -m steelyard.train PLAN --data PATH`.
    """
    plan = read_plan(path)
    require_training("`steelyard train` trains")
    from steelyard.runtime.launch import launch

    given = TrainOptions(**options)
    elastic = _elastic(plan, path, given, hosts, rendezvous)
    finished = launch(path, data, given, restarts=restarts, elastic=elastic, stdout_to_stderr=as_json)
    if finished is None:
        print("This host is done; the host of rank 0 has the record.", file=sys.stderr)
    elif as_json:
        print_json(finished)
    else:
        console().print(comparison_table(finished))


def _elastic(
    plan: Plan, path: Path, options: TrainOptions, hosts: str | None, rendezvous: str | None
) -> Elastic | None:
    """Return the settings of an elastic run; raises `UserError` if it cannot replan or its options are incomplete."""
    if (hosts is None) != (rendezvous is None) or (hosts is not None and not options.elastic):
        raise UserError(
            field="--hosts",
            found=" ".join(
                name
                for name, given in (("--hosts", hosts), ("--rendezvous", rendezvous), ("--elastic", options.elastic))
                if given
            ),
            expected="--elastic --hosts MIN:MAX --rendezvous HOST:PORT together",
            hint="give all three, identical on every host; on one host --elastic is enough",
        )
    if not options.elastic:
        return None
    check_replannable(plan, path.parent, options.pool or "")
    if hosts is None and plan.is_mixed:
        raise UserError(
            field="--elastic",
            found=f"a plan over {len(plan.pools())} device groups ({plan.cluster}), and no --hosts",
            expected="one host or more per device group",
            hint="give --elastic --hosts MIN:MAX --rendezvous HOST:PORT --pool NAME on every host",
        )
    if hosts is None:
        return Elastic()
    counts = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", hosts)
    least, most = (int(counts[1]), int(counts[2])) if counts else (0, 0)
    nodes = sum(pool.num_nodes for pool in plan.pools()) if plan.is_mixed else None
    if not least <= most or most == 0 or (plan.num_devices % most if nodes is None else most != nodes):
        parts = (
            f"equal parts of the plan's {plan.num_devices} devices"
            if nodes is None
            else f"the {nodes} nodes of all groups"
        )
        raise UserError(
            field="--hosts",
            found=repr(hosts),
            expected=f"MIN:MAX, where MAX hosts have {parts}",
            hint="write for example --hosts 1:2",
        )
    return Elastic(hosts=(least, most), rendezvous=rendezvous)


def _parameters() -> list[Parameter]:
    """Return the parameters of the command, with every field of `TrainOptions` instead of ``**options``."""
    *own, _ = (each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature(train).parameters.values())
    for each in fields(TrainOptions):
        metavar, text = _METAVARS.get(each.metadata["parser"]), _sentence(each.metadata["help"])
        shown = option(flag(each), metavar, text, _GROUP_OF.get(each.name))
        kind, annotation = Parameter.KEYWORD_ONLY, Annotated[list[str] if each.default == () else each.type, shown]
        own.append(Parameter(each.name, kind, default=each.default, annotation=annotation))
    groups = (None, *_GROUPS)
    return sorted(own, key=lambda parameter: groups.index(_GROUP_OF.get(parameter.name)))


train.__signature__ = signature(train).replace(parameters=_parameters())  # type: ignore[attr-defined]
