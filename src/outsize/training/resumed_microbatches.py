"""The microbatches of a run that goes on: as many as it had, since another number sums gradients in another order."""

import contextlib
import json
from pathlib import Path

from outsize.checkpoint.checkpoint_dir import CHECKPOINTS
from outsize.config import Config, load_config

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"


def as_before(
    config: Config, run_dir: Path, resumed: Path | None, rank_dir: str = "", num_ranks: int = 1
) -> Config:
    """Return ``config`` with the microbatches that its run had so far, where it names none itself.

    Of several ranks each has chosen its own number, as its memory wants it. Where a rank was not there before, it takes
    that of rank 0.

    Args:
        config: of a run that begins or goes on.
        run_dir: its directory.
        resumed: checkpoint that it goes on from, ``RUN/checkpoints/NAME`` if it is one of ours; None for none.
        rank_dir: name of the directory of this rank within that of the run; empty for rank 0, whose is the run's.
        num_ranks: that share a step now; of more than there were, each may have too few sequences for as many.

    Raises:
        ConfigError: the configuration of the run so far cannot be read.
    """
    if config.train.microbatches is not None or config.train.resume == "none":
        return config
    runs = [run_dir] if config.train.resume == "auto" else []
    # Others lie where a file of that name is anybody's.
    places = [] if resumed is None else [resumed.resolve().parent]
    runs += [place.parent for place in places if place.name == CHECKPOINTS]
    for run in runs:
        count = _number_of(run, rank_dir)
        if count is not None:
            # A run of other steps is refused later, in words.
            fits = num_ranks * count <= config.sequences_per_step
            return config.in_microbatches(count) if fits else config
    return config


def _number_of(run: Path, rank_dir: str) -> int | None:
    """Return the microbatches of a rank in a run so far; None where there is no run, or a file that a user wrote."""
    if rank_dir:
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or not a whole one
            return int(json.loads((run / rank_dir / PLAN_FILE).read_text())["microbatches"])
    if not (run / CONFIG_FILE).is_file():
        return None
    return load_config(run / CONFIG_FILE, environ={}).train.microbatches
