"""A seeded permutation of 0..size-1 in constant memory.

A shuffled array of sequence numbers costs 8 bytes per sequence and has to be rebuilt on resume. A block
cipher on the domain 0..size-1 costs nothing and answers any position at once. The construction is the
generalised Feistel network with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002): a balanced Feistel network permutes 0..4**k-1, the smallest such domain that holds ``size``; a
value that falls outside 0..size-1 is encrypted again until it falls inside. The domain is at most 4 * size,
so four walks are expected at most. Luby and Rackoff (1988) show that four rounds suffice for a pseudo-random
permutation; eight are used because the halves may be a few bits only. The round function is the finaliser of
splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 8


class SeededPermutation:
    """Bijection of 0..size-1 that is a pure function of (size, seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(f"outsize permutation {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS)
        self._keys = np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each position (int64 ``[n]``, within 0..size-1) goes, as int64 ``[n]``."""
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
