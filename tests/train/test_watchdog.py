import itertools
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from outsize import files
from outsize.config import dump_config
from outsize.errors import StalledError
from outsize.planner.program.program import Op
from outsize.runtime.engine import engine
from outsize.runtime.engine.executor import Waiting
from outsize.training import watchdog
from outsize.training.run import train
from outsize.training.watchdog import Watchdog
from patience import PATIENCE_S
from support import make_run

SOON = {"steps": 3, "save_every": 1, "stall_floor_s": 0.6, "stall_factor": 1.0}
RESUMED = {**SOON, "resume": "auto", "stall_floor_s": PATIENCE_S}


class Engine:
    """Stands still unless it is told to move."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.given_up: list[BaseException] = []
        self.lanes = {"compute:w0": Waiting("F 3.0@w0", ("LOAD 3@w0.1",)), "up:w0": Waiting("LOAD 3@w0.1")}

    def waiting(self) -> dict[str, Waiting]:
        return self.lanes

    def position(self) -> str:
        return "step 7, 3 of 9 ops done\n-->     3  LOAD 3@w0.1"

    def give_up(self, error: BaseException) -> None:
        self.given_up.append(error)


class Kennel:
    """A watchdog whose looks are taken by hand, one second apart; nothing may stand still for ten."""

    def __init__(
        self,
        run_dir: Path,
        action: str = "report",
        step: int = 1,
        predicted_step_s: float | None = None,
        links_are_disk: bool = False,
    ) -> None:
        self.said: list[str] = []
        self.statuses: list[int] = []
        self.engine = Engine()
        self.dog = Watchdog(
            run_dir,
            self.said.append,
            action=action,
            factor=10.0,
            floor_s=10.0,
            predicted_step_s=predicted_step_s,
            links_are_disk=links_are_disk,
            grace_s=0.0,
            end_process=self.statuses.append,
        )
        self.dog.watch(self.engine, step)

    def look(self, times: int, elapsed_s: float = 1.0) -> None:
        for _ in range(times):
            self.dog.look(elapsed_s)


def test_a_run_whose_giving_up_hangs_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "REPORT_S", 0.05)
    kennel, for_ever = Kennel(tmp_path, "abort"), threading.Event()
    monkeypatch.setattr(kennel.engine, "give_up", lambda _: for_ever.wait())
    kennel.look(20)
    assert kennel.statuses == [watchdog.STALLED_STATUS]
    for_ever.set()


def test_a_report_says_what_lanes_wait_for_where_the_program_is_and_what_threads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path / "absent")
    )  # as a full one: nothing is written there
    kennel = Kennel(tmp_path, step=7)
    kennel.look(20)
    (line,) = kennel.said
    assert line == (
        "stalled: step 7: nothing has ended for 11.0 s, more than train.stall_floor_s=10. Lane up:w0 hangs in LOAD "
        "3@w0.1; compute:w0 waits for it. A copy over the link does not end: look at nvidia-smi and dmesg. "
        f"{tmp_path}/stall-00000007.txt says where every thread stands"
    )
    text = (tmp_path / "stall-00000007.txt").read_text()
    assert "compute:w0: F 3.0@w0 waits for LOAD 3@w0.1" in text
    assert "-->     3  LOAD 3@w0.1" in text
    assert "Thread MainThread (most recent call first):" in text
    assert "test_watchdog.py" in text  # the stack of this thread
    assert (kennel.engine.given_up, kennel.statuses) == ([], [])


def test_its_own_thread_may_end_it(tmp_path: Path):
    """The collector lets go of a model, and of its watchdog, in any thread."""
    dog, ended = Watchdog(tmp_path, print, action="report", factor=1.0, floor_s=0.01), threading.Event()

    class Ending(Engine):
        def __getattribute__(self, name: str) -> Any:
            if name == "num_ended":
                dog.__exit__()
                ended.set()
            return super().__getattribute__(name)

    with dog:
        dog.watch(Ending(), 1)
        assert ended.wait(PATIENCE_S)


def test_to_abort_is_to_give_the_step_up_and_where_that_ends_nothing_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kennel = Kennel(tmp_path, "abort")
    kennel.look(20)
    (error,) = kennel.engine.given_up
    assert isinstance(error, StalledError)
    assert kennel.statuses == [watchdog.STALLED_STATUS]
    assert "outsize: StalledError: step 1: nothing has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (True, "Go on with --resume auto;"),
        (False, "Nothing is saved yet, --resume auto starts with step 1 again;"),
    ],
)
def test_a_stall_says_whether_there_is_something_to_go_on_from(saved: bool, told: str, tmp_path: Path):
    kennel = Kennel(tmp_path, "abort")
    kennel.dog.saved = lambda done: saved and done == 0
    kennel.look(20)
    assert told in str(kennel.engine.given_up[0])


LANES = ("compute:w0", "up:w0", "down:w0", "peer:w0-w1", "host", "read", "write", "read:units", "write:units")
LANES += ("net:reduce", "net:gather", "store", "commit")


@pytest.mark.parametrize("hung", LANES)
def test_one_short_message_names_the_lane_that_hangs_and_what_to_look_at(hung: str, tmp_path: Path):
    """However many lanes and ops wait for it; the disk is named where a disk can be the reason, and nowhere else."""
    kennel = Kennel(tmp_path, "abort")
    ops = tuple(f"STEP {unit}#3@t1" for unit in range(200))
    kennel.engine.lanes = {lane: Waiting("LOAD 3@w0.1", () if lane == hung else ops) for lane in LANES}
    kennel.look(20)
    (error,) = kennel.engine.given_up
    text = str(error).replace(str(tmp_path), "runs/first")
    assert f"Lane {hung} hangs in LOAD 3@w0.1; " in text
    assert "and 8 more lanes wait for it" in text
    assert len(text) <= 600
    disks = ("read", "write", "store", "commit")
    assert ("The disk does not answer" in text) == (hung.partition(":")[0] in disks)
    assert ("other ranks" in text.lower()) == hung.startswith("net")
    assert kennel.said == []  # it is the error that the run ends with, and is printed then
    assert ops[-1] in (tmp_path / "stall-00000001.txt").read_text()


def test_with_a_disk_below_the_device_its_copies_are_the_disks(tmp_path: Path):
    kennel = Kennel(tmp_path, links_are_disk=True)
    kennel.look(20)
    assert "Lane up:w0 hangs in LOAD 3@w0.1; compute:w0 waits for it. The disk does not" in kennel.said[0]


def test_where_no_op_is_under_way_the_disk_is_not_blamed(tmp_path: Path):
    kennel = Kennel(tmp_path)
    kennel.engine.lanes = {}
    kennel.look(20)
    assert "No op is under way: look at the main thread in the report" in kennel.said[0]


class Hung(files.System):
    """A disk that does not answer until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        self.let_go.wait()
        return super().open(path, flags, mode)


