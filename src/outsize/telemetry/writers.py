"""Who else is told of every step: TensorBoard, Weights & Biases, trackio, each behind the same two calls.

A run must not end because a tracker does. A writer that fails is told of once, counted, and left out from then on;
what it would have been told is in the heartbeat.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from outsize.errors import Closing, ConfigError

# Fields of a heartbeat line that are told as they are.
FIELDS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "seconds",
    "mfu",
    "stall_share",
    "data_s",
    "rss_bytes",
    "skipped_steps",
)


class Writer(Protocol):
    """Takes the numbers of steps; ascending."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take ``values`` of ``step``, by name."""

    def close(self) -> None:
        """Hand over what is left; idempotent."""


class WriterRecord(Protocol):
    """What a run knows of a step."""

    @property
    def step(self) -> int:
        """From 1."""

    @property
    def seconds(self) -> float:
        """Of the step."""

    @property
    def waits_s(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        """Seconds by compute lane, cause and owner; empty where they were not followed."""

    def to_dict(self) -> dict[str, Any]:
        """Return its line in the heartbeat."""


class TensorBoard:
    """Event files below ``directory``."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Writer.close`."""
        self._writer.close()


class Tracker:
    """A run of `wandb` or of `trackio`, whose calls are the same."""

    def __init__(self, module: Any, **options: Any) -> None:
        self._module = module
        module.init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        """See `Writer.close`."""
        self._module.finish()


class Writers(Closing):
    """Several writers as one, none of which can end a run.

    Args:
        writers: by name.
        every: steps between two that are told.
        announce: told of a writer that failed.

    Attributes:
        num_failed: writers that have been left out.
    """

    def __init__(self, writers: Mapping[str, Writer], every: int, announce: Callable[[str], None]) -> None:
        self._writers = dict(writers)
        self._every = every
        self._announce = announce
        self.num_failed = 0
        self._waits: dict[str, float] = {}

    def tell(self, record: WriterRecord) -> None:
        """Tell of a step, as its line in the heartbeat does."""
        if not self._writers:
            return
        step = record.step
        # Causes are followed in one step of several, perhaps never in one that writers are told of.
        self._waits = shares_waited(record.waits_s, record.seconds) or self._waits
        if step % self._every == 0:
            waits = {f"waits/{cause}": share for cause, share in self._waits.items()}
            values = {**waits, **values_of(record.to_dict())}
            self._each(lambda writer: writer.write(step, values))

    def close(self) -> None:
        """Close all of them; idempotent."""
        self._each(lambda writer: writer.close())
        self._writers.clear()

    def _each(self, call: Callable[[Writer], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except (
                Exception
            ) as error:  # whatever a tracker raises: a full disk, no network, a version of its own
                self.num_failed += 1
                del self._writers[name]
                self._announce(
                    f"{name} failed and is told no more ({type(error).__name__}: {error}); the heartbeat has all steps"
                )


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a step by name."""
    fields = {name: record[name] for name in FIELDS}
    for name, num_bytes in record["wire_bytes"].items():
        fields[f"bytes/{name}"] = num_bytes
    return {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def shares_waited(
    waits_s: Mapping[str, Mapping[str, Mapping[str, float]]], step_s: float
) -> dict[str, float]:
    """Return the waits of a step as shares of it, by cause, means over workers."""
    shares: dict[str, float] = {}
    for causes in waits_s.values():
        for cause, owners in causes.items():
            share = sum(owners.values()) / step_s / len(waits_s)
            shares[cause] = shares.get(cause, 0.0) + share
    return shares


def open_writers(
    names: Sequence[str], run_dir: Path, project: str, config: Mapping[str, Any]
) -> dict[str, Writer]:
    """Open the writers called ``names``.

    Args:
        names: of `OPENERS`.
        run_dir: whose name the run gets; TensorBoard's files go below it.
        project: of W&B and trackio.
        config: of the run, for them to keep.

    Raises:
        ConfigError: one of them is not installed, or refuses to begin.
    """
    writers: dict[str, Writer] = {}
    with contextlib.ExitStack() as opened:
        for name in names:
            try:
                writers[name] = OPENERS[name](run_dir, project, config)
            except ImportError as error:
                raise ConfigError(
                    f"telemetry.writers: {name} is not installed; pip install {name}, or leave it out"
                ) from error
            except Exception as error:
                raise ConfigError(f"telemetry.writers: {name} does not begin: {error}") from error
            opened.callback(writers[name].close)
        opened.pop_all()
    return writers


def _tensorboard(run_dir: Path, project: str, config: Mapping[str, Any]) -> Writer:
    return TensorBoard(run_dir / "tensorboard")


def _wandb(run_dir: Path, project: str, config: Mapping[str, Any]) -> Writer:
    import wandb

    return Tracker(wandb, project=project, name=run_dir.resolve().name, dir=str(run_dir), config=dict(config))


def _trackio(run_dir: Path, project: str, config: Mapping[str, Any]) -> Writer:
    import trackio

    return Tracker(trackio, project=project, name=run_dir.resolve().name, config=dict(config))


OPENERS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Writer]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
