"""From a request to a finished plan: the planner's parts in their order, one after another.

| module             | from → to                                                                        |
|--------------------|----------------------------------------------------------------------------------|
| `request`          | what a user says, or a plan → `PlanRequest`: all that planning is asked          |
| `complete`         | request → finished plan: searched, compared, with the plans that go along        |
| `job`              | request → job: a price for every layer, traced or measured, scaled by runs       |
| `pins`             | what layers must have, as a user writes it → cost tables that allow nothing else |
| `problem`          | job and decisions → cost tables, one for every pipeline configuration            |
| `choose`           | cost tables → search → the best few re-scored by the simulator → plan            |
| `price`            | outcome of a search → plan, and its prediction                                   |
| `variants`         | request → named what-ifs, and the best plan of each                              |
| `uniform`          | cost tables → those of one strategy everywhere                                   |
| `why_not`          | request and a pin → what it costs, or what forbids it; job → what is not searched |
| `sizes`            | request → the largest batch, the longest sequence, the fewest devices that do    |
| `explain`          | plan → what binds, its baselines, what memory is worth, its frontier             |
| `frontier`         | request → time against memory, time and money against devices and their parts    |
| `engine_fit`       | plan → the best plan that another engine can run in its place                    |
| `elastic`          | plan → the plan for what is left of its cluster, or around a slow rank           |
"""
