"""Directories that exist as long as their user, and those on zram: checks, and what it costs.

zram serves as any disk does: by a file system on the device, mounted where ``memory.store_dir`` is. Nothing here sets
one up, for that takes root; what is missing is said with the commands that mend it. What lies on it takes RAM, which no
budget of a run knows of: `Zram.costs` says how much, from ``mm_stat``.

Attributes and their meaning: Documentation/admin-guide/blockdev/zram.rst of Linux.
"""

import atexit
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outsize import files
from outsize.errors import OutsizeError, StorageError, explain
from outsize.storage.prealloc import sync_directory
from outsize.units import format_bytes

_TEMPORARY = "outsize-tmp-"
# Those of this process by its id: a forked child has none yet.
_of_processes: dict[int, Path] = {}
_lock = threading.Lock()


@contextmanager
def needed_directory(path: Path, key: str) -> Iterator[None]:
    """Make ``path`` and its parents; afterwards remove those that were made here and are empty again.

    Raises:
        StorageError: it cannot be made, or not be written.
    """
    absent = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        try:
            files.make_directories(path)
            for directory in reversed(absent):  # what will be durable in it must be found again
                sync_directory(directory.parent)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise explain(error, f"write in {path} ({key})") from error
        yield
    finally:
        for directory in absent:
            with suppress(OSError):  # in use, or never made
                files.system().rmdir(directory)


@contextmanager
def removed_if_refused(path: Path, may_remove: bool = True) -> Iterator[None]:
    """Remove ``path`` with all in it where it is made meanwhile and an `OutsizeError` is raised."""
    is_new = may_remove and not path.exists()
    try:
        yield
    except OutsizeError:
        if is_new:
            files.system().remove_tree(path)
        raise


@contextmanager
def temporary_directory(near: Path | None = None) -> Iterator[Path]:
    """Make a directory for files that nobody looks for later; afterwards remove it and all in it.

    It is locked as long as it is used. A process that is killed leaves it and takes the lock along: the next one that
    makes such a directory beside it removes it.

    Args:
        near: the directory that it lies in; None is the system's for temporary files.

    Raises:
        StorageError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if near is None else near
    try:
        _remove_abandoned(parent)
        path, lock = _make_locked(parent)
    except OSError as error:
        raise explain(error, f"make a directory for temporary files in {parent}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def directory_of_process() -> Path:
    """Return a temporary directory of this process, removed when it ends; see `temporary_directory`.

    Raises:
        StorageError: it cannot be made.
    """
    process = os.getpid()
    with _lock:
        if process not in _of_processes:
            stack = ExitStack()
            _of_processes[process] = stack.enter_context(temporary_directory())
            atexit.register(_close_in, process, stack)
        return _of_processes[process]


def _close_in(process: int, stack: ExitStack) -> None:
    """Close ``stack`` at the end of the process that opened it, not of its forked children."""
    if process == os.getpid():
        stack.close()


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that locks it, where the file system has locks of directories."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        # Another process may take it for abandoned until it is locked: that one removes it, and this one tries again.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if files.lock(lock) and os.path.samestat(os.fstat(lock), path.stat()):
                    return path, lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # removed by the other, or about to be: tried again under another name


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary directories in ``parent`` that no process has locked."""
    for path in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # another user's, gone by now, in use, or on a file system without locks
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if files.lock(lock, without_locks=False):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


