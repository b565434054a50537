"""Ctrl-C and SIGTERM: the first ends the run after the step under way, saved; the second ends it at once."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bad_input.traps import Trap, while_saving
from bad_input.world import World, half_written, names_below, run_well
from outsize.config import dump_config
from outsize.planner.program.program import Kind
from outsize.runtime.ops.compute_ops import ComputeOps
from outsize.session.stream import StreamedTrainer
from outsize.training.evaluation import Interrupt
from patience import PATIENCE_S

SIX = {"steps": 6}
EACH = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"]
)


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sends this process a signal from any thread, and returns when it has been taken note of."""
    taken = threading.Event()
    handle = Interrupt._handle

    def noted(self: Interrupt, number: int, frame: Any) -> None:
        taken.set()
        handle(self, number, frame)

    monkeypatch.setattr(Interrupt, "_handle", noted)
    former = signal.signal(signal.SIGUSR1, lambda *_: None)

    def send_it(number: int) -> None:
        taken.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        if threading.current_thread() is threading.main_thread():
            return
        # A signal that comes just before the main thread goes to sleep does not wake it; another one does.
        while not taken.wait(1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    yield send_it
    signal.signal(signal.SIGUSR1, former)


@pytest.fixture(autouse=True)
def handlers_are_given_back() -> Any:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@EACH
def test_the_first_signal_finishes_the_step_and_saves(
    world: World, monkeypatch: pytest.MonkeyPatch, send: Callable[[int], None], number: int
) -> None:
    with monkeypatch.context() as patched:
        Trap(patched, Kind.FORWARD, microbatch=1, unit=1).put(ComputeOps, "_find", lambda: send(number))
        outcome = world.command(world.config(train=SIX))
    assert (outcome.status, outcome.result["steps"]) == (0, 2)
    told = r"was heard: the run ends after step 2, in about .*, and saves\. A second one stops it at once: "
    assert re.search(told, " ".join(outcome.err.split()))
    assert "interrupted after step 2; saving" in outcome.err
    assert "interrupted and saved; outsize train " in outcome.err
    again = world.command(world.config(train=SIX), "--resume", "auto")
    assert (again.status, again.result["steps"]) == (0, 6)
    run_well(world, "through", train=SIX)
    assert world.digest() == world.digest("through")


@EACH
def test_the_second_signal_stops_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, send: Callable[[int], None], number: int
) -> None:
    """A checkpoint stays, of the step before if it was complete; from there the run ends where it would have."""
    every_step = {"save_every": 1, **SIX}
    with monkeypatch.context() as patched:
        trap = Trap(patched, Kind.FORWARD, microbatch=1, unit=1, step=2)
        trap.put(ComputeOps, "_find", lambda: (send(number), send(number)))
        outcome = world.command(world.config(train=every_step))
    check_stopped(outcome.status, outcome.err, world.root / "run", "step-0000000[12]")
    again = world.command(world.config(train=every_step), "--resume", "auto")
    assert (again.status, again.result["steps"]) == (0, 6)
    run_well(world, "through", train=SIX)
    assert world.digest() == world.digest("through")


def check_stopped(status: int, err: str, run_dir: Path, latest: str) -> None:
    """A run that stopped at once: says so in one line, and its last checkpoint is whole."""
    assert status == 130
    assert err.count("outsize: interrupted") == 1
    assert "Traceback" not in err
    assert re.fullmatch(latest, (run_dir / "checkpoints/latest").read_text().strip())
    assert not half_written(run_dir)
    assert {path.name for path in (run_dir / "store").iterdir()} == {"home.bin"}


def test_the_second_signal_while_saving_leaves_the_checkpoint_before(
    world: World, monkeypatch: pytest.MonkeyPatch, send: Callable[[int], None]
) -> None:
    every_step = {"save_every": 1, **SIX}
    with monkeypatch.context() as patched:
        while_saving(patched, 2, 50, lambda: (send(signal.SIGINT), send(signal.SIGINT)))
        outcome = world.command(world.config(train=every_step))
    check_stopped(outcome.status, outcome.err, world.root / "run", "step-00000001")


@EACH
def test_a_signal_before_the_first_step_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, send: Callable[[int], None], number: int
) -> None:
    def filling(self: StreamedTrainer) -> None:
        fill(self)
        send(number)

    fill = StreamedTrainer.fill
    with monkeypatch.context() as patched:
        patched.setattr(StreamedTrainer, "fill", filling)
        outcome = world.command(world.config(train=SIX))
    assert (outcome.status, outcome.err.count("outsize: interrupted")) == (130, 1)
    assert "interrupted while the machine was timed" in outcome.err
    assert "nothing is lost" in outcome.err
    assert names_below(world.root) == {"config-of-command.yaml"}


SCRIPT = """
import os, signal, sys
from outsize.runtime.engine import engine
handle = engine.run_op
def watched(table, op, context):
    number = getattr(context, "number", None)  # a STORE belongs to no step
    if (str(op), number) == ("F 1.1@w0", 2):
        os.kill(os.getpid(), signal.SIGINT)
    if (str(op), number) == ("B 1.1@w0", 2):
        os.kill(os.getpid(), signal.SIGINT)
    handle(table, op, context)
engine.run_op = watched
from outsize.cli import main
main(sys.argv[1:])
"""


def test_a_process_that_was_told_twice_ends(world: World) -> None:
    """As a shell sees it: status 130, no traceback, no thread that keeps the process."""
    config = world.config(train={"save_every": 1, **SIX})
    file = world.root / "run.yaml"
    file.write_text(dump_config(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "train", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    check_stopped(done.returncode, done.stderr, world.root / "run", "step-0000000[12]")
    assert done.stderr.rstrip().endswith("outsize: interrupted")
