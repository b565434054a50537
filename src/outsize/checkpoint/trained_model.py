"""Where the model of a run lies, or its adapters, for whoever runs it."""

from pathlib import Path

from outsize.checkpoint.checkpoint_dir import CHECKPOINTS, best, latest
from outsize.errors import CheckpointError


def servable(model: str) -> str:
    """Return the directory or hub id that a model can be loaded from: of a run its best checkpoint, else the newest.

    Raises:
        CheckpointError: a run has no checkpoint.
    """
    path = Path(model).expanduser()
    if not (path / CHECKPOINTS).is_dir():
        return model
    found = best(path) or latest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint yet; name a model, or a run that has saved one")
    return str(found)
