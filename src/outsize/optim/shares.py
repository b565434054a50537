"""Bytes of the optimizer's state at home: the share of each of several ranks, and the record of a commit. No torch.

Every rank holds all weights in compute dtype, and masters, moments and the summed gradient of its share alone. A share
is one range of elements in each unit, so that what a rank sends or keeps of a unit is one piece. Ranges are cut at
whole granules, those of the checksums of a home on disk. What does not go up evenly in one unit goes to the ranks that
have the least of the units before, so that over all units together no rank has two granules more than another.

Shares follow from the model and the number of ranks, and from nothing else: whoever knows both knows who holds what.
"""

import json
from collections.abc import Collection, Mapping
from functools import lru_cache

from outsize.model.sizes.model_spec import (
    GRANULE_ELEMENTS,
    PLANE_ELEMENTS,
    SECTOR_BYTES,
    ModelSpec,
    UnitSpec,
    granule_elements_for,
)
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, Plane, State, StateLayout, layout_of
from outsize.units import align_up

# A granule is at most this part of a share, so that shares of large models are even within one percent.
_GRANULES_OF_A_SHARE = 256


def share_granule(model: ModelSpec, num_ranks: int) -> int:
    """Return the elements that shares of ``model`` are whole multiples of: a power of two, 2048 to 131,072."""
    trained = sum(unit.numel for unit in model.units if unit.trainable)
    most = trained // (num_ranks * _GRANULES_OF_A_SHARE)
    granule = GRANULE_ELEMENTS
    while granule > PLANE_ELEMENTS and granule > most:
        granule //= 2
    return granule


def home_granule(model: ModelSpec, tile_elements: int, num_ranks: int) -> int:
    """Return the elements that checksums of a home on disk cover, so that tiles and shares are whole multiples."""
    granule = granule_elements_for(tile_elements)
    return granule if num_ranks == 1 else min(granule, share_granule(model, num_ranks))


def shares(model: ModelSpec, num_ranks: int) -> tuple[tuple[range, ...], ...]:
    """Return the elements that each rank steps: by unit, then by rank; empty ranges of a unit that does not train.

    The ranges of a unit follow one another in the order of ranks and cover it.

    Raises:
        ValueError: fewer than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks share nothing")
    granule = share_granule(model, num_ranks)
    totals = [0] * num_ranks
    by_unit = []
    for unit in model.units:
        numel = unit.numel * unit.trainable
        counts = _deal(numel, granule, totals)
        ranges, end = [], 0
        for rank, count in enumerate(counts):
            start, end = end, min(end + count * granule, numel)
            ranges.append(range(start, end))
            totals[rank] += end - start
        by_unit.append(tuple(ranges))
    return tuple(by_unit)


def _deal(numel: int, granule: int, totals: list[int]) -> list[int]:
    """Return how many granules of a unit each rank gets, where ``totals`` are the elements that each has already."""
    left = -(-numel // granule)
    target = (sum(totals) + numel) / len(totals)
    counts = []
    for total in totals:
        counts.append(min(left, max(0, int((target - total) // granule))))
        left -= counts[-1]
    for _ in range(left):
        least = min(range(len(totals)), key=lambda rank: totals[rank] + counts[rank] * granule)
        counts[least] += 1
    return counts


def largest_share(model: ModelSpec, num_ranks: int) -> tuple[int, ...]:
    """Return the elements by unit of the rank that steps most."""
    by_rank = zip(*shares(model, num_ranks), strict=True)
    return max((tuple(len(part) for part in ranges) for ranges in by_rank), key=sum)


def own_elements(model: ModelSpec, num_ranks: int, rank: int | None = None) -> tuple[int, ...]:
    """Return the elements of each unit that one of several ranks steps; ``rank`` None is the one that steps most."""
    if rank is None:
        return largest_share(model, num_ranks)
    return tuple(len(ranges[rank]) for ranges in shares(model, num_ranks))


def home_bytes(
    unit: UnitSpec, state: State, own_elements: int | None = None, full_planes: Collection[str] = (WEIGHTS,)
) -> int:
    """Return the bytes of ``unit`` at home: weights, and where it trains master, moments and gradient.

    Of several ranks each has ``full_planes`` planes, and ``own_elements`` of all others; None is all.
    """
    layout = layout_of(state)
    if not unit.trainable:
        return unit.link_bytes(layout.dtype)
    kept_bytes = _kept_bytes(unit, layout, tuple(layout.planes), own_elements, full_planes)
    return kept_bytes + sum(part.home_bytes for part in unit.frozen)


def committed_bytes(
    unit: UnitSpec, state: State, own_elements: int | None = None, full_planes: Collection[str] = (WEIGHTS,)
) -> int:
    """Return the bytes of ``unit`` in a home that commits: what a step changes twice, the rest once."""
    layout = layout_of(state)
    twice = _kept_bytes(unit, layout, layout.write_planes, own_elements, full_planes) if unit.trainable else 0
    return home_bytes(unit, layout, own_elements, full_planes) + twice


def _kept_bytes(
    unit: UnitSpec,
    layout: StateLayout,
    names: tuple[str, ...],
    own_elements: int | None,
    full_planes: Collection[str],
) -> int:
    """Return the bytes of planes of a unit: of ``full_planes`` all, of others ``own_elements``, or all."""
    if own_elements is None:
        return layout.bytes_of(unit, names=names)
    shared = tuple(name for name in names if name not in full_planes)
    rest = tuple(name for name in names if name in full_planes)
    return layout.bytes_of(unit, names=rest) + layout.bytes_of(unit, own_elements, shared)


# A commit record holds a text that says where the run stood, with each parameter's name and a number, and a side and a
# checksum for each granule.
_TEXT_BYTES, _NUMBER_BYTES, _GRANULE_BYTES = 16_384, 16, 9


def commit_record_bytes(
    model: ModelSpec, granule_elements: int = PLANE_ELEMENTS, planes: Mapping[str, Plane] | None = None
) -> int:
    """Return the most bytes that a commit record of ``model`` takes, whole sectors, with granules of that size.

    Args:
        model: the units.
        granule_elements: elements that a checksum covers.
        planes: of the home; None for those of a plain layout.
    """
    forms = layout_of(model.dtype).planes if planes is None else planes
    lasting = [plane for name, plane in forms.items() if name != GRADIENT]
    granules = sum(
        sum(-(-plane.items_of(unit) // plane.granule_items(granule_elements)) for plane in lasting)
        if unit.trainable
        else -(-unit.numel // granule_elements)
        for unit in model.units
    )
    parts = [part for unit in model.units for part in unit.frozen]
    granules += sum(-(-part.home_elements // granule_elements) for part in parts)
    parameters = sum(
        _text_bytes(tensor.name) + _NUMBER_BYTES for unit in model.units for tensor in unit.tensors
    )
    size = _TEXT_BYTES + parameters + granules * _GRANULE_BYTES
    return align_up(size, SECTOR_BYTES)


@lru_cache(maxsize=65_536)
def _text_bytes(name: str) -> int:
    return len(json.dumps(name))
