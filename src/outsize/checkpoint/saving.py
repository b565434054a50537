"""Write one checkpoint beside training: contents, order of writes, and handling of failures.

The story of one checkpoint:

1. Between two steps, the `Saver` notes where the run stands and submits a program of STOREs. The next step begins
   at once; its forward and backward read the same weights, and only its STEP of a unit waits for the unit's STORE.
2. On the lane ``store``, `Saving` writes each unit's weights and optimizer state as it comes, with checksums, every
   file synced, into a directory whose name says that it is not complete.
3. After the last unit it writes the rest, ``trainer_state.json`` last, and syncs the directories. Then it renames the
   directory, syncs, writes ``latest``, syncs, and only then removes checkpoints beyond the limit.
4. The `Saver` tells, between steps, what became of it.
5. Where a later step fails, the units that are left are written before the run ends; their state is still there.

At every moment ``latest`` names a checkpoint that is whole on the disk. One that cannot be written is given up, with
what was written of it; the run goes on, says so, and tries again when the next one is due. Only at the end of the run
is it an error.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize import files
from outsize.checkpoint.begun_adapters import AdapterWriter
from outsize.checkpoint.checkpoint_state import (
    CHECKPOINTS,
    MASTER_EXCEPTED,
    MASTER_LOW,
    OPTIMIZER,
    STATE,
    file_of,
    known_files,
    make_durable,
    name_of,
    plane_of,
    remove_litter,
    remove_old,
    render_state,
    set_latest,
    state_planes,
    take_place,
)
from outsize.checkpoint.files.checkpoint_files import Beside
from outsize.checkpoint.files.checkpoint_format import FileSum, Moved, write_file
from outsize.checkpoint.files.checkpoint_map import Chunk, write_plane
from outsize.checkpoint.files.checkpoint_shards import CheckpointWriter
from outsize.errors import CheckpointError, StorageError, explain
from outsize.model.sizes.model_spec import UnitSpec
from outsize.optim.optimizer_spec import MASTER, WEIGHTS
from outsize.optim.split_masters import PIECE_ELEMENTS, split_low
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.checkpoint_ops import UnitAtRest
from outsize.session.job.prepare import Job


class _CancelledError(Exception):
    """The run ends before its checkpoint is complete."""


class Saving:
    """One checkpoint on its way: takes the units of a program of STOREs.

    Args:
        prepared: the model.
        directory: of the run.
        state: what `trainer_state.json` says besides what is found out on the way.
        beside: the files beside the weights.
        step: steps done.
        limit: checkpoints to keep; None keeps all.
        moved: called after every piece that was read or written.

    Attributes:
        path: of the checkpoint, once it is complete and ``latest`` names it.
        error: why it could not be written.
        cancelled: set it to have the checkpoint given up.
        step: steps done.
        number: of the last of them, from 0, as in a `StepContext`.
    """

    def __init__(
        self,
        prepared: Job,
        directory: Path,
        state: dict[str, Any],
        beside: Beside,
        step: int,
        limit: int | None,
        moved: Moved = lambda: None,
    ) -> None:
        self.path: Path | None = None
        self.error: StorageError | None = None
        self.cancelled = False
        self.step = step
        self.number = step - 1
        self._prepared = prepared
        self._checkpoints = directory / CHECKPOINTS
        self._final = self._checkpoints / name_of(step)
        self._staging = self._final.with_name(self._final.name + files.PARTIAL)
        self._state = state
        self._beside = beside
        self._limit = limit
        self._moved = moved
        self._updates: dict[str, int] = {}
        self._files: dict[str, FileSum] = {}
        self._writer: CheckpointWriter | AdapterWriter | None = None
        self._former: tuple[Path, dict[str, FileSum]] | None = None
        self._num_left = sum(bool(unit.tensors) for unit in prepared.split.spec.units)

    def __call__(self, resting: UnitAtRest) -> None:
        """Write one unit, and after the last one make the checkpoint complete.

        Raises:
            StorageError: the home cannot be read. What cannot be written only ends this checkpoint, see ``error``.
        """
        if self.error is not None or self.cancelled or not resting.unit.tensors:
            return
        complete = False
        try:
            writer = self._writer or self._begin()
            self._write(resting, writer)
            self._num_left -= 1
            if not self._num_left:
                self._finish(writer)
            complete = True
        except OSError as error:
            self.error = explain(error, f"write the checkpoint {self._final}")
        except CheckpointError as error:  # it was written, and does not read as a checkpoint
            self.error = StorageError(f"cannot write the checkpoint {self._final}: {error}")
        except _CancelledError:
            pass  # given up below, as it was told
        finally:
            if not complete:
                self._give_up()

    def _begin(self) -> CheckpointWriter | AdapterWriter:
        remove_litter(self._checkpoints)
        make_durable(self._checkpoints)
        self._former = known_files(self._checkpoints.parent, self._state["run"])
        files.make_directories(self._staging / OPTIMIZER)
        split, adapters = self._prepared.split, self._prepared.adapters
        if adapters is not None:
            units = [split.spec.units[unit] for unit in self._prepared.plan.layout.step_order]
            self._writer = AdapterWriter(self._staging, adapters, units)
        else:
            tied = split.tied_names()
            self._writer = CheckpointWriter(self._staging, split.model, split.spec.units, self._check, tied)
        return self._writer

    def _write(self, resting: UnitAtRest, writer: CheckpointWriter | AdapterWriter) -> None:
        unit, spec = resting.unit, self._prepared.split.spec
        weights = TORCH_DTYPE[spec.dtype]
        linked = isinstance(writer, CheckpointWriter) and not unit.trainable and self._link(resting, writer)
        if not linked:
            writer.stream_unit(unit, weights, self._chunks(resting, WEIGHTS))
        for plane, dtype in state_planes(self._prepared.plan.state, unit).items():
            name = file_of(unit, plane)
            excepted: list[tuple[Tensor, Tensor]] = []
            chunks = (
                self._low_halves(resting, excepted) if plane == MASTER_LOW else self._chunks(resting, plane)
            )
            stored_unit = plane_of(self._prepared.plan.state, unit, plane)
            self._files[name] = write_plane(
                self._staging / name, stored_unit, dtype, chunks, moved=self._check
            )
            if plane == MASTER_LOW:
                name = file_of(unit, MASTER_EXCEPTED)
                self._files[name] = write_file(self._staging / name, _joined(excepted), self._check)
        self._updates.update(resting.updates)

    def _link(self, resting: UnitAtRest, writer: CheckpointWriter) -> bool:
        """Take the weights of a frozen unit from the checkpoint before, where there is one; whether that went."""
        if self._former is None:
            return False
        directory, files = self._former
        expected = files.get(writer.shard_of(resting.unit))
        dtype = TORCH_DTYPE[self._prepared.split.spec.dtype]
        return expected is not None and writer.link_unit(resting.unit, dtype, directory, expected)

    def _chunks(self, resting: UnitAtRest, plane: str) -> Iterator[Chunk]:
        layout = self._prepared.plan.state
        group = layout.planes[plane].group if plane in layout.planes else 1
        for start, (chunk,) in resting.chunks(plane):
            self._check()
            yield start // group, chunk

    def _low_halves(self, resting: UnitAtRest, excepted: list[tuple[Tensor, Tensor]]) -> Iterator[Chunk]:
        """What the masters of a unit hold beyond its weights; what that does not decide goes to ``excepted``."""
        for start, (master, weights) in resting.chunks(MASTER, WEIGHTS):
            for first in range(0, len(master), PIECE_ELEMENTS):
                self._check()
                piece = slice(first, first + PIECE_ELEMENTS)
                low, positions, bits = split_low(master[piece], weights[piece])
                if len(positions):
                    positions += start + first
                    ours = _within(resting.unit, positions)  # what lies between tensors is anything
                    excepted.append((positions[ours], bits[ours]))
                yield start + first, low

    def _check(self) -> None:
        """After every piece: say that the checkpoint gets on, and go no further where it is given up."""
        self._moved()
        if self.cancelled:
            raise _CancelledError

    def _finish(self, writer: CheckpointWriter | AdapterWriter) -> None:
        """Write everything else; when nothing can be lost any more, point ``latest`` to the checkpoint."""
        prepared, staging = self._prepared, self._staging
        writer.finish(prepared.hf_config, self._beside)
        listed = {name: asdict(file) for name, file in sorted({**writer.files, **self._files}.items())}
        for unit in prepared.split.spec.units:
            of_unit = [file_of(unit, plane) for plane in state_planes(prepared.plan.state, unit)]
            for name in (*of_unit, writer.shard_of(unit)) if unit.tensors else ():
                listed[name]["unit"] = unit.name
        state = {**self._state, "updates": self._updates, "files": listed}
        files.write_whole(staging / STATE, render_state(state))
        files.sync(staging / OPTIMIZER)
        files.sync(staging)
        if self.cancelled:
            raise _CancelledError
        take_place(staging, self._final)
        set_latest(self._final)
        self.path = self._final
        if self._limit is not None:
            remove_old(self._checkpoints, self._final, self._limit, self._state["run"])

    def _give_up(self) -> None:
        """Leave nothing of a checkpoint that is not complete."""
        self.cancelled = True
        self._num_left = -1
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        remove_litter(self._checkpoints)


def _within(unit: UnitSpec, positions: Tensor) -> Tensor:
    """Which elements of a plane belong to a tensor, bool ``[k]``."""
    ours = torch.zeros_like(positions, dtype=torch.bool)
    for tensor in unit.tensors:
        ours |= (positions >= tensor.offset) & (positions < tensor.offset + tensor.numel)
    return ours


def _joined(excepted: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    positions = [piece for piece, _ in excepted] or [torch.empty(0, dtype=torch.int64)]
    bits = [piece for _, piece in excepted] or [torch.empty(0, dtype=torch.int32)]
    return {"positions": torch.cat(positions), "bits": torch.cat(bits)}
