"""Processes that are killed, ranks, and the profiler, on a device that is late."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator.exactness_set import DEVICE
from devices import IS_MADE_UP
from outsize.accelerators import VENDORS
from outsize.training.run import train
from support import make_run
from train.rank_runs import losses, run_all, scenario, state, told, write_run

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group("processes on the made-up accelerator"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Run everything; returns the directory and the exit codes by name."""
    root = tmp_path_factory.mktemp("late")

    def run(name: str, device: str, home: str, microbatches: int) -> str:
        train = {"microbatches": microbatches, "resume": "auto"}
        return write_run(root, name, train=train, memory={"device": device, "home": home})

    killed = run("killed", DEVICE, "disk", 4)
    lost = run("lost", "late", "host", 2)
    chain = [
        scenario("alone", run("alone", DEVICE, "host", 4), ranks=1),
        scenario("killed", killed, ranks=1, kill=[0, 3]),
        scenario("killed again", killed, ranks=1),
        scenario("both", run("both", "late", "disk", 2)),
        scenario("lost", lost, kill=[1, 4]),
        scenario("lost again", lost, restarts=1),
    ]
    return root, run_all(root, chain, lateness=[request.config.getoption("lateness")])


def same_state(root: Path, one: str, other: str) -> bool:
    ours, theirs = state(root / one), state(root / other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_was_killed_goes_on_to_the_same_bits(runs):
    root, codes = runs
    assert codes["alone"] == [0], told(root, "alone", 0)
    assert codes["killed"] == [-9]
    assert codes["killed again"] == [0], told(root, "killed again", 0)
    assert "resumed from step" in told(root, "killed again", 0)
    assert losses(root / "killed") == losses(root / "alone")
    assert same_state(root, "killed", "alone")


def test_ranks_on_devices_of_their_own_train_what_one_process_trains(runs):
    root, codes = runs
    assert codes["both"] == [0, 0], told(root, "both", 0) + told(root, "both", 1)
    assert losses(root / "both") == pytest.approx(losses(root / "alone"), rel=1e-5)


def test_ranks_go_on_after_one_was_killed(runs):
    root, codes = runs
    assert codes["lost"] == [2, -9], told(root, "lost", 0)
    assert codes["lost again"] == [0, 0], told(root, "lost again", 0) + told(root, "lost again", 1)
    assert losses(root / "lost") == losses(root / "both")
    assert same_state(root, "lost", "both")


def test_the_driver_s_profiler_is_told_every_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    @contextmanager
    def ranges(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    monkeypatch.setitem(VENDORS, "late", replace(VENDORS["late"], ranges=ranges))
    config = make_run(tmp_path, memory={"device": DEVICE}, train={"steps": 3, "profile_steps": 1})
    train(config)
    recorded = json.loads((Path(config.train.run_dir) / "profile.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in recorded}
    for op in ("LOAD 1@", r"FK? 1\.0@w0", r"B 1\.0@w0", "GRAD 1@", "STEP 1"):
        assert any(re.match(op, name) for name in seen), op
        assert any(re.match(op, name) for name in names), op
