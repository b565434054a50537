"""Flat buffers of a unit's state, and the rules that update them.

The planes of a unit that an optimizer steps, whatever form a home keeps them in.

Masters are split (``weights`` and ``master_low``, perhaps ``master_ties``), separate (``weights`` and ``master``), or
the weights themselves. Moments are fp32, bf16 or, beside scales, codes of 8 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.choices import Moments
from outsize.model.sizes.model_spec import TensorSpec
from outsize.optim.optimizer_names import BESIDE_MUON, Factor
from outsize.optim.optimizer_spec import (
    BLOCK_ELEMENTS,
    EXP_AVG_SQ,
    GRADIENT,
    MASTER,
    MASTER_LOW,
    MASTER_TIES,
    STATE,
    WEIGHTS,
)
from outsize.optim.split_masters import join_master, split_master

_MOMENTS: dict[torch.dtype, Moments] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "int8",
}
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "weights": (torch.float32, torch.bfloat16, torch.float16),
    "master": (torch.float32,),
    "master_low": (torch.int16, torch.int8),
    "master_ties": (torch.uint8,),
    "exp_avg": tuple(_MOMENTS),
    "exp_avg_sq": tuple(_MOMENTS),
    "exp_avg_scales": (torch.uint8,),
    "exp_avg_sq_scales": (torch.uint8,),
}
# Elements of the unit that one item stands for.
_GROUPS = dict.fromkeys(_DTYPES, 1) | {
    "master_ties": 8,
    "exp_avg_scales": BLOCK_ELEMENTS,
    "exp_avg_sq_scales": BLOCK_ELEMENTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlanes:
    """Planes of ``n`` elements, in host memory.

    Attributes:
        weights: fp32 ``[n]``, which are the masters; or bf16 or fp16 beside masters.
        master: fp32 ``[n]``.
        master_low: int16 ``[n]``, beside bf16 weights: the lower halves of split masters; int8 of masters of 24 bits.
        master_ties: uint8 ``[n / 8]``, see `outsize.optim.split_masters`; None for masters that may lose the last bit.
        exp_avg: first moment: fp32, bf16 or uint8 ``[n]``; None for none.
        exp_avg_sq: second moment, of the same dtype; None for optimizers that have none.
        exp_avg_scales: uint8 ``[n / 64]``, exponents of blocks, where ``exp_avg`` is uint8.
        exp_avg_sq_scales: the same of ``exp_avg_sq``.
        others: what a class of torch keeps instead of moments, fp32 ``[n]`` each, by the name of its plane.

    Raises:
        ValueError: planes that do not go together; it says which.
    """

    weights: Tensor
    master: Tensor | None = None
    master_low: Tensor | None = None
    master_ties: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    exp_avg_scales: Tensor | None = None
    exp_avg_sq_scales: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, planes: Mapping[str, Tensor | None]) -> "StatePlanes":
        """Return planes by their names at home, what they lack left out."""
        held = {name: plane for name, plane in planes.items() if plane is not None}
        others = {name: plane for name, plane in held.items() if name.startswith(STATE)}
        return cls(**{name: plane for name, plane in held.items() if name not in others}, others=others)

    def __post_init__(self) -> None:
        masters = (self.master is not None, self.master_low is not None, self.weights.dtype is torch.float32)
        if sum(masters) != 1:
            raise ValueError(
                "need fp32 weights, or a master, or the lower halves of split masters: one of them"
            )
        dtypes = dict(_DTYPES)
        if self.master_low is not None:
            dtypes["weights"] = (torch.bfloat16,)
        for name, plane in self._present().items():
            size = -(-self.numel // _GROUPS[name])
            if plane.dtype not in dtypes[name] or plane.shape != (size,) or not plane.is_contiguous():
                raise ValueError(f"{name}: need {size} items, not {plane.dtype} {list(plane.shape)}")
        for name, plane in self.others.items():
            if plane.dtype is not torch.float32 or plane.shape != (self.numel,):
                raise ValueError(f"{name}: need {self.numel} of fp32, not {plane.dtype} {list(plane.shape)}")
        self._check_moments()

    def _check_moments(self) -> None:
        for moment, scales in (
            (self.exp_avg, self.exp_avg_scales),
            (self.exp_avg_sq, self.exp_avg_sq_scales),
        ):
            if (moment is not None and moment.dtype is torch.uint8) != (scales is not None):
                raise ValueError("moments of 8 bits, and no others, have scales")
        if self.exp_avg_sq is not None and self.exp_avg_sq.dtype is not self._first_moment().dtype:
            raise ValueError(
                f"moments of one dtype, not {self._first_moment().dtype} and {self.exp_avg_sq.dtype}"
            )

    @property
    def numel(self) -> int:
        """Elements."""
        return self.weights.numel()

    @property
    def moments(self) -> Moments:
        """What the moments are kept in; fp32 where there are none."""
        return "fp32" if self.exp_avg is None else _MOMENTS[self.exp_avg.dtype]

    @property
    def num_moments(self) -> int:
        """How many moments there are, or planes in their place."""
        return (self.exp_avg is not None) + (self.exp_avg_sq is not None) + len(self.others)

    def cut(self, start: int, stop: int) -> "StatePlanes":
        """Return the planes of elements ``start``, a multiple of 8 and, with scales, of 64, to ``stop``."""
        part = object.__new__(StatePlanes)  # whose planes have been checked
        for name, group in _GROUPS.items():
            plane: Tensor | None = getattr(self, name)
            assert start % group == 0 or plane is None
            view = None if plane is None else plane[start // group : -(-stop // group)]
            object.__setattr__(part, name, view)
        object.__setattr__(part, "others", {name: plane[start:stop] for name, plane in self.others.items()})
        return part

    def _present(self) -> dict[str, Tensor]:
        present = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "others"}
        return {name: plane for name, plane in present.items() if plane is not None}

    def _first_moment(self) -> Tensor:
        if self.exp_avg is None:
            raise ValueError("exp_avg_sq without exp_avg")
        return self.exp_avg


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter in the planes of its whole unit, in host memory.

    Attributes:
        tensor: the parameter.
        planes: of the unit by name, gradient included: fp32 or bf16.
        scratches: as many as `StateLayout.num_scratches`, fp32; what they hold is lost.
        factors: where those that it has lie in their planes.
        unit: index of its unit.
    """

    tensor: TensorSpec
    planes: Mapping[str, Tensor]
    scratches: Sequence[Tensor]
    factors: Mapping[Factor, TensorSpec]
    unit: int

    def flat(self, name: str, factor: Factor | None = None) -> Tensor | None:
        """Return what a plane holds of it, or of one of its factors; None where there is nothing."""
        tensor = self.tensor if factor is None else self.factors.get(factor)
        if tensor is None or name not in self.planes:
            return None
        group = _GROUPS.get(name, 1)
        return self.planes[name][tensor.offset // group : -(-(tensor.offset + tensor.numel) // group)]

    def state(self) -> StatePlanes:
        """Return its planes for a step element by element, the second moment as far as it has one beside Muon."""
        return StatePlanes.of(
            {
                name: self.flat(name, BESIDE_MUON if name.startswith(EXP_AVG_SQ) else None)
                for name in self.planes
                if name != GRADIENT
            }
        )

    def master(self) -> Tensor:
        """Return the fp32 master, in its shape: where it lies, or joined in the first scratch."""
        if MASTER_LOW not in self.planes:
            return self._shaped(MASTER if MASTER in self.planes else WEIGHTS)
        master = self.scratches[0][: self.tensor.numel]
        join_master(*self._halves(), master)
        return master.view(self.tensor.shape)

    def gradient(self) -> Tensor:
        """Return the gradient in fp32, in its shape: where it lies, or widened in the next scratch."""
        gradient = self._shaped(GRADIENT)
        if gradient.dtype is torch.float32:
            return gradient
        wide = self.scratches[MASTER_LOW in self.planes][: self.tensor.numel]
        return wide.view(self.tensor.shape).copy_(gradient)

    def put_back(self, master: Tensor, key: int) -> None:
        """Make of a master that has been stepped what lies beside it; ``key`` is that of the chances of the update."""
        if MASTER_LOW in self.planes:
            split_master(master.view(-1), *self._halves(), self.tensor.offset, key)
        elif MASTER in self.planes:
            self._shaped(WEIGHTS).copy_(master)

    def _shaped(self, name: str) -> Tensor:
        flat = self.flat(name)
        assert flat is not None
        return flat.view(self.tensor.shape)

    def _halves(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The planes of a split master, flat."""
        weights, low = (self._shaped(name).view(-1) for name in (WEIGHTS, MASTER_LOW))
        return weights, low, self.flat(MASTER_TIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update depends on besides the planes.

    Attributes:
        lr: learning rate of these parameters.
        count: how often the parameters have been stepped, this update included.
        decay: factor of weight decay.
        clip: factor of the gradient.
        first: index of the first element in its unit.
        key: of the chances of this update, see `outsize.optim.planes.chance_key`.
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


def chance_key(seed: int, unit: int, update: int) -> int:
    """Return the key of the chances of one update of one unit: 32 bits of splitmix64 over the three."""
    value = 0
    for part in (seed, unit, update):
        value = (value + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ value >> shift) * factor & (2**64 - 1)
        value ^= value >> 31
    return value & 0xFFFFFFFF
