"""Where weights and optimizer state live between uses, addressed by unit, plane and element.

A home holds the planes of a model's units: ``weights`` for every unit, and for units that are trained the
planes of the optimizer (see `outsize.optim.optimizer_spec.StateLayout`). `HostHome` holds them in memory, `DiskHome` in
a file. Both promise:

- what is read is what was last written, bit for bit; a plane that was never written reads as zeros;
- ranges start at a multiple of 2048 elements and are multiples of 2048 elements long, and have the plane's
  dtype; of planes with items of a byte, or an item for a group of elements, they are whole sectors of 4096 bytes;
- ranges that do not overlap may be read and written at the same time from any threads.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.codecs.transport import room_bytes
from outsize.errors import Closing
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, is_packed
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES, DirectFile, Span, Tally
from outsize.storage.encoded_planes import PackedPlane
from outsize.storage.home_layout import HomeLayout, Planes
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.prealloc import IOPool
from outsize.storage.record import CommitRecord


class Home(Closing, ABC):
    """What the runtime needs of a home; a context manager.

    Attributes:
        in_memory: whether planes lie in host memory, where they are worked on in place; else they pass through buffers.
        granule_elements: what is read and written begins and ends at multiples of it, or with the plane.
        tally: bytes moved for the thread that asks; None where nothing is transferred.
        record: of the newest commit; None where nothing was committed.
    """

    in_memory: bool = False
    granule_elements: int = PLANE_ELEMENTS
    tally: Tally | None = None
    record: CommitRecord | None = None
    _layout: HomeLayout

    @property
    def num_bytes(self) -> int:
        """Size of all planes."""
        return self._layout.num_bytes

    def read(self, unit: int, plane: str, start: int, into: Tensor) -> None:
        """Fill ``into`` with the elements of a plane from ``start`` on.

        Raises:
            StorageError: the medium failed.
            ValueError: no such plane or range, or a tensor of another dtype or alignment.
        """
        self.read_planes(unit, start, {plane: into})

    def write(self, unit: int, plane: str, start: int, source: Tensor) -> None:
        """Replace the elements of a plane from ``start`` on by ``source``; errors as in `read`."""
        self.write_planes(unit, start, {plane: source})

    def lend(self, unit: int, plane: str, elements: range | None = None) -> Tensor | None:
        """Return the memory of a plane, flat, or of a range of elements; None for a plane that has to be read."""
        return None

    def view(self, unit: int, plane: str, elements: range | None = None) -> Tensor:
        """Return the memory of a plane, as `lend` does.

        Raises:
            ValueError: there is no such plane, or it does not lie in memory as it is.
        """
        lent = self.lend(unit, plane, elements)
        if lent is None:
            self._layout.extent(unit, plane)
            raise ValueError(f"plane {plane!r} of unit {unit} does not lie in memory as it is; read it")
        return lent

    def packed(self, unit: int, plane: str) -> PackedPlane | None:
        """Return an encoded plane in memory; None for any other."""
        return None

    def version(self, unit: int, plane: str) -> int:
        """Return the number of writes to a plane in memory; changes of views do not count."""
        return 0

    @property
    def on_device(self) -> Mapping[int, int]:
        """Bytes of what lies in the memory of the device that computes, by unit."""
        return {}

    def extend(self, model: ModelSpec, planes: Planes) -> None:
        """Add the planes that ``model`` needs where it trains other units; existing planes stay.

        Raises:
            ValueError: this home cannot grow, and has no room for that.
        """
        missing = HomeLayout(model, planes).extents.keys() - self._layout.extents.keys()
        if missing:
            raise ValueError(f"a {type(self).__name__} cannot grow, and has no room for {sorted(missing)}")

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make everything written so far the state after a crash, with ``state``, JSON, beside it.

        Raises:
            StorageError: the medium failed; the state before is still the committed one.
            ValueError: what this home holds ends with the process.
        """
        raise ValueError(f"a {type(self).__name__} commits nothing")

    def check(self, borrow: Callable[[int], Tensor]) -> None:
        """Read the committed state once and check it, before anything is written.

        Args:
            borrow: gives aligned memory of at least so many bytes, until the next call.

        Raises:
            StorageError: it is damaged; says where.
            ValueError: what this home holds ends with the process.
        """
        raise ValueError(f"a {type(self).__name__} commits nothing")

    def fallbacks(self) -> dict[str, int]:
        """Return the number of times that each fallback was taken."""
        return {}

    def pin(self) -> None:
        """Pin what crosses to devices and is not pinned yet: weights, then gradients, as far as the driver does."""

    def read_ranges(self, unit: int, plane: str, ranges: Sequence[tuple[int, Tensor]]) -> None:
        """Read several ranges of one plane, each ``(start, into)``, together; errors as in `read`."""
        for start, into in ranges:
            self.read(unit, plane, start, into)

    @abstractmethod
    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """Read the same range of several planes together: plane name to tensor; errors as in `read`."""

    @abstractmethod
    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """Write the same range of several planes together: plane name to tensor; errors as in `read`."""

    @abstractmethod
    def close(self) -> None:
        """Give the medium back; a second call does nothing."""


