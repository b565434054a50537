"""Where the model of a run lies, or its adapters, for whoever runs it."""

import os
from pathlib import Path

from outsize.checkpoint.checkpoint_dir import CHECKPOINTS, best, latest
from outsize.errors import CheckpointError


def servable(model: str) -> str:
    """Return the directory or hub id that a model can be loaded from: of a run its best checkpoint, else the newest.

    Raises:
        CheckpointError: a run has no checkpoint.
    """
    path = Path(os.path.expanduser(model))
    is_run = (path / "heartbeat.jsonl").is_file() and not (path / "config.json").is_file()
    if not is_run and not (path / CHECKPOINTS).is_dir():
        return model
    found = best(path) or latest(path)
    if found is None:
        raise CheckpointError(
            f"{path} is a run that has not saved yet: Ctrl-C ends it after a step and saves, and train.save_every and "
            "save_minutes say when else; name a model, or a run that has saved one"
        )
    return str(found)
