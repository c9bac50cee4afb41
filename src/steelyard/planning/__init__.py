"""From a model, a cluster and a budget to a plan: the planner's parts in their order, one after another.

| module             | from → to                                                                        |
|--------------------|----------------------------------------------------------------------------------|
| `job`              | config, cluster, batch → job, with its profile (traced, or given as measured)    |
| `profile_file`     | plan from a measured profile → that profile's file, if it is as it was           |
| `assumed_links`    | job with a profile of one device → the same for many, links as the cluster says  |
| `problem`          | job and options → cost tables, one for every pipeline setting                    |
| `choose`           | cost tables → search → the best few re-scored by the simulator → plan            |
| `pool_search`      | job on pools of unlike devices → the best plans over them, of `pool_space`       |
| `pool_rivals`      | job on pools and plan → the best plans on each alone, and of even cuts           |
| `plan_from_search` | outcome of a search → plan without prediction                                    |
| `pins`             | what layers must have, as a user writes it → cost tables that allow nothing else |
| `impossible`       | job and a pin → what of it no strategy could have                                |
| `demands`          | options of a search ↔ what a user asked for, as it stands in a plan              |
| `why_not`          | job and a pin → what it costs, or what forbids it                                |
| `price`            | plan without prediction → plan with it                                           |
| `calibration`      | job and measured runs → the job with all times scaled                            |
| `devices`          | job → the same on other numbers of devices; the fewest that do                   |
| `trial`            | job → its plan, as one of several sizes tried                                    |
| `batch`            | job → the global batch that is worth its size                                    |
| `length`           | jobs of any length → the longest sequences that fit                              |
| `rivals`           | job and plan → the best plans under restrictions                                 |
| `framework_fit`    | job and plan → the best plan that another framework can run                      |
| `not_searched`     | job → what was never searched, and why                                           |
| `explain`          | job and plan → what binds, the rivals, what memory is worth                      |
| `elastic`          | plan → the plan for what is left of its cluster, when it is or beforehand         |
| `slow_rank`        | plan and a run → what its slow ranks cost, and what planning around them gains    |
| `fallbacks`        | plan → others in it: of less memory to go on with, the next best to measure      |
| `offers`           | machines and prices → the best plan on their parts, by time and money            |
| `frontier`         | job → time against memory, time and money against devices                        |
| `report_search`    | job and plan → its frontier and rivals, as far as a time limit reaches           |
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "batch": ("grow_batch",),
    "calibration": ("calibrate", "time_factors"),
    "choose": ("NothingFitsError", "PlanningResult", "find_plan", "plan_job"),
    "demands": ("demands_of",),
    "devices": ("device_counts", "plan_fewest_devices", "with_devices"),
    "elastic": ("check_replannable", "with_spares"),
    "explain": ("explain_plan",),
    "fallbacks": ("with_fallbacks", "with_next_best"),
    "framework_fit": ("FittedPlan", "plan_for_framework"),
    "frontier": ("find_trade_offs",),
    "impossible": ("refuse_impossible",),
    "job": ("make_any_job", "make_job", "planned_chain"),
    "length": ("longest_sequence",),
    "not_searched": ("samples_not_measured",),
    "offers": ("find_offers",),
    "pins": ("parse_pin",),
    "pool_rivals": ("explain_pools", "with_pool_baselines"),
    "pool_space": ("not_with_pools",),
    "price": ("any_job_of", "job_of", "job_or_reason", "uniform_plan", "with_cost", "with_price"),
    "problem": ("PlanOptions", "Space", "make_tables", "pipeline_settings", "problem_of", "stage_strategies"),
    "report_search": ("search_for_report",),
    "rivals": ("with_baselines",),
    "slow_rank": ("slow_nodes",),
    "trial": ("Trial", "Trials"),
    "why_not": ("pin_error", "why_not_plan"),
}
"""The public names of modules, each of which is loaded when one of its names is first used."""
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
