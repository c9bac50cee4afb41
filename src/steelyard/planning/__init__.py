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
