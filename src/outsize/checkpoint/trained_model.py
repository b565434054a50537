"""Where the model of a run lies, or of adapters, for whoever runs it."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outsize.checkpoint.checkpoint_dir import CHECKPOINTS, best, latest
from outsize.checkpoint.merge import merge
from outsize.errors import CheckpointError
from outsize.model.adapters import ADAPTER_CONFIG


@contextlib.contextmanager
def servable(model: str, trust_remote_code: bool = False) -> Iterator[str]:
    """Give the directory or hub id that a model can be loaded from, as long as the body runs.

    Args:
        model: a model; the directory of a run, whose best checkpoint is meant, else the newest; or adapters, which are
            merged into their model in a temporary directory.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        CheckpointError: a run has no checkpoint, or adapters cannot be merged.
    """
    path = Path(model).expanduser()
    if (path / CHECKPOINTS).is_dir():
        found = best(path) or latest(path)
        if found is None:
            raise CheckpointError(
                f"{path} holds no checkpoint yet; name a model, or a run that has saved one"
            )
        path, model = found, str(found)
    if not (path / ADAPTER_CONFIG).is_file():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="outsize-merged-") as directory:
        yield str(merge(path, Path(directory) / "model", trust_remote_code))
