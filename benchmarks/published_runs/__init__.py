"""Training runs that others measured and published, predicted; `../published_runs.py` prints how far off it is.

| module       | idea                                                                                |
|--------------|-------------------------------------------------------------------------------------|
| `rows`       | the table of runs, read: one row is one run; `data/` holds those with a measurement |
| `frameworks` | the engine of a row with its options, of the product or of the same kind            |
| `jobs`       | a row as settings, job and plan that the product can price, or why not              |
| `forecast`   | seconds, memory and whether it fits, of every row                                   |
| `score`      | errors, verdicts on memory and regret, per source                                   |
| `targets`    | the project's targets and what was reached                                          |
| `classes`    | dense, experts, long context, 8-bit, adapters: what every figure by class goes by   |
| `order`      | which plan of a job is ranked first, its regret, and the rank correlation           |
| `accuracy`   | errors and verdicts by class and source, and the targets of classes                 |
| `page`       | docs/explanation/accuracy.md, with what others' estimators say                      |
| `table`      | all of this for the terminal and as JSON                                            |
"""
