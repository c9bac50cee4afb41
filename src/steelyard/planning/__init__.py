"""The planner: from a request to a finished plan. Its modules in their order:

| module             | from → to                                                                        |
|--------------------|----------------------------------------------------------------------------------|
| `request`          | what a user says, or a plan → `PlanRequest`: all that planning is asked          |
| `complete`         | request → finished plan: searched, compared, with fallbacks and next best plans  |
| `job`              | request → job: a price for every layer, traced or measured, scaled by runs       |
| `pins`             | what layers must have, as a user writes it → cost tables that allow nothing else |
| `problem`          | job and decisions → cost tables, one for every pipeline configuration            |
| `choose`           | cost tables → search → the best few re-scored by the simulator → plan            |
| `price`            | result of a search → plan and its prediction                                     |
| `variants`         | request → named what-ifs, and the best plan of each                              |
| `uniform`          | cost tables → those of one strategy everywhere                                   |
| `why_not`          | request and a pin → what it costs, or what forbids it; job → what is not searched |
| `sizes`            | request → largest useful batch, longest sequence, fewest devices                 |
| `explain`          | plan → its bottleneck, its baselines, the value of memory, its frontier          |
| `frontier`         | request → time against memory, time and money against parts of a cluster         |
| `engine_fit`       | plan → the best plan that another engine can run instead                         |
| `elastic`          | plan → the plan for the devices that are left, or around a slow rank             |
"""
