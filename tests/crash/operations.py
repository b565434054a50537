"""Operations of a run that can go wrong, how each is found again, and in which ways it can."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

LANE = "lane"


class Fault(StrEnum):
    """What goes wrong."""

    EIO = "EIO"  # the call fails, nothing was done
    ENOSPC = "ENOSPC"  # the same, as a full disk says it
    SHORT = "short"  # half of the bytes move, and the call says so
    TORN = "torn"  # half of the bytes are written, then the call fails
    LOST = "lost"  # a sync that says it was done and did nothing
    FLIP = "flip"  # one bit of what was read is another
    DELAY = "delay"  # the call takes its time
    EXCEPTION = "exception"  # an op of a lane raises what nobody expects
    WRECK = "wreck"  # a full disk, and every clean-up that follows fails as well, by another error


# What removes what an operation has left behind.
CLEAN_UPS = ("unlink", "rmdir", "remove_tree")

# What can go wrong with an operation of a kind. A look is one of `os.stat`. `rename` and below change directories;
# ENOSPC there is a full one.
APPLICABLE: Mapping[str, tuple[Fault, ...]] = {
    "look": (Fault.EIO,),
    "open": (Fault.EIO, Fault.ENOSPC, Fault.WRECK, Fault.DELAY),
    "close": (Fault.EIO, Fault.DELAY),
    "pread": (Fault.EIO, Fault.SHORT, Fault.FLIP, Fault.DELAY),
    "pwrite": (Fault.EIO, Fault.ENOSPC, Fault.WRECK, Fault.SHORT, Fault.TORN, Fault.DELAY),
    "fsync": (Fault.EIO, Fault.ENOSPC, Fault.WRECK, Fault.LOST, Fault.DELAY),
    "fdatasync": (Fault.EIO, Fault.ENOSPC, Fault.LOST, Fault.DELAY),
    "allocate": (Fault.EIO, Fault.ENOSPC, Fault.WRECK),
    "truncate": (Fault.EIO, Fault.ENOSPC),
    "rename": (Fault.EIO, Fault.ENOSPC, Fault.WRECK, Fault.DELAY),
    "link": (Fault.EIO, Fault.ENOSPC),
    "unlink": (Fault.EIO,),
    "mkdir": (Fault.EIO, Fault.ENOSPC),
    "rmdir": (Fault.EIO,),
    "remove_tree": (Fault.DELAY,),
    LANE: (Fault.EXCEPTION, Fault.DELAY),
}


class Key(NamedTuple):
    """Which operation it is, the same in every run of the same configuration, in any process and directory.

    Attributes:
        kind: as in `APPLICABLE`.
        path: relative to the layer's root; the text of the op for a lane.
        offset: first byte; the step for a lane; 0 in files whose lengths differ from run to run.
        length: in bytes, or 0 as well.
        occurrence: how many like it came before.
    """

    kind: str
    path: str
    offset: int
    length: int
    occurrence: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, as it happened.

    Attributes:
        number: calls that began before it.
        key: which one it is.
        path: the file as it was called; the new name for a rename.
        target: the name after a rename.
        offset: first byte that is read or written; the step for a lane.
        begun, ended: its place among the beginnings and ends of all calls. A sync makes durable what had ended
            when it began; a crash between the two numbers may find any part of it done.
        flags: of an open.
        data: what was written, where the layer keeps it.
        error: number of the error it raised, None where it went well.
        moved: bytes that were read or written.
    """

    number: int
    key: Key
    path: Path
    target: Path | None = None
    offset: int = 0
    begun: int = 0
    ended: int = 0
    flags: int = 0
    data: bytes | None = None
    error: int | None = None
    moved: int = 0

    @property
    def kind(self) -> str:
        """Its kind, as in `APPLICABLE`."""
        return self.key.kind


def faults_of(operation: Operation) -> tuple[Fault, ...]:
    """Return what can go wrong with an operation and be told apart from its going well."""
    faults = APPLICABLE[operation.kind]
    if operation.kind == "open" and not operation.flags & os.O_CREAT:
        faults = tuple(fault for fault in faults if fault not in (Fault.ENOSPC, Fault.WRECK))
    if operation.kind in ("pread", "pwrite") and operation.moved < 2:
        faults = tuple(fault for fault in faults if fault not in (Fault.SHORT, Fault.TORN, Fault.FLIP))
    return faults
