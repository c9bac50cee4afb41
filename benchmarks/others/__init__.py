"""Others' open estimators, asked about published runs: each in a virtual environment of its own, never in ours.

| module        | idea                                                                                          |
|---------------|-----------------------------------------------------------------------------------------------|
| `estimators`  | which there are, what each states and leaves out, and how it is installed and asked           |
| `questions`   | a run as plain numbers, as an estimator's own arguments need them                              |
| `scripts/`    | one script for each, run by its environment: questions on standard input, estimates on output |

A script imports nothing of this project. Its environment lies in ``$XDG_CACHE_HOME/steelyard/estimators``.
"""
