"""Granules of a plane: the pieces that have checksums and, where the plane is kept twice, sides.

- What is written goes to the side that is not committed, so the committed one is whole until the next commit.
- What is read comes from the side that was written last, and must have the checksum that it was written with.
- A granule that was never written reads as zeros.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from outsize.storage.disk_file import Inspect
from outsize.storage.home_layout import PlaneExtent
from outsize.storage.record import Checksums, Sides, checksum

Run = tuple[int, int, int]
"""A side, and the first and behind the last granule of a run that lies on it."""


class DamagedError(Exception):
    """The bytes of a granule are not those that were written; says which granule of the plane it is."""

    def __init__(self, granule: int, side: int) -> None:
        super().__init__(granule)
        self.granule = granule
        self.side = side


class Granules:
    """The granules of one plane.

    Args:
        extent: of the plane.
        granule_elements: elements of each but the last, which may be shorter.

    Attributes:
        newest: the side that was written last, by granule.
        committed: the side of the last commit.
        checksums: uint64 [sides, granules].
    """

    def __init__(self, extent: PlaneExtent, granule_elements: int) -> None:
        self.extent = extent
        self.granule_elements = granule_elements
        self.granule_bytes = granule_elements * extent.dtype.itemsize
        count = -(-extent.numel // granule_elements)
        self.newest: Sides = np.zeros(count, np.uint8)
        self.committed: Sides = np.zeros(count, np.uint8)
        self.checksums: Checksums = np.empty((extent.num_sides, count), np.uint64)
        self.checksums[:] = checksum(bytes(min(self.granule_bytes, extent.num_bytes)))
        last = extent.num_bytes - (count - 1) * self.granule_bytes
        self.checksums[:, -1] = checksum(bytes(last))

    @property
    def newest_checksums(self) -> Checksums:
        """Checksums of the sides that were written last."""
        found: Checksums = self.checksums[self.newest, np.arange(len(self.newest))]
        return found

    def to_read(self, start: int, numel: int) -> Iterator[Run]:
        """Yield runs of granules where they were written last."""
        first, last = self._range(start, numel)
        return _runs(self.newest[first:last], first)

    def to_write(self, start: int, numel: int) -> Iterator[Run]:
        """Yield runs of granules where they are to be written."""
        first, last = self._range(start, numel)
        free = 1 - self.committed[first:last] if self.extent.num_sides == 2 else self.committed[first:last]
        return _runs(free, first)

    def offset(self, side: int, granule: int) -> int:
        """First byte of a granule in the file."""
        return self.extent.offset + side * self.extent.num_bytes + granule * self.granule_bytes

    def check(self, side: int, first: int) -> Inspect:
        """Return what checks the bytes of a run that begins with granule ``first``.

        It raises `DamagedError`.
        """

        def inspect(view: memoryview, offset: int) -> None:
            for granule, found in self._digests(view, first, offset):
                if self.checksums[side, granule] != found:
                    raise DamagedError(granule, side)

        return inspect

    def note(self, side: int, first: int) -> Inspect:
        """Return what keeps the checksums of a run that begins with granule ``first``."""

        def inspect(view: memoryview, offset: int) -> None:
            for granule, found in self._digests(view, first, offset):
                self.checksums[side, granule] = found

        return inspect

    def restore(self, sides: Sides, checksums: Checksums) -> None:
        """Take over what a commit record says."""
        self.newest[:] = sides
        self.committed[:] = sides
        self.checksums[sides, np.arange(len(sides))] = checksums

    def refine(self, granule_elements: int, plane: memoryview) -> "Granules":
        """Return smaller granules of the same plane, whose bytes are ``plane``, all committed."""
        finer = Granules(self.extent, granule_elements)
        sides = np.repeat(self.committed, self.granule_elements // granule_elements)[: len(finer.newest)]
        digests = [found for _, found in finer._digests(plane, 0, 0)]
        finer.restore(sides, np.array(digests, np.uint64))
        return finer

    def _digests(self, view: memoryview, first: int, offset: int) -> Iterator[tuple[int, int]]:
        size = self.granule_bytes
        for at in range(0, len(view), size):
            yield first + (offset + at) // size, checksum(view[at : at + size])

    def _range(self, start: int, numel: int) -> tuple[int, int]:
        stop, size = start + numel, self.granule_elements
        if start % size or (stop % size and stop != self.extent.numel):
            raise ValueError(f"elements {start}..{stop}: need whole granules of {size}")
        return start // size, -(-stop // size)


def _runs(sides: Sides, first: int) -> Iterator[Run]:
    """Yield runs of equal sides."""
    if not len(sides):
        return
    changes = np.flatnonzero(np.diff(sides)) + 1
    for begin, end in pairwise([0, *changes.tolist(), len(sides)]):
        yield int(sides[begin]), first + begin, first + end
