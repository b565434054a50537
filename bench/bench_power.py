"""Does a run survive a loss of power? Every crash state of its files must go on from a committed step, bit for bit.

A tiny run with its home on disk is trained once while every call to the file system is recorded: what was written
where, synced, renamed, removed, and when each call began and ended. From that record crash states are made as ALICE
and CrashMonkey do: the power goes at a random moment; what a sync that had ended made durable is there, and of all else
any subset, sector by sector where the policy tears writes, name by name. In each state the run directory is looked
at as a resume would: newest commit record and newest checkpoint. What is chosen is read whole and compared with what
the run had at that step; it may not be older than the last commit that had ended.

    python bench/bench_power.py                     # 1,200 crash points
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common
from bench_kill import config_of, write_model
from torch import Tensor

from crash.faults import Layer, Operation, layered
from outsize.checkpoint.checkpoint_dir import latest
from outsize.checkpoint.checkpoint_state import position_of
from outsize.choices import Optimizer
from outsize.config import Config
from outsize.errors import OutsizeError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import GRADIENT
from outsize.session.job.machine import home_file
from outsize.session.job.optimizer_layout import layout_for
from outsize.storage.arena import Arena
from outsize.storage.committed import CommittedHome, find_record
from outsize.storage.pool import IOPool
from outsize.training.run import train

SECTOR = 4096
# Of what is not yet durable: all gone, all there, any subset, one missing, any sectors.
POLICIES = ("none", "all", "subset", "one missing", "torn")


# --- the recorded run -----------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What one run did to its files.

    Attributes:
        operations: all calls, in the order in which they began.
        spec: of its model.
        planes: digest of the whole state after each committed step.
        saved: digest of the files of each checkpoint, by its name.
    """

    operations: list[Operation] = field(default_factory=list)
    spec: ModelSpec | None = None
    planes: dict[int, str] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)
    committed_at: dict[int, int] = field(default_factory=dict)
    """When the commit of a step had ended, on the clock of the operations."""


def record(config: Config, root: Path) -> Recording:
    """Train while everything is recorded."""
    found = Recording()
    layer = Layer(root, keep_data=True)
    commit = CommittedHome.commit

    def watched(self: CommittedHome, state: Any) -> None:
        found.spec = self._model
        found.planes[state["step"]] = state_digest(self)
        commit(self, state)
        found.committed_at[state["step"]] = max(op.ended for op in list(layer.operations))

    CommittedHome.commit = watched  # type: ignore[method-assign]
    try:
        with layered(layer):
            train(config)
    finally:
        CommittedHome.commit = commit  # type: ignore[method-assign]
    changing = (op for op in layer.operations if op.kind not in ("pread", "close", "lane"))
    found.operations = sorted(changing, key=lambda op: op.begun)
    run_dir = Path(config.train.run_dir or "")
    for directory in (run_dir / "checkpoints").glob("step-*"):
        found.saved[directory.name] = tree_digest(directory)
    return found


def state_digest(home: CommittedHome) -> str:
    """Digest of every plane of a state."""
    digest = hashlib.sha256()
    with Arena() as arena:
        for (unit, plane), extent in sorted(home._layout.extents.items()):
            if plane != GRADIENT:
                buffer = arena.take(extent.num_bytes, "plane")
                home.read(unit, plane, 0, buffer.view(extent.dtype))
                digest.update(buffer.numpy().data)
    return digest.hexdigest()


def tree_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(directory)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


# --- crash states ---------------------------------------------------------------------------------------------


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


def keeping(policy: str, chance: random.Random) -> Callable[[int], Sequence[bool]]:
    """Return what decides which pieces of a call that is not durable happened."""
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


# --- what a resume would find ---------------------------------------------------------------------------------


def recovered(config: Config, found: Recording, pool: IOPool) -> int:
    """Return the step that a resume goes on from, after comparing all of its state with what it was.

    Raises:
        OutsizeError: a resume would fail.
        AssertionError: it would go on from something else than a committed step.
    """
    run_dir = Path(config.train.run_dir or "")
    assert found.spec is not None
    saved = latest(run_dir)
    step = position_of(saved).step if saved is not None else 0
    if saved is not None:
        assert tree_digest(saved) == found.saved[saved.name], f"{saved.name} is not what was saved"
    path = home_file(config.memory, run_dir)
    planes = layout_for(config, found.spec).planes
    record_found, _ = find_record(path, found.spec, planes)
    if record_found is None or record_found.state["step"] < step:
        return step
    with (
        Arena() as arena,
        CommittedHome(found.spec, planes, path, pool, arena=arena, record=record_found) as home,
    ):
        home.check(lambda num_bytes: _borrow(arena, num_bytes))
        step = record_found.state["step"]
        assert state_digest(home) == found.planes[step], f"the home is not what it was after step {step}"
    return int(step)


def _borrow(arena: Arena, num_bytes: int) -> Tensor:
    return arena.take(num_bytes, "borrowed")


def moments(found: Recording, points: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """Yield moments of a crash and policies, half of the moments around commits and the last checkpoint."""
    last = max(op.ended for op in found.operations)
    lively = sorted({op.begun for op in found.operations if op.kind not in ("pwrite", "open")})
    for number in range(points):
        near = chance.random() < 0.5
        moment = chance.choice(lively) + chance.randint(-2, 2) if near else chance.randint(0, last + 1)
        yield moment, POLICIES[number % len(POLICIES)]


def examine(root: Path, config: Config, found: Recording, points: int, seed: int) -> dict[str, Any]:
    """Make crash states and look at each."""
    chance = random.Random(seed)
    steps: Counter[int] = Counter()
    failures: list[str] = []
    run_dir, crashed = Path(config.train.run_dir or ""), root / "crashed"
    calls, names = resolve(found.operations)
    top = names.directory(run_dir)
    there = config.model_copy(update={"train": config.train.model_copy(update={"run_dir": str(crashed)})})
    with IOPool(2) as pool:
        for moment, policy in moments(found, points, chance):
            shutil.rmtree(crashed, ignore_errors=True)
            crashed.mkdir()
            Disk(calls, moment, keeping(policy, chance)).write_to(top, crashed)
            least = max((step for step, at in found.committed_at.items() if at <= moment), default=0)
            try:
                step = recovered(there, found, pool)
                assert step >= least, f"step {step} is older than {least}, whose commit had ended"
            except (OutsizeError, AssertionError) as error:
                failures.append(f"crash at {moment}, unsynced: {policy}: {type(error).__name__}: {error}")
            else:
                steps[step] += 1
    return {
        "points": points,
        "operations": len(found.operations),
        "steps_found": dict(sorted(steps.items())),
        "corrupt": len(failures),
        "failures": failures[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outsize-power-") as made:
        root = Path(made)
        write_model(root)
        config = config_of(root, "run", "disk", arguments.steps, arguments.optimizer)
        saving = config.train.model_copy(
            update={"save_every": arguments.save_every, "save_total_limit": None}
        )
        config = config.model_copy(update={"train": saving})
        found = record(config, root)
        result = examine(root, config, found, arguments.points, arguments.seed)
    rows = [(f"step {step}", count) for step, count in result["steps_found"].items()]
    common.print_table(("goes on from", "crash states"), rows, title="Loss of power")
    for failure in result["failures"]:
        print(failure)
    common.finish(
        {
            "bench": "power",
            "optimizer": arguments.optimizer,
            "machine": common.machine(),
            "steps": arguments.steps,
            "save_every": arguments.save_every,
            **result,
            "ok": result["corrupt"] == 0,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
