r"""The order in which a run reads its samples: a permutation for every epoch, worked out place by place.

Sample $i$ of a run lies in epoch $e = \lfloor i / n \rfloor$ at place $i \bmod n$, and is data sample
$\pi_{\text{seed},e}(i \bmod n)$. The permutation $\pi$ is a balanced Feistel network of four rounds on the smallest
even number of bits that holds $n$, repeated until the result is below $n$: a step costs a few multiplications and no
memory, whereas a shuffled list of a trillion-token corpus would take a gigabyte on every rank.

| symbol | argument      | meaning                              |
|--------|---------------|--------------------------------------|
| $n$    | `num_samples` | samples of the data                  |
| $i$    | `sample`      | samples of the run before this one   |

Sources: Luby and Rackoff 1988 (four rounds); Black and Rogaway 2002 (walking the cycle); Steele et al. 2014, figure 15
(the mixing function). Not modelled: secrecy; the order is only meant to look like no order.
"""

from dataclasses import dataclass

_NUM_ROUNDS = 4
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Mapping from the samples of a run to data samples; depends only on these two numbers."""

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
    """Return the samples of a global batch that share ``index`` of ``degree`` trains on, microbatch after microbatch.

    A microbatch is a run of neighbouring samples, and each share of it too.
    """
    samples = global_batch // num_microbatches
    share = samples // degree
    return [
        microbatch * samples + index * share + place for microbatch in range(num_microbatches) for place in range(share)
    ]


def mixed(value: int) -> int:
    """Return a 64-bit number that depends on every bit of ``value``."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
