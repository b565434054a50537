"""Checkpoints written beside training: when one is due, what is written, and what becomes of it.

The story of one checkpoint:

1. Between two steps, `Saver.start` notes where the run stands and submits a program of STOREs. The next step begins
   at once; its forward and backward read the same weights, and only its STEP of a unit waits for the unit's STORE.
2. On the lane ``store``, `Saving` writes each unit's weights and optimizer state as it comes, with checksums, every
   file synced, into a directory whose name says that it is not complete.
3. After the last unit it writes the rest, ``trainer_state.json`` last, and syncs the directories. Then it renames the
   directory, syncs, writes ``latest``, syncs, and only then removes checkpoints beyond the limit.
4. `Saver.poll`, between steps, tells what became of it.

At every moment ``latest`` names a checkpoint that is whole on the disk. One that cannot be written is given up, with
what was written of it; the run goes on, says so, and tries again when the next one is due. Only at the end of the run
is it an error.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.config.schema import TrainConfig
from outsize.errors import StorageError
from outsize.model.checkpoint_format import FileSum, write_file
from outsize.model.checkpoint_planes import Chunk, write_plane
from outsize.model.checkpoint_writer import CheckpointWriter, sync
from outsize.model.spec import UnitSpec
from outsize.optim.halves import PIECE_ELEMENTS, split_low
from outsize.optim.spec import MASTER, WEIGHTS
from outsize.runtime.binding import TORCH_DTYPE
from outsize.runtime.executor import Task
from outsize.runtime.storing import UnitAtRest
from outsize.storage.prealloc import explain
from outsize.train.checkpoint_dir import (
    CHECKPOINTS,
    LATEST,
    PARTIAL,
    STATE,
    latest,
    make_durable,
    name_of,
    remove_litter,
    remove_old,
    take_place,
    write_durable,
)
from outsize.train.checkpoint_state import (
    MASTER_EXCEPTED,
    MASTER_LOW,
    OPTIMIZER,
    Position,
    file_of,
    known_files,
    render_state,
    state_planes,
)
from outsize.train.prepare import Prepared
from outsize.train.stream import StreamedTrainer

# A home that does not commit is lost in a crash, and with it the work since the last checkpoint. At 1 GB/s a model of 4
# billion parameters takes 48 s to save: in half an hour 2.7 %, were nothing computed beside.
DEFAULT_MINUTES = 30.0


class _CancelledError(Exception):
    """The run ends before its checkpoint is complete."""


class Saving:
    """One checkpoint on its way: takes the units of a program of STOREs.

    Args:
        prepared: the model.
        directory: of the run.
        state: what `trainer_state.json` says besides what is found out on the way.
        step: steps done.
        limit: checkpoints to keep; None keeps all.

    Attributes:
        path: of the checkpoint, once it is complete and ``latest`` names it.
        error: why it could not be written.
        cancelled: set it to have the checkpoint given up.
    """

    def __init__(
        self, prepared: Prepared, directory: Path, state: dict[str, Any], step: int, limit: int | None
    ) -> None:
        self.path: Path | None = None
        self.error: StorageError | None = None
        self.cancelled = False
        self.step = step
        self._prepared = prepared
        self._checkpoints = directory / CHECKPOINTS
        self._final = self._checkpoints / name_of(step)
        self._staging = self._final.with_name(self._final.name + PARTIAL)
        self._state = state
        self._limit = limit
        self._updates: dict[str, int] = {}
        self._files: dict[str, FileSum] = {}
        self._writer: CheckpointWriter | None = None
        self._former: tuple[Path, dict[str, FileSum]] | None = None
        self._num_left = sum(bool(unit.tensors) for unit in prepared.split.spec.units)

    def __call__(self, resting: UnitAtRest) -> None:
        """Write one unit, and after the last one make the checkpoint complete.

        Raises:
            StorageError: the home cannot be read. What cannot be written only ends this checkpoint, see ``error``.
        """
        if self.error is not None or self.cancelled:
            return
        whole = False
        try:
            writer = self._writer or self._begin()
            self._write(resting, writer)
            self._num_left -= 1
            if not self._num_left:
                self._finish(writer)
            whole = True
        except OSError as error:
            self.error = explain(error, f"write the checkpoint {self._final}")
        except _CancelledError:
            pass
        finally:
            if not whole:
                self._give_up()

    def _begin(self) -> CheckpointWriter:
        remove_litter(self._checkpoints)
        make_durable(self._checkpoints)
        self._former = known_files(self._checkpoints.parent, self._state["run"])
        (self._staging / OPTIMIZER).mkdir(parents=True)
        split = self._prepared.split
        self._writer = CheckpointWriter(self._staging, split.model, split.spec.units)
        return self._writer

    def _write(self, resting: UnitAtRest, writer: CheckpointWriter) -> None:
        """Write the weights and the optimizer state of a unit."""
        unit, spec = resting.unit, self._prepared.split.spec
        weights = TORCH_DTYPE[spec.dtype]
        if unit.trainable or not self._link(resting, writer):
            writer.stream_unit(unit, weights, self._chunks(resting, WEIGHTS))
        for plane, dtype in state_planes(spec.dtype, unit).items():
            name = file_of(unit, plane)
            excepted: list[tuple[Tensor, Tensor]] = []
            chunks = (
                self._low_halves(resting, excepted) if plane == MASTER_LOW else self._chunks(resting, plane)
            )
            self._files[name] = write_plane(self._staging / name, unit, dtype, chunks)
            if plane == MASTER_LOW:
                name = file_of(unit, MASTER_EXCEPTED)
                self._files[name] = write_file(self._staging / name, _joined(excepted))
        self._updates.update(resting.updates)

    def _link(self, resting: UnitAtRest, writer: CheckpointWriter) -> bool:
        """Take the weights of a frozen unit from the checkpoint before, where there is one; whether that went."""
        if self._former is None:
            return False
        directory, files = self._former
        known = files.get(writer.shard_of(resting.unit))
        dtype = TORCH_DTYPE[self._prepared.split.spec.dtype]
        return known is not None and writer.link_unit(resting.unit, dtype, directory, known)

    def _chunks(self, resting: UnitAtRest, plane: str) -> Iterator[Chunk]:
        for start, (chunk,) in resting.chunks(plane):
            self._check()
            yield start, chunk

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
        if self.cancelled:
            raise _CancelledError

    def _finish(self, writer: CheckpointWriter) -> None:
        """Write everything else; when nothing can be lost any more, point ``latest`` to the checkpoint."""
        prepared, staging = self._prepared, self._staging
        # Not from where the run began: that may be a checkpoint that has been removed since.
        writer.finish(prepared.hf_config, self._former[0] if self._former else prepared.directory)
        files = {name: asdict(file) for name, file in sorted({**writer.files, **self._files}.items())}
        for unit in prepared.split.spec.units:
            of_unit = [file_of(unit, plane) for plane in state_planes(prepared.split.spec.dtype, unit)]
            for name in (*of_unit, writer.shard_of(unit)) if unit.tensors else ():
                files[name]["unit"] = unit.name
        state = {**self._state, "updates": self._updates, "files": files}
        write_durable(staging / STATE, render_state(state))
        sync(staging / OPTIMIZER)
        sync(staging)
        if self.cancelled:
            raise _CancelledError
        take_place(staging, self._final)
        write_durable(self._checkpoints / LATEST, self._final.name + "\n")
        self.path = self._final
        if self._limit is not None:
            remove_old(self._checkpoints, self._final, self._limit, self._state["run"])

    def _give_up(self) -> None:
        """Leave nothing of a checkpoint that is not complete."""
        self._num_left = -1
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


class Saver:
    """Starts checkpoints of a run when they are due, one at a time, and says what became of them.

    Args:
        trainer: the run.
        run_dir: its directory.
        config: how often, and how many are kept.
        commits: whether the home keeps every step by itself, so that no checkpoint is due by the clock.
        state_of: what ``trainer_state.json`` says of a position, besides what is found out on the way.
        announce: called with lines for people.
        saved_step: steps of the newest checkpoint there is already; -1 where there is none.
        clock: seconds.

    Attributes:
        num_failed: checkpoints that were due and could not be written.
    """

    def __init__(
        self,
        trainer: StreamedTrainer,
        run_dir: Path,
        config: TrainConfig,
        *,
        commits: bool,
        state_of: Callable[[Position], dict[str, Any]],
        announce: Callable[[str], None],
        saved_step: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_failed = 0
        self._trainer = trainer
        self._run_dir = run_dir
        self._config = config
        minutes = config.save_minutes
        if minutes is None:
            minutes = 0.0 if commits else DEFAULT_MINUTES
        self._interval_s = minutes * 60 or float("inf")
        self._state_of = state_of
        self._announce = announce
        self._saved_step = saved_step
        self._clock = clock
        self._started_s = clock()
        self._under_way: tuple[Saving, list[Task]] | None = None

    def between_steps(self, position: Position) -> None:
        """Report a checkpoint that is complete, and start one that is due.

        Raises:
            OutsizeError: an op failed.
        """
        if self._under_way is not None and all(task.passed() for task in self._under_way[1]):
            self._report(self._collect())
        every = self._config.save_every
        counted = bool(every) and position.step % every == 0
        if (
            counted
        ):  # one that is still under way has had the time of all these steps: the disk is slower than they
            self._report(self._collect())
        if counted or (self._under_way is None and self._clock() - self._started_s >= self._interval_s):
            self._start(position)

    def finish(self, position: Position) -> None:
        """Return when the state after the last step is saved.

        Raises:
            StorageError: it cannot be; the checkpoint before is untouched.
        """
        self._report(self._collect())
        if self._saved_step != position.step:
            self._start(position)
            saving = self._collect()
            if saving is not None and saving.error is not None:
                raise saving.error
            self._report(saving)

    def cancel(self) -> None:
        """Have a checkpoint that is under way given up."""
        if self._under_way is not None:
            self._under_way[0].cancelled = True

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _start(self, position: Position) -> None:
        if self._saved_step == position.step:
            return
        self._started_s = self._clock()
        state, limit = self._state_of(position), self._config.save_total_limit
        saving = Saving(self._trainer.prepared, self._run_dir, state, position.step, limit)
        self._under_way = saving, self._trainer.engine.store(saving)

    def _collect(self) -> Saving | None:
        """Wait for the checkpoint under way, if any."""
        if self._under_way is None:
            return None
        saving, tasks = self._under_way
        self._trainer.engine.wait(tasks)
        self._under_way = None
        return saving

    def _report(self, saving: Saving | None) -> None:
        if saving is None:
            return
        if saving.path is not None:
            self._saved_step = saving.step
            self._announce(f"saved {saving.path}")
        elif saving.error is not None:
            self.num_failed += 1
            kept = latest(self._run_dir)
            stands = f"the newest checkpoint is still {kept.name}" if kept else "there is no checkpoint yet"
            self._announce(f"warning: {saving.error}; the run goes on, {stands}")
