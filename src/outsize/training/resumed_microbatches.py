"""The microbatches and rounds of a run that goes on: as it had them, since others sum gradients in another order."""

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
        count, in_a_round = _numbers_of(run, rank_dir)
        if count is not None:
            # A run of other steps is refused later, in words.
            fits = num_ranks * count <= config.sequences_per_step
            named = config.train.round_microbatches is not None
            return config.in_microbatches(count, None if named else in_a_round) if fits else config
    return config


def _numbers_of(run: Path, rank_dir: str) -> tuple[int | None, int | None]:
    """Return the microbatches of a rank in a run so far, and those of a round; None where nothing tells them."""
    if rank_dir:
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or not a whole one
            return int(json.loads((run / rank_dir / PLAN_FILE).read_text())["microbatches"]), None
    if not (run / CONFIG_FILE).is_file():
        return None, None
    train = load_config(run / CONFIG_FILE, environ={}).train
    return train.microbatches, train.round_microbatches
