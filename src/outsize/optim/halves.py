"""An fp32 master beside its bf16 weight: the weight is the upper half, so only the lower half need be kept.

A bf16 weight is the upper 16 bits of its master, plus one where rounding to nearest went up, which the lower half says:
it does from 0x8000 on. The one case that is not decided so is the tie that was rounded down to an even weight, one
master in 131,072; those, and whatever else does not come back (the payload of a NaN), are kept one by one. Nothing
is lost.
"""

import torch
from torch import Tensor

# Masters are best halved in pieces that stay in a cache: these and what is made of them are 2 MiB.
PIECE_ELEMENTS = 2**17


def split_low(master: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `join_low` needs to make ``master`` from ``weights`` again.

    Args:
        master: fp32 ``[n]``.
        weights: bf16 ``[n]``, of the same elements.

    Returns:
        The lower halves, int16 ``[n]``; the positions where they do not suffice, int64 ``[k]``; and the bits of the
        masters there, int32 ``[k]``.
    """
    bits = master.view(torch.int32)
    low = bits.bitwise_and(0xFFFF).to(torch.int16)
    positions = (join_low(weights, low).view(torch.int32) != bits).nonzero().view(-1)
    return low, positions, bits[positions]


def join_low(weights: Tensor, low: Tensor) -> Tensor:
    """Return masters, fp32 ``[n]``, of bf16 ``weights`` and lower halves, except where `split_low` names others."""
    bits = weights.view(torch.int16).to(torch.int32)
    bits += low >> 15  # -1 where it rounded up
    bits <<= 16
    bits |= low.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.view(torch.float32)
