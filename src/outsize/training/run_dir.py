"""The directory of a run: one run at a time, never one over another, and microbatches and kernels as it had before.

Another number of microbatches sums gradients in another order, and compiled blocks round otherwise.
"""

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from outsize import files
from outsize.checkpoint.checkpoint_state import CHECKPOINTS, LATEST, check_outside
from outsize.config import Config, MemoryConfig, load_config
from outsize.errors import ConfigError, StorageError, explain
from outsize.session.job.job_options import products_open
from outsize.session.job.machine import home_file
from outsize.storage.directory import needed_directory
from outsize.storage.record import has_commit
from outsize.training.records import HEARTBEAT

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
# Of these a process that was killed may leave a half; nothing else is ever removed.
_PARTIAL = re.compile(
    r"(config\.yaml|(plan|run|machine|prediction|timeline|quantisation)\.json|evaluations\.jsonl)\.partial"
)

_RECORDED = re.compile(r"heartbeat\.jsonl|(plan|run|timeline)\.json|stall-\d+\.txt|report\.html")
_log = logging.getLogger(__name__)


def choose_run_dir(named: str | None) -> Path:
    """Return the directory that is ``named``, or one for a run that starts now."""
    if named is not None:
        return Path(named)
    now = Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    later = (now.with_name(f"{now.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([now], later) if not path.exists())


def config_of(run: Path, announce: Callable[[str], None] = lambda _: None) -> Config | None:
    """Return the configuration that a run has written; None where there is none, or a broken one, which is said."""
    path = run / CONFIG_FILE
    try:
        if path.is_file():
            return load_config(path, environ={})
    except (ConfigError, OSError) as error:
        why = "; ".join(str(error).splitlines())
        announce(f"note: a broken {CONFIG_FILE} counts as none, and the run goes on without it: {why}")
    return None


def as_before(
    config: Config,
    run_dir: Path,
    resumed: Path | None,
    rank_dir: str = "",
    num_ranks: int = 1,
    announce: Callable[[str], None] = lambda _: None,
) -> Config:
    """Return ``config`` with the microbatches, rounds, kernels and products of its run so far, where it names none.

    Of several ranks each has chosen its own numbers, as its memory wants them, and its home on disk holds what one
    round needs, or several. Where a rank was not there before, it takes those of rank 0.

    Args:
        config: of a run that begins or goes on.
        run_dir: its directory.
        resumed: checkpoint that it goes on from, ``RUN/checkpoints/NAME`` if it is one of ours; None for none.
        rank_dir: name of the directory of this rank within that of the run; empty for rank 0, whose is the run's.
        num_ranks: that share a step now; of more than there were, each may have too few sequences for as many.
        announce: told of a broken configuration of the run so far, which counts as none.

    Raises:
        ConfigError: the run so far has another objective.
    """
    if config.train.resume == "none":
        return config
    so_far = runs_so_far(config, run_dir, resumed, announce)
    for run, before in so_far:
        if before is None:
            continue
        _check_objective(config, run, before)
        _tell_of_renaming(config, run, before, announce)
        if products_open(config.optimizer):
            config = config.multiplying(before.optimizer.ns_on)
    named = config.train.microbatches
    rounds_named = config.train.round_microbatches is not None
    if named is not None and (num_ranks == 1 or rounds_named):
        return config
    for run, before in so_far:
        count, in_a_round = _numbers_of(run, before, rank_dir, num_ranks)
        count = count if named is None else named
        if count is not None:
            # A run of other steps is refused later, in words.
            fits = num_ranks * count <= config.sequences_per_step
            keeps = not rounds_named and in_a_round is not None and in_a_round <= count
            return config.in_microbatches(count, in_a_round if keeps else None) if fits else config
    return config


def runs_so_far(
    config: Config, run_dir: Path, resumed: Path | None, announce: Callable[[str], None] = lambda _: None
) -> list[tuple[Path, Config | None]]:
    """Return the directories of the run that ``config`` goes on with, and what each has configured; None of none.

    Arguments are those of `as_before`.
    """
    runs = [run_dir] if config.train.resume == "auto" else []
    # Others lie where a file of that name is anybody's.
    places = [] if resumed is None else [resumed.resolve().parent]
    runs += [place.parent for place in places if place.name == CHECKPOINTS]
    return [(run, config_of(run, announce)) for run in runs]


def _tell_of_renaming(config: Config, run: Path, before: Config, announce: Callable[[str], None]) -> None:
    """Say where the home of a run stays whose directory has been renamed: in a directory of homes it has its name."""
    if before.train.run_dir is None or config.memory.store_dir is None:
        return
    previous = home_file(config.memory, Path(before.train.run_dir))
    ours = home_file(config.memory, run)
    if previous != ours and previous.is_file() and not ours.is_file():
        announce(
            f"note: {run} was {before.train.run_dir} before, and its home is still {previous}; give that file the name "
            f"{ours} to go on from it"
        )


def _check_objective(config: Config, run: Path, before: Config) -> None:
    was, now = before.train.objective, config.train.objective
    if was != now:
        raise ConfigError(
            f"train.objective: the run in {run} has {was}, and cannot go on with {now}; leave it as it was, or begin "
            "from the weights of a checkpoint, with model.path and train.resume=none"
        )


@contextlib.contextmanager
def claimed(run_dir: Path, config: Config | None = None) -> Iterator[None]:
    """Make a run directory and keep other runs out of it; one that stays empty is removed again.

    Args:
        run_dir: the directory.
        config: says whether a run that it holds is to be continued, and where its home would be; None for a loop of the
            user's own, which puts an earlier one's records aside.

    Raises:
        ConfigError: it holds a run that is not to be continued.
        StorageError: it cannot be written, or another run is using it.
    """
    key = "run_dir" if config is None else "train.run_dir"
    check_outside(run_dir, key)
    if config is not None and config.memory.store_dir is not None:
        check_outside(Path(config.memory.store_dir), "memory.store_dir")
    with needed_directory(run_dir, key):
        try:
            descriptor = files.system().open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise explain(error, f"open {run_dir} ({key})") from error
        try:
            try:
                is_ours = files.lock(descriptor)
            except OSError as error:
                raise explain(error, f"lock {run_dir} ({key})") from error
            if not is_ours:
                raise StorageError(
                    f"{run_dir} is in use by another run; wait for it, or choose another {key}"
                )
            _remove_partial(run_dir)
            if config is None and _has_begun(run_dir):
                _put_aside(run_dir)
            if config is not None and config.train.resume != "auto" and _holds_run(run_dir, config.memory):
                raise ConfigError(
                    f"{run_dir} holds a run already; go on with it with --resume auto (train.resume=auto), or choose "
                    "another train.run_dir"
                )
            yield
        finally:
            files.system().close(descriptor)


def _put_aside(run_dir: Path) -> None:
    """Move what an earlier loop of the user's own has recorded to ``earlier-N``: a job is queued again."""
    if (run_dir / CONFIG_FILE).exists() or (run_dir / CHECKPOINTS).exists():
        raise ConfigError(f"{run_dir} holds a run of outsize train; choose another run_dir")
    places = (run_dir / f"earlier-{number}" for number in itertools.count(1))
    place = next(path for path in places if not path.exists())
    files.system().mkdir(place)
    recorded = [path for path in run_dir.iterdir() if _RECORDED.fullmatch(path.name)]
    # The heartbeat, by which a run is known to have begun, goes last: killed in between, the next start goes on here.
    for path in sorted(recorded, key=lambda path: path.name.startswith("heartbeat")):
        files.system().rename(path, place / path.name)
    _log.warning("%s held the records of an earlier loop; they are in %s now", run_dir, place)


def _remove_partial(run_dir: Path) -> None:
    """Remove what a process left that was killed while it wrote a file of the run; the directory is locked."""
    for path in run_dir.iterdir():
        if _PARTIAL.fullmatch(path.name) and not path.is_symlink() and path.is_file():
            with contextlib.suppress(OSError):
                files.system().unlink(path)


def _holds_run(run_dir: Path, memory: MemoryConfig) -> bool:
    return (
        _has_begun(run_dir)
        or (run_dir / CHECKPOINTS / LATEST).exists()
        or has_commit(home_file(memory, run_dir))
    )


def _has_begun(run_dir: Path) -> bool:
    heartbeat = run_dir / HEARTBEAT
    return heartbeat.is_file() and heartbeat.stat().st_size > 0


def _numbers_of(
    run: Path, before: Config | None, rank_dir: str, num_ranks: int
) -> tuple[int | None, int | None]:
    """Return the microbatches of a rank in a run so far, and those of a round; None where nothing tells them."""
    read = files.json_or_empty(run / rank_dir / PLAN_FILE)
    planned = {name: number for name, number in read.items() if type(number) is int and number > 0}
    if "microbatches" in planned and (rank_dir or before is None):
        return planned["microbatches"], planned.get("round_microbatches")
    if before is None:
        return None, None
    rounds = planned.get("round_microbatches") if num_ranks > 1 else None
    return before.train.microbatches, rounds or before.train.round_microbatches
