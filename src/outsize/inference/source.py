"""From the home of a unit's weights to where it computes: whole, or some rows of a table."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outsize.model.spec import PLANE_ELEMENTS, ModelSpec, TensorSpec
from outsize.runtime.device import Device
from outsize.runtime.weights import typed_plane
from outsize.storage.arena import Arena, Pinner
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Ledger
from outsize.units import align_up

# Rows that are read from disk together: a few MiB keep its queue full.
READ_BYTES = 4 * 2**20


class Source:
    """Weights at rest.

    Args:
        spec: the model.
        device: what computes.
        home: where the weights rest.
        ledger: where a buffer between disk and device is reserved.
        pinner: what pins it.

    Attributes:
        bytes_moved: from home so far.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        home: HostHome | DiskHome,
        ledger: Ledger,
        pinner: Pinner | None = None,
    ) -> None:
        self.bytes_moved = 0
        self._spec = spec
        self._device = device
        self._home = home
        self._arena = Arena(ledger=ledger, tier="host", pinner=pinner)
        self._buffers: list[Tensor] = []
        self._marks: list[object] = []
        if isinstance(home, DiskHome) and device.name != "cpu":
            most = max(unit.weight_bytes(spec.dtype) for unit in spec.units)
            self._buffers = self._arena.take_all([most, most], "weights between disk and device")
            self._marks = [None, None]

    def plane(self, unit: int, memory: Tensor) -> Tensor:
        """The weights of ``unit`` [numel] as they lie in a piece of memory."""
        return typed_plane(memory, self._spec.units[unit], self._spec.dtype)

    def load(self, unit: int, memory: Tensor) -> None:
        """Bring the weights of ``unit`` into ``memory``; on the lane ``up``.

        Raises:
            StorageError: the disk failed.
        """
        plane = self.plane(unit, memory)
        self.bytes_moved += plane.nbytes
        if isinstance(self._home, HostHome):
            self._device.copy(plane, self._home.view(unit, "weights"))
        elif not self._buffers:
            self._home.read(unit, "weights", 0, plane)
        else:  # the other buffer's copy goes on while the disk fills this one
            buffer, mark = self._buffers.pop(0), self._marks.pop(0)
            if mark is not None:
                self._device.wait("", mark)
            staged = self.plane(unit, buffer)
            self._home.read(unit, "weights", 0, staged)
            self._device.copy(plane, staged)
            self._buffers.append(buffer)
            self._marks.append(self._device.record("up"))

    def rows(self, unit: int, tensor: TensorSpec, numbers: Tensor) -> Tensor:
        """Return rows of a tensor of ``unit``, on the device: [len(numbers), ...].

        Args:
            unit: which.
            tensor: one of its tensors.
            numbers: of the rows, ascending and each once, on the CPU.
        """
        width = tensor.numel // tensor.shape[0]
        dtype = typed_plane(torch.empty(0, dtype=torch.uint8), self._spec.units[unit], self._spec.dtype).dtype
        found = torch.empty((len(numbers), *tensor.shape[1:]), dtype=dtype, device=self._device.torch_device)
        if isinstance(self._home, HostHome):
            flat = self._home.view(unit, "weights")[tensor.offset : tensor.offset + tensor.numel]
            self._device.copy(found, flat.view(tensor.shape).index_select(0, numbers))
            self.bytes_moved += found.nbytes
            return found
        done = 0
        count = max(READ_BYTES // max(width * dtype.itemsize, 2 * 4096), 1)
        for part in numbers.tensor_split(tuple(range(count, len(numbers), count))):
            read = self._read_rows(unit, tensor, part.tolist(), width, dtype)
            self._device.copy(found[done : done + len(part)], read.view(len(part), *tensor.shape[1:]))
            done += len(part)
        return found

    def _read_rows(
        self, unit: int, tensor: TensorSpec, numbers: Sequence[int], width: int, dtype: torch.dtype
    ) -> Tensor:
        """Read the stretches of the plane that rows lie in, all in flight together, and pick the rows out."""
        assert isinstance(self._home, DiskHome)
        starts = [tensor.offset + number * width for number in numbers]
        stretches = list(_stretches(starts, width))
        sizes = [stop - start for start, stop in stretches]
        picked = torch.empty(len(numbers), width, dtype=dtype)
        with Arena() as arena:
            memory = arena.take(sum(sizes) * dtype.itemsize, "rows").view(dtype)
            pieces = memory.tensor_split(tuple(accumulate(sizes[:-1])))
            self._home.read_ranges(
                unit, "weights", [(start, piece) for (start, _), piece in zip(stretches, pieces, strict=True)]
            )
            self.bytes_moved += memory.nbytes
            stretch = 0
            for row, start in enumerate(starts):
                while start >= stretches[stretch][1]:
                    stretch += 1
                first = start - stretches[stretch][0]
                picked[row] = pieces[stretch][first : first + width]
        return picked

    def close(self) -> None:
        """Give buffers back; idempotent."""
        self._buffers.clear()
        self._arena.close()


def _stretches(starts: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole `PLANE_ELEMENTS` that hold the rows, ascending, neighbours joined."""
    first, last = None, 0
    for start in starts:
        low, high = start // PLANE_ELEMENTS * PLANE_ELEMENTS, align_up(start + width, PLANE_ELEMENTS)
        if first is not None and low <= last:
            last = max(last, high)
            continue
        if first is not None:
            yield first, last
        first, last = low, high
    if first is not None:
        yield first, last
