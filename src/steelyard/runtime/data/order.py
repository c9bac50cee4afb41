r"""Sample order of a run: a permutation for every epoch, computed one position at a time.

Sample $i$ of a run is in epoch $e = \lfloor i / n \rfloor$ at position $i \bmod n$, and is data sample
$\pi_{\text{seed},e}(i \bmod n)$. The permutation $\pi$ is a balanced Feistel network of four rounds on the smallest
even number of bits that holds $n$, applied repeatedly until the result is below $n$. A lookup costs a few
multiplications and no memory, but a shuffled list for a trillion-token corpus would take a gigabyte on every rank.

| symbol | argument      | meaning                              |
|--------|---------------|--------------------------------------|
| $n$    | `num_samples` | number of data samples               |
| $i$    | `sample`      | index of the sample in the run       |

Sources: Luby and Rackoff 1988 (four rounds); Black and Rogaway 2002 (cycle walking); Steele et al. 2014, figure 15
(mixing function). The order is not cryptographically secure; it only needs to look random.
"""

from dataclasses import dataclass

_NUM_ROUNDS = 4
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Map from the samples of a run to data samples; depends only on ``num_samples`` and ``seed``."""

    num_samples: int
    seed: int

    def data_sample(self, sample: int) -> int:
        """Return the data sample, from 0 to ``num_samples`` - 1, that the run reads as its ``sample``-th."""
        epoch, place = divmod(sample, self.num_samples)
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        key = mixed(mixed(self.seed) ^ epoch)
        while True:
            mask = (1 << half_bits) - 1
            left, right = place >> half_bits, place & mask
            for round_number in range(_NUM_ROUNDS):
                left, right = right, left ^ (mixed(key ^ mixed(right * _NUM_ROUNDS + round_number)) & mask)
            place = left << half_bits | right
            if place < self.num_samples:
                return place


def rank_samples(*, global_batch: int, num_microbatches: int, degree: int, index: int) -> list[int]:
    """Return the samples of a global batch in share ``index`` of ``degree``, microbatch by microbatch.

    A microbatch consists of consecutive samples, and so does each share of it.
    """
    samples = global_batch // num_microbatches
    share = samples // degree
    return [
        microbatch * samples + index * share + place for microbatch in range(num_microbatches) for place in range(share)
    ]


def mixed(value: int) -> int:
    """Return a 64-bit hash that depends on every bit of ``value``."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
