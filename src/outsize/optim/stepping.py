"""A step of a unit whose planes are not plain numbers: piece by piece into fp32, stepped there, and back.

The arithmetic is that of `outsize.optim.adamw` in every layout. What is kept between steps is what differs: with split
masters and fp32 moments nothing, so that such a step is bit for bit a plain one.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.spec import UnitSpec
from outsize.optim.adamw import AdamW, step_planes
from outsize.optim.spec import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT,
    MASTER,
    MASTER_LOW,
    MASTER_TIES,
    WEIGHTS,
    StateLayout,
)
from outsize.optim.split import join_master, split_master

Planes = Mapping[str, Tensor]
# Pieces of 512 KiB in fp32: these and what is made of them stay in a cache.
PIECE_ELEMENTS = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step of a unit is taken with, see `outsize.optim.adamw.step_planes`."""

    settings: AdamW
    step: int | Mapping[str, int]
    lr: float
    clip_coefficient: Tensor | None = None
    skip: AbstractSet[str] = frozenset()


class StateStepper:
    """Steps units of one layout; holds the fp32 numbers of a piece.

    Args:
        layout: of their planes.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._room: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, unit: UnitSpec, start: int, stop: int, planes: Planes, update: Update) -> None:
        """Step elements ``start`` to ``stop`` of ``unit``, in place.

        Args:
            unit: whose parameters they are.
            start: first element, a multiple of the layout's quantum.
            stop: end of the range, such a multiple or the end of the unit.
            planes: that range of every plane that a step reads or writes, and the gradient.
            update: what with.

        Raises:
            ValueError: a range or a tensor that does not fit the unit, or a bad learning rate.
        """
        for first in range(start, stop, PIECE_ELEMENTS):
            last = min(first + PIECE_ELEMENTS, stop)
            if not any(
                t.trainable and t.name not in update.skip and t.offset < last and t.offset + t.numel > first
                for t in unit.tensors
            ):
                continue
            self._piece(unit, first, last, self._cut(planes, first - start, last - start), update)

    def _cut(self, planes: Planes, first: int, last: int) -> dict[str, Tensor]:
        made = self._layout.tile_planes
        return {
            name: plane[first // made[name].group : -(-last // made[name].group)]
            for name, plane in planes.items()
        }

    def _piece(self, unit: UnitSpec, first: int, last: int, planes: Planes, update: Update) -> None:
        master = self._master(planes, last - first)
        step_planes(
            update.settings,
            unit,
            start=first,
            stop=last,
            master=master,
            exp_avg=planes[EXP_AVG],
            exp_avg_sq=planes[EXP_AVG_SQ],
            gradient=self._in_fp32(GRADIENT, planes[GRADIENT]),
            step=update.step,
            lr=update.lr,
            clip_coefficient=update.clip_coefficient,
            skip=update.skip,
        )
        if MASTER_LOW in planes:
            split_master(master, planes[WEIGHTS], planes[MASTER_LOW], planes.get(MASTER_TIES))
        elif MASTER in planes:
            planes[WEIGHTS].copy_(master)

    def _master(self, planes: Planes, numel: int) -> Tensor:
        if MASTER_LOW not in planes:
            return planes[MASTER if MASTER in planes else WEIGHTS]
        master = self._take(MASTER, numel)
        join_master(planes[WEIGHTS], planes[MASTER_LOW], planes.get(MASTER_TIES), master)
        return master

    def _in_fp32(self, name: str, values: Tensor) -> Tensor:
        return values if values.dtype is torch.float32 else self._take(name, values.numel()).copy_(values)

    def _take(self, name: str, numel: int) -> Tensor:
        if name not in self._room:
            self._room[name] = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
        return self._room[name][:numel]
