"""The directory of a run: one run at a time, and never one over another."""

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outsize import files
from outsize.checkpoint.checkpoint_dir import CHECKPOINTS, LATEST
from outsize.config import Config
from outsize.errors import ConfigError, StorageError
from outsize.session.job.machine import home_file
from outsize.storage.directory import needed_directory
from outsize.storage.prealloc import explain
from outsize.storage.record import has_commit
from outsize.training.metrics.heartbeat import HEARTBEAT


def choose_run_dir(config: Config) -> Path:
    """Return the directory that ``config`` names, or one for a run that starts now."""
    if config.train.run_dir is not None:
        return Path(config.train.run_dir)
    now = Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    later = (now.with_name(f"{now.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([now], later) if not path.exists())


@contextmanager
def claimed(run_dir: Path, config: Config | None = None) -> Iterator[None]:
    """Make a run directory and keep other runs out of it; one that stays empty is removed again.

    Args:
        run_dir: the directory.
        config: says whether a run that it holds is to be continued, and where its home would be; None for a loop of the
            user's own, which continues none.

    Raises:
        ConfigError: it holds a run that is not to be continued.
        StorageError: it cannot be written, or another run is using it.
    """
    key = "run_dir" if config is None else "train.run_dir"
    with needed_directory(run_dir, key):
        try:
            descriptor = files.system().open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise explain(error, f"open {run_dir} ({key})") from error
        try:
            _lock(descriptor, run_dir, key)
            if config is None and _has_begun(run_dir):
                raise ConfigError(f"{run_dir} holds a run already; choose another run_dir")
            if config is not None and config.train.resume != "auto" and _holds_run(run_dir, config):
                raise ConfigError(
                    f"{run_dir} holds a run already; go on with it with --resume auto (train.resume=auto), or choose "
                    "another train.run_dir"
                )
            yield
        finally:
            files.system().close(descriptor)


def _lock(descriptor: int, run_dir: Path, key: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{run_dir} is in use by another run; wait for it, or choose another {key}"
        ) from error
    except OSError:
        return  # a file system without locks: nothing to check


def _holds_run(run_dir: Path, config: Config) -> bool:
    return (
        _has_begun(run_dir)
        or (run_dir / CHECKPOINTS / LATEST).exists()
        or has_commit(home_file(config.memory, run_dir))
    )


def _has_begun(run_dir: Path) -> bool:
    heartbeat = run_dir / HEARTBEAT
    return heartbeat.is_file() and heartbeat.stat().st_size > 0
