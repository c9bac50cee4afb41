"""Training data: what a sample is, and which samples a step reads, the same under every plan.

Which samples a step reads depends on the seed and on their place in the run alone (step · global batch + index): every
plan and world size sees the same data in the same order, and a run that resumes at a step needs no other state than
its number. A rank reads the samples that it trains on and no others.

| module        | what it does                                                                      |
|---------------|-----------------------------------------------------------------------------------|
| `order`       | the order of samples: a permutation of each epoch that takes no memory            |
| `files`       | token files, read in place; a file that shrinks is an error and not a crash       |
| `rows`        | rows that `datasets` reads, and mixtures of them                                  |
| `completions` | prompts with completions and conversations, as tokens with targets                |
| `prepare`     | text, its documents and tokenizers, as a token file, made once and kept           |
| `tokens`      | samples of next-token and masked-token prediction, and of encoder and decoder     |
| `source`      | what ``--data`` and ``--dataset`` mean; samples of images, features, own modules  |
"""
