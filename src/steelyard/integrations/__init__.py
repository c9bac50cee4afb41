"""Plans in the loops of other libraries.

| module               | what it does                                                                 |
|----------------------|------------------------------------------------------------------------------|
| `transformers`       | `transformers.Trainer`, or a subclass of it as TRL has, under a plan         |
| `training_arguments` | refuses arguments of Trainer that contradict the plan                        |
| `batches`            | the batches of collators as the samples of a plan                            |
"""
