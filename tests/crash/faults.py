"""Faults under a whole run: one layer below every call of `outsize.files` and every op of a lane.

The layer counts the operations of a run, says what each was, keeps what was written, and lets the one you name go
wrong in the way you name::

    with layered(Layer(root)) as seen:                    # what does this run do?
        train(config)
    for operation in seen.operations:
        for fault in faults_of(operation):                # everything that can go wrong there
            with layered(Layer(root, {operation.key: fault})) as layer:
                ...

An operation is found again in another run by its `Key`, whatever the order in which threads happen to run.
"""

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crash.operations import APPLICABLE, CLEAN_UPS, LANE, Fault, Key, Operation, faults_of
from outsize import files
from outsize.planner.program.program import Op
from outsize.runtime.engine import engine
from outsize.runtime.ops.context import HandlerTable, StepContext

__all__ = ["APPLICABLE", "LANE", "Fault", "Key", "Layer", "Operation", "faults_of", "layered"]

SECTOR_BYTES = 4096
DELAY_S = 0.02
# What differs from run to run or process to process in names: files that are renamed later, and digests of paths.
_VARYING = (
    (re.compile(r"(partial|former|tmp)-[0-9a-f]+"), r"\1-*"),
    (re.compile(r"\.writing-[^/]+"), ".writing-*"),
    (re.compile(r"\b[0-9a-f]{24}\b"), "*"),
)
# Files of text with times in them, whose lengths differ as well.
_TIMED = (".jsonl", ".json", ".partial")


