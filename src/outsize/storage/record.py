"""The commit record of a home: granules with checksums, and which side of each is the state.

A file of a home begins with two slots of the same size. Records go to them in turn, so that while one is being
written the one before is whole. A record is a header, a JSON text, a byte for each granule (its side) and eight for
its checksum; the header's digest covers all of it, so a torn record is known for what it is.

- What is written goes to the side that is not committed, so the committed one is whole until the next commit.
- What is read comes from the side that was written last, and must have the checksum that it was written with.
- A granule that was never written reads as zeros.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from outsize import files
from outsize.errors import StorageError, explain
from outsize.model.sizes.model_spec import PLANE_ELEMENTS
from outsize.storage.disk_file import Inspect
from outsize.storage.home_layout import PlaneExtent

VERSION = 1
NUM_SLOTS = 2
# What checksums are made with, by the name that a record gives it. One that names none is of before there was a choice.
HASH = "xxh3_64"
# Of the bytes of a granule, 64 bits; for large ones without the interpreter's lock.
checksum = xxhash.xxh3_64_intdigest
_MAGIC = b"OUTSIZE\x00"
# Magic, version, bytes of the text, granules, sequence number, and the digest of all but itself.
_HEADER = struct.Struct("<8sIIQQQ")
_DIGEST_BYTES = 8

Sides = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One committed state.

    Attributes:
        sequence: number of the commit, from 1; they go to slots 0 and 1 in turn.
        state: what the run says of itself, JSON.
        granule_elements: elements that a checksum covers.
        layout: digest of what lies where, see `outsize.storage.home_layout`.
        sides: the side, 0 or 1, of each granule, uint8 [granules].
        checksums: of that side, uint64 [granules].
    """

    sequence: int
    state: Mapping[str, Any]
    granule_elements: int
    layout: str
    sides: Sides
    checksums: Checksums

    @property
    def slot(self) -> int:
        """Index of the record's slot."""
        return (self.sequence - 1) % NUM_SLOTS


class _BadRecordError(Exception):
    """What is wrong with the bytes of a slot."""


