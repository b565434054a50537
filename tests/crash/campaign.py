"""One small run under every fault: what each does to it, and whether that was allowed.

A run that a fault is put into may end in two ways: as if nothing had been wrong, bit for bit; or with an `OutsizeError`
that says what was, after which the same run, resumed on a sound machine, ends bit for bit where it would have. It
leaves no thread, no open file and no half-written name, and the next run in the same process is as good as any.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crash.faults import LANE, Fault, Key, Layer, Operation, faults_of, layered
from crash.operations import CLEAN_UPS
from outsize.checkpoint.checkpoint_state import latest
from outsize.config import Config
from outsize.errors import ExecutionError, OutsizeError, StorageError
from outsize.training.run import train
from tiny import tiny_run

# What a run writes under another name first, or under a name that is gone at once.
HALF_WRITTEN = ("*.partial*", "*.former*", ".writing*", "activations.bin")
# Files with checksums over all that is read of them.
CHECKED = ("home.bin",)
JOIN_TIMEOUT_S = 5.0

Point = tuple[Key, Fault]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault did.

    Attributes:
        outcome: ``equal``, ``refused`` (and resumed to the same end), or ``missed``: the operation did not come by.
        error: what the run said of it, empty where nothing.
        problems: promises that were broken, one sentence each.
    """

    outcome: str
    error: str
    problems: tuple[str, ...]


class Campaign:
    """Runs one configuration again and again.

    Args:
        config: of the run; its ``run_dir`` is removed before each.
        root: directory of all its files, whose names are told relative to it.
        begin: a run directory to go on from, copied before each; None starts afresh.
    """

    def __init__(self, config: Config, root: Path, begin: Path | None = None) -> None:
        assert config.train.run_dir is not None
        self._begin = begin
        self._config = config
        self._root = root
        self._run_dir = Path(config.train.run_dir)
        self._reset()
        self._train()  # whatever libraries open and start once
        self._reset()
        with layered(Layer(root, looks=True)) as layer:
            self._train()
        self.operations: tuple[Operation, ...] = tuple(layer.operations)
        self._expected = self._digest()

    def points(
        self, wanted: Callable[[Operation, Fault], bool] = lambda operation, fault: True
    ) -> list[Point]:
        """Return every operation with everything that can go wrong there, in the order of the run."""
        ordered = sorted(self.operations, key=lambda operation: operation.number)
        return [(o.key, fault) for o in ordered for fault in faults_of(o) if wanted(o, fault)]

    def judge(self, key: Key, fault: Fault) -> Verdict:
        """Run under one fault."""
        self._reset()
        threads, files = _threads(), _open_files()
        problems: list[str] = []
        error, num_untold = "", 0
        with layered(Layer(self._root, {key: fault}, looks=True)) as layer:
            try:
                num_untold = self._train()
            except OutsizeError as refusal:
                error = f"{type(refusal).__name__}: {refusal}"
                if fault is Fault.WRECK and _hides_full_disk(refusal):
                    problems.append(f"the first error is hidden: {error}")
                if fault is Fault.EIO and not isinstance(refusal, StorageError):
                    problems.append(f"a disk that fails is called something else: {error}")
            except Exception as other:
                error = f"{type(other).__name__}: {other}"
                problems.append(f"not an error of ours: {error}")
        problems += self._left(threads, files, key.kind in CLEAN_UPS or fault is Fault.WRECK)
        if error and not problems:
            self._train(again=True)
            problems += self._left(threads, files, False)
        if not problems and not self._is_as_expected(num_untold):
            problems.append("ends with other weights, state or losses" + (" when resumed" if error else ""))
        outcome = "missed" if not layer.sprung else "refused" if error else "equal"
        return Verdict(outcome, error, tuple(problems))

    def _is_as_expected(self, num_untold: int) -> bool:
        """Whether a run came to what it should; lines of the heartbeat may be missing where it says that some are."""
        found = self._digest()
        untold = [name for name in self._expected.keys() - found.keys() if name.startswith("loss")]
        expected = {name: value for name, value in self._expected.items() if name not in untold}
        return found == expected and len(untold) <= num_untold

    def _train(self, *, again: bool = False) -> int:
        """Train, ``again`` after what has failed; returns how many lines could not be told."""
        resume = {"resume": "auto"} if again else {}
        config = self._config.model_copy(update={"train": self._config.train.model_copy(update=resume)})
        return train(config).failed_writes

    def _digest(self) -> dict[str, str]:
        """Return what all came to."""
        return digest(self._run_dir)

    def _reset(self) -> None:
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._begin is not None:
            shutil.copytree(self._begin, self._run_dir)

    def _left(self, threads: set[threading.Thread], files: dict[str, str], names_may_stay: bool) -> list[str]:
        """Return what a run left behind that it should not have."""
        running = _threads() - threads
        for thread in running:
            thread.join(JOIN_TIMEOUT_S)
        found = [f"thread left running: {thread.name}" for thread in running if thread.is_alive()]
        found += [f"file left open: {to}" for fd, to in _open_files().items() if files.get(fd) != to]
        if not names_may_stay:
            found += [
                f"half-written file left: {path.relative_to(self._root)}"
                for pattern in HALF_WRITTEN
                for path in self._root.rglob(pattern)
            ]
        return found


