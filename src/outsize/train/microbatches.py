"""The microbatches of a run that goes on: as many as it had, since another number sums gradients in another order."""

from pathlib import Path

from outsize.config import Config, load_config
from outsize.train.checkpoint_dir import CHECKPOINTS

CONFIG_FILE = "config.yaml"


def as_before(config: Config, run_dir: Path, resumed: Path | None) -> Config:
    """Return ``config`` with the microbatches that its run had so far, where it names none itself.

    Args:
        config: of a run that begins or goes on.
        run_dir: its directory.
        resumed: checkpoint that it goes on from, ``RUN/checkpoints/NAME`` if it is one of ours; None for none.

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
        former = load_config(run / CONFIG_FILE, environ={}) if (run / CONFIG_FILE).is_file() else config
        if (
            former.train.microbatches is not None
        ):  # what a run has written names them; a user's own file may not
            # A run of other steps is refused later, in words.
            fits = former.microbatches <= config.sequences_per_step
            return config.in_microbatches(former.microbatches) if fits else config
    return config
