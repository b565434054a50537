"""Which devices of a run copy to each other by themselves, without host memory between them."""

from functools import cache

import torch

from outsize.accelerators import Devices, vendor_of

# 1 MiB of numbers, enough to go over the wire that large copies take.
_NUMBERS = 2**18


def can_copy(source: Devices, target: Devices) -> bool:
    """Return whether copies go from one device's memory to the other's, and arrive as they were sent.

    The driver may promise it where an IOMMU or the mainboard then loses bytes, so a copy is tried. Copies between two
    workers on one device stay in its memory.

    Args:
        source: an accelerator.
        target: another of its kind.
    """
    return source == target or _arrives(source, target)


@cache
def _arrives(source: Devices, target: Devices) -> bool:
    here, there, reaches = source.torch_device, target.torch_device, vendor_of(source.kind).reaches
    one, other = source.index, target.index
    if not (reaches(one, other) and reaches(other, one)):
        return False
    sent = torch.arange(_NUMBERS, dtype=torch.int32)
    return torch.equal(sent.to(here).to(there).cpu(), sent)
