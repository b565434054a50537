"""How masters lie in the home that a run goes on from: a run that leaves that open keeps it as it was written."""

import contextlib
from pathlib import Path
from typing import Literal

from outsize.config import Config
from outsize.errors import StorageError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.session.job.optimizer_layout import layout_for
from outsize.storage.committed import find_record
from outsize.storage.layout_digest import is_laid_out

_WAYS: tuple[Literal["split", "separate"], ...] = ("split", "separate")


def with_masters_of(path: Path, config: Config, spec: ModelSpec, num_workers: int) -> Config:
    """Return ``config`` with ``optimizer.masters`` as they lie in the home at ``path``, where it says ``auto``.

    Which of the two is best here may have changed since: by a version of this program, or by kernels that were built.

    Raises:
        ConfigError: see `layout_for`.
    """
    if config.optimizer.masters != "auto" or config.train.resume != "auto" or spec.dtype != "bf16":
        return config
    for masters in _WAYS:
        optimizer = config.optimizer.model_copy(update={"masters": masters})
        given = config.model_copy(update={"optimizer": optimizer})
        planes = layout_for(given, spec, num_workers=num_workers).planes
        with contextlib.suppress(StorageError):  # whoever goes on from that home says it
            record, _ = find_record(path, spec, planes)
            if record is not None and is_laid_out(record.layout, spec, planes):
                return given
    return config
