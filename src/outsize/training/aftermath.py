"""After a run has failed: from which step the next one goes on."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from outsize.checkpoint.checkpoint_dir import latest
from outsize.checkpoint.checkpoint_state import position_of
from outsize.config import Config
from outsize.errors import OutsizeError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import WEIGHTS, Plane
from outsize.session.job.machine import home_file
from outsize.storage.committed import find_record


class Aftermath:
    """A context manager that tells what a run which fails has left; it tells nothing of one that did not begin.

    Args:
        config: of the run.
        run_dir: its directory.
        spec: its model.
        announce: told.
        planes: of a trained unit, at home.
        own: elements of each unit that this rank steps; None for all.
        whole: planes of which it holds all elements all the same.

    Attributes:
        begun: whether there have been steps.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        spec: ModelSpec,
        announce: Callable[[str], None],
        planes: Mapping[str, Plane],
        own: Sequence[range] | None = None,
        whole: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._planes = planes
        self._own, self._whole = own, whole
        self.begun = False
        self._config = config
        self._run_dir = run_dir
        self._spec = spec
        self._announce = announce

    def __enter__(self) -> "Aftermath":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self.begun:
            with contextlib.suppress(OutsizeError, OSError):  # the run ends with the error that it failed of
                self._announce(f"the run failed: {self.next_start()}")

    def next_start(self) -> str:
        """Say what `--resume auto` will do, by what lies on the disk.

        Raises:
            OutsizeError: it cannot be read.
        """
        saved = latest(self._run_dir)
        found = [(position_of(saved).step, saved.name)] if saved is not None else []
        home = home_file(self._config.memory, self._run_dir)
        record, _ = find_record(home, self._spec, self._planes, self._own, self._whole)
        if record is not None:
            found.append((record.state["step"], str(home)))
        if not found:
            return "nothing is saved yet, --resume auto starts with step 1 again"
        step, where = max(found)
        return f"--resume auto goes on after step {step}, from {where}"
