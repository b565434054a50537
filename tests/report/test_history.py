import json

import pytest

from outsize.doctor.run_record import KEPT_LINES, record_of
from outsize.errors import ConfigError
from outsize.reporting.history import History, shares_of
from report.recorded import line


def write(directory, steps, mode="w"):
    with (directory / "heartbeat.jsonl").open(mode) as file:
        file.writelines(json.dumps(step) + "\n" for step in steps)


def test_a_heartbeat_is_read_on_from_where_it_was(tmp_path):
    write(tmp_path, [line(1), line(2)])
    history = History(tmp_path)
    assert history.advance() == 2
    assert history.advance() == 0
    write(tmp_path, [line(3)], "a")
    assert history.advance() == 1
    assert history.steps == [1, 2, 3]
    assert history.columns["loss"] == [line(n)["loss"] for n in (1, 2, 3)]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "heartbeat.jsonl"
    whole = json.dumps(line(1)) + "\n"
    path.write_text(whole + whole[:40])
    history = History(tmp_path)
    assert history.advance() == 1
    path.write_text(whole + json.dumps(line(2)) + "\n")
    assert history.advance() == 1
    assert history.steps == [1, 2]


def test_a_step_that_was_repeated_after_a_crash_counts_once(tmp_path):
    write(tmp_path, [line(1), line(2, loss=1.0), line(3), line(2, loss=0.5), line(3, loss=0.25)])
    history = History(tmp_path)
    history.advance()
    assert history.steps == [1, 2, 3]
    assert history.columns["loss"][1:] == [0.5, 0.25]
    assert [step["loss"] for step in record_of(tmp_path, history.recent).steps] == [0.5, 0.25]


def test_shares_of_a_step_add_up_over_workers(tmp_path):
    waits = {"compute:w0": {"weights": {"up:w0": 0.5}}, "compute:w1": {"workers": {"compute:w0": 1.0}}}
    step = line(1, seconds=2.0) | {"waits_s": waits, "idle_s": {"compute:w0": 0.5, "compute:w1": 1.0}}
    write(tmp_path, [step])
    history = History(tmp_path)
    history.advance()
    assert history.shares == [pytest.approx({"compute": 0.625, "weights": 0.125, "workers": 0.25})]


def test_an_old_heartbeat_still_has_its_curves(tmp_path):
    write(tmp_path, [{"schema": 1, "step": 1, "seconds": 1.0, "loss": 3.0}])
    history = History(tmp_path)
    history.advance()
    assert history.columns["loss"] == [3.0]
    assert history.shares == [{}]
    assert history.last("mfu") is None


def test_only_the_last_lines_are_kept_whole(tmp_path):
    write(tmp_path, [line(n) for n in range(1, KEPT_LINES + 11)])
    history = History(tmp_path)
    history.advance()
    assert len(history.recent) == KEPT_LINES
    assert len(history.steps) == KEPT_LINES + 10


@pytest.mark.parametrize(
    ("text", "message"), [("{}\n", "line 1: not a step"), ("nonsense\n", "line 1"), (None, "cannot read")]
)
def test_what_is_no_heartbeat_is_an_error_that_says_where(text, message, tmp_path):
    if text is not None:
        (tmp_path / "heartbeat.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        History(tmp_path).advance()


def test_shares_need_no_more_of_a_line_than_its_waits():
    step = {
        "waits_s": {
            "compute:w0": {"disk": {"read": 1.0}},
            "compute:w1": {"link": {"up:w1": 0.5, "down:w1": 0.5}},
        }
    }
    assert shares_of(step, 4.0) == {"compute": 0.75, "disk": 0.125, "link": 0.125}
