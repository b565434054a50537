"""Groups rotated by a Hadamard matrix, so that one large element does not take the precision of its neighbours.

A group x of n elements, a power of two, becomes H D x / n: D flips the signs of some elements (always the same, so that
a group whose elements are alike does not become a single large one), H adds and subtracts all of them in log2(n) rounds
of butterflies. The way back is D H, since H H = n. Each element of the rotated group is a mean of all elements up to
their signs, so nothing overflows, and the factor 1/n is exact.

Both ways together are exact but for fp32: an element comes back within 2 n log2(n) 2^-24 of its group's largest
magnitude. Signs that are random for this purpose: QuIP (Chee et al., 2023) and QuaRot (Ashkboos et al., 2024).
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

# Hexadecimal digits of pi behind the point. Bit i is that of element i of a group; a set bit is a minus.
SIGNS: Final = (0x243F6A8885A308D3, 0x13198A2E03707344)
MOST_GROUP: Final = 64 * len(SIGNS)


def rotate(x: Tensor, into: Tensor) -> Tensor:
    """Fill ``into`` with the rotated rows of ``x``, fp32 [groups, n], and return it; they may be the same tensor."""
    torch.mul(x, signs(x.shape[1], x.device) / x.shape[1], out=into)
    return _butterflies(into)


def rotate_back(y: Tensor) -> Tensor:
    """Turn the rows of ``y``, fp32 [groups, n], back in place, and return it."""
    return _butterflies(y).mul_(signs(y.shape[1], y.device))


@cache
def signs(group: int, device: torch.device) -> Tensor:
    """Return the signs of the elements of a group, fp32 [group] of 1 and -1.

    Raises:
        ValueError: no power of two from 2 to 128.
    """
    if not 2 <= group <= MOST_GROUP or group & (group - 1):
        raise ValueError(f"no rotation of {group} elements")
    bits = [SIGNS[i // 64] >> (i % 64) & 1 for i in range(group)]
    return (1 - 2 * torch.tensor(bits, dtype=torch.float32)).to(device)


def _butterflies(y: Tensor) -> Tensor:
    apart = 1
    while apart < y.shape[1]:
        one, other = y.view(-1, 2, apart).unbind(1)
        sums = one + other
        torch.sub(one, other, out=other)
        one.copy_(sums)
        apart *= 2
    return y