def test_a_report_that_cannot_be_written_keeps_no_run_from_being_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "REPORT_S", 0.05)
    kennel, disk = Kennel(tmp_path, "abort"), Hung()
    with files.replaced(disk):
        looking = threading.Thread(target=kennel.look, args=(20,), daemon=True)
        looking.start()
        looking.join(PATIENCE_S)
        stuck = looking.is_alive()
        disk.let_go.set()
        looking.join()
        for thread in threading.enumerate():
            if thread.name == "outsize-report":
                thread.join()
    assert not stuck
    assert len(kennel.engine.given_up) == 1
    assert kennel.statuses == [watchdog.STALLED_STATUS]


def test_a_step_is_reported_once(tmp_path: Path):
    kennel = Kennel(tmp_path)
    kennel.look(100)
    assert len(kennel.said) == 1
    kennel.dog.step_ended(0.1)
    kennel.look(100)
    assert len(kennel.said) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["stall-00000001.txt", "stall-00000002.txt"]


def test_progress_is_no_stall(tmp_path: Path):
    kennel = Kennel(tmp_path)
    for _ in range(20):
        kennel.engine.num_ended += 1
        kennel.look(9)
    assert kennel.said == []


def test_data_that_are_made_meanwhile_are_progress(tmp_path: Path):
    kennel, made = Kennel(tmp_path), itertools.count()
    kennel.dog.watch(kennel.engine, 3, lambda: next(made))
    kennel.look(100)
    assert kennel.said == []


def test_what_is_not_a_step_is_called_by_its_name(tmp_path: Path):
    kennel = Kennel(tmp_path)
    with kennel.dog.during("the checkpoint after step 3"):
        kennel.look(20)
    (line,) = kennel.said
    assert line.startswith("stalled: the checkpoint after step 3: nothing has ended for 11.0 s, more than")


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path):
    kennel = Kennel(tmp_path)
    kennel.look(4, elapsed_s=3600.0)
    assert kennel.said == []


