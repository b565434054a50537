"""What an optimizer keeps per parameter, in planes and bytes. No torch.

A plane holds one number per element of a unit, padding included. Masters, moments and gradients are fp32
whatever the compute dtype, so the optimizer's arithmetic is that of a plain fp32 run; with fp32 compute the
weights are their own masters.

A home that commits every step keeps what a step changes twice, so that the state of the step before is whole until the
next one is; gradients are made anew in every step and lie there once.
"""

import json

from outsize.model.spec import PLANE_ELEMENTS, SECTOR_BYTES, ModelSpec, UnitSpec
from outsize.units import align_up

WEIGHTS = "weights"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRADIENT = "gradient"

_STATE = {EXP_AVG: 4, EXP_AVG_SQ: 4, GRADIENT: 4}
_PLANES = {
    "fp32": {WEIGHTS: 4, **_STATE},
    "bf16": {WEIGHTS: 2, MASTER: 4, **_STATE},
    "fp16": {WEIGHTS: 2, MASTER: 4, **_STATE},
}


def planes_for(dtype: str) -> dict[str, int]:
    """Return the planes of a trained unit and their bytes per element, for compute dtype ``dtype``.

    Units that are not trained have ``weights`` only.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype not in _PLANES:
        raise ValueError(f"no state layout for dtype {dtype!r}; there is {', '.join(_PLANES)}")
    return dict(_PLANES[dtype])


def master_plane(dtype: str) -> str:
    """Return the plane that the optimizer steps: ``master`` where there is one, else ``weights``."""
    return MASTER if MASTER in planes_for(dtype) else WEIGHTS


def bytes_per_parameter(dtype: str) -> int:
    """Return the bytes of all planes per trained element: 16 for fp32, 18 for bf16 and fp16."""
    return sum(planes_for(dtype).values())


def step_read_planes(dtype: str) -> tuple[str, ...]:
    """Return the planes that a step reads."""
    return (master_plane(dtype), EXP_AVG, EXP_AVG_SQ, GRADIENT)


def step_write_planes(dtype: str) -> tuple[str, ...]:
    """Return the planes that a step changes and that must be kept."""
    return tuple(plane for plane in planes_for(dtype) if plane != GRADIENT)


# A commit record holds a text that says where the run stood, with each parameter's name and a number, and a side and a
# checksum for each granule.
_TEXT_BYTES, _NUMBER_BYTES, _GRANULE_BYTES = 16_384, 16, 9


def committed_bytes(unit: UnitSpec, dtype: str, own_elements: int | None = None) -> int:
    """Return the bytes of ``unit`` in a home that commits: what a step changes twice, the rest once.

    All weights, and of everything else ``own_elements``, or all where that is None.
    """
    if not unit.trainable:
        return unit.link_bytes(dtype)
    planes = planes_for(dtype)
    apart = sum(part.home_bytes for part in unit.frozen)
    twice = sum(planes[plane] for plane in step_write_planes(dtype))
    own, weights = unit.numel if own_elements is None else own_elements, planes[WEIGHTS]
    return unit.numel * 2 * weights + own * (sum(planes.values()) + twice - 2 * weights) + apart


def commit_record_bytes(model: ModelSpec, granule_elements: int = PLANE_ELEMENTS) -> int:
    """Return the most bytes that a commit record of ``model`` takes, whole sectors, with granules of that size."""
    num_planes = len(step_write_planes(model.dtype))
    granules = sum(
        -(-unit.numel // granule_elements) * (num_planes if unit.trainable else 1) for unit in model.units
    )
    parts = [part for unit in model.units for part in unit.frozen]
    granules += sum(-(-part.home_elements // granule_elements) for part in parts)
    parameters = sum(
        len(json.dumps(tensor.name)) + _NUMBER_BYTES for unit in model.units for tensor in unit.tensors
    )
    size = _TEXT_BYTES + parameters + granules * _GRANULE_BYTES
    return align_up(size, SECTOR_BYTES)
