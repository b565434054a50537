"""Where weights and optimizer state live between uses, addressed by unit, plane and element.

A home holds the planes of a model's units: ``weights`` for every unit, and for units that are trained the
planes of the optimizer (see `outsize.optim.optimizer_spec.StateLayout`). `HostHome` holds them in memory, `DiskHome` in
a file. Both pass the same contract (`outsize.testing`):

- what is read is what was last written, bit for bit; a plane that was never written reads as zeros;
- ranges start at a multiple of 2048 elements and are multiples of 2048 elements long, and have the plane's
  dtype; of planes with items of a byte, or an item for a group of elements, they are whole sectors of 4096 bytes;
- ranges that do not overlap may be read and written at the same time from any threads.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.codecs.transport import room_bytes
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, is_packed
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.storage.arena import Arena
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES, DirectFile, Span, Transfers
from outsize.storage.encoded_planes import PackedPlane
from outsize.storage.home_layout import HomeLayout, Planes
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool


class Home(ABC):
    """What the runtime needs of a home; a context manager."""

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

    @abstractmethod
    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """Read the same range of several planes together: plane name to tensor; errors as in `read`."""

    @abstractmethod
    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """Write the same range of several planes together: plane name to tensor; errors as in `read`."""

    @abstractmethod
    def statistics(self) -> Transfers:
        """Return what was moved so far; work done in place on views of a `HostHome` is not seen."""

    @abstractmethod
    def close(self) -> None:
        """Give the medium back; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HostHome(Home):
    """A home in host memory; `view` lends planes out for work in place.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of.
        arena: where the memory comes from. It stays the owner: close it after the home.
        packed: lossless codec that writes weights which do not train; such planes are not lent out by `view`. None
            keeps them as they are.
        own: elements of each unit whose optimizer state is held; None for all.
        whole: planes of which all elements are held whatever ``own`` says.

    Raises:
        BudgetExceededError: the arena's tier has too little left.
    """

    def __init__(
        self,
        model: ModelSpec,
        planes: Planes,
        arena: Arena,
        packed: Codec | None = None,
        own: Sequence[range] | None = None,
        whole: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._layout = HomeLayout(model, planes, own=own, whole=whole)
        self._planes: dict[tuple[int, str], Tensor] = {}
        self._packed: dict[tuple[int, str], PackedPlane] = {}
        for (unit, plane), extent in self._layout.extents.items():
            if packed is not None and is_packed(model.units[unit], plane):
                size = room_bytes(packed.spec, extent.numel, DTYPE_NAME[extent.dtype])
                memory = arena.take(size, "home: packed weights")
                self._packed[unit, plane] = PackedPlane(extent.numel, extent.dtype, packed, memory)
                continue
            memory = arena.take(extent.num_bytes, f"home: {plane}")
            self._planes[unit, plane] = memory.view(extent.dtype)
        self._statistics = Transfers()
        self._versions: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def view(self, unit: int, plane: str) -> Tensor:
        """Return the plane itself, all elements that are held, flat.

        Raises:
            ValueError: there is no such plane, or it is packed.
        """
        self._layout.extent(unit, plane)
        if (unit, plane) in self._packed:
            raise ValueError(f"plane {plane!r} of unit {unit} is packed; read it, or take its pieces")
        return self._planes[unit, plane]

    def part(self, unit: int, plane: str, elements: range) -> Tensor:
        """Return what a plane holds of ``elements`` of its unit; otherwise as `view`."""
        extent = self._layout.extent(unit, plane)
        first = extent.item_of(elements.start)
        return self.view(unit, plane)[first : first - (-len(elements) // extent.group)]

    def packed(self, unit: int, plane: str) -> PackedPlane | None:
        """Return an encoded plane; None for a plain one."""
        return self._packed.get((unit, plane))

    def version(self, unit: int, plane: str) -> int:
        """Return how often a plane was written by `write`; what is done on views is not seen."""
        return self._versions[unit, plane]

    def extend(self, model: ModelSpec, planes: Planes, arena: Arena) -> None:
        """Add the planes that ``model`` needs where it trains other units; existing planes stay."""
        wanted = HomeLayout(model, planes)
        for key, extent in wanted.extents.items():
            if key not in self._planes and key not in self._packed:
                self._planes[key] = arena.take(extent.num_bytes, f"home: {key[1]}").view(extent.dtype)
                self._layout.extents[key] = extent

    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """See `Home.read_planes`; tensors may lie on any device."""
        for plane, tensor in into.items():
            self._read(unit, plane, start, tensor)

    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """See `Home.write_planes`; tensors may lie on any device."""
        for plane, tensor in sources.items():
            self._write(unit, plane, start, tensor)

    def _read(self, unit: int, plane: str, start: int, into: Tensor) -> None:
        start -= self._layout.locate(unit, plane, start, into).first
        started = time.perf_counter()
        packed = self._packed.get((unit, plane))
        if packed is not None:
            packed.read(start, into.detach())
        else:
            first = start // self._layout.extent(unit, plane).group
            into.detach().copy_(self._planes[unit, plane][first : first + into.numel()])
        elapsed = time.perf_counter() - started
        with self._lock:
            former = self._statistics
            self._statistics = replace(
                former, bytes_read=former.bytes_read + into.nbytes, read_s=former.read_s + elapsed
            )

    def _write(self, unit: int, plane: str, start: int, source: Tensor) -> None:
        start -= self._layout.locate(unit, plane, start, source).first
        started = time.perf_counter()
        packed = self._packed.get((unit, plane))
        if packed is not None:
            packed.write(start, source.detach())
        else:
            first = start // self._layout.extent(unit, plane).group
            self._planes[unit, plane][first : first + source.numel()].copy_(source.detach())
        elapsed = time.perf_counter() - started
        with self._lock:
            self._versions[unit, plane] += 1
            former = self._statistics
            self._statistics = replace(
                former, bytes_written=former.bytes_written + source.nbytes, write_s=former.write_s + elapsed
            )

    def statistics(self) -> Transfers:
        """See `Home.statistics`."""
        return self._statistics

    def close(self) -> None:
        """Let go of the planes; the arena gives the memory back."""
        self._planes.clear()
        self._packed.clear()


class DiskHome(Home):
    """A home in one preallocated file of aligned extents.

    Tensors must lie at addresses that are multiples of 4096, as those of `outsize.storage.arena` do.

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

    Attributes:
        granule_elements: what is read and written begins and ends at multiples of it, or with the plane.

    Raises:
        StorageError: see `DirectFile`.
        BudgetExceededError: the ledger has too little left.
    """

    granule_elements: int = PLANE_ELEMENTS

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
        own: Sequence[range] | None = None,
        whole: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._layout = self._lay_out(model, planes, own, whole)
        self.file = DirectFile(
            path,
            self._layout.num_bytes,
            pool=pool,
            request_bytes=request_bytes,
            temporary=temporary,
            ledger=ledger,
            existing=existing,
        )

    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """See `Home.read_planes`; all requests are in flight together."""
        self.file.read_spans([self._span(unit, plane, start, tensor) for plane, tensor in into.items()])

    def read_ranges(self, unit: int, plane: str, ranges: Sequence[tuple[int, Tensor]]) -> None:
        """Read several ranges of one plane, each ``(start, into)``, all in flight together; errors as in `read`."""
        self.file.read_spans([self._span(unit, plane, start, into) for start, into in ranges])

    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """See `Home.write_planes`; all requests are in flight together."""
        self.file.write_spans([self._span(unit, plane, start, tensor) for plane, tensor in sources.items()])

    def statistics(self) -> Transfers:
        """See `Home.statistics`."""
        return self.file.statistics()

    def close(self) -> None:
        """Close the file, after the transfers under way; a second call does nothing."""
        self.file.close()

    def _lay_out(
        self, model: ModelSpec, planes: Planes, own: Sequence[range] | None, whole: Collection[str]
    ) -> HomeLayout:
        return HomeLayout(model, planes, own=own, whole=whole)

    def _span(self, unit: int, plane: str, start: int, tensor: Tensor) -> Span:
        extent = self._layout.locate(unit, plane, start, tensor)
        offset = extent.offset + extent.item_of(start) * extent.dtype.itemsize
        return tensor.detach().view(torch.uint8), offset
