"""Plans that experts ran, priced by the engine that ran them, beside what they measured and what we would plan.

    python benchmarks/expert_plans.py [JOBS.csv] [--predictions OUT.csv] [--free]
    python benchmarks/expert_plans.py [JOBS.csv] --native [--only WORD ...]

JOBS.csv has a row for each job with its model, devices, batch, the experts' settings and the measured step. Each plan
is priced as ``steelyard price`` prices it, with its engine; with ``--free`` the job is also planned for that engine,
as ``steelyard plan --engine`` does, and a table has both side by side, and why they differ: the terms of a step in
which they differ most, as ``steelyard diff`` has them, and what the run did that is not priced. OUT.csv has a row a
job: name, priced_s, priced_gib, fits, free_s, free_gib, free_plan, skipped (with its reason).
"""

import argparse
import csv
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from published_runs.frameworks import options_of, torchtitan_of
from published_runs.rows import read_runs

from steelyard.cost.job import layer_precision
from steelyard.engines.automodel import AUTOMODEL
from steelyard.engines.engine import Engine
from steelyard.engines.megatron import MEGATRON
from steelyard.engines.megatron_bridge import MEGATRON_BRIDGE
from steelyard.engines.torchtitan import TORCHTITAN, WHOLE_LOSS
from steelyard.errors import UserError
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import complete, engine_answers, engine_limit_s
from steelyard.planning.job import job_of
from steelyard.planning.price import describe, peak_bytes, summarise
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, price_settings
from steelyard.planning.simple import with_usual_stages
from steelyard.report.explain_view import step_terms
from steelyard.units import GIB

DATA = Path(__file__).parent / "data" / "expert_plans"
ENGINES: Mapping[str, Engine] = {
    "megatron": MEGATRON_BRIDGE,
    "megatron-classic": MEGATRON,
    "megatron-deep": MEGATRON_BRIDGE,
    "nanotron": MEGATRON,
    "torchtitan": TORCHTITAN.with_options([WHOLE_LOSS]),
    "fsdp": AUTOMODEL,
    "fsdp-deep": AUTOMODEL,
}
"""The engine that prices what each framework of the table ran, the nearest where it is none of the product's."""
LEVERS: Mapping[str, Mapping[str, str]] = {"automodel qwen3-30b-a3b ep8 8xH100": {"weights": "bf16"}}
"""Beside float8 of torchtitan, which the precision says: parameters and moments of qwen3_moe_30b_te_deepep.yaml."""
RUNS = {run.id: run for run in read_runs()}
COLUMNS = ("name", "priced_s", "priced_gib", "fits", "free_s", "free_gib", "free_plan", "skipped")


NOT_PRICED: Mapping[str, str] = {
    "llama3-405b 8k 8192xH100": "chunks not stated, 4 assumed; theirs shards gradients",
    "llama3-405b 8k 16384xH100": "chunks not stated, 4 assumed; theirs shards gradients",
    "deepseek-v3 2048xH800 fp8": "theirs caches activations in fp8",
    "bridge deepseek-v3 256xGB200 bf16": "theirs recomputes MLA's projections alone, and has chunks of unlike blocks",
}
"""What runs did that no settings here express: recompute_modules of Megatron-Bridge's recipes (deepseek in
scripts/performance/configs), Automodel's examples/benchmark/configs, and section 3.2 of the DeepSeek-V3 report."""
SHOWN_TERMS = 3
"""Terms of a step in which two plans are said to differ."""
LEAST_SHARE = 0.005
"""Of a step, below which a term is left out."""

VOCABULARY_UNIT = 128
"""Megatron makes the vocabulary a multiple of this for each tensor-parallel rank."""


