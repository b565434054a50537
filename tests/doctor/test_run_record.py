import json

import pytest

from doctor.records import run, step
from outsize.cli.train_command import _verdict
from outsize.doctor.run_record import read_run
from outsize.errors import ConfigError


def test_a_lane_is_believed_for_no_longer_than_it_was_busy(tmp_path):
    # As recorded with a loader of 80 ms: everything was booked on `up`, which was busy for 3 ms.
    slow_loader = run(
        tmp_path,
        plan={"below": "disk"},
        seconds=0.1,
        data_s=0.08,
        busy_s={"compute:w0": 0.018, "up:w0": 0.003, "down:w0": 0, "host": 0.001, "read": 0, "write": 0},
        stall_s={"up:w0": 0.082},
    )
    assert slow_loader.waits() == pytest.approx({"data": 0.8, "disk": 0.02})


def test_a_lane_that_waited_itself_hands_the_wait_on(tmp_path):
    # Loads take 0.1 s of the 0.5 s booked on them: they waited for the optimizer, which was busy all the time.
    late = run(tmp_path, stall_s={"up:w0": 0.5}, busy_s={"up:w0": 0.1, "host": 1.9, "down:w0": 0.0})
    assert late.waits() == pytest.approx({"host": 0.2, "link": 0.05, "python": 0.0075})


def test_a_wait_for_another_worker_is_no_lanes_fault(tmp_path):
    late = run(tmp_path, stall_s={"compute:w1": 0.6, "up:w0": 0.1}, busy_s={"compute:w1": 1.9})
    assert late.waits() == pytest.approx({"workers": 0.3, "link": 0.05, "python": 0.0075})
    # The same, booked on a load that itself waited.
    late = run(tmp_path, stall_s={"up:w0": 0.7}, busy_s={"compute:w1": 1.9, "up:w0": 0.1})
    assert late.waits() == pytest.approx({"workers": 0.3, "link": 0.05, "python": 0.0075})


@pytest.mark.parametrize("lane", ["read", "write", "write:units", "store", "commit"])
def test_checkpoints_and_commits_are_the_disks(tmp_path, lane):
    late = run(tmp_path, stall_s={lane: 0.6}, busy_s={lane: 1.2})
    assert late.waits() == pytest.approx({"disk": 0.3, "python": 0.0075})


def test_what_no_lane_accounts_for_is_pythons(tmp_path):
    idle = dict.fromkeys(("up:w0", "down:w0", "host", "read", "write"), 0.0)
    late = run(tmp_path, stall_s={"dispatch": 0.2, "up:w0": 0.4}, busy_s=idle)
    assert late.waits() == pytest.approx({"python": 0.3075})


def test_shares_add_up_to_no_more_than_what_was_waited(tmp_path):
    waits = run(tmp_path, stall_s={"up:w0": 0.5, "host": 0.3, "dispatch": 0.1}, data_s=0.2).waits()
    assert sum(waits.values()) == pytest.approx((0.9 + 0.015) / 2.0)


def test_with_a_disk_below_the_device_up_and_down_are_the_disks(tmp_path):
    assert run(tmp_path, plan={"below": "disk"}, stall_s={"up:w0": 0.4}).waits()["disk"] == pytest.approx(0.2)


def test_the_first_step_and_those_with_a_checkpoint_are_left_out(tmp_path):
    steps = [step(1, seconds=60.0), *(step(n) for n in range(2, 9)), step(9, seconds=30.0)]
    recorded = run(tmp_path, steps)
    assert recorded.mean("seconds") == 2.0
    assert len(recorded.steps) == 8


def test_a_run_of_one_step_is_that_step(tmp_path):
    assert run(tmp_path, count=1).mean("seconds") == 2.0


def test_the_line_that_is_being_written_is_left_alone(tmp_path):
    run(tmp_path)
    with (tmp_path / "heartbeat.jsonl").open("a") as file:
        file.write('{"schema": 3, "ste')
    assert len(read_run(tmp_path).steps) == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "name the directory of a run"),
        ("", "no step has ended yet"),
        ("[]\n", "line 1: not a step"),
        ("{\n", "line 1: not a step"),
        (
            json.dumps({"schema": 1, "step": 1, "seconds": 1.0}) + "\n",
            "schema 1 of the heartbeat does not tell the time of each lane",
        ),
    ],
)
def test_what_is_no_run_is_refused_with_what_to_do(tmp_path, text, message):
    if text is not None:
        (tmp_path / "heartbeat.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)


def test_a_plan_that_is_none_is_refused(tmp_path):
    run(tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"plan\.json: not what a run writes"):
        read_run(tmp_path)


def test_a_run_of_several_workers_tells_its_bubble(tmp_path):
    run(tmp_path / "one")
    assert "bubble" not in str(_verdict(tmp_path / "one"))
    run(tmp_path / "two", busy_s={"compute:w0": 1.5, "compute:w1": 1.1})
    first, *_ = _verdict(tmp_path / "two")
    assert first.startswith("bubble 35.0%: of the time of all workers")
