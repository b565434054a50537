"""The live line of a run: step, loss and the time that is left; with ``--verbose`` all that is known of a step.

On a terminal one line is rewritten with every step; anywhere else each step is a line of its own, so that a
log file reads like a table. Nothing runs in the background: the line changes when a step reports.
"""

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outsize.cli.text.columns import width_of, wrapped
from outsize.detail import Detail
from outsize.units import format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.training.records import StepRecord


# What a step waited for, by the cause in its record, in words.
WAITS = {
    "weights": "weights to arrive",
    "gradients": "gradients to move",
    "activations": "activations to move",
    "optimizer": "the optimizer",
    "disk": "the disk",
    "commit": "a step to be safe on the disk",
    "checkpoint": "a checkpoint",
    "workers": "other workers",
    "ranks": "other ranks",
    "loader": "the next batch",
    "between steps": "the run between two steps",
    "python": "Python to hand out work",
}
# Steps whose mean says how long the rest will take.
_RECENT = 20


class Progress:
    """Shows step records as they come.

    Args:
        console: where to.
        verbose: whether details, rates, waits, learning rate, gradient norm and lanes are shown as well.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._live: Live | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._followed: StepRecord | None = None  # the last step whose waits were followed to their causes

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # auto_refresh would start a thread; a step refreshes instead.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line above the live one; details of those where the screen is verbose."""
        if self._verbose or not isinstance(text, Detail):
            self._console.print(wrapped(text, width_of(self._console.file)), markup=False)

    def update(self, record: "StepRecord") -> None:
        """Show ``record``."""
        self._recent_s.append(record.seconds)
        left_s = (record.num_steps - record.step) * sum(self._recent_s) / len(self._recent_s)
        self._followed = record if record.waits_s else self._followed
        line = describe(record, left_s, self._followed, verbose=self._verbose)
        if self._live is None:
            self.say(line)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def describe(
    record: "StepRecord", left_s: float, followed: "StepRecord | None" = None, *, verbose: bool = False
) -> str:
    """Return a step as one line, its columns aligned from step to step.

    Args:
        record: of the step.
        left_s: seconds that the run is expected to take from here on.
        followed: the last step whose waits were followed to their causes; ``record`` by default.
        verbose: whether learning rate, gradient norm, rates and lanes are told as well.
    """
    parts = [
        f"step {record.step:>{len(str(record.num_steps))}}/{record.num_steps}",
        f"loss {record.loss:.4f}",
        f"{format_seconds(left_s)} left",
    ]
    if record.skipped:
        parts.append("skipped: not finite")
    if verbose:
        stall = f"stall {record.stall_share:6.1%}"
        parts += [
            *([] if record.epoch is None else [f"epoch {record.epoch:.2f}"]),
            f"{record.tokens_per_s:.0f} trained tokens/s",
            waited(record, followed or record),
            f"lr {record.lr:.2e}",
            f"norm {record.grad_norm:.3f}",
            f"in {format_rate(record.up_bytes_per_s)}",
            f"out {format_rate(record.down_bytes_per_s)}",
            f"{stall} {record.stall_owner}" if record.stall_owner else stall,
        ]
    return "  ".join(parts)


def waited(record: "StepRecord", followed: "StepRecord") -> str:
    """Return which share of a step the compute lane that stood still longest waited, and mostly for what.

    The cause is that of ``followed``, which is named where it is another step: causes are known of one step in several.
    """
    lane = max(record.idle_s, key=lambda name: record.idle_s[name], default=None)
    if lane is None or record.seconds <= 0:
        return "waits   0%"
    causes = {
        cause: sum(owners.values()) for cause, owners in followed.waits_s.get(lane, {}).items() if owners
    }
    most = max(causes, key=lambda cause: causes[cause], default=None)
    share = f"waits {min(1.0, record.idle_s[lane] / record.seconds):4.0%}"
    if most is None or record.idle_s[lane] < 0.005 * record.seconds:
        return share
    at = "" if followed.step == record.step else f" (step {followed.step})"
    return f"{share}, mostly for {WAITS.get(most, most)}{at}"
