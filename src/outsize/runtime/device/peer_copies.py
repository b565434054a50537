"""Which devices of a run copy to each other by themselves, without host memory between them."""

from functools import cache

import torch

from outsize.accelerators import index_of, vendor_of

# 1 MiB of numbers, enough to go over the wire that large copies take.
_NUMBERS = 2**18


def can_copy(source: str, target: str) -> bool:
    """Return whether copies go from one device's memory to the other's, and arrive as they were sent.

    The driver may promise it where an IOMMU or the mainboard then loses bytes, so a copy is tried. Copies between two
    workers on one device stay in its memory.

    Args:
        source: ``cuda:i``.
        target: ``cuda:j``.
    """
    return source == target or _arrives(source, target)


@cache
def _arrives(source: str, target: str) -> bool:
    here, there, reaches = torch.device(source), torch.device(target), vendor_of(source).reaches
    one, other = index_of(source), index_of(target)
    if not (reaches(one, other) and reaches(other, one)):
        return False
    sent = torch.arange(_NUMBERS, dtype=torch.int32)
    return torch.equal(sent.to(here).to(there).cpu(), sent)