class Layer(files.System):
    """Makes the calls of the operating system, and lets some of them go wrong. May be used from any thread.

    Args:
        root: names are told relative to it.
        faults: what goes wrong where: by key, or by the number of the operation in the order of this run.
        keep_data: whether `operations` hold what was written.
        looks: whether looks at files below ``root`` are operations too, whoever makes them.
        delay_s: seconds that a delayed operation waits.

    Attributes:
        operations: all that have ended, in that order.
        sprung: those that a fault was put into.
    """

    def __init__(
        self,
        root: Path,
        faults: Mapping[Key | int, Fault] | None = None,
        *,
        keep_data: bool = False,
        looks: bool = False,
        delay_s: float = DELAY_S,
    ) -> None:
        self.operations: list[Operation] = []
        self.sprung: list[Operation] = []
        self._root = root
        self._faults = dict(faults or {})
        self._keep_data = keep_data
        self.looks = looks
        self._wrecked = False
        self._delay_s = delay_s
        self._seen: Counter[tuple[str, str, int, int]] = Counter()
        self._path_of: dict[int, Path] = {}
        self._began = self._clock = 0
        self._lock = threading.Lock()

    # --- the calls -----------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """See `System.open`."""
        operation, fault = self._begin("open", Path(path), flags=flags)
        with self._ending(operation, fault):
            descriptor = super().open(path, flags, mode)
            self._path_of[descriptor] = Path(path)
            return descriptor

    def close(self, descriptor: int) -> None:
        """See `System.close`."""
        operation, fault = self._begin("close", self._path_of.pop(descriptor, _path_of(descriptor)))
        with self._ending(operation, None if fault is Fault.EIO else fault):
            super().close(descriptor)
            if (
                fault is Fault.EIO
            ):  # the descriptor is gone all the same, as of a share that could not be reached
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(operation.path))

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        """See `System.pread`; what a short read left out is filled with rubbish, for callers who do not look."""
        operation, fault = self._begin("pread", self._named(descriptor), offset=offset, length=len(into))
        with self._ending(operation, fault) as done:
            moved = super().pread(descriptor, into, offset)
            if fault is Fault.SHORT and moved > 1:
                half = _half(moved, descriptor)
                into[half:moved] = b"\xa5" * (moved - half)
                moved = half
            if fault is Fault.FLIP and moved:
                into[moved // 2] ^= 0x10
            done.append(moved)
            return moved

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """See `System.pwrite`."""
        operation, fault = self._begin("pwrite", self._named(descriptor), offset=offset, length=len(data))
        with self._ending(operation, fault, data) as done:
            part = data[: _half(len(data), descriptor)] if fault in (Fault.SHORT, Fault.TORN) else data
            moved = super().pwrite(descriptor, part, offset) if len(part) else 0
            done.append(moved)
            if fault is Fault.TORN:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(operation.path))
            return moved

    def fsync(self, descriptor: int) -> None:
        """See `System.fsync`."""
        self._sync("fsync", descriptor, super().fsync)

    def fdatasync(self, descriptor: int) -> None:
        """See `System.fdatasync`."""
        self._sync("fdatasync", descriptor, super().fdatasync)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """See `System.allocate`."""
        operation, fault = self._begin("allocate", self._named(descriptor), length=num_bytes)
        with self._ending(operation, fault):
            super().allocate(descriptor, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """See `System.truncate`."""
        operation, fault = self._begin("truncate", self._named(descriptor), length=num_bytes)
        with self._ending(operation, fault):
            super().truncate(descriptor, num_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """See `System.rename`."""
        operation, fault = self._begin("rename", Path(source), target=Path(target))
        with self._ending(operation, fault):
            super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `System.link`."""
        operation, fault = self._begin("link", Path(source), target=Path(target))
        with self._ending(operation, fault):
            super().link(source, target)

    def unlink(self, path: Path) -> None:
        """See `System.unlink`."""
        self._of_name("unlink", path, super().unlink)

    def mkdir(self, path: Path) -> None:
        """See `System.mkdir`."""
        self._of_name("mkdir", path, super().mkdir)

    def rmdir(self, path: Path) -> None:
        """See `System.rmdir`."""
        self._of_name("rmdir", path, super().rmdir)

    def remove_tree(self, path: Path) -> None:
        """See `System.remove_tree`; it raises nothing, so it can only take long, or leave all as it is."""
        with contextlib.suppress(OSError):
            self._of_name("remove_tree", path, super().remove_tree)

    def look(self, path: object, call: Callable[[], os.stat_result]) -> os.stat_result:
        """Look at a file, as `os.stat` does."""
        if not isinstance(path, (str, Path)) or not Path(path).is_relative_to(self._root):
            return call()
        operation, fault = self._begin("look", Path(path))
        with self._ending(operation, fault):
            return call()

    def lane_op(self, op: Op, context: StepContext, run: Callable[[], None]) -> None:
        """Run an op of a lane."""
        operation, fault = self._begin(LANE, Path(str(op)), offset=context.number)
        with self._ending(operation, fault):
            run()

    # --- what they share -----------------------------------------------------------------------------------

    def _of_name(self, kind: str, path: Path, call: Callable[[Path], None]) -> None:
        operation, fault = self._begin(kind, Path(path))
        with self._ending(operation, fault):
            call(path)

    def _sync(self, kind: str, descriptor: int, call: Callable[[int], None]) -> None:
        operation, fault = self._begin(kind, self._named(descriptor))
        with self._ending(operation, fault):
            if fault is not Fault.LOST:
                call(descriptor)

    def _named(self, descriptor: int) -> Path:
        return self._path_of.get(descriptor) or _path_of(descriptor)

    def _begin(
        self,
        kind: str,
        path: Path,
        *,
        target: Path | None = None,
        offset: int = 0,
        length: int = 0,
        flags: int = 0,
    ) -> tuple[Operation, Fault | None]:
        name = str(path.relative_to(self._root) if path.is_relative_to(self._root) else path)
        place = (0, 0) if path.suffix in _TIMED else (offset, length)
        for varying, shown in _VARYING:
            name = varying.sub(shown, name)
        like = (kind, name, *place)
        with self._lock:
            key = Key(*like, occurrence=self._seen[like])
            self._seen[like] += 1
            operation = Operation(self._began, key, path, target, offset, begun=self._clock, flags=flags)
            self._began += 1
            self._clock += 1
        fault = self._faults.get(key) or self._faults.get(operation.number)
        if fault is not None:
            self.sprung.append(operation)
            self._wrecked |= fault is Fault.WRECK
        elif self._wrecked and kind in CLEAN_UPS:
            return operation, Fault.EIO
        return operation, fault

    @contextlib.contextmanager
    def _ending(
        self, operation: Operation, fault: Fault | None, data: memoryview | None = None
    ) -> Iterator[list[int]]:
        """Let the body do the call, or the fault come before it; afterwards note how it ended."""
        moved: list[int] = []
        number: int | None = None
        try:
            if fault is Fault.DELAY:
                time.sleep(self._delay_s)
            if fault in (Fault.EIO, Fault.ENOSPC, Fault.WRECK):
                number = errno.EIO if fault is Fault.EIO else errno.ENOSPC
                raise OSError(number, os.strerror(number), str(operation.path))
            if fault is Fault.EXCEPTION:
                raise RuntimeError("injected")
            yield moved
        except OSError as error:
            number = error.errno
            raise
        finally:
            count = sum(moved)
            kept = bytes(data[:count]) if data is not None and self._keep_data else None
            with self._lock:
                self.operations.append(
                    replace(operation, ended=self._clock, data=kept, error=number, moved=count)
                )
                self._clock += 1


@contextlib.contextmanager
def layered(layer: Layer) -> Iterator[Layer]:
    """Put ``layer`` under the file calls of all threads, and under the lanes of engines made in this context."""
    handle, stat = engine.run_op, os.stat

    def watched(table: HandlerTable, op: Op, context: StepContext) -> None:
        layer.lane_op(op, context, lambda: handle(table, op, context))

    def looked_at(path: Any, **how: Any) -> os.stat_result:
        return layer.look(path, lambda: stat(path, **how))

    engine.run_op = watched
    if layer.looks:
        os.stat = looked_at  # type: ignore[assignment]
    try:
        with files.replaced(layer):
            yield layer
    finally:
        engine.run_op, os.stat = handle, stat


def _half(num_bytes: int, descriptor: int) -> int:
    """Half; of direct I/O in whole sectors, so none of a single one."""
    half = num_bytes // 2
    direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    return half - half % SECTOR_BYTES if direct else half


def _path_of(descriptor: int) -> Path:
    """Where a descriptor points that was opened before the layer was there."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
