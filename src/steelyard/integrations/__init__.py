"""Plans in the training loops of other libraries.

| module               | purpose                                                                      |
|----------------------|------------------------------------------------------------------------------|
| `transformers`       | `transformers.Trainer`, or a subclass such as TRL's, under a plan            |
| `training_arguments` | refusal of Trainer arguments that contradict the plan                        |
| `batches`            | collator batches as the samples of a plan                                    |
"""
