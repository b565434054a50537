"""A home on disk that commits: the state of the last commit is whole whatever happens, and is checked on reading.

1. What a step writes goes beside what is committed (`outsize.storage.record`); what is read is the newest.
2. `commit` makes all of it durable, then writes a record that says where it lies, then makes that durable. Until the
   record is, the one before holds, and everything that it speaks of is untouched.
3. Only behind a commit may the next step write: it overwrites the state before the last commit. The planner's program
   sees to that (`COMMIT`).

Gradients are not part of a state: they lie there once, and no commit speaks of them. They have checksums all the same.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize import files
from outsize.errors import StorageError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, Plane
from outsize.optim.shares import commit_record_bytes
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES, SECTOR_BYTES, Inspect, Span
from outsize.storage.home import DiskHome, Home
from outsize.storage.home_layout import HomeLayout, Planes, is_laid_out, layout_digest, made_for, made_of
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool, sync_directory
from outsize.storage.record import (
    NUM_SLOTS,
    CommitRecord,
    DamagedError,
    Granules,
    newest_record,
    pack,
    whole_records,
)
from outsize.units import align_up


def find_record(
    path: Path,
    model: ModelSpec,
    planes: Planes | None = None,
    shares: Sequence[range] | None = None,
    full_planes: Collection[str] = (WEIGHTS,),
) -> tuple[CommitRecord | None, str]:
    """Return the newest whole commit record of the home at ``path``, and what is wrong with it otherwise.

    ``planes`` are those of the home, None for those of a plain layout.

    Raises:
        StorageError: the file cannot be read, or was written in another format.
    """
    if not path.is_file():
        return None, ""
    forms = made_for(model, planes)
    record, wrong = newest_record(path, commit_record_bytes(model, planes=forms))
    ours = record is not None and is_laid_out(record.layout, model, forms, shares, full_planes)
    if ours and path.stat().st_size != _layout_of(model, forms, shares, full_planes).num_bytes:
        return None, f"{path} is truncated"
    return record, wrong


def find_records(
    path: Path,
    model: ModelSpec,
    planes: Planes | None,
    shares: Sequence[range] | None,
    full_planes: Collection[str] = (WEIGHTS,),
) -> tuple[list[CommitRecord], str]:
    """Return the whole commit records of the home of a share at ``path``, newest first, and what is wrong otherwise.

    The one before the newest holds until the next step writes, which is when all ranks have committed.

    Raises:
        StorageError: the file cannot be read, or was written in another format.
    """
    newest, wrong = find_record(path, model, planes, shares, full_planes)
    if newest is None:
        return [], wrong
    records, wrong = whole_records(path, commit_record_bytes(model, planes=made_for(model, planes)))
    return [
        record for record in records if is_laid_out(record.layout, model, planes, shares, full_planes)
    ], wrong


class CommittedHome(DiskHome):
    """A home in a file that holds a committed state at any time after the first commit.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of; all but the gradient are kept twice.
        path: the file.
        pool: threads that move the bytes; shared, and closed by whoever made it.
        arena: where the buffer of the commit record comes from; in its ledger the file's bytes are reserved, in tier
            ``disk``.
        granule_elements: elements that a checksum covers, a power of two from 2048 up; what is read and written
            begins and ends at multiples of it, or with the plane.
        record: of the home that ``path`` holds, to go on with it; None makes a new one.
        temporary: the file has no name and is gone when the process ends; it commits all the same.
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
        arena: Arena,
        granule_elements: int = PLANE_ELEMENTS,
        record: CommitRecord | None = None,
        temporary: bool = False,
        shares: Sequence[range] | None = None,
        full_planes: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._model = model
        self._own, self._whole = shares, full_planes
        self._made = made_for(model, planes)
        self._digest = layout_digest(model, self._made, shares, full_planes)
        self._slot_bytes = commit_record_bytes(model, planes=self._made)
        if record is not None:
            granule_elements = min(record.granule_elements, granule_elements)
        recorded_elements = record.granule_elements if record is not None else granule_elements
        self._buffer = arena.take(commit_record_bytes(model, granule_elements, self._made), "commit record")
        super().__init__(
            model,
            planes,
            path,
            pool,
            request_bytes=align_up(DEFAULT_REQUEST_BYTES, 4 * max(recorded_elements, granule_elements)),
            temporary=temporary,
            ledger=arena.ledger,
            existing=record is not None,
            shares=shares,
            full_planes=full_planes,
        )
        self.granule_elements = granule_elements
        self._granules = {key: self._cut(key, recorded_elements) for key in self._layout.extents}
        self._sequence = 0
        self._stays = not temporary
        self.record = record
        try:
            if record is not None:
                self._restore(record)
            elif not temporary:
                # What the file held before must not come back once there are new bytes in it.
                self.file.sync()
                sync_directory(self.file.path.parent)
        except BaseException:
            self.close()
            raise

    def commit(self, state: Mapping[str, Any]) -> None:
        """See `Home.commit`; nothing may be written meanwhile."""
        self.file.sync()
        lasting = [granules for key, granules in self._granules.items() if key[1] != GRADIENT]
        record = CommitRecord(
            sequence=self._sequence + 1,
            state=dict(state),
            granule_elements=self.granule_elements,
            layout=self._digest,
            sides=np.concatenate([granules.newest for granules in lasting]),
            checksums=np.concatenate([granules.newest_checksums for granules in lasting]),
        )
        size = align_up(pack(record, self._buffer.numpy().data), SECTOR_BYTES)
        view = self._buffer.numpy().data[:size]
        self.file.run([lambda: self.file.write_request(view, record.slot * self._slot_bytes)])
        self.file.sync()
        for granules in lasting:
            granules.committed[:] = granules.newest
        self._sequence, self.record = record.sequence, record

    def check(self, borrow: Callable[[int], Tensor]) -> None:
        """See `Home.check`."""
        for (unit, plane), granules in self._granules.items():
            if plane != GRADIENT:
                buffer = borrow(granules.extent.num_bytes)
                self.read(unit, plane, granules.extent.first, buffer.view(granules.extent.dtype))
                wanted = self._granule_items((unit, plane), self.granule_elements)
                if granules.granule_elements > wanted:
                    self._granules[unit, plane] = granules.refine(wanted, buffer.numpy().data)
            else:
                self._granules[unit, plane] = self._cut((unit, plane), self.granule_elements)

    def close(self) -> None:
        """Close the file; one that stays but has nothing committed is of no use to anyone, and goes."""
        super().close()
        if self._stays and self.record is None:
            self._stays = False
            with contextlib.suppress(OSError):
                files.system().unlink(self.file.path)

    def copy_to(self, home: Home, piece: Tensor) -> None:
        """Write the committed state into another home of the same model, by way of ``piece``, aligned memory."""
        for (unit, plane), granules in self._granules.items():
            if plane == GRADIENT:
                continue
            extent = granules.extent
            size = (
                len(piece) // extent.dtype.itemsize // granules.granule_elements * granules.granule_elements
            )
            size = size or extent.numel
            for start in range(0, extent.numel, size):
                part = piece.view(extent.dtype)[: min(size, extent.numel - start)]
                at = extent.first + start * extent.group
                self.read(unit, plane, at, part)
                home.write(unit, plane, at, part)

    def read_planes(self, unit: int, start: int, into: Mapping[str, Tensor]) -> None:
        """See `Home.read_planes`; what is read is checked."""
        self._read_all(unit, [(plane, start, tensor) for plane, tensor in into.items()])

    def read_ranges(self, unit: int, plane: str, ranges: Sequence[tuple[int, Tensor]]) -> None:
        """See `Home.read_ranges`; what is read is checked."""
        self._read_all(unit, [(plane, start, into) for start, into in ranges])

    def _read_all(self, unit: int, ranges: Iterable[tuple[str, int, Tensor]]) -> None:
        """Fill each tensor with the newest elements of a plane from a start on, all in flight together."""
        spans: list[Span] = []
        checks: list[Inspect] = []
        for plane, start, tensor in ranges:
            self._layout.locate(unit, plane, start, tensor)
            granules = self._granules[unit, plane]
            at = granules.extent.item_of(start)
            for side, first, last in granules.to_read(at, tensor.numel()):
                spans.append(_span(granules, tensor, at, side, first, last))
                checks.append(self._checked(unit, plane, granules, granules.check(side, first)))
        self.file.read_spans(spans, checks)

    def write_planes(self, unit: int, start: int, sources: Mapping[str, Tensor]) -> None:
        """See `Home.write_planes`; what is committed stays as it is."""
        spans: list[Span] = []
        notes: list[Inspect] = []
        written: list[tuple[Granules, int, int, int]] = []
        for plane, tensor in sources.items():
            self._layout.locate(unit, plane, start, tensor)
            granules = self._granules[unit, plane]
            at = granules.extent.item_of(start)
            for side, first, last in granules.to_write(at, tensor.numel()):
                spans.append(_span(granules, tensor, at, side, first, last))
                notes.append(granules.note(side, first))
                written.append((granules, side, first, last))
        self.file.write_spans(spans, notes)
        for granules, side, first, last in written:
            granules.newest[first:last] = side

    def _restore(self, record: CommitRecord) -> None:
        lasting = [granules for key, granules in self._granules.items() if key[1] != GRADIENT]
        ends = np.cumsum([len(granules.newest) for granules in lasting])
        bad = int(ends[-1]) != len(record.sides) or bool((record.sides > 1).any())
        if bad or not is_laid_out(record.layout, self._model, self._made, self._own, self._whole):
            raise StorageError(f"{self.file.path} holds another model, or the same one split otherwise")
        for granules, sides, checksums in zip(
            lasting, np.split(record.sides, ends[:-1]), np.split(record.checksums, ends[:-1]), strict=True
        ):
            granules.restore(sides, checksums)
        self._sequence = record.sequence
        self._forget_later(record)

    def _forget_later(self, record: CommitRecord) -> None:
        """Where the run goes on from the record before the newest one, see that nobody ever goes on from that."""
        newest, _ = newest_record(self.file.path, self._slot_bytes)
        if newest is not None and newest.sequence > record.sequence:
            self._buffer[:SECTOR_BYTES].zero_()
            view = self._buffer.numpy().data[:SECTOR_BYTES]
            self.file.run([lambda: self.file.write_request(view, newest.slot * self._slot_bytes)])
            self.file.sync()

    def _lay_out(
        self, model: ModelSpec, planes: Planes, shares: Sequence[range] | None, full_planes: Collection[str]
    ) -> HomeLayout:
        return _layout_of(model, made_of(model.dtype, planes), shares, full_planes)

    def _granule_items(self, key: tuple[int, str], granule_elements: int) -> int:
        """Items of a plane that a checksum covers."""
        plane = self._made.get(key[1])
        return granule_elements if plane is None else plane.granule_items(granule_elements)

    def _cut(self, key: tuple[int, str], granule_elements: int) -> Granules:
        return Granules(self._layout.extents[key], self._granule_items(key, granule_elements))

    def _checked(self, unit: int, plane: str, granules: Granules, check: Inspect) -> Inspect:
        """Let ``check`` raise what tells the user."""

        def inspect(view: memoryview, offset: int) -> None:
            try:
                check(view, offset)
            except DamagedError as damage:
                raise StorageError(self._describe(unit, plane, granules, damage)) from None

        return inspect

    def _describe(self, unit: int, plane: str, granules: Granules, damage: DamagedError) -> str:
        extent, size = granules.extent, granules.granule_elements
        first = damage.granule * size
        where = (
            f"unit {self._model.units[unit].name}, plane {plane}, elements {extent.first + first * extent.group} to "
            f"{extent.first + min(first + size, extent.numel) * extent.group}"
        )
        message = f"{self.file.path} is damaged: {where} are not what was written; look at the disk"
        if self.record is None:
            return f"{message}. Nothing was committed yet"
        step = self.record.state.get("step", self.record.sequence)
        if plane != GRADIENT and damage.side == granules.committed[damage.granule]:
            return (
                f"{message}. They belong to step {step}, the last committed one; the last good one is that of the "
                "newest checkpoint, and --resume auto goes on from there"
            )
        return (
            f"{message}. Step {step}, the last committed one, is good, and --resume auto goes on from there"
        )


def _layout_of(
    model: ModelSpec,
    forms: Mapping[str, Plane],
    shares: Sequence[range] | None = None,
    full_planes: Collection[str] = (WEIGHTS,),
) -> HomeLayout:
    return HomeLayout(
        model,
        forms,
        base=NUM_SLOTS * commit_record_bytes(model, planes=forms),
        twice=[name for name in forms if name != GRADIENT],
        shares=shares,
        full_planes=full_planes,
    )


def _span(granules: Granules, tensor: Tensor, start: int, side: int, first: int, last: int) -> Span:
    """The part of ``tensor``, items from ``start`` on, that is a run of granules, and where it lies."""
    size = granules.granule_elements
    piece = tensor.detach()[first * size - start : min(last * size - start, tensor.numel())]
    return piece.view(torch.uint8), granules.offset(side, first)
