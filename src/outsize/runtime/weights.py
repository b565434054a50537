"""LOAD and READ of whole units: weights on their way up into slots."""

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from outsize.model.spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.planner.ops import Op
from outsize.runtime.binding import TORCH_DTYPE
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
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        home: HostHome | DiskHome,
        slots: list[Tensor],
        host_buffers: list[Tensor],
    ) -> None:
        self._spec = spec
        self._device = device
        self._home = home
        self._slots = slots
        self._host_buffers = host_buffers
        self.bytes_up = 0

    def plane(self, unit: int, slot: int) -> Tensor:
        """The weights of ``unit`` as they lie in ``slot``, [unit.numel]."""
        return typed_plane(self._slots[slot], self._spec.units[unit], self._spec.dtype)

    def load(self, op: Op, context: StepContext) -> None:
        """LOAD: home or host buffer → slot."""
        assert op.unit is not None
        assert op.slot is not None
        plane = self.plane(op.unit, op.slot)
        self.bytes_up += plane.nbytes
        if self._spec.units[op.unit].kind == "rest":
            # Glue of a forward whose backward is still to come has saved these parameters. They are loaded again with
            # the values that they had, or that backward is refused.
            with _unsafe_preserve_version_counter(plane):
                self._fill(op, plane)
        else:
            self._fill(op, plane)

    def _fill(self, op: Op, plane: Tensor) -> None:
        assert op.unit is not None
        if op.buffer is not None:
            self._device.copy(plane, self._staged(op.unit, op.buffer))
        elif isinstance(self._home, HostHome):
            self._device.copy(plane, self._home.view(op.unit, "weights"))
        else:
            self._home.read(op.unit, "weights", 0, plane)

    def read(self, op: Op, context: StepContext) -> None:
        """READ of a whole unit: disk → host buffer."""
        assert op.unit is not None
        assert op.buffer is not None
        self._home.read(op.unit, "weights", 0, self._staged(op.unit, op.buffer))

    def _staged(self, unit: int, buffer: int) -> Tensor:
        return typed_plane(self._host_buffers[buffer], self._spec.units[unit], self._spec.dtype)
