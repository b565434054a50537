"""LOAD and READ of whole units: weights on their way up into slots."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor

from outsize.compat.torch_private import keeping_versions
from outsize.model.sizes.model_spec import ITEMSIZE, FrozenPart, ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.planner.program.program import Kind, Op
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import TORCH_DTYPE, weight_planes
from outsize.runtime.ops.context import Moved, StepContext, handles
from outsize.runtime.ops.link_codecs import Decoding, EncodedWeights, bring_up
from outsize.storage.home import Home


def typed_plane(buffer: Tensor, unit: UnitSpec, dtype: str) -> Tensor:
    """The first ``unit.numel`` elements of a byte buffer, in ``dtype``."""
    return buffer[: unit.numel * ITEMSIZE[dtype]].view(TORCH_DTYPE[dtype])


@dataclass(frozen=True, slots=True)
class Resting:
    """Units that rest on the device.

    Attributes:
        stays: in slots of their own, of which what never trains is loaded once.
        resident: of which what trains rests there, lent out by the home.
        encoded: of which encoded frozen parts come up once, and are decoded where they lie.
    """

    stays: Set[int] = frozenset()
    resident: Set[int] = frozenset()
    encoded: Set[int] = frozenset()


NOTHING = Resting()


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
        in_place: whether weights that lie in a host home as they are used are used there; slots stay untouched then.
        resting: what of units rests on the device.

    Attributes:
        up: what has moved so far, or would have if it were not used in place.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        home: Home,
        slots: list[Tensor],
        host_buffers: list[Tensor],
        encoded: EncodedWeights | None = None,
        staging: Sequence[Tensor] = (),
        *,
        in_place: bool = False,
        resting: Resting = NOTHING,
    ) -> None:
        self._in_place = in_place
        self._stays = resting.stays
        self._resident = resting.resident
        self._there: set[tuple[int, str]] = set()  # planes of units that stay, once they are loaded
        self._held, self._up_once = resting.encoded, set[tuple[int, str]]()
        self._spec = spec
        self._device = device
        self._home = home
        self._slots = slots
        self._host_buffers = host_buffers
        self._encoded = encoded
        self._staging = staging
        self._decoding = Decoding(spec, device, resting.encoded)
        self.up = Moved()

    @property
    def bytes_up(self) -> int:
        """That went over the link."""
        return self.up.wire

    def planes(self, unit: int, slot: int) -> tuple[Tensor, ...]:
        """The weights of ``unit`` where they are used: its plane [unit.numel], and those of its frozen parts.

        They lie in ``slot``, or at home where they are used in place.
        """
        spec = self._spec.units[unit]
        if unit in self._resident:
            frozen = weight_planes(replace(spec, numel=0), self._spec.dtype, self._slots[slot])[1:]
            planes = (self._home.view(unit, WEIGHTS), *frozen)
        else:
            planes = weight_planes(spec, self._spec.dtype, self._slots[slot])
        parts = zip(_names(spec), (None, *spec.frozen), planes, strict=True)
        # With counts of changes of their own: that the optimizer steps other units is nothing to a graph of this one.
        return tuple(
            plane if (resting := self._resting(unit, name, part, plane)) is None else resting.data
            for name, part, plane in parts
        )

    def _resting(self, unit: int, name: str, part: FrozenPart | None, plane: Tensor) -> Tensor | None:
        """The plane at home, where it is used there; None for one that lies in a slot."""
        if unit in self._resident and part is None:
            return self._home.lend(unit, name)
        if not self._in_place or not plane.numel() or (part is not None and part.codec is not None):
            return None
        sent = self._encoded is not None and bool(self._encoded.pieces(unit, name))
        return None if sent else self._home.lend(unit, name)

    @handles(Kind.LOAD)
    def load(self, op: Op, context: StepContext) -> None:
        """LOAD: home or host buffer → slot."""
        assert op.unit is not None
        assert op.slot is not None
        unit, planes = self._spec.units[op.unit], self.planes(op.unit, op.slot)
        if unit.kind == "rest":
            # Outer code whose backward is still to come has saved these parameters. They are loaded again with
            # the values that they had, or that backward is refused.
            with keeping_versions(planes):
                self._fill(op, unit, planes)
        else:
            self._fill(op, unit, planes)

    def forget(self, unit: int | None = None) -> None:
        """Load all of ``unit`` again, or of every unit, although it stays or is held; between programs only."""
        self._there = {key for key in self._there if unit not in (None, key[0])}
        self._up_once = {key for key in self._up_once if unit not in (None, key[0])}

    def _fill(self, op: Op, unit: UnitSpec, planes: tuple[Tensor, ...]) -> None:
        staged = (None,) * len(planes) if op.buffer is None else self._staged(unit, op.buffer)
        parts = (None, *unit.frozen)
        for name, part, plane, buffer in zip(_names(unit), parts, planes, staged, strict=True):
            there = (unit.index, name) in self._there or (part is None and unit.index in self._resident)
            if plane.numel() and not there:
                self._bring(unit.index, name, part, plane, buffer)
                if unit.index in self._stays and (part is not None or not unit.trainable):
                    self._there.add((unit.index, name))

    def _bring(
        self, unit: int, name: str, part: FrozenPart | None, plane: Tensor, staged: Tensor | None
    ) -> None:
        """Bring one plane up, from the host buffer ``staged`` where there is one, else from its home."""
        pieces = self._encoded.pieces(unit, name) if self._encoded is not None else []
        if self._encoded is not None and pieces:
            wire_bytes = bring_up(self._device, self._encoded.codec, pieces, plane, self._staging)
            self.up = self.up.and_then(wire_bytes, plane.nbytes)
            return
        if self._resting(unit, name, part, plane) is not None:
            self.up = self.up.and_then(plane.nbytes, plane.nbytes)
            return
        encoded = self._decoding.room(unit, part) if part is not None and part.codec is not None else None
        if part is not None and encoded is not None and (unit, name) in self._up_once:
            self._decoding.decode(part, encoded, plane)
            return
        into = plane if encoded is None else encoded
        self.up = self.up.and_then(into.nbytes, plane.nbytes)
        if staged is not None:
            self._device.copy(into, staged)
        elif (lent := self._home.lend(unit, name)) is not None:
            self._device.copy(into, lent)
        else:
            self._home.read(unit, name, 0, into)
        if part is not None and encoded is not None:
            self._decoding.decode(part, encoded, plane)
            if unit in self._held:
                self._up_once.add((unit, name))

    @handles(Kind.FREE)
    def free(self, op: Op, context: StepContext) -> None:
        """FREE concerns the plan of memory only: the slot is a fixed allocation."""

    @handles(Kind.READ)
    def read(self, op: Op, context: StepContext) -> None:
        """READ of a whole unit: disk → host buffer."""
        assert op.unit is not None
        assert op.buffer is not None
        unit = self._spec.units[op.unit]
        for name, plane in zip(_names(unit), self._staged(unit, op.buffer), strict=True):
            if plane.numel() and (unit.index, name) not in self._there:
                self._home.read(unit.index, name, 0, plane)

    def _staged(self, unit: UnitSpec, buffer: int) -> tuple[Tensor, ...]:
        """The planes of ``unit`` as they lie at home, one behind the other in a host buffer."""
        memory = self._host_buffers[buffer]
        end = unit.numel * ITEMSIZE[self._spec.dtype]
        planes = [memory[:end].view(TORCH_DTYPE[self._spec.dtype])]
        for part in unit.frozen:
            start, end = end, end + part.home_bytes
            plane = memory[start:end]
            planes.append(plane if part.codec is not None else plane.view(TORCH_DTYPE[part.dtype]))
        return tuple(planes)


def _names(unit: UnitSpec) -> Iterator[str]:
    """The planes of the weights of ``unit``, in the order of `weight_planes`."""
    yield WEIGHTS
    yield from (part.plane for part in unit.frozen)
