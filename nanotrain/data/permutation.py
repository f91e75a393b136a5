"""A random permutation of [0, n) that is computed, not stored.

A Feistel network is a bijection of [0, 4**h) for any round function. Following its cycle until the value is below n
restricts it to [0, n). With 4**h < 4n this takes fewer than four steps on average, so one index costs a few
microseconds and no memory, for 10 samples or 10**15.

Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 4. The round function is a keyed
splitmix64 finalizer: it mixes well but is not a cipher.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """A bijection of [0, size) selected by a key.

    >>> order = Permutation(5, seed=1, epoch=0)
    >>> sorted(order[i] for i in range(5))
    [0, 1, 2, 3, 4]
    """

    size: int  # number of elements, at least 1
    seed: int  # first half of the key
    epoch: int  # second half of the key; every epoch has its own order

    @cached_property
    def _half_bits(self) -> int:
        return max(1, ((self.size - 1).bit_length() + 1) // 2)

    @cached_property
    def _round_keys(self) -> tuple[int, ...]:
        key = hashlib.blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        return struct.unpack(f"<{_ROUNDS}Q", key)

    def __getitem__(self, index: int) -> int:
        """The element at `index` of the permuted order."""
        assert 0 <= index < self.size, f"index {index} is outside [0, {self.size}): the loop might not end"
        value = self._feistel(index)
        while value >= self.size:
            value = self._feistel(value)
        return value

    def _feistel(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << bits | right


def _mix(value: int) -> int:
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
