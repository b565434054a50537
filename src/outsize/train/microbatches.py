"""The microbatches of a run that goes on: as many as it had, since another number sums gradients in another order."""

from pathlib import Path

from outsize.config import Config, load_config

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
    runs += [resumed.parent.parent] if resumed is not None else []
    for run in runs:
        if (run / CONFIG_FILE).is_file():
            former = load_config(run / CONFIG_FILE, environ={}).microbatches
            # A run of other steps is refused later, in words.
            return config.in_microbatches(former) if former <= config.sequences_per_step else config
    return config
