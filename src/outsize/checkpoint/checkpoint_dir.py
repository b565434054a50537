"""The directory of a run's checkpoints: what lies in it, what is removed, and when.

::

    checkpoints/
    ├── latest                    the name of the newest complete checkpoint
    ├── best                      the name of the one with the least loss, where a run is evaluated
    ├── step-00000100/            complete: it got this name after all its files were on the disk
    ├── checkpoint-150/           of the Hugging Face ``Trainer``, where that trains
    └── step-00000200.partial/    on its way in, or on its way out; whoever comes next removes it

A checkpoint counts once ``latest`` names it, and ``latest`` is written when nothing of it can be lost any more. One is
removed only after that, and by renaming it first, so that what has a checkpoint's name is whole.
"""

import contextlib
import json
import re
from pathlib import Path

from outsize import files
from outsize.errors import CheckpointError

CHECKPOINTS = "checkpoints"
STATE = "trainer_state.json"
LATEST, BEST = "latest", "best"

_NAME = re.compile(r"step-(\d{8,})|checkpoint-(\d+)")
_SHOWN_CHARS = 80
# What a process that was killed may leave; nothing else is ever removed as litter.
_LITTER = re.compile(r"\.?step-\d{8,}\.partial.*|latest\.partial")


def name_of(step: int) -> str:
    """Name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, None where there is none.

    Raises:
        CheckpointError: ``latest`` cannot be read, or names one that is not there.
    """
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.exists():
        return None
    try:
        name = files.read_text(pointer).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; correct or remove it") from error
    directory = pointer.parent / name
    if not _NAME.fullmatch(name) or not (directory / STATE).is_file():
        raise CheckpointError(
            f"{pointer} names {name[:_SHOWN_CHARS]!r}, which is not a checkpoint; correct or remove it"
        )
    return directory


def best(run_dir: Path) -> Path | None:
    """The checkpoint with the least loss of those that were evaluated, None where there is none."""
    try:
        name = files.read_text(run_dir / CHECKPOINTS / BEST).strip()
    except (OSError, ValueError):
        return None
    directory = run_dir / CHECKPOINTS / name
    return directory if _NAME.fullmatch(name) and (directory / STATE).is_file() else None


def set_latest(directory: Path) -> None:
    """Name a checkpoint the newest complete one: all of its files are on the disk by then.

    Raises:
        OSError: as the system says.
    """
    files.write_whole(directory.parent / LATEST, directory.name + "\n")


def set_best(run_dir: Path, name: str) -> None:
    """Name a checkpoint the best one; it may still be on its way.

    Raises:
        OSError: as the system says.
    """
    make_durable(run_dir / CHECKPOINTS)
    files.write_whole(run_dir / CHECKPOINTS / BEST, name + "\n")


def make_durable(path: Path) -> None:
    """Make a directory and its parents, each entered in the one above for good.

    Raises:
        OSError: as the system says.
    """
    if not path.is_dir():
        make_durable(path.parent)
        files.make_directories(path)
        files.sync(path.parent)


def take_place(staging: Path, directory: Path) -> None:
    """Give a complete checkpoint its name, durably; one that bears it already and that nobody trusts makes room.

    Raises:
        OSError: as the system says.
    """
    if directory.exists():
        _remove(directory)
    files.system().rename(staging, directory)
    files.sync(directory.parent)


def remove_litter(checkpoints: Path) -> None:
    """Remove what a process left that was killed while it saved or removed a checkpoint; an empty directory too."""
    with contextlib.suppress(OSError):  # what cannot be removed stays, and hides no error
        for path in list(checkpoints.iterdir()):
            if _LITTER.fullmatch(path.name) and not path.is_symlink():
                if path.is_dir():
                    files.system().remove_tree(path)
                else:
                    with contextlib.suppress(OSError):
                        files.system().unlink(path)
        files.system().rmdir(checkpoints)


def remove_old(checkpoints: Path, newest: Path, limit: int, run: str) -> None:
    """Keep ``newest``, the ``limit - 1`` before it and the best; remove the others that ``run`` has made.

    What cannot be removed stays, and is tried again after the next checkpoint.

    Args:
        checkpoints: the directory.
        newest: the checkpoint that ``latest`` names, durably.
        limit: checkpoints to keep, at least one.
        run: id of the run; checkpoints of any other are not touched.
    """
    spared = (newest, best(checkpoints.parent))
    others = [p for p in checkpoints.iterdir() if p not in spared and _made_by(run, p)]
    # A later one never became the latest: the process died before it could say so.
    before = sorted((p for p in others if _step(p) < _step(newest)), key=_step)
    kept = set(before[len(before) - limit + 1 :]) if limit > 1 else set()
    for path in others:
        if path not in kept:
            with contextlib.suppress(OSError):
                _remove(path)


def _remove(directory: Path) -> None:
    doomed = directory.with_name(directory.name + files.PARTIAL + "-removed")
    files.system().remove_tree(doomed)
    files.system().rename(directory, doomed)
    files.system().remove_tree(doomed)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def _made_by(run: str, path: Path) -> bool:
    """Whether a directory is a checkpoint that ``run`` has made."""
    if _step(path) < 0 or path.is_symlink():
        return False
    try:
        state = json.loads(files.read_text(path / STATE))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("run") == run