class HostHome(Home):
    """A home in host memory; it lends planes out for work in place.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of.
        arena: where the memory comes from. It stays the owner: close it after the home.
        packed: lossless codec that writes weights which do not train; such planes are not lent out. None keeps
            them as they are.
        own: elements of each unit whose optimizer state is held; None for all.
        whole: planes of which all elements are held whatever ``own`` says.
        resident: units of which what trains lies on a device.
        without_gradient: units whose gradients have no plane.
        take_on_device: takes so many bytes of its memory, for what is said.

    Raises:
        BudgetExceededError: the arena's tier has too little left, or the device's.
    """

    in_memory = True

    def __init__(
        self,
        model: ModelSpec,
        planes: Planes,
        arena: Arena,
        packed: Codec | None = None,
        shares: Sequence[range] | None = None,
        full_planes: Collection[str] = (WEIGHTS,),
        *,
        resident: Collection[int] = (),
        without_gradient: Collection[int] = (),
        take_on_device: Callable[[int, str], Tensor] | None = None,
    ) -> None:
        self._layout = HomeLayout(
            model, planes, shares=shares, full_planes=full_planes, without_gradient=without_gradient
        )
        self._on_device: Counter[int] = Counter()
        self._planes: dict[tuple[int, str], Tensor] = {}
        self._packed: dict[tuple[int, str], PackedPlane] = {}
        self._never_cross = planes.keys() - {WEIGHTS, GRADIENT}
        self._arena, self._crossing = arena, list[tuple[bool, Tensor]]()
        for (unit, plane), extent in self._layout.extents.items():
            if packed is not None and is_packed(model.units[unit], plane):
                size = room_bytes(packed.spec, extent.numel, DTYPE_NAME[extent.dtype])
                memory = self._take(size, "home: packed weights", plane)
                self._packed[unit, plane] = PackedPlane(extent.numel, extent.dtype, packed, memory)
                continue
            rests = unit in resident and plane in planes  # frozen parts do not: they come up once
            what = f"home: {plane}"
            if rests and take_on_device is not None:
                memory = take_on_device(extent.num_bytes, what)
            else:
                memory = self._take(extent.num_bytes, what, plane)
            self._planes[unit, plane] = memory.view(extent.dtype)
            if rests:
                self._on_device[unit] += extent.num_bytes
        self._versions: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def _take(self, num_bytes: int, what: str, plane: str) -> Tensor:
        """Return host memory for a plane; masters and moments, the most of it, never leave it and need no pinning."""
        memory = self._arena.take(num_bytes, what, pins=False)
        if plane not in self._never_cross:
            self._crossing.append((plane == GRADIENT, memory))
        return memory

    def pin(self) -> None:
        """See `Home.pin`."""
        self._crossing.sort(key=itemgetter(0))
        self._arena.pin(
            [memory for _, memory in self._crossing if memory.numel()], "weights and gradients at home"
        )
        self._crossing.clear()

    def lend(self, unit: int, plane: str, elements: range | None = None) -> Tensor | None:
        """See `Home.lend`; what is packed has to be read, or its pieces taken."""
        lent = self._planes.get((unit, plane))
        if lent is None or elements is None:
            return lent
        extent = self._layout.extent(unit, plane)
        first = extent.item_of(elements.start)
        return lent[first : first - (-len(elements) // extent.group)]

    def packed(self, unit: int, plane: str) -> PackedPlane | None:
        """See `Home.packed`."""
        return self._packed.get((unit, plane))

    def version(self, unit: int, plane: str) -> int:
        """See `Home.version`."""
        return self._versions[unit, plane]

    @property
    def on_device(self) -> Mapping[int, int]:
        """See `Home.on_device`."""
        return self._on_device

    def extend(self, model: ModelSpec, planes: Planes) -> None:
        """See `Home.extend`."""
        wanted = HomeLayout(model, planes)
        for key, extent in wanted.extents.items():
            if key not in self._planes and key not in self._packed:
                memory = self._take(extent.num_bytes, f"home: {key[1]}", key[1])
                self._planes[key] = memory.view(extent.dtype)
                self._layout.extents[key] = extent

    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """See `Home.read_planes`; tensors may lie on any device."""
        for plane, tensor in into.items():
            self._move(unit, plane, start, tensor.detach(), written=False)

    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """See `Home.write_planes`; tensors may lie on any device."""
        for plane, tensor in sources.items():
            self._move(unit, plane, start, tensor.detach(), written=True)

    def _move(self, unit: int, plane: str, start: int, tensor: Tensor, *, written: bool) -> None:
        start -= self._layout.locate(unit, plane, start, tensor).first
        packed = self._packed.get((unit, plane))
        if packed is not None:
            (packed.write if written else packed.read)(start, tensor)
        else:
            first = start // self._layout.extent(unit, plane).group
            place = self._planes[unit, plane][first : first + tensor.numel()]
            place.copy_(tensor) if written else tensor.copy_(place)
        with self._lock:
            self._versions[unit, plane] += written

    def close(self) -> None:
        """Let go of the planes; the arena gives the memory back."""
        self._planes.clear()
        self._packed.clear()


class DiskHome(Home):
    """A home in one preallocated file of aligned extents.

    Tensors must lie at addresses that are multiples of 4096, as those of `outsize.storage.ledger` do.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of.
        path: the file; it is made here and stays after `close`, unless ``temporary``.
        pool: threads that move the bytes; shared, and closed by whoever made it.
        request_bytes: largest single disk request.
        temporary: the file has no name and is gone when the process ends.
        ledger: where the file's bytes are reserved, in tier ``disk``.
        existing: open the file of an earlier home, with what it holds.
        own: elements of each unit whose optimizer state is held; None for all.
        whole: planes of which all elements are held whatever ``own`` says.

    Raises:
        StorageError: see `DirectFile`.
        BudgetExceededError: the ledger has too little left.
    """

    def __init__(
        self,
        model: ModelSpec,
        planes: Planes,
        path: str | Path,
        pool: IOPool,
        *,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
        temporary: bool = False,
        ledger: Ledger | None = None,
        existing: bool = False,
        shares: Sequence[range] | None = None,
        full_planes: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._layout = self._lay_out(model, planes, shares, full_planes)
        self.file = DirectFile(
            path,
            self._layout.num_bytes,
            pool=pool,
            request_bytes=request_bytes,
            temporary=temporary,
            ledger=ledger,
            existing=existing,
        )
        self.tally = self.file.tally

    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """See `Home.read_planes`; all requests are in flight together."""
        self.file.read_spans([self._span(unit, plane, start, tensor) for plane, tensor in into.items()])

    def read_ranges(self, unit: int, plane: str, ranges: Sequence[tuple[int, Tensor]]) -> None:
        """See `Home.read_ranges`; all requests are in flight together."""
        self.file.read_spans([self._span(unit, plane, start, into) for start, into in ranges])

    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """See `Home.write_planes`; all requests are in flight together."""
        self.file.write_spans([self._span(unit, plane, start, tensor) for plane, tensor in sources.items()])

    def fallbacks(self) -> dict[str, int]:
        """See `Home.fallbacks`."""
        return {"buffered": int(self.file.is_refused)}

    def close(self) -> None:
        """Close the file, after the transfers under way; a second call does nothing."""
        self.file.close()

    def _lay_out(
        self, model: ModelSpec, planes: Planes, shares: Sequence[range] | None, full_planes: Collection[str]
    ) -> HomeLayout:
        return HomeLayout(model, planes, shares=shares, full_planes=full_planes)

    def _span(self, unit: int, plane: str, start: int, tensor: Tensor) -> Span:
        extent = self._layout.locate(unit, plane, start, tensor)
        offset = extent.offset + extent.item_of(start) * extent.dtype.itemsize
        return tensor.detach().view(torch.uint8), offset
