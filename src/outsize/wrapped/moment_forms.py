"""Moments on their way into a home that may keep them in another form than they have.

A ``state_dict`` has moments as they are kept: fp32, bf16, or codes of 8 bits beside the exponents of their blocks, so
that what is loaded goes on bit for bit. One of another form, ``torch.optim.AdamW``'s say, is rounded to the nearest.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from outsize.optim.moments import EXP_AVG_FORM, EXP_AVG_SQ_FORM, from_codes, to_codes
from outsize.optim.optimizer_spec import (
    BLOCK_ELEMENTS,
    EXP_AVG,
    EXP_AVG_SCALES,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALES,
    Moments,
)

_KEPT = {
    EXP_AVG: (EXP_AVG_SCALES, EXP_AVG_FORM),
    EXP_AVG_SQ: (EXP_AVG_SQ_SCALES, EXP_AVG_SQ_FORM),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
# Of the 16 bits of a chance, half: what is rounded by it goes to the nearest.
_HALF = 0x8000


def as_kept(values: Mapping[str, Tensor], moments: Moments) -> dict[str, Tensor]:
    """Return the state of a parameter with its moments in the form ``moments``.

    Args:
        values: ``exp_avg`` and ``exp_avg_sq`` of the shape of the parameter, where they are codes with
            ``exp_avg_scales`` and ``exp_avg_sq_scales`` (one byte for 64 elements); and whatever else there is.
        moments: the form.
    """
    found = dict(values)
    for name, (scales, form) in _KEPT.items():
        if name not in found or found[name].dtype is _DTYPES[moments]:
            continue
        # A file may have been read onto a GPU; the home is in host memory or on disk.
        given, tops = found[name].cpu(), found.pop(scales, None)
        exact = given.float() if tops is None else from_codes(given.reshape(-1), tops.cpu(), form)
        exact = exact.reshape(given.shape)
        found[name] = exact.to(_DTYPES[moments])
        if moments == "int8":
            flat = exact.reshape(-1).contiguous()
            found[scales] = torch.empty(-(-flat.numel() // BLOCK_ELEMENTS), dtype=torch.uint8)
            codes = torch.empty(flat.numel(), dtype=torch.uint8)
            chance = torch.full((flat.numel(),), _HALF, dtype=torch.int32)
            to_codes(flat, chance, form, codes, found[scales])
            found[name] = codes.view(exact.shape)
    return found
