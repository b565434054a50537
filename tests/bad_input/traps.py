"""Trouble at a chosen moment: while a certain kind of op of a certain step runs, in the thread that runs it."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outsize.checkpoint.files import checkpoint_format
from outsize.checkpoint.files.checkpoint_shards import CheckpointWriter
from outsize.checkpoint.saving import Saving
from outsize.planner.program.program import Kind, Op
from outsize.runtime.engine import engine
from outsize.runtime.ops.context import HandlerTable, StepContext

SECOND = 1  # steps are numbered from 0


class Trap:
    """Does something once, when the code of an op comes by.

    Args:
        monkeypatch: undoes everything.
        kind: of the op.
        step: of the run, from 0.
        microbatch: of the op; None for any.
        unit: of the op; None for any.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: Kind,
        *,
        step: int = SECOND,
        microbatch: int | None = None,
        unit: int | None = None,
    ) -> None:
        self._monkeypatch = monkeypatch
        self._wanted = kind, step, microbatch, unit
        self._thread = threading.local()
        self.sprung = 0
        handle = engine.run_op

        def watched(table: HandlerTable, op: Op, context: StepContext) -> None:
            self._thread.now = op, getattr(context, "number", None)
            handle(table, op, context)

        monkeypatch.setattr(engine, "run_op", watched)

    def put(self, owner: Any, name: str, action: Callable[[], object]) -> None:
        """Run ``action`` before ``owner.name`` does its work, when the moment has come."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def trapped(*args: Any, **kwargs: Any) -> Any:
            if self._is_now():
                self.sprung += 1
                action()
            return real(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, trapped)

    def _is_now(self) -> bool:
        op, step = getattr(self._thread, "now", (None, None))
        if op is None:
            return False
        kind, number, microbatch, unit = self._wanted
        return (
            op.kind is kind
            and step == number
            and microbatch in (None, op.microbatch)
            and unit in (None, op.unit)
        )


def while_saving(
    monkeypatch: pytest.MonkeyPatch, step: int, num_writes: int, action: Callable[[], object]
) -> None:
    """Run ``action`` before the write number ``num_writes``, from 0, of the checkpoint after ``step`` steps."""
    write_all, begin = checkpoint_format._write_all, Saving._begin
    left: list[int] = []

    def begin_checkpoint(self: Saving) -> CheckpointWriter:
        left[:] = [num_writes] if self.step == step else []
        return begin(self)

    def write_some(descriptor: int, data: memoryview, offset: int) -> int:
        if left == [0]:
            left.clear()
            action()
        left[:] = [number - 1 for number in left]
        return write_all(descriptor, data, offset)

    monkeypatch.setattr(Saving, "_begin", begin_checkpoint)
    monkeypatch.setattr(checkpoint_format, "_write_all", write_some)


def raiser(error: BaseException) -> Callable[[], None]:
    """A function that raises ``error``, afresh each time."""

    def raise_it() -> None:
        raise type(error)(*error.args)

    return raise_it