def _hides_full_disk(error: BaseException) -> bool:
    """Whether an error comes of a full disk and does not say so: what came after it is told in its place."""
    text, before = str(error), error.__cause__ or error.__context__
    while before is not None:
        if isinstance(before, OSError) and before.errno == errno.ENOSPC:
            return os.strerror(errno.ENOSPC) not in text
        before = before.__cause__ or before.__context__
    return False


def digest(run_dir: Path) -> dict[str, str]:
    """Hash what a run came to: weights and optimizer state of its last checkpoint, and the loss of each step.

    A step that was lost and trained again has a line each time; the last one counts.
    """
    checkpoint = latest(run_dir)
    assert checkpoint is not None, "nothing was saved"
    found = {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*.safetensors")
    }
    beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines() if line]
    return found | {f"loss {beat['step']}": repr(beat["loss"]) for beat in beats}


def _threads() -> set[threading.Thread]:
    """Return the threads that a run answers for: native ones that have run Python, and tqdm's monitor, go on."""
    return {
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and not type(thread).__module__.startswith("tqdm")
    }


def _open_files() -> dict[str, str]:
    """Return the open descriptors, with what they point to."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that lists the directory
            continue
    return found


SCENARIOS = ("host", "disk", "resume", "home")


def scenario(name: str, root: Path) -> Campaign:
    """A tiny run to put faults into.

    ``host`` and ``disk`` start afresh; ``resume`` goes on from the checkpoint after two steps, and ``home`` from the
    home on disk that a run has left which broke in its third.
    """
    memory = {"home": "host" if name == "host" else "disk", "offload": True}
    save = {"save_every": 0 if name == "home" else 2, "round_microbatches": 1}
    if name in ("host", "disk"):
        return Campaign(tiny_run(root, train=save, memory=memory), root)
    if name == "resume":
        train(tiny_run(root, train={"steps": 2, **save}, memory=memory))
    else:
        broken = Layer(root, {Key(LANE, "CLIP", 2, 0, 0): Fault.EXCEPTION})
        with layered(broken), contextlib.suppress(ExecutionError):
            train(tiny_run(root, train=save, memory=memory))
        assert broken.sprung
    (root / "run").rename(root / "before")
    return Campaign(tiny_run(root, train={"resume": "auto", **save}, memory=memory), root, root / "before")


def does_harm(operation: Operation, fault: Fault) -> bool:
    """Whether a fault may change how a run ends; late calls and lost syncs alone do not."""
    return fault not in (Fault.DELAY, Fault.LOST) and is_noticed(operation, fault)


def is_noticed(operation: Operation, fault: Fault) -> bool:
    """Whether somebody can tell: one bit of a file without a checksum is a different file, not a damaged one."""
    return fault is not Fault.FLIP or operation.path.name in CHECKED
