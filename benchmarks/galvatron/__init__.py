"""Galvatron's published inputs, cost rules and predictions, rebuilt; `../galvatron_paper.py` prints the comparison.

| module   | idea                                                                                     |
|----------|------------------------------------------------------------------------------------------|
| `inputs` | what the authors measured, as typed values                                               |
| `rules`  | their cost rules: seconds and MB of a layer, of a switch, and what a stage holds besides |
| `tables` | the rules as our cost tables                                                             |
| `cuts`   | the fastest cuts under their objective, with our search for each stage                   |
| `cells`  | the cells of their table of predictions: theirs, their plan scored again, ours           |
| `greedy` | the cuts of their planner, rebuilt: what it finds in cells whose prediction is not at hand |
"""
