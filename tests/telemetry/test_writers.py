"""Trackers are told the same numbers, and none of them can end a run."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outsize.errors import ConfigError
from outsize.telemetry.writers import Writers, open_writers, values_of
from outsize.training.records import StepRecord
from outsize.training.run import train
from support import make_run


class Memory:
    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at
        self.closed = 0

    def write(self, step, values):
        if step == self.fails_at:
            raise OSError("no network")
        self.told.append((step, dict(values)))

    def close(self):
        self.closed += 1


def record(step=1, **changes):
    values = {"loss": 2.5, "lr": 1e-4, "grad_norm": math.nan, "tokens": 100, "seconds": 2.0}
    waits = {
        "compute:w0": {"loader": {"none": 1.0}},
        "compute:w1": {"loader": {"none": 0.5}, "workers": {"compute:w0": 0.4}},
    }
    return StepRecord(step=step, **{**values, "waits_s": waits, "wire_bytes": {"up:w0": 7}, **changes})


def test_what_is_told_is_finite_and_named():
    values = values_of(record().to_dict())
    assert values["loss"] == 2.5
    assert values["bytes/up:w0"] == 7.0
    assert not {"grad_norm", "mfu"} & values.keys()


def test_a_writer_is_told_the_waits_that_were_followed_last():
    """They are followed in one step of several, and told of every second one here."""
    with Writers({"all": (memory := Memory())}, 2, print) as writers:
        for step in (1, 2, 3, 4):
            writers.tell(record(step) if step == 3 else record(step, waits_s={}))
    (_, first), (_, second) = memory.told
    assert "waits/loader" not in first
    assert (second["waits/loader"], second["waits/workers"]) == pytest.approx((0.375, 0.1))


def test_a_writer_that_fails_is_left_out_and_the_others_go_on():
    said: list[str] = []
    good, bad = Memory(), Memory(fails_at=2)
    with Writers({"bad": bad, "good": good}, 1, said.append) as writers:
        for step in (1, 2, 3):
            writers.tell(record(step))
    assert [step for step, _ in good.told] == [1, 2, 3]
    assert [step for step, _ in bad.told] == [1]
    assert (writers.num_failed, good.closed, bad.closed) == (1, 1, 0)
    assert said == ["bad failed and is told no more (OSError: no network); the heartbeat has all steps"]


def test_only_every_so_many_steps_are_told():
    memory = Memory()
    writers = Writers({"memory": memory}, 3, print)
    for step in range(1, 8):
        writers.tell(record(step))
    assert [step for step, _ in memory.told] == [3, 6]


def fake_tracker():
    calls = []
    return calls, SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda values, step: calls.append(("log", step, values)),
        finish=lambda: calls.append(("finish",)),
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_is_tracked(name, tmp_path: Path, monkeypatch):
    calls, module = fake_tracker()
    monkeypatch.setitem(sys.modules, name, module)
    train(make_run(tmp_path, telemetry={"writers": (name,), "project": "mine", "every": 2}))
    (init, options), *logs, (finish,) = calls
    assert (init, finish) == ("init", "finish")
    assert (options["project"], options["name"]) == ("mine", "run")
    assert options["config"]["train"]["steps"] == 4
    assert [(call, step) for call, step, _ in logs] == [("log", 2), ("log", 4)]
    assert logs[0][2]["loss"] > 0


def test_one_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = make_run(tmp_path, telemetry={"writers": ("wandb",)})
    with pytest.raises(ConfigError, match=r"pip install wandb"):
        train(config)


def test_those_that_began_end_where_another_does_not_begin(tmp_path: Path, monkeypatch):
    calls, module = fake_tracker()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="not installed"):
        open_writers(["trackio", "wandb"], tmp_path, "outsize", {})
    assert [call for call, *_ in calls] == ["init", "finish"]


def test_one_that_refuses_to_begin_says_so(tmp_path: Path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=refuse))
    with pytest.raises(ConfigError, match="trackio does not begin: no API key"):
        open_writers(["trackio"], tmp_path, "outsize", {})


def test_tensorboard_writes_event_files(tmp_path: Path):
    writer = open_writers(["tensorboard"], tmp_path, "outsize", {})["tensorboard"]
    writer.write(3, {"loss": 1.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("loss")
    assert (scalar.step, scalar.value) == (3, 1.5)
