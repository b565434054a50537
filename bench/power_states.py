"""Crash states of files, as ALICE and CrashMonkey make them: from what a run wrote, synced and renamed, and when.

The power goes at a moment; what a sync that had ended made durable is there, and of all else any subset, sector by
sector where the policy tears writes, name by name.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crash.faults import Operation

SECTOR = 4096
# Of what is not yet durable: all gone, all there, any subset, one missing, any sectors.
POLICIES = ("none", "all", "subset", "one missing", "torn")


@dataclass(eq=False)
class Content:
    """A file or a directory, whatever its names are.

    Attributes:
        data: of a file.
        syncs: beginning and end of every sync of it.
    """

    data: bytearray = field(default_factory=bytearray)
    syncs: list[tuple[int, int]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        if len(self.data) < offset + len(data):
            self.data.extend(bytes(offset + len(data) - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))


@dataclass(frozen=True)
class Call:
    """A call with what it is about, whatever that was called then.

    Attributes:
        operation: the call.
        about: the file that it opens, writes or syncs; None for one from before the run.
        within: the directory whose entries it changes.
        entry: directory, name and content that it adds.
        gone: directories and names that it takes away.
    """

    operation: Operation
    about: Content | None = None
    within: Content | None = None
    entry: tuple[Content, str, Content] | None = None
    gone: tuple[tuple[Content, str], ...] = ()


class Names:
    """The names of a run as its programs saw them, which turns paths into files and directories."""

    def __init__(self) -> None:
        self.roots: dict[Path, Content] = {}
        self.children: dict[Content, dict[str, Content]] = {}
        self._opened: dict[Path, Content] = {}

    def directory(self, path: Path) -> Content:
        """The directory at ``path``; one that was there before the run is a root of its own."""
        if path in self.roots:
            return self.roots[path]
        if path.parent != path:
            above = self.find(path.parent)
            if above is not None and path.name in self.children.get(above, {}):
                return self.children[above][path.name]
        content = self.roots[path] = Content()
        self.children[content] = {}
        return content

    def find(self, path: Path) -> Content | None:
        if path in self.roots:
            return self.roots[path]
        above = self.find(path.parent) if path.parent != path else None
        return self.children.get(above, {}).get(path.name) if above is not None else None

    def resolve(self, op: Operation) -> Call:
        """Follow one call."""
        path = op.path
        if op.kind == "open":
            found = self.find(path)
            made = None
            if found is None and op.flags & os.O_CREAT:
                found = Content()
                made = (self.directory(path.parent), path.name, found)
                self.children[made[0]][path.name] = found
            if found is None:
                found = self.directory(path)
            self._opened[path] = found
            return Call(op, found, made[0] if made else None, made)
        if op.kind == "mkdir":
            content = Content()
            self.children[content] = {}
            within = self.directory(path.parent)
            self.children[within][path.name] = content
            return Call(op, content, within, (within, path.name, content))
        if op.kind == "rename":
            assert op.target is not None
            source, target = self.directory(path.parent), self.directory(op.target.parent)
            content = self.children[source].pop(path.name)
            self.children[target][op.target.name] = content
            return Call(op, content, target, (target, op.target.name, content), ((source, path.name),))
        if op.kind == "link":
            assert op.target is not None
            content, target = self.find(path), self.directory(op.target.parent)
            assert content is not None, f"{path} has a second name and was never made"
            self.children[target][op.target.name] = content
            return Call(op, content, target, (target, op.target.name, content))
        if op.kind in ("unlink", "rmdir", "remove_tree"):
            within = self.directory(path.parent)
            content = self.children[within].pop(path.name, None)
            return Call(op, content, within, None, ((within, path.name),) if content is not None else ())
        return Call(op, self._opened.get(path))


def resolve(operations: Sequence[Operation]) -> tuple[list[Call], Names]:
    """Return the calls that went well with what they are about, syncs noted where they belong."""
    names = Names()
    calls = []
    for op in operations:
        if op.error is None:
            call = names.resolve(op)
            if op.kind in ("fsync", "fdatasync") and call.about is not None:
                call.about.syncs.append((op.begun, op.ended))
            calls.append(call)
    return calls, names


class Disk:
    """What is on the disk after a crash at ``moment``, where ``keep`` decides about what was not durable.

    Args:
        calls: in the order in which they began.
        moment: calls that began later never happened.
        keep: given how many pieces of a call that is not durable there are, says which of them happened.
    """

    def __init__(self, calls: Sequence[Call], moment: int, keep: Callable[[int], Sequence[bool]]) -> None:
        self._moment = moment
        self._keep = keep
        self._directories = {call.about for call in calls if call.operation.kind == "mkdir"}
        self.data: dict[Content, Content] = {}
        self.entries: dict[Content, dict[str, Content]] = {}
        for call in calls:
            if call.operation.begun <= moment:
                self._apply(call)

    def _happens(self, content: Content, op: Operation) -> bool:
        """Whether a sync of ``content`` that ended before the crash began after ``op`` had ended; else, by chance."""
        return self._is_durable(content, op) or self._keep(1)[0]

    def _is_durable(self, content: Content, op: Operation) -> bool:
        return any(begun >= op.ended and ended <= self._moment for begun, ended in content.syncs)

    def _apply(self, call: Call) -> None:
        op, about = call.operation, call.about
        if call.within is not None and self._happens(call.within, op):
            for directory, name in call.gone:
                self.entries.setdefault(directory, {}).pop(name, None)
            if call.entry is not None:
                directory, name, content = call.entry
                self.entries.setdefault(directory, {})[name] = content
        if about is None:
            return
        file = self.data.setdefault(about, Content())
        if op.kind == "pwrite":
            self._write(about, file, op)
        elif op.kind in ("allocate", "truncate") and self._happens(about, op):
            file.resize(op.key.length if op.kind == "truncate" else max(op.key.length, len(file.data)))
        elif op.kind == "open" and op.flags & os.O_TRUNC and file.data and self._happens(about, op):
            file.data.clear()

    def _write(self, about: Content, file: Content, op: Operation) -> None:
        data, offset = op.data or b"", op.key.offset
        if self._is_durable(about, op):
            file.write(offset, data)
            return
        sectors = range(0, len(data), SECTOR)
        for at, kept in zip(sectors, self._keep(len(sectors)), strict=True):
            if kept:
                file.write(offset + at, data[at : at + SECTOR])

    def write_to(self, directory: Content, target: Path) -> None:
        """Write a directory, as far as its entries are there, to ``target``."""
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self.entries.get(directory, {}).items():
            if content in self._directories:
                self.write_to(content, target / name)
            else:
                (target / name).write_bytes(self.data[content].data if content in self.data else b"")


def keeping(policy: str, chance: random.Random | None = None) -> Callable[[int], Sequence[bool]]:
    """Return what decides which pieces of a call that is not durable happened."""
    chance = chance or random.Random(0)
    share = chance.random()
    missing = chance.randint(0, 30)
    count = iter(range(10**9))

    def keep(num_pieces: int) -> Sequence[bool]:
        if policy == "torn":
            return [chance.random() < share for _ in range(num_pieces)]
        if policy == "subset":
            return [chance.random() < share] * num_pieces
        if policy == "one missing":
            return [next(count) != missing] * num_pieces
        return [policy == "all"] * num_pieces

    return keep