SYSFS, DEV = Path("/sys"), Path("/dev")
_NAME = re.compile(r"zram\d+")
# Of what a kernel may offer, what makes the least of training state first.
_BEST_FIRST = ("zstd", "deflate", "842", "lz4hc", "lz4", "lzo-rle", "lzo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zram:
    """One zram device, as it is now.

    Attributes:
        name: such as ``zram0``.
        num_bytes: that it holds, uncompressed; 0 where it was not configured.
        algorithm: that compresses.
        algorithms: all that this kernel offers.
        original_bytes: written to it.
        memory_bytes: of RAM that it takes for them, its own bookkeeping included.
        limit_bytes: most RAM that it may take; 0 is no limit.
    """

    name: str
    num_bytes: int
    algorithm: str
    algorithms: tuple[str, ...]
    original_bytes: int
    memory_bytes: int
    limit_bytes: int

    @classmethod
    def read(cls, name: str, sysfs: Path = SYSFS) -> Self:
        """Read a device's attributes.

        Raises:
            StorageError: there is no such device, or the kernel does not say what it does.
        """
        block = sysfs / "block" / name
        try:
            counters = [int(word) for word in (block / "mm_stat").read_text().split()]
            original, _, memory, limit = counters[:4]
            num_bytes = int((block / "disksize").read_text())
            algorithms = (block / "comp_algorithm").read_text()
        except FileNotFoundError as error:
            raise StorageError(
                f"there is no {name} on this machine: load the module (as root: modprobe zram), or leave "
                "memory.store_dir on a disk"
            ) from error
        except (OSError, ValueError) as error:
            raise StorageError(f"{block} does not say what {name} does: {error}") from error
        chosen = re.search(r"\[(.+?)\]", algorithms)
        return cls(
            name=name,
            num_bytes=num_bytes,
            algorithm=chosen[1] if chosen else algorithms.strip(),
            algorithms=tuple(re.sub(r"[\[\]]", "", algorithms).split()),
            original_bytes=original,
            memory_bytes=memory,
            limit_bytes=limit,
        )

    @property
    def best_algorithm(self) -> str:
        """Which of those that the kernel offers to choose; the chosen one where none of them is known."""
        return next((name for name in _BEST_FIRST if name in self.algorithms), self.algorithm)

    def costs(self) -> str:
        """Describe original and compressed bytes in a line for people."""
        limit = f" of at most {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        line = (
            f"{self.name} ({self.algorithm}) holds {format_bytes(self.original_bytes)} in "
            f"{format_bytes(self.memory_bytes)} of RAM{limit}"
        )
        if not self.original_bytes or not self.memory_bytes:
            return line
        return f"{line}, {self.original_bytes / self.memory_bytes:.2f}:1"


def check_not_a_device(directory: Path, *, sysfs: Path = SYSFS, dev: Path = DEV) -> None:
    """Check that ``directory``, where a home shall be, is not a zram device itself.

    Raises:
        StorageError: it is; says what is missing until there is a directory on it.
    """
    if directory.parent != dev or not _NAME.fullmatch(directory.name):
        return
    zram = Zram.read(directory.name, sysfs)
    if not directory.exists():
        raise StorageError(
            f"{directory} does not exist, though the kernel has {zram.name}: udev has not made it"
        )
    if not os.access(directory, os.R_OK | os.W_OK):
        raise StorageError(
            f"{directory} may not be written by this user; have root put a file system on it, mount it, and hand its "
            "directory over (chown)"
        )
    if not zram.num_bytes:
        block = f"/sys/block/{zram.name}"
        raise StorageError(
            f"{directory} is not configured. As root, choose its algorithm and the bytes that it holds: "
            f"echo {zram.best_algorithm} > {block}/comp_algorithm; echo 64G > {block}/disksize"
        )
    raise StorageError(
        f"{directory} is a device, and a home is a file in a directory. As root: mkfs.ext4 -E nodiscard {directory}; "
        f"mount -o discard {directory} /mnt/{zram.name}; then memory.store_dir=/mnt/{zram.name}"
    )


def zram_below(path: Path, *, sysfs: Path = SYSFS) -> Zram | None:
    """Return the zram device that ``path``, or the nearest directory above it that exists, lies on; None of no other.

    Raises:
        StorageError: the kernel does not say what the device does.
    """
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    number = existing.stat().st_dev
    block = sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    name = block.resolve().name
    return Zram.read(name, sysfs) if _NAME.fullmatch(name) else None
