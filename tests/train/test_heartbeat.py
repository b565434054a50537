import errno
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from outsize.errors import StorageError
from outsize.telemetry.run_reading import step_of
from outsize.training.records import Heartbeat, StepRecord, write_json, write_whole


def record(step: int = 1, **changes) -> StepRecord:
    values = {"step": step, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.5, "tokens": 100, "seconds": 2.0}
    return StepRecord(**{**values, **changes})


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]


def test_a_beat_is_one_line_that_can_be_read_at_once(tmp_path: Path):
    with Heartbeat(tmp_path, print) as heartbeat:
        heartbeat.beat(record(1))
        (line,) = lines(tmp_path)  # before it is closed
        assert (line["step"], line["loss"], line["tokens_per_s"], line["schema"]) == (1, 2.5, 50.0, 4)
        assert line["time"] > 1.6e9
        heartbeat.beat(record(2))
        assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path):
    for step in (1, 2):
        with Heartbeat(tmp_path, print) as heartbeat:
            heartbeat.beat(record(step))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null(value: float, tmp_path: Path):
    with Heartbeat(tmp_path, print) as heartbeat:
        heartbeat.beat(record(loss=value, grad_norm=value))
    (line,) = lines(tmp_path)
    assert line["loss"] is line["grad_norm"] is None


def test_a_directory_that_is_not_there_is_an_error_that_names_the_file(tmp_path: Path):
    with pytest.raises(StorageError, match=r"heartbeat\.jsonl"):
        Heartbeat(tmp_path / "nowhere", print)


def test_closing_twice_is_fine(tmp_path: Path):
    heartbeat = Heartbeat(tmp_path, print)
    heartbeat.close()
    heartbeat.close()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "plan.json"
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, None]}
    with pytest.raises(StorageError, match=r"write .*nowhere"):
        write_whole(tmp_path / "nowhere" / "x", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


# --- what tells does not end what trains ------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 7], ids=["nothing of the line", "half of it"])
def test_a_line_that_a_full_disk_does_not_take_is_counted_and_the_next_one_is_whole(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    with Heartbeat(tmp_path, said.append) as heartbeat:
        heartbeat.beat(record(1))
        write = heartbeat._file.write
        pieces = iter([written] * bool(written))

        def full(data: memoryview) -> int:
            for size in pieces:
                return write(data[:size])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(heartbeat, "_file", SimpleNamespace(write=full))
            heartbeat.beat(record(2))
            heartbeat.beat(record(3))
        heartbeat.beat(record(4))
    assert heartbeat.telling.num_failed == 2
    assert len(said) == 1
    assert "a line of the heartbeat cannot be told, and the run goes on: cannot write" in said[0]
    told = [step_of(line) for line in (tmp_path / "heartbeat.jsonl").read_bytes().splitlines()]
    assert [step["step"] for step in told if step] == [1, 4]


def test_half_a_line_of_a_run_before_is_ended(tmp_path: Path):
    (tmp_path / "heartbeat.jsonl").write_text('{"step": 1, "seco')
    with Heartbeat(tmp_path, print) as heartbeat:
        heartbeat.beat(record(2))
    half, line = (tmp_path / "heartbeat.jsonl").read_bytes().splitlines()
    assert step_of(half) is None
    assert step_of(line)["step"] == 2