def test_the_limit_is_a_multiple_of_the_median_step(tmp_path: Path):
    dog = Kennel(tmp_path).dog
    assert dog.limit_s == 10.0
    for seconds in (1.0, 2.0, 300.0):
        dog.step_ended(seconds)
    assert dog.limit_s == 20.0


def test_until_a_step_was_measured_the_limit_is_a_multiple_of_the_predicted_one(tmp_path: Path):
    kennel = Kennel(tmp_path, predicted_step_s=3.0)
    assert kennel.dog.limit_s == 30.0
    kennel.look(29)
    assert kennel.said == []
    kennel.look(3)
    assert ", more than 10 times the predicted step, 3.0 s. " in kennel.said[0]
    kennel.dog.step_ended(2.0)
    assert kennel.dog.limit_s == 20.0
    kennel.look(22)
    assert ", more than 10 times the median of 1 steps, 2.0 s. " in kennel.said[1]


def test_nobody_watches_before_the_first_step_or_if_told_not_to(tmp_path: Path):
    before = threading.active_count()
    with Watchdog(tmp_path, print, action="ignore", factor=1.0, floor_s=1.0):
        assert threading.active_count() == before
    with Watchdog(tmp_path, print, action="abort", factor=1.0, floor_s=1.0) as dog:
        dog.look(1e9)
    assert list(tmp_path.iterdir()) == []


# --- under a run --------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """One op of a run stands still until the returned event is set; before it began, the watchdog looks away.

    So nothing else counts as a stall, however slow the machine is.
    """
    began, let_go = threading.Event(), threading.Event()
    handle, look = engine.run_op, Watchdog.look

    def stuck_op(table: Any, op: Op, context: Any) -> None:
        if str(op) == "B 1.0@w0" and context.number == 1:
            began.set()
            assert let_go.wait(PATIENCE_S)
        handle(table, op, context)

    monkeypatch.setattr(engine, "run_op", stuck_op)
    monkeypatch.setattr(
        Watchdog, "look", lambda dog, elapsed_s: look(dog, elapsed_s) if began.is_set() else None
    )
    monkeypatch.setitem(Watchdog.__init__.__kwdefaults__, "grace_s", PATIENCE_S)
    return let_go


def test_a_run_whose_op_comes_back_late_ends_with_an_error_and_resumes(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    give_up = engine.Engine.give_up
    with monkeypatch.context() as patched:
        patched.setattr(engine.Engine, "give_up", lambda *given: (give_up(*given), stuck.set()))
        with pytest.raises(StalledError, match=r"^step 2: nothing .* Lane compute:w0 hangs in B 1\.0@w0"):
            train(make_run(tmp_path, train=SOON), announce=said.append)
    text = (tmp_path / "run/stall-00000002.txt").read_text()
    assert "B 1.0@w0" in text.split("-->")[1].splitlines()[0]
    assert "stuck_op" in text  # where the lane sleeps
    assert not any(line.startswith("stalled") for line in said)
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-00000001"
    assert train(make_run(tmp_path, train=RESUMED)).steps == 3


def test_a_run_that_is_only_reported_ends_well(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    report = Watchdog._report
    monkeypatch.setattr(Watchdog, "_report", lambda *given: (report(*given), stuck.set()))
    assert train(make_run(tmp_path, train={**SOON, "on_stall": "report"})).steps == 3
    assert (tmp_path / "run/stall-00000002.txt").exists()


SCRIPT = """
import sys, threading
from pathlib import Path
from outsize.config import load_config
from outsize.runtime.engine import engine
from outsize.training import run, watchdog
began, handle, look = threading.Event(), engine.run_op, watchdog.Watchdog.look
def stuck(table, op, context):
    if (str(op), context.number) == ("B 1.0@w0", 1):
        began.set()
        threading.Event().wait()
    handle(table, op, context)
engine.run_op = stuck
watchdog.Watchdog.look = lambda dog, elapsed_s: look(dog, elapsed_s) if began.is_set() else None
watchdog.Watchdog.__init__.__kwdefaults__["grace_s"] = 1.0
run.train(load_config(Path(sys.argv[1])))
"""


def test_an_op_that_never_comes_back_ends_the_process(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(dump_config(make_run(tmp_path, train=SOON)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == watchdog.STALLED_STATUS, done.stderr
    assert "outsize: StalledError: step 2: nothing has ended" in done.stderr
    assert train(make_run(tmp_path, train=RESUMED)).steps == 3
