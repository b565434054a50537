"""ACC, SUM, NORM, GRAD, CLIP and WRITE of whole units: gradients from where they are summed to where they rest."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.accelerators import catch_up
from outsize.codecs.codec import pieces_on
from outsize.errors import NonFiniteError
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.step import clip_coefficient, gradient_norms
from outsize.planner.program.program import Kind, Op, Program
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import TORCH_DTYPE, GradientSums, tensor_views
from outsize.runtime.ops.context import Moved, StepContext, handles
from outsize.runtime.ops.link_codecs import GradientCarrier
from outsize.runtime.ops.load_ops import typed_plane
from outsize.storage.home import Home
from outsize.storage.ledger import Arena

# Gradients are rounded in pieces of 1 MiB, of which a copy is made.
PIECE_ELEMENTS = 2**18
GradientObserver = Callable[[int, frozenset[int], Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """How gradients are clipped, and how they rest.

    Attributes:
        parameter_order: position of each parameter in ``model.parameters()``, for the order of the norms.
        max_grad_norm: global norm to clip to; infinity only takes the norm.
        clips: whether the program has a CLIP; without one a step is judged by its loss, and each unit by its own
            gradient before it steps.
        unit_clips: whether each unit is clipped by its own norm, which its NORM takes.
        skip_nonfinite: skip a step whose loss or norm is not finite, instead of raising.
        times_home: how often the gradient of a unit comes home in a step, where that is more than once.
        dtype: in which gradients wait at home.
        tile_elements: elements per tile.
        resident: units whose gradients stay in their accumulators.
        rests_there: whether those rest in their home on the device instead, from pass to pass, and are summed there.
        in_place: whether gradients that rest in a host home as they are summed are summed there; accumulators stay
            untouched then, and leave room for first gradients, which wait for the second ones.
    """

    parameter_order: Mapping[str, int]
    max_grad_norm: float
    clips: bool
    unit_clips: bool = False
    skip_nonfinite: bool
    times_home: Mapping[int, int] = field(default_factory=dict)
    dtype: str = "fp32"
    tile_elements: int = 0
    resident: Set[int] = frozenset()
    rests_there: bool = False
    in_place: bool = False


class GradientOps:
    """Sums gradients on the device, takes their norms, and brings them home.

    Args:
        spec: the model.
        device: owner of the accumulators.
        home: where gradients rest until the optimizer takes them.
        sums: the running sums.
        accumulators: one byte buffer per accumulator, the rest's last where there is a rest.
        host_buffers: byte buffers for units between device and disk.
        settings: how they are clipped, and how they rest.
        observe: called with ``(unit, touched, gradient plane)`` before a gradient leaves the device.
        carrier: brings gradients home encoded, once they are whole; None where they go as they are.
        tiles: where gradients that pass through a ring go, by tile buffer; fp32 [tile_elements] each.

    Attributes:
        down: what has moved home so far, or would have if it were not summed there.
        bytes_up: that came back to be summed on.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        home: Home,
        sums: GradientSums,
        accumulators: list[Tensor],
        host_buffers: list[Tensor],
        settings: GradientSettings,
        *,
        observe: GradientObserver | None = None,
        carrier: GradientCarrier | None = None,
        tiles: Sequence[Tensor] = (),
    ) -> None:
        as_summed = settings.dtype == "fp32" and carrier is None and not tiles
        self._in_place = settings.in_place and home.in_memory and as_summed
        self._settings = settings
        self._carrier = carrier
        self._tiles = tiles
        self._spec = spec
        self._device = device
        self._home = home
        self._sums = sums
        self._accumulators = accumulators
        self._host_buffers = host_buffers
        self._observe = observe
        self._plane_of: dict[int, Tensor] = {}
        self.down = Moved()
        self.bytes_up = 0

    @property
    def bytes_down(self) -> int:
        """That went home over the link."""
        return self.down.wire

    @handles(Kind.ACC)
    def accumulate(self, op: Op, context: StepContext) -> None:
        """ACC: from now on this accumulator sums the gradient of the unit."""
        unit, plane = self._accumulator(op)
        self._plane_of[unit.index] = plane
        self._sums.open(unit, plane, keeps_first=self._in_place and self._lies_at_home(unit.index))

    def _accumulator(self, op: Op) -> tuple[UnitSpec, Tensor]:
        """The unit of ``op``, and where its gradient is summed, fp32 [unit.numel]."""
        assert op.unit is not None
        assert op.slot is not None
        unit = self._spec.units[op.unit]
        if self._lies_at_home(op.unit):
            return unit, self._home.view(op.unit, "gradient").data
        return unit, typed_plane(self._accumulators[op.slot], unit, "fp32")

    def _lies_at_home(self, unit: int) -> bool:
        """Whether the gradient of a unit is summed where it rests."""
        return self._settings.rests_there if unit in self._settings.resident else self._in_place

    @handles(Kind.SUM)
    def sum_on(self, op: Op, context: StepContext) -> None:
        """SUM: home → accumulator; the gradient of the unit as summed so far, to which more is added.

        `StepContext.touched` says of which tensors there is one.
        """
        unit, plane = self._accumulator(op)
        self._plane_of[unit.index] = plane
        if not self._lies_at_home(unit.index):
            self._bring_up(unit.index, plane)
        if unit.index not in self._settings.resident:
            self.bytes_up += plane.nbytes
        self._sums.open(unit, plane, context.touched[unit.index])

    def _bring_up(self, unit: int, plane: Tensor) -> None:
        lent = self._home.lend(unit, "gradient")
        if lent is not None:
            self._device.copy(plane, lent)
        elif plane.device.type == "cpu":
            self._home.read(unit, "gradient", 0, plane)
        else:
            with Arena() as arena:
                staged = arena.take(plane.nbytes, "gradient on its way up").view(plane.dtype)
                self._home.read(unit, "gradient", 0, staged)
                plane.copy_(staged)

    @handles(Kind.NORM)
    def norm(self, op: Op, context: StepContext) -> None:
        """NORM: one norm for each tensor of the unit, where the gradient lies."""
        assert op.unit is not None
        self._sums.settle(op.unit)
        context.touched[op.unit] = self._sums.touched(op.unit)
        context.norms[op.unit] = gradient_norms(self._spec.units[op.unit], self._plane_of[op.unit])
        if self._settings.unit_clips:
            norms = self._ordered([op.unit], context)
            context.unit_clips[op.unit] = clip_coefficient(norms, self._settings.max_grad_norm)

    def _judge(self, unit: int, plane: Tensor, context: StepContext) -> None:
        """Without CLIP: go no further with a step whose loss, or with a unit whose gradient, is not finite.

        The coefficient of a unit that is clipped by its own norm is brought to the host here, where nothing that
        computes waits for it.
        """
        self._check(context)
        if unit not in context.unit_clips:
            self._check_gradient(self._spec.units[unit], context.touched[unit], plane, context)
            return
        total, coefficient = context.unit_clips[unit]
        catch_up(total.device)
        if not math.isfinite(total.item()):
            self._refuse(self._spec.units[unit], context)
        context.unit_coefficients[unit] = coefficient.cpu()

    @handles(Kind.GRAD, tile=True)
    def to_ring(self, op: Op, context: StepContext) -> None:
        """GRAD of a tile: accumulator → tile buffer. The accumulator is free behind the last."""
        assert op.unit is not None
        assert op.tile is not None
        assert op.buffer is not None
        unit = self._spec.units[op.unit]
        plane = self._plane_of[op.unit]
        if op.tile == 0:
            context.touched[op.unit] = self._sums.close(op.unit)
            context.brought[op.unit] += 1
            if not context.skipped:
                self._judge(op.unit, plane, context)
            if self._observe is not None:
                self._observe(op.unit, context.touched[op.unit], plane)
        start = op.tile * self._settings.tile_elements
        part = plane[start : start + self._settings.tile_elements]
        self.down = self.down.and_then(part.nbytes, part.nbytes)
        self._device.copy(self._tiles[op.buffer][: part.numel()], part)
        if start + part.numel() == unit.numel:
            del self._plane_of[op.unit]

    def take(self, unit: int, context: StepContext) -> Tensor:
        """Return the gradient of a resident unit as it steps by it: at home, or in its accumulator, free behind that.

        Raises:
            NonFiniteError: no norm is waited for, and the loss or the gradient is not finite.
        """
        if self._settings.rests_there:
            return self._home.view(unit, "gradient")
        plane = self._close(unit, context, every_round=True)
        return plane if self._settings.dtype != "bf16" else _narrowed(plane, torch.bfloat16)

    def _close(self, unit: int, context: StepContext, *, every_round: bool) -> Tensor:
        """Return a sum that nothing is added to any more; judge it and have it seen where it is ``every_round``."""
        plane = self._plane_of.pop(unit)
        context.touched[unit] = self._sums.close(unit)
        # A pass without losses of its own is judged by the caller, see `planner.passes.step_parts`.
        if every_round and not self._settings.clips and context.losses and not context.skipped:
            self._judge(unit, plane, context)
        if every_round and self._observe is not None:
            self._observe(unit, context.touched[unit], plane)
        return plane

    @handles(Kind.GRAD)
    def bring_home(self, op: Op, context: StepContext) -> None:
        """GRAD: accumulator → home or host buffer."""
        assert op.unit is not None
        context.brought[op.unit] += 1
        times_home = self._settings.times_home if context.times_home is None else context.times_home
        every_round = context.brought[op.unit] == times_home.get(op.unit, 1)
        plane = self._close(op.unit, context, every_round=every_round)
        if op.unit in self._settings.resident:
            return
        target = self._target(op.unit, op.buffer)
        if self._carrier is not None and target is not None and every_round:
            wire_bytes = self._carrier.bring_home(self._spec.units[op.unit], plane, target, context)
            self.down = self.down.and_then(wire_bytes, plane.nbytes)
            return
        wire = (
            plane if self._settings.dtype == "fp32" else _narrowed(plane, TORCH_DTYPE[self._settings.dtype])
        )
        self.down = self.down.and_then(wire.nbytes, plane.nbytes)
        if self._in_place:
            return
        if target is not None:
            self._device.copy(target, wire)
        else:
            self._home.write(op.unit, "gradient", 0, wire)

    @handles(Kind.WRITE)
    def write(self, op: Op, context: StepContext) -> None:
        """WRITE of a whole unit: host buffer → disk."""
        assert op.unit is not None
        assert op.buffer is not None
        self._home.write(op.unit, "gradient", 0, self._staged(op.unit, op.buffer))

    @handles(Kind.CLIP)
    def clip(self, op: Op, context: StepContext) -> None:
        """CLIP: norms become one coefficient; what is not finite goes no further.

        Raises:
            NonFiniteError: the loss or the norm is NaN or infinite, and steps are not to be skipped.
        """
        ordered = [norm / context.loss_scale for norm in self._ordered(context.norms, context)]
        ordered = [norm.to(ordered[0].device) for norm in ordered]
        total, coefficient = clip_coefficient(ordered, self._settings.max_grad_norm)
        coefficient = coefficient / context.loss_scale
        catch_up(total.device)
        context.gradient_norm, context.coefficient = total.item(), coefficient.cpu()
        self._check(context)

    def _ordered(self, units: Iterable[int], context: StepContext) -> list[Tensor]:
        """The norms of what received a gradient in ``units``, in the order of ``model.parameters()``."""
        norms = [
            (self._settings.parameter_order[tensor.name], norm)
            for unit in units
            for position, (tensor, norm) in enumerate(
                zip(self._spec.units[unit].tensors, context.norms[unit].unbind(), strict=True)
            )
            if position in context.touched[unit]
        ]
        return [norm for _, norm in sorted(norms, key=lambda pair: pair[0])]

    def _check(self, context: StepContext) -> None:
        norm = context.gradient_norm
        if math.isfinite(context.loss()) and (norm is None or math.isfinite(norm)):
            return
        context.skipped = True
        if self._settings.skip_nonfinite:
            return
        detail = "" if norm is None else f", gradient norm {norm:g}"
        raise NonFiniteError(
            f"step {context.number + 1}: loss {context.loss():g}{detail}; no weight was changed. Try a lower "
            "optimizer.lr, fp32 or bf16 instead of fp16, or train.on_nonfinite=skip to go on"
        )

    def _check_gradient(
        self, unit: UnitSpec, touched: frozenset[int], plane: Tensor, context: StepContext
    ) -> None:
        """Without CLIP: keep a unit from stepping by a gradient that is not finite, and all that step after it."""
        views = tensor_views(unit, plane)
        # Both extremes of a tensor are finite only if all of it is; unlike `isfinite`, they take no memory.
        extremes = [extreme for position in touched for extreme in torch.aminmax(views[position])]
        are_finite = not extremes or torch.stack(extremes).isfinite().all()
        catch_up(plane.device)
        if are_finite:
            return
        self._refuse(unit, context)

    def _refuse(self, unit: UnitSpec, context: StepContext) -> None:
        context.skipped = True
        raise NonFiniteError(
            f"step {context.number + 1}: loss {context.loss():g}, gradient of {unit.name} not finite; nothing of this "
            "step is saved. Try a lower optimizer.lr, or optimizer.clip=global with optimizer.max_grad_norm, or with "
            "train.on_nonfinite=skip to go on: both look at all gradients before any unit steps"
        )

    def _target(self, unit: int, buffer: int | None) -> Tensor | None:
        """Where in host memory the gradient of a unit goes: a host buffer, or its home; None for a home on disk."""
        if buffer is not None:
            return self._staged(unit, buffer)
        return self._home.lend(unit, "gradient")

    def _staged(self, unit: int, buffer: int) -> Tensor:
        return typed_plane(self._host_buffers[buffer], self._spec.units[unit], self._settings.dtype)


def count_times_home(program: Program) -> Counter[int]:
    """Return how often ``program`` brings the gradient of each unit home."""
    return Counter(op.unit for op in program if op.kind is Kind.GRAD and op.unit is not None)


def _narrowed(plane: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``plane`` to a narrower ``dtype`` in the memory that it lies in.

    Its first elements by way of a copy; then ever twice as many, which go where nothing lies any more.
    """
    narrow = plane.view(dtype)[: plane.numel()]
    start, stop = 0, pieces_on(plane.device, PIECE_ELEMENTS)
    while start < plane.numel():
        part = plane[start:stop]
        narrow[start:stop] = part if start else part.to(dtype)
        start, stop = stop, 2 * stop
    return narrow
