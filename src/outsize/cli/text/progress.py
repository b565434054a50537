"""The live line of a run: loss, learning rate, gradient norm, tokens/s, GB/s each way, stall.

On a terminal one line is rewritten with every step; anywhere else each step is a line of its own, so that a
log file reads like a table. Nothing runs in the background: the line changes when a step reports.
"""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outsize.units import format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.training.metrics.run_records import StepRecord


class Progress:
    """Shows step records as they come.

    Args:
        console: where to.
        num_steps: steps of the whole run.
    """

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live: Live | None = None
        self._seconds = 0.0
        self._num_seen = 0

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
        """Print a line above the live one."""
        self._console.print(text, markup=False)

    def update(self, record: "StepRecord") -> None:
        """Show ``record``."""
        self._seconds += record.seconds
        self._num_seen += 1
        line = describe(record, self._num_steps)
        if self._live is None:
            self.say(line)
            return
        left = (self._num_steps - record.step) * self._seconds / self._num_seen
        self._live.update(
            Text(f"{line}  {format_seconds(left)} left", no_wrap=True, overflow="ellipsis"), refresh=True
        )


def describe(record: "StepRecord", num_steps: int) -> str:
    """Return a step as one line, its columns aligned from step to step."""
    width = len(str(num_steps))
    stall = f"stall {record.stall_share:6.1%}"
    parts = [
        f"step {record.step:>{width}}/{num_steps}",
        f"loss {record.loss:.4f}",
        f"lr {record.lr:.2e}",
        f"norm {record.grad_norm:.3f}",
        f"{record.tokens_per_s:.0f} tokens/s",
        f"in {format_rate(record.up_bytes_per_s)}",
        f"out {format_rate(record.down_bytes_per_s)}",
        f"{stall} {record.stall_owner}" if record.stall_owner else stall,
    ]
    if record.skipped:
        parts.append("skipped: not finite")
    return "  ".join(parts)
