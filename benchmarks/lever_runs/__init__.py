"""Published measurements of single training levers, predicted; `../levers.py` prints how far off it is.

| module       | idea                                                                              |
|--------------|-----------------------------------------------------------------------------------|
| `rows`       | the table, read: one row is one measurement                                       |
| `models`     | the config of a row's model, and the names of the linear layers that it adapts    |
| `frameworks` | what each framework keeps, and what its modules save beyond ours                  |
| `jobs`       | a row as a request, settings and an engine that the cost model can price, or why not |
| `forecast`   | seconds, tokens, memory and whether it fits, of every row                         |
| `score`      | errors by source and lever, verdicts and pairs                                    |
"""