def _megatrons(config: Mapping[str, Any], tp: int) -> Mapping[str, Any]:
    """The config as Megatron trains it: GPT-2's form with sp, which transformers' positions forbid (as GPT-NeoX's,
    whose sizes are the same), and a larger vocabulary where tp does not divide its own."""
    if config["model_type"] == "gpt2":
        names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        sizes = {new: config[old] for old, new in names.items()}
        more = {"intermediate_size": config.get("n_inner") or 4 * config["n_embd"], "use_parallel_residual": False}
        positions = {"max_position_embeddings": config["n_positions"], "vocab_size": config["vocab_size"]}
        config = {"model_type": "gpt_neox", **sizes, **more, **positions}
    size, unit = config["vocab_size"], VOCABULARY_UNIT * tp
    return config if size % tp == 0 else {**config, "vocab_size": -(-size // unit) * unit}


def load_config(name: str, folder: Path) -> Mapping[str, Any]:
    """The config of a packaged model by its name, or at a path beside the table or here."""
    if not name.endswith(".json"):
        return dict(load_model(name).config)
    found = next((path for path in (folder / name, DATA / name) if path.is_file()), None)
    if found is None:
        raise UserError(field="model", found=name, expected="a config beside the table", hint="add it")
    return json.loads(found.read_text())


def settings_of(row: Mapping[str, str]) -> Settings:
    """The experts' settings in a row of the table."""
    number = {key: int(row[key] or 1) for key in ("tp", "pp", "vpp", "cp", "ep", "mbs")}
    return Settings(
        tp=number["tp"],
        pp=number["pp"],
        vpp=number["vpp"] if number["pp"] > 1 else 1,
        cp=number["cp"],
        ep=number["ep"],
        micro_batch=number["mbs"],
        zero=int(row["zero"] or 1),
        remat=Remat(row["remat"] or "none"),
    )


def engine_of(row: Mapping[str, str]) -> Engine:
    """The engine of a row, with the options that the published run names; torchtitan in the version of the run."""
    engine, run = ENGINES[row["framework"]], RUNS.get(row["row"])
    if run is None:
        return engine
    if row["framework"] == "torchtitan":
        return torchtitan_of(run.text("framework"), options_of(run, TORCHTITAN))
    return engine.with_options(options_of(run, engine))


def predicted(row: Mapping[str, str], folder: Path, *, plans_freely: bool) -> dict[str, Any]:
    """A row of OUT.csv for a job, and under ``plans`` that of the experts and the free one."""
    found: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"name": row["name"]}
    nodes = max(1, int(row["gpus"]) // int(row["gpus_per_node"]))
    per_node = min(int(row["gpus"]), int(row["gpus_per_node"]))
    try:
        engine, precision = engine_of(row), row["precision"]
        levers = dict(LEVERS.get(row["name"], {}))
        if precision == "fp8" and "torchtitan" in engine.name:  # its float8 is a lever, not a precision
            levers, precision = levers | {"float8": "tensorwise"}, "bf16"
        config = load_config(row["model"], folder)
        request = make_request(
            _megatrons(config, int(row["tp"])) if "megatron" in engine.name else config,
            f"{nodes}x{per_node}x{row['device']}",
            global_batch=int(row["global_batch"]),
            seq_len=int(row["seq"]),
            precision=layer_precision(precision),  # type: ignore[arg-type]
            levers=levers,
            engine=engine.name if levers else None,
        )
        plan, job = price_settings(request, engine, precision, settings_of(row))  # type: ignore[arg-type]
        found |= {
            "priced_s": _step_s(plan),
            "priced_gib": peak_bytes(plan) / GIB,
            "fits": int(peak_bytes(plan) <= job.budget_bytes + job.margin_bytes),
            "plans": (plan, None),
        }
        if plans_freely:
            free = with_usual_stages(plan_job(job, top=1), request)[0].plan
            if free is not None:
                found |= {"free_s": _step_s(free), "free_gib": peak_bytes(free) / GIB}
                found |= {"free_plan": f"{describe(free.pipeline)}: {summarise(free)}", "plans": (plan, free)}
    except UserError as error:
        found["skipped"] = f"{error.field}: found {error.found}; expected {error.expected}"
    except KeyError as error:
        found["skipped"] = f"framework {error} has no engine"
    return found


def planned_natively(row: Mapping[str, str], folder: Path) -> str:
    """Plan a job for our own runtime; return a line of Markdown: seconds, configurations and the plan found."""
    nodes = max(1, int(row["gpus"]) // int(row["gpus_per_node"]))
    per_node = min(int(row["gpus"]), int(row["gpus_per_node"]))
    request = make_request(
        load_config(row["model"], folder),
        f"{nodes}x{per_node}x{row['device']}",
        global_batch=int(row["global_batch"]),
        seq_len=int(row["seq"]),
        precision=layer_precision(row["precision"]),  # type: ignore[arg-type]
    )
    job_of(request)
    started = time.process_time()
    result = complete(request)
    planned = time.process_time()
    engine_answers(request, result, limit_s=engine_limit_s(planned - started))
    ended = time.process_time()
    plan, configs = result.plan, result.search.configs
    made = sum(each.is_made for each in result.tables)
    searched = f"| {row['name']} | {planned - started:.1f} | {ended - planned:.1f} | {len(configs)} | {made} |"
    if plan is None or plan.prediction is None:
        return f"{searched} nothing fits | | | |"
    gap = plan.prediction.certificate.gap or 0.0
    return f"{searched} {_step_s(plan):.4f} | {gap:.2%} | {plan.num_groups} | {degrees(plan)} |"


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "just priced"
    return plan.prediction.step_time_s


def degrees(plan: Plan) -> str:
    """Stages and their chunks, the strategy of most layers, and the samples of a microbatch on a rank at most."""
    chunks = f"x{plan.num_chunks}" if plan.num_chunks > 1 else ""
    usual, _ = Counter(map(str, plan.strategies)).most_common(1)[0]
    return f"pp{plan.num_stages}{chunks} {usual} mbs{max(plan.rank_samples)}"


def reason(name: str, plan: Plan, free: Plan) -> str:
    """Say where a free plan gains and loses time beside the experts', and what theirs did that is not priced."""
    assert plan.prediction is not None, "just priced"
    assert free.prediction is not None, "just priced"
    before, after = step_terms(plan, plan.prediction), step_terms(free, free.prediction)
    gained = {term: after.get(term, 0.0) - before.get(term, 0.0) for term in {**before, **after}}
    most = sorted(gained, key=lambda term: -abs(gained[term]))[:SHOWN_TERMS]
    parts = [
        f"{term} {gained[term] / _step_s(plan):+.1%}"
        for term in most
        if abs(gained[term]) > LEAST_SHARE * _step_s(plan)
    ]
    return "; ".join([", ".join(parts) or "the same plan"] + ([NOT_PRICED[name]] if name in NOT_PRICED else []))


def side_by_side(found: Sequence[Mapping[str, Any]]) -> str:
    """The experts' plans and the free ones, a row a job, as Markdown."""
    lines = ["| job | theirs | s | GiB | free | s | GiB | free / theirs | why |", "|" + "---|" * 9]
    for one in found:
        plan, free = one.get("plans", (None, None))
        if plan is None or free is None:
            continue
        fits = "" if one["fits"] else " (does not fit)"
        lines.append(
            f"| {one['name']} | {degrees(plan)} | {one['priced_s']:.2f} | {one['priced_gib']:.0f}{fits} | "
            f"{degrees(free)} | {one['free_s']:.2f} | {one['free_gib']:.0f} | {one['free_s'] / one['priced_s']:.3f} | "
            f"{reason(one['name'], plan, free)} |"
        )
    return "\n".join(lines)


_JOB = ("model", "device", "gpus", "seq", "global_batch", "precision")
"""Columns that the plans of one job share."""


def orders(rows: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each job of which several plans were measured: the one ranked first, and its regret."""
    jobs: dict[tuple[str, ...], list[tuple[float, float, str]]] = {}
    for row, one in zip(rows, found, strict=True):
        if row.get("measured_s") and not one["skipped"]:
            plan = (float(one["priced_s"]), float(row["measured_s"]), row["name"])
            jobs.setdefault(tuple(row[column] for column in _JOB), []).append(plan)
    lines = []
    for plans in jobs.values():
        if len(plans) > 1:
            _, measured_s, name = min(plans)
            regret = measured_s / min(measured for _, measured, _ in plans) - 1
            lines.append(f"{len(plans)} plans of one job: {name} is ranked first, regret {regret:.1%}")
    return lines


def main() -> None:
    """Prints each job's price beside what was measured, errors by class, and the order of one job's plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=Path, default=DATA / "jobs.csv")
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--free", action="store_true", help="also plan each job for its engine")
    parser.add_argument("--native", action="store_true", help="plan each job for our own runtime, and time it")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="jobs with one of these in their name")
    options = parser.parse_args()
    with options.jobs.open() as file:
        rows = [row for row in csv.DictReader(file) if any(word in row["name"] for word in options.only or [""])]
    if options.native:
        columns = "job | plan, CPU s | engines, CPU s | configurations | with tables | s | gap | groups | plan"
        print(f"| {columns} |\n|{'---|' * 9}", flush=True)
        for row in rows:
            print(planned_natively(row, options.jobs.parent), flush=True)
        return
    found, errors = [], dict[str, list[float]]()
    for row in rows:
        started = time.process_time()
        one = predicted(row, options.jobs.parent, plans_freely=options.free or options.predictions is not None)
        found.append(one)
        measured = float(row["measured_s"]) if row.get("measured_s") else None
        text = one["skipped"] or f"{one['priced_s']:8.2f} s, {one['priced_gib']:6.1f} GiB"
        if measured and not one["skipped"]:
            error = one["priced_s"] / measured - 1
            errors.setdefault(_class_of(row), []).append(error)
            memory = f" of {row['measured_mem_gib']}" if row.get("measured_mem_gib") else ""
            text += f"{memory}, measured {measured:8.2f} s: {error:+.0%}"
        if one["free_s"]:
            text += f"; free {one['free_s']:.2f} s, {one['free_gib']:.1f} GiB: {one['free_plan']}"
        print(f"{row['name']:48} {text} ({time.process_time() - started:.1f} CPU s)", flush=True)
    if options.free:
        print(side_by_side(found))
    for name, each in errors.items():
        print(f"{name}: median error {median(map(abs, each)):.1%} of {len(each)}")
    print("\n".join(orders(rows, found)))
    if options.predictions is not None:
        with options.predictions.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(found)


def _class_of(row: Mapping[str, str]) -> str:
    if row["precision"] != "bf16":
        return row["precision"]
    if int(row["ep"] or 1) > 1 or "moe" in row["model"] or "a3b" in row["model"] or "mixtral" in row["model"]:
        return "experts"
    return "context" if int(row["cp"] or 1) > 1 else "dense"


if __name__ == "__main__":
    main()
