"""Weights that nobody has to store: random numbers that follow from a seed and a name, piece by piece."""

import hashlib

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**20
NUM_BLOCKS = 29
STANDARD_DEVIATION = 0.02


class RandomWeights:
    """A `WeightSource` of normal numbers; vectors whose name ends in ``norm.weight`` are ones.

    A parameter is made of blocks drawn once; which ones, and with which sign, follows from the seed and its name. So
    billions of parameters are made at the speed of copying, and any range of one is the same whenever it is read.

    Args:
        seed: of all of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._blocks = torch.empty(NUM_BLOCKS, BLOCK_ELEMENTS)
        self._blocks.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """Fill ``into`` with elements ``[start, stop)`` of parameter ``name``."""
        flat = into.view(-1)
        if name.endswith("norm.weight"):
            flat.fill_(1.0)
            return
        for number in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
            first = number * BLOCK_ELEMENTS
            low, high = max(start, first), min(stop, first + BLOCK_ELEMENTS)
            chosen = hashlib.blake2b(f"{self._seed}/{name}/{number}".encode(), digest_size=8).digest()
            block = self._blocks[int.from_bytes(chosen[:4]) % NUM_BLOCKS, low - first : high - first]
            torch.mul(block, 1.0 if chosen[7] & 1 else -1.0, out=flat[low - start : high - start])
