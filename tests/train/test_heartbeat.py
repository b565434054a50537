import json
import math
from pathlib import Path

import pytest

from outsize.errors import StorageError
from outsize.training.metrics.heartbeat import Heartbeat, write_json, write_whole
from outsize.training.metrics.run_records import StepRecord


def record(step: int = 1, **changes) -> StepRecord:
    values = {"step": step, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.5, "tokens": 100, "seconds": 2.0}
    return StepRecord(**{**values, **changes})


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]


def test_a_beat_is_one_line_that_can_be_read_at_once(tmp_path: Path):
    with Heartbeat(tmp_path) as heartbeat:
        heartbeat.beat(record(1))
        (line,) = lines(tmp_path)  # before it is closed
        assert (line["step"], line["loss"], line["tokens_per_s"], line["schema"]) == (1, 2.5, 50.0, 4)
        assert line["time"] > 1.6e9
        heartbeat.beat(record(2))
        assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path):
    for step in (1, 2):
        with Heartbeat(tmp_path) as heartbeat:
            heartbeat.beat(record(step))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null(value: float, tmp_path: Path):
    with Heartbeat(tmp_path) as heartbeat:
        heartbeat.beat(record(loss=value, grad_norm=value))
    (line,) = lines(tmp_path)
    assert line["loss"] is line["grad_norm"] is None


def test_a_directory_that_is_not_there_is_an_error_that_names_the_file(tmp_path: Path):
    with pytest.raises(StorageError, match=r"heartbeat\.jsonl"):
        Heartbeat(tmp_path / "nowhere")


def test_closing_twice_is_fine(tmp_path: Path):
    heartbeat = Heartbeat(tmp_path)
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
