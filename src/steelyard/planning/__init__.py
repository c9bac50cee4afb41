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

from steelyard.planning.batch import grow_batch
from steelyard.planning.calibration import calibrate, time_factors
from steelyard.planning.choose import NothingFitsError, PlanningResult, find_plan, plan_job
from steelyard.planning.demands import demands_of
from steelyard.planning.devices import device_counts, plan_fewest_devices, with_devices
from steelyard.planning.elastic import check_replannable, with_spares
from steelyard.planning.explain import explain_plan
from steelyard.planning.fallbacks import with_fallbacks, with_next_best
from steelyard.planning.framework_fit import FittedPlan, plan_for_framework
from steelyard.planning.frontier import find_trade_offs
from steelyard.planning.impossible import refuse_impossible
from steelyard.planning.job import make_any_job, make_job, planned_chain
from steelyard.planning.length import longest_sequence
from steelyard.planning.not_searched import samples_not_measured
from steelyard.planning.offers import find_offers
from steelyard.planning.pins import parse_pin
from steelyard.planning.pool_rivals import explain_pools, with_pool_baselines
from steelyard.planning.pool_space import not_with_pools
from steelyard.planning.price import any_job_of, job_of, job_or_reason, uniform_plan, with_cost, with_price
from steelyard.planning.problem import PlanOptions, Space, make_tables, pipeline_settings, problem_of, stage_strategies
from steelyard.planning.report_search import search_for_report
from steelyard.planning.rivals import with_baselines
from steelyard.planning.slow_rank import slow_nodes
from steelyard.planning.trial import Trial, Trials
from steelyard.planning.why_not import pin_error, why_not, why_not_plan

__all__ = [
    "FittedPlan",
    "NothingFitsError",
    "PlanOptions",
    "PlanningResult",
    "Space",
    "Trial",
    "Trials",
    "any_job_of",
    "calibrate",
    "check_replannable",
    "demands_of",
    "device_counts",
    "explain_plan",
    "explain_pools",
    "find_offers",
    "find_plan",
    "find_trade_offs",
    "grow_batch",
    "job_of",
    "job_or_reason",
    "longest_sequence",
    "make_any_job",
    "make_job",
    "make_tables",
    "not_with_pools",
    "parse_pin",
    "pin_error",
    "pipeline_settings",
    "plan_fewest_devices",
    "plan_for_framework",
    "plan_job",
    "planned_chain",
    "problem_of",
    "refuse_impossible",
    "samples_not_measured",
    "search_for_report",
    "slow_nodes",
    "stage_strategies",
    "time_factors",
    "uniform_plan",
    "why_not",
    "why_not_plan",
    "with_baselines",
    "with_cost",
    "with_devices",
    "with_fallbacks",
    "with_next_best",
    "with_pool_baselines",
    "with_price",
    "with_spares",
]
