"""What a loop of the user's own tells in a run directory: the files that `outsize train` writes there.

1. Each plan is written as it is made, with what the run is of.
2. A step is what lies between two steps of an optimizer of torch's kind over parameters of the model: any number of
   forwards and backwards. Its line goes to the heartbeat when the next step is known, since the optimizer goes on
   moving bytes until then.
3. While a pass runs a watchdog watches it. Between passes the loop does what it likes, and that counts as progress.
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from outsize.accelerators import uuids_of
from outsize.config import Config
from outsize.config.train_section import TrainConfig
from outsize.hardware.gpus import import_nvml
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.search.step_plan import Plan
from outsize.planner.simulate.simulator import Event, Timeline
from outsize.reporting.html_page import to_chrome
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.executor import Waiting
from outsize.runtime.ops.context import Moved, StepContext
from outsize.session.session import Session
from outsize.session.steps import StepOutcome
from outsize.telemetry.counters import GpuSampler
from outsize.training.loop import TIMELINE_STEP
from outsize.training.measures import Accounts, describe, peak_of
from outsize.training.records import Heartbeat, StepRecord, write_json, write_whole
from outsize.training.run_dir import PLAN_FILE, claimed
from outsize.training.watchdog import Watchdog

_log = logging.getLogger(__name__)
# Ops that a loop remembers, the last ones of a step: it may go forward for as long as it likes.
MOST_EVENTS = 200_000


class _Passes:
    """The engine while a pass is under way; between passes there is progress at every look."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._looks = 0

    @property
    def num_ended(self) -> int:
        """See `Watched.num_ended`."""
        engine = self.engine
        self._looks -= 1
        return self._looks if engine is None else engine.num_ended

    def waiting(self) -> Mapping[str, Waiting]:
        """See `Watched.waiting`."""
        engine = self.engine
        return {} if engine is None else engine.waiting()

    def position(self) -> str:
        """See `Watched.position`."""
        engine = self.engine
        return "" if engine is None else engine.position()

    def give_up(self, error: BaseException) -> None:
        """See `Watched.give_up`."""
        engine = self.engine
        if engine is not None:
            engine.give_up(error)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a loop that is a run.

    Attributes:
        config: of the run, which says whether it goes on with what its directory holds.
        num_steps: that were done before.
        complete: called with the record of each step; returns it with what the loop knows besides.
    """

    config: Config
    num_steps: int
    complete: Callable[[StepRecord], StepRecord]


class LoopRecords:
    """Writes the run directory of a wrapped model; closed with the model.

    Args:
        run_dir: made if need be; nobody else's.
        session: of the model.
        model: the model.
        dtype: in which it computes.
        known: of the loop; None where nothing is.

    Raises:
        ConfigError: the directory holds a run.
        StorageError: it cannot be written.
    """

    def __init__(
        self, run_dir: Path, session: Session, model: nn.Module, dtype: str, known: Known | None = None
    ) -> None:
        self._run_dir, self._dtype, self._is_bare = run_dir, dtype, known is None
        self._complete: Callable[[StepRecord], StepRecord] = (
            known.complete if known else lambda record: record
        )
        # Weakly: what closes the records of a model that is dropped must not keep the model.
        self._session, self._model = weakref.ref(session), weakref.ref(model)
        self._passes = _Passes()
        self._accounts: Accounts | None = None
        self._unwritten: tuple[StepRecord, StepOutcome] | None = None
        self._first = self._number = known.num_steps if known else 0
        self._began_s = time.perf_counter()
        # Of the step under way:
        self._asked_s: float | None = None
        self._moved: list[Mapping[tuple[str, str], Moved]] = []
        self._loss: tuple[Tensor, int] | None = None
        self._loss_sum = 0.0
        self._scored = self._others = 0  # targets that the model has scored, and backwards from another loss
        self._tokens = 0
        self._norm: Tensor | None = None
        self._events: list[Event] = []
        train = TrainConfig()
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(run_dir, known.config if known else None))
            self._heartbeat = stack.enter_context(Heartbeat(run_dir, _log.warning))
            stack.callback(self._write_line)
            self._watchdog = stack.enter_context(
                Watchdog(
                    run_dir,
                    _log.warning,
                    action="report",  # what becomes of a process that is not ours is not ours to say
                    factor=train.stall_factor,
                    floor_s=train.stall_floor_s,
                    links_are_disk=session.machine.below == "disk",
                )
            )
            uuids = uuids_of(session.machine.devices)
            self._sampler = stack.enter_context(GpuSampler(uuids, import_nvml))
            stack.callback(register_optimizer_step_post_hook(_hook(weakref.ref(self))).remove)
            self._stack = stack.pop_all()
        self._watchdog.setting = ""
        self._watchdog.watch(self._passes, 1)

    def planned(self, plan: Plan, spec: ModelSpec, session: Session) -> None:
        """Write the plan of a new engine, and at the first one of a session what the loop is of."""
        moved = session is not self._session()  # to another home, with its own budgets
        self._session = weakref.ref(session)
        engine = session.engine
        model = self._model()
        assert engine is not None
        assert model is not None
        write_json(self._run_dir / PLAN_FILE, plan.to_dict())
        if self._accounts is not None and not moved:
            return
        machine = session.machine
        peak = peak_of(machine.devices, self._dtype)
        self._accounts = Accounts(
            machine.devices,
            machine.num_workers,
            tuple(engine.moved()),
            session.ledger,
            partial(_fallbacks, self._session),
            self._sampler,
            None,
            peak,
        )
        facts = describe(model, spec, machine, self._dtype, None, peak)
        write_json(self._run_dir / "run.json", {**facts, "num_ranks": 1, "wrapped": self._is_bare})

    def begin(self) -> None:
        """Forget what was done so far: the first step begins now."""
        session = self._session()
        if session is not None and session.engine is not None:
            session.engine.take_timeline()
        self._began_s, self._loss = time.perf_counter(), None
        self._forget()

    def leaving(self, engine: Engine) -> None:
        """Take what an engine knows of the step under way, before it is closed."""
        self._events += engine.take_timeline().events
        del self._events[:-MOST_EVENTS]

    @contextlib.contextmanager
    def passing(self, engine: Engine, context: StepContext) -> Iterator[None]:
        """Watch a pass, and count what it moves."""
        if self._asked_s is None:
            self._asked_s = time.perf_counter()
        self.counts(context)
        self._passes.engine = engine
        try:
            yield
        finally:
            self._passes.engine = None
        self._moved = [{("", crossed): moved for crossed, moved in _sum(self._moved).items()}]
        self.leaving(engine)

    def counts(self, context: StepContext) -> None:
        """Book what the ops of ``context`` move on the step under way."""
        self._moved.append(context.moved)

    def scored(self, loss: Tensor | None, tokens: int) -> None:
        """Take the loss of a batch of so many targets, where its backward began there, else None."""
        self._tokens += tokens
        self._book_loss()  # of a pass before, whose work is done
        if loss is None:
            self._others += 1
        else:
            self._loss = loss, tokens

    def clipped(self, norm: Tensor) -> None:
        """Take the norm of all gradients."""
        self._norm = norm

    def stepped(self, optimizer: Optimizer) -> None:
        """End the step, where ``optimizer`` steps parameters of the model."""
        model, accounts = self._model(), self._accounts
        if model is None or accounts is None or not self._moved:
            return
        own = {id(parameter) for parameter in nn.Module.parameters(model)}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        ended_s = time.perf_counter()
        outcome = self._outcome(float(optimizer.param_groups[0]["lr"]), ended_s)
        session = self._session()
        engine = None if session is None else session.engine
        events = (*self._events, *(engine.take_timeline().events if engine is not None else ()))
        timeline = Timeline(tuple(sorted(events, key=lambda event: event.start_s)))
        self._watchdog.step_ended(outcome.seconds)
        self._write_line()
        failed = {"failed_writes": self._heartbeat.telling.num_failed}
        self._unwritten = self._complete(accounts.record(outcome, timeline, 0, failed)), outcome
        if outcome.number - self._first == TIMELINE_STEP:
            path, trace = self._run_dir / "timeline.json", to_chrome(timeline)
            self._heartbeat.telling.tell("the timeline", lambda: write_whole(path, trace))
        self._number, self._began_s = self._number + 1, ended_s
        self._forget()

    def measured(self, loss: float, perplexity: float | None) -> None:
        """Take what an evaluation after the step that is known last has found."""
        if self._unwritten is not None:
            record, outcome = self._unwritten
            self._unwritten = replace(record, eval_loss=loss, eval_perplexity=perplexity), outcome

    def close(self) -> None:
        """Write what is known, and watch no longer; idempotent."""
        self._stack.close()

    def _outcome(self, lr: float, ended_s: float) -> StepOutcome:
        asked_s = self._asked_s or ended_s
        self._book_loss()
        return StepOutcome(
            number=self._number,
            loss=self._loss_sum / self._scored if self._scored and not self._others else float("nan"),
            gradient_norm=float("nan") if self._norm is None else float(self._norm),
            learning_rate=lr,
            tokens=self._tokens,
            seconds=ended_s - self._began_s,
            data_s=asked_s - self._began_s,
            between_s=0.0,
            ended_s=ended_s,
            skipped=False,
            moved=partial(_sum, tuple(self._moved)),
        )

    def _forget(self) -> None:
        """Begin to count anew, for the next step."""
        self._asked_s, self._norm, self._tokens = None, None, 0
        self._moved, self._events = [], []
        self._loss_sum, self._scored, self._others = 0.0, 0, 0

    def _book_loss(self) -> None:
        if self._loss is not None:
            (loss, tokens), self._loss = self._loss, None
            self._loss_sum += float(loss) * tokens
            self._scored += tokens

    def _write_line(self) -> None:
        """Write the line of the step that was known last: by now all of its bytes have moved."""
        if self._unwritten is not None and self._accounts is not None:
            (record, outcome), self._unwritten = self._unwritten, None
            self._heartbeat.beat(self._accounts.counted(record, outcome))


def _hook(records: "weakref.ref[LoopRecords]") -> Any:
    """Return what torch calls after each step of any optimizer."""

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = records()
        if found is not None:
            found.stepped(optimizer)

    return stepped


def _fallbacks(session: "weakref.ref[Session]") -> dict[str, int]:
    found = session()
    return {} if found is None else found.fallbacks()


def _sum(counted: Iterable[Mapping[tuple[str, str], Moved]]) -> dict[str, Moved]:
    """Return the bytes that all passes of a step have moved so far, by what they crossed."""
    found: dict[str, Moved] = {}
    for moved in counted:
        for (_, crossed), size in dict(moved).items():
            found[crossed] = found.get(crossed, Moved()).and_then(*size)
    return found
