"""What the loop over steps asks of who trains: a streamed run and one of plain data parallel answer the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from outsize.checkpoint.saver import Stores
from outsize.data.batch import Batch
from outsize.planner.simulate.timeline import Timeline
from outsize.runtime.device.moved_bytes import Moved
from outsize.runtime.device.profiler_ranges import OpRanges
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position
from outsize.session.steps import LossScale, StepOutcome
from outsize.storage.ledger import Ledger
from outsize.training.watchdog import Watched


class StepEngine(Watched, Stores, Protocol):
    """Runs the ops of steps: an `Engine`, or the `ReplicaEngine` of plain data parallel."""

    @property
    def ranges(self) -> OpRanges:
        """Names of ops in profiles."""

    def moved(self) -> Mapping[str, Moved]:
        """Return what went over each link so far, by lane."""


class Trainer(Protocol):
    """Trains: a `StreamedTrainer`, or a `DataParallelTrainer`."""

    @property
    def prepared(self) -> Job:
        """The run."""

    @property
    def engine(self) -> StepEngine:
        """Runs its ops."""

    @property
    def ledger(self) -> Ledger:
        """What of every budget is used."""

    @property
    def position(self) -> Position:
        """Where it stands before its first step."""

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by."""

    def steps(
        self, batches: Iterable[Batch], first: int = 0, done: Callable[[], None] = lambda: None
    ) -> Iterator[StepOutcome]:
        """Train on ``batches``, numbered from ``first``; yields what is known of a step.

        ``done`` is called when nothing of the step that was yielded last is under way any more.
        """

    def settle(self) -> None:
        """Return when nothing of the last step is under way."""

    def take_timeline(self) -> Timeline:
        """Return what the lanes did since the last call."""

    def fallbacks(self) -> dict[str, int]:
        """Return what could not be had as asked so far, and how often."""
