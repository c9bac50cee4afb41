"""Training data: samples and their order, identical under every plan.

The samples of a step depend only on the seed and on their position in the run (step · global batch + index). Every plan
and world size therefore reads the same data in the same order, and a resumed run needs only its step number. A rank
reads only the samples that it trains on.

| module        | purpose                                                                           |
|---------------|-----------------------------------------------------------------------------------|
| `order`       | order of samples: a permutation of each epoch, computed without storing it        |
| `files`       | token files, read in place; a file that shrinks raises an error                   |
| `rows`        | rows read by `datasets`, and mixtures of them                                     |
| `completions` | prompts with completions, and conversations, as tokens with targets               |
| `packing`     | packing of rows into samples of one length                                        |
| `prepare`     | text, documents and tokenizers; token files, written once and cached              |
| `tokens`      | samples for next-token and masked-token prediction and for encoder-decoder models |
| `source`      | sources of ``--data`` and ``--dataset``; samples of images, features, own modules |
"""
