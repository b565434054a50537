"""One update of neighbouring parameters, as an optimizer is told of it."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.optim.factors import Factor
from outsize.optim.planes import StatePlanes, WholeParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update depends on besides the planes.

    Attributes:
        lr: learning rate of these parameters.
        count: how often the parameters have been stepped, this update included.
        decay: factor of weight decay.
        clip: factor of the gradient.
        first: index of the first element in its unit.
        key: of the chances of this update, see `outsize.optim.moments.chance_key`.
    """

    lr: float
    count: int
    decay: float
    clip: float
    first: int
    key: int


class UpdateRule(Protocol):
    """Update rule of an elementwise optimizer."""

    @property
    def num_moments(self) -> int:
        """How many moments it keeps, or planes in their place."""

    def update(
        self, update: Update, master: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], *, exact: bool
    ) -> None:
        """Update fp32 ``master`` and ``moments`` in place, in torch ops.

        Args:
            update: the occasion; the gradient is clipped already.
            master: fp32 ``[n]``.
            gradient: fp32 ``[n]``, free to be overwritten.
            moments: fp32 ``[n]`` each, as many as there are.
            exact: whether moments are kept in fp32: then the bits are those of torch's own optimizer, where it has one.
        """

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return what does the same to separate fp32 parameters in groups, for runs that keep all in memory."""

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Step planes with a C kernel; return how many elements, from the first on, it has stepped: perhaps none."""


@runtime_checkable
class WholeRule(Protocol):
    """How an optimizer that looks at whole parameters updates them, one after the other."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Factors that it keeps of some parameters."""

    def step_parameter(self, parameter: WholeParameter, update: Update) -> None:
        """Step a parameter in place; its gradient is spent, and not clipped before."""

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return what does the same to separate fp32 parameters in groups, for runs that keep all in memory."""