def pack(record: CommitRecord, into: memoryview) -> int:
    """Write ``record`` to the start of ``into`` and return its bytes.

    Raises:
        StorageError: it does not fit.
    """
    text = json.dumps(
        {
            "granule_elements": record.granule_elements,
            "hash": HASH,
            "layout": record.layout,
            "state": dict(record.state),
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    body = text + record.sides.tobytes() + record.checksums.astype("<u8").tobytes()
    end = _HEADER.size + len(body)
    if end > len(into):
        raise StorageError(f"a commit record of {end} bytes does not fit its slot of {len(into)}")
    fields = (_MAGIC, VERSION, len(text), len(record.sides), record.sequence)
    _HEADER.pack_into(into, 0, *fields, 0)
    into[_HEADER.size : end] = body
    _HEADER.pack_into(into, 0, *fields, _digest(into[:end]))
    return end


def unpack(data: memoryview) -> CommitRecord | None:
    """Return the record at the start of ``data``, None where nothing was ever written.

    Raises:
        StorageError: it was written in another format.
        _BadRecordError: it is torn or damaged.
    """
    if len(data) < _HEADER.size or not any(data[: _HEADER.size]):
        return None
    magic, version, text_bytes, num_granules, sequence, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or not version:
        raise _BadRecordError("it does not begin as one")
    if version != VERSION:
        raise StorageError(f"it is a home of format {version}, and this version of outsize knows {VERSION}")
    end = _HEADER.size + text_bytes + 9 * num_granules
    if end > len(data):
        raise _BadRecordError("it is longer than its slot")
    if _digest(data[:end]) != digest:
        raise _BadRecordError("its digest is wrong")
    at = _HEADER.size + text_bytes
    try:
        head = json.loads(bytes(data[_HEADER.size : at]))
        named = head.get("hash", HASH)
        record = CommitRecord(
            sequence=sequence,
            state=dict(head["state"]),
            granule_elements=_granule(head["granule_elements"]),
            layout=str(head["layout"]),
            sides=np.frombuffer(data[at : at + num_granules], np.uint8).copy(),
            checksums=np.frombuffer(data[at + num_granules : end], "<u8").astype(np.uint64),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _BadRecordError(f"its text cannot be read: {error!r}") from error
    if named != HASH:
        raise StorageError(f"its checksums are {str(named)[:20]!r}, and this version of outsize knows {HASH}")
    return record


def _granule(num_elements: Any) -> int:
    if type(num_elements) is not int or num_elements < PLANE_ELEMENTS or num_elements & (num_elements - 1):
        raise ValueError(f"granules of {num_elements!r} elements")
    return num_elements


def has_commit(path: Path) -> bool:
    """Whether the file at ``path`` is a home that has committed, whole or not."""
    return path.is_file() and bytes(_read(path, 0, 0)).startswith(_MAGIC)


def newest_record(path: Path, slot_bytes: int) -> tuple[CommitRecord | None, str]:
    """Return the newest whole record in the slots of ``path``, and what is wrong with the others, empty if nothing is.

    Raises:
        StorageError: see `whole_records`.
    """
    records, wrong = whole_records(path, slot_bytes)
    return records[0] if records else None, wrong


def whole_records(path: Path, slot_bytes: int) -> tuple[list[CommitRecord], str]:
    """Return the whole records in the slots of ``path``, the newest first, and what is wrong with the others.

    Raises:
        StorageError: the file cannot be read, or was written in another format.
    """
    records: list[CommitRecord] = []
    wrong: list[str] = []
    for slot in range(NUM_SLOTS):
        try:
            record = unpack(_read(path, slot * slot_bytes, slot_bytes))
        except _BadRecordError as error:
            wrong.append(f"commit record {slot} of {path}: {error}")
        except StorageError as error:
            raise StorageError(f"{path}: {error}; use that version, or remove the file") from error
        else:
            records += [record] if record is not None else []
    return sorted(records, key=lambda record: -record.sequence), "; ".join(wrong)


def _digest(data: memoryview) -> int:
    """Digest of a packed record, its own digest left out."""
    digest = xxhash.xxh3_64(bytes(data[: _HEADER.size - _DIGEST_BYTES]))
    digest.update(data[_HEADER.size :])
    return digest.intdigest()


def _read(path: Path, offset: int, num_bytes: int) -> memoryview:
    """Return up to ``num_bytes`` of a slot: its header, and as much more as that speaks of."""
    try:
        with files.open_binary(path, "r") as file:
            file.seek(offset)
            data = file.read(_HEADER.size)
            if len(data) == _HEADER.size and data.startswith(_MAGIC):
                _, _, text_bytes, num_granules, _, _ = _HEADER.unpack(data)
                data += file.read(max(0, min(text_bytes + 9 * num_granules, num_bytes - len(data))))
            os.posix_fadvise(file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise explain(error, f"read {path}") from error
    return memoryview(data)


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
        newest: Checksums = self.checksums[self.newest, np.arange(len(self.newest))]
        return newest

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
            for granule, digest in self._digests(view, first, offset):
                if self.checksums[side, granule] != digest:
                    raise DamagedError(granule, side)

        return inspect

    def note(self, side: int, first: int) -> Inspect:
        """Return what keeps the checksums of a run that begins with granule ``first``."""

        def inspect(view: memoryview, offset: int) -> None:
            for granule, digest in self._digests(view, first, offset):
                self.checksums[side, granule] = digest

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
        digests = [digest for _, digest in finer._digests(plane, 0, 0)]
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
    if not len(sides):
        return
    changes = np.flatnonzero(np.diff(sides)) + 1
    for begin, end in pairwise([0, *changes.tolist(), len(sides)]):
        yield int(sides[begin]), first + begin, first + end
