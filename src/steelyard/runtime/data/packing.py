"""Packing of rows into samples: strategies and names of TRL (``packing_strategy``).

| strategy      | samples                                                                | attention          |
|---------------|------------------------------------------------------------------------|--------------------|
| ``bfd``       | whole rows, each truncated to the length of a sample                   | within each row    |
| ``bfd_split`` | whole rows; a longer row is cut into rows first                        | within each row    |
| ``wrapped``   | rows joined and cut at the length of a sample, without padding         | over the sample    |

With best-fit decreasing (``bfd``) the rows are taken by length, the longest first, and each goes into the sample with
the least room that is enough, or else into a new one. Positions begin anew with each row, by which transformers masks
attention between rows (`find_packed_sequence_indices`), and nothing predicts the first token of a row.

Source: Ding et al. 2024 (Fewer Truncations Improve Language Modeling), section 3.
"""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

BFD, SPLIT, WRAPPED = "bfd", "bfd_split", "wrapped"
STRATEGIES = (BFD, SPLIT, WRAPPED)


def pack(lengths: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Return the rows of each sample by best-fit decreasing; no row has more than ``seq_len`` tokens."""
    samples: list[list[int]] = []
    spaces: list[int] = []
    """Numbers of free tokens of all samples that are not full, each once, in rising order."""
    with_space: defaultdict[int, list[int]] = defaultdict(list)
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            sample, space = len(samples), seq_len
            samples.append([])
        else:
            space = spaces[place]
            sample = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        samples[sample].append(row)
        if left := space - length:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(sample)
    return [np.array(rows) for rows in samples]
