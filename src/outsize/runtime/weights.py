"""LOAD and READ of whole units: weights on their way up into slots."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from outsize.model.spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.optim.spec import WEIGHTS
from outsize.planner.ops import Op
from outsize.runtime.binding import TORCH_DTYPE, weight_planes
from outsize.runtime.carriers import EncodedWeights, bring_up
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.storage.home import DiskHome, HostHome


def typed_plane(buffer: Tensor, unit: UnitSpec, dtype: str) -> Tensor:
    """The first ``unit.numel`` elements of a byte buffer, in ``dtype``."""
    return buffer[: unit.numel * ITEMSIZE[dtype]].view(TORCH_DTYPE[dtype])


class WeightOps:
    """Moves weights from their home into slots, directly or by way of a host buffer.

    Args:
        spec: the model.
        device: owner of the slots.
        home: where the weights rest.
        slots: one byte buffer per slot, the rest's slot last where there is a rest.
        host_buffers: byte buffers for units between disk and device.
        encoded: the weights as they go over the link; None where they go as they are.
        staging: two byte buffers on the device for what arrives encoded.

    Attributes:
        bytes_up: that went over the link.
        logical_up: of weights that they were.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        home: HostHome | DiskHome,
        slots: list[Tensor],
        host_buffers: list[Tensor],
        encoded: EncodedWeights | None = None,
        staging: Sequence[Tensor] = (),
    ) -> None:
        self._spec = spec
        self._device = device
        self._home = home
        self._slots = slots
        self._host_buffers = host_buffers
        self._encoded = encoded
        self._staging = staging
        self.bytes_up = self.logical_up = 0

    def planes(self, unit: int, slot: int) -> tuple[Tensor, ...]:
        """The weights of ``unit`` as they lie in ``slot``: its plane [unit.numel], and those of its frozen parts."""
        return weight_planes(self._spec.units[unit], self._spec.dtype, self._slots[slot])

    def load(self, op: Op, context: StepContext) -> None:
        """LOAD: home or host buffer → slot."""
        assert op.unit is not None
        assert op.slot is not None
        unit, planes = self._spec.units[op.unit], self.planes(op.unit, op.slot)
        if unit.kind == "rest":
            # Glue of a forward whose backward is still to come has saved these parameters. They are loaded again with
            # the values that they had, or that backward is refused.
            with _unsafe_preserve_version_counter(planes):
                self._fill(op, unit, planes)
        else:
            self._fill(op, unit, planes)

    def _fill(self, op: Op, unit: UnitSpec, planes: tuple[Tensor, ...]) -> None:
        staged = self._staged(unit, op.buffer) if op.buffer is not None else None
        for position, (name, plane) in enumerate(zip(_names(unit), planes, strict=True)):
            if not plane.numel():
                continue
            self.logical_up += plane.nbytes
            pieces = self._encoded.pieces(unit.index, name) if self._encoded is not None else []
            if self._encoded is not None and pieces:
                codec = self._encoded.codec
                self.bytes_up += bring_up(self._device, codec, pieces, plane, self._staging)
                continue
            self.bytes_up += plane.nbytes
            if staged is not None:
                self._device.copy(plane, staged[position])
            elif isinstance(self._home, HostHome):
                self._device.copy(plane, self._home.view(unit.index, name))
            else:
                self._home.read(unit.index, name, 0, plane)

    def read(self, op: Op, context: StepContext) -> None:
        """READ of a whole unit: disk → host buffer."""
        assert op.unit is not None
        assert op.buffer is not None
        unit = self._spec.units[op.unit]
        for name, plane in zip(_names(unit), self._staged(unit, op.buffer), strict=True):
            if plane.numel():
                self._home.read(unit.index, name, 0, plane)

    def _staged(self, unit: UnitSpec, buffer: int) -> tuple[Tensor, ...]:
        return weight_planes(unit, self._spec.dtype, self._host_buffers[buffer])


def _names(unit: UnitSpec) -> Iterator[str]:
    """The planes of the weights of ``unit``, in the order of `weight_planes`."""
    yield WEIGHTS
    yield from (part.plane for part in unit.frozen)
