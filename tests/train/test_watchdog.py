import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import StalledError
from outsize.testing.faults import LANE, Fault, Key, Layer, layered
from outsize.train import watchdog
from outsize.train.run import train
from outsize.train.watchdog import Watchdog
from support import make_run

STUCK = Key(LANE, "B 1.0@w0", 1, 0, 0)
SOON = {"steps": 3, "save_every": 1, "stall_floor_s": 0.6, "stall_factor": 1.0}


class Engine:
    """Stands still unless it is told to move."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.given_up: list[BaseException] = []
        self.gave_up = threading.Event()

    def waiting(self) -> dict[str, str]:
        return {"up:w0": "LOAD 3@w0.1 is running"}

    def position(self) -> str:
        return "step 7, 3 of 9 ops done\n-->     3  LOAD 3@w0.1"

    def give_up(self, error: BaseException) -> None:
        self.given_up.append(error)
        self.gave_up.set()


def dog(run_dir: Path, said: list[str], **settings: Any) -> Watchdog:
    chosen = {"action": "abort", "factor": 2.0, "floor_s": 0.05, "tick_s": 0.01, **settings}
    return Watchdog(run_dir, said.append, **chosen)


def test_a_report_says_what_lanes_wait_for_where_the_program_is_and_what_threads_do(tmp_path: Path):
    said: list[str] = []
    engine = Engine()
    with dog(tmp_path, said) as watching:
        watching.watch(engine, 7)
        assert engine.gave_up.wait(10)
    (line,) = said
    assert line.startswith("stalled: step 7: nothing has ended for ")
    assert "up:w0: LOAD 3@w0.1 is running" in line
    text = (tmp_path / "stall-00000007.txt").read_text()
    assert "-->     3  LOAD 3@w0.1" in text
    assert "test_watchdog.py" in text  # the stack of this thread
    assert isinstance(engine.given_up[0], StalledError)


def test_reporting_only_waits_on_and_reports_a_step_once(tmp_path: Path):
    said: list[str] = []
    engine = Engine()
    reported = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        reported.set()

    with Watchdog(tmp_path, say, action="report", factor=1.0, floor_s=0.05, tick_s=0.01) as watching:
        watching.watch(engine, 1)
        assert reported.wait(10)
        time.sleep(0.3)
        assert len(said) == 1
        reported.clear()
        watching.step_ended(0.01)
        assert reported.wait(10)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["stall-00000001.txt", "stall-00000002.txt"]
    assert engine.given_up == []


def test_progress_and_pauses_are_no_stall(tmp_path: Path):
    said: list[str] = []
    engine = Engine()
    with dog(tmp_path, said, floor_s=0.5) as watching:
        watching.watch(engine, 1)
        for _ in range(50):
            engine.num_ended += 1
            time.sleep(0.02)
        with watching.paused():
            time.sleep(1.0)
    assert said == []


def test_the_limit_is_a_multiple_of_the_median_step(tmp_path: Path):
    watching = dog(tmp_path, [], factor=10.0, floor_s=5.0)
    assert watching.limit_s == 5.0
    for seconds in (1.0, 2.0, 300.0):
        watching.step_ended(seconds)
    assert watching.limit_s == 20.0


def test_time_in_which_the_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each look at the clock finds that an hour has passed."""
    said: list[str] = []
    clock = iter(range(0, 10**9, 3600))
    with monkeypatch.context() as patched:
        patched.setattr(watchdog.time, "monotonic", lambda: next(clock))
        with dog(tmp_path, said, floor_s=100.0, tick_s=0.01) as watching:
            watching.watch(Engine(), 1)
            time.sleep(0.2)
    assert said == []


def test_ignoring_starts_no_thread(tmp_path: Path):
    before = threading.active_count()
    with dog(tmp_path, [], action="ignore"):
        assert threading.active_count() == before


# --- under a run --------------------------------------------------------------------------------------------


def stuck_run(tmp_path: Path, delay_s: float, **train_section: Any) -> tuple[Config, Layer]:
    config = make_run(tmp_path, train={**SOON, **train_section})
    return config, Layer(tmp_path, {STUCK: Fault.DELAY}, delay_s=delay_s)


def test_a_run_whose_op_comes_back_late_ends_with_an_error_and_resumes(tmp_path: Path):
    config, layer = stuck_run(tmp_path, 4.0)
    said: list[str] = []
    with (
        layered(layer),
        pytest.raises(StalledError, match=r"^step 2: nothing .* compute:w0: B 1\.0@w0 is running"),
    ):
        train(config, announce=said.append)
    text = (tmp_path / "run/stall-00000002.txt").read_text()
    assert "B 1.0@w0" in text.split("-->")[1].splitlines()[0]
    assert "lane_op" in text  # where the lane sleeps
    assert any(line.startswith("stalled: step 2") for line in said)
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-00000001"
    resumed = train(make_run(tmp_path, train={**SOON, "resume": "auto", "stall_floor_s": 60}))
    assert resumed.steps == 3


def test_a_run_that_is_only_reported_ends_well(tmp_path: Path):
    config, layer = stuck_run(tmp_path, 3.0, on_stall="report")
    with layered(layer):
        assert train(config).steps == 3
    assert (tmp_path / "run/stall-00000002.txt").exists()


SCRIPT = """
import sys, threading
from pathlib import Path
from outsize.config import load_config
from outsize.runtime import engine
from outsize.train import run, watchdog
handle = engine.run_op
def stuck(table, op, context):
    if (str(op), context.number) == ("B 1.0@w0", 1):
        threading.Event().wait()
    handle(table, op, context)
engine.run_op = stuck
watchdog.Watchdog.__init__.__kwdefaults__["grace_s"] = 1.0
run.train(load_config(Path(sys.argv[1])))
"""


def test_an_op_that_never_comes_back_ends_the_process(tmp_path: Path):
    from outsize.config import dump_config

    config, _ = stuck_run(tmp_path, 0.0)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == watchdog.STALLED_STATUS, done.stderr
    assert "outsize: StalledError: step 2: nothing has ended" in done.stderr
    assert train(make_run(tmp_path, train={**SOON, "resume": "auto", "stall_floor_s": 60})).steps == 3
