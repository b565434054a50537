"""COMMIT: the home makes the state after a step the one that a crash goes back to."""

from collections.abc import Callable, Mapping
from typing import Any

from outsize.planner.program.program import Kind, Op
from outsize.runtime.ops.context import StepContext, handles
from outsize.storage.home import Home

Describe = Callable[[StepContext], Mapping[str, Any]]
"""What the run says of itself after a step, JSON; called once per step, in order, when all of its ops are done."""


class CommitOps:
    """Commits steps.

    Args:
        home: where the state rests; one that does not commit gets no COMMIT from the planner.
        describe: what a commit record says of the run.
    """

    def __init__(self, home: Home, describe: Describe) -> None:
        self._home = home
        self._describe = describe

    @handles(Kind.COMMIT)
    def commit(self, op: Op, context: StepContext) -> None:
        """COMMIT: the step of ``context``, skipped or not."""
        self._home.commit(self._describe(context))
