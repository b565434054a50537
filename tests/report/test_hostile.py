"""Run directories of anybody: each file damaged in every way that a reader could trip over, and no reader trips."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.doctor.examine import examine
from outsize.doctor.run_record import Facts, read_run
from outsize.errors import ConfigError
from outsize.objectives.objective_run import _result
from outsize.reporting.collect import LiveRun, collect
from outsize.reporting.html_page import make_page, page_data, write_page
from outsize.training.run import train
from tiny import tiny_run

DEEP = "[" * 100_000 + "]" * 100_000
MARKUP = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    config = tiny_run(root)
    train(config)
    return root / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    for path in whole.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / "run")
    return tmp_path / "run"


def read_by_all(run: Path) -> list[str]:
    """Have every reader read a run; returns what they refuse, each by an error of ours."""
    refused = []
    readers: tuple[Callable[[], Any], ...] = (
        lambda: write_page(run / "report.html", make_page(page_data([collect(run)]))),
        lambda: examine(Facts(recorded=read_run(run))),
        lambda: make_page(LiveRun(run, 0.0).data(), live=True),
        lambda: _result(run, 0, {"steps": 3, "num_steps": 3, "budget_bytes": 0}),
    )
    for read in readers:
        try:
            read()
        except ConfigError as error:
            refused.append(str(error))
    return refused


FIELDS: list[tuple[str, Any]] = [
    *[("tiers", value) for value in ([1], {"device": 3}, {"device": {"used_bytes": "x"}}, {"device": {}})],
    *[("waits_s", value) for value in ([1], {"compute:w0": 3}, {"compute:w0": {"disk": 5}}, {"other": {}})],
    *[("busy_s", value) for value in (3, None, {"compute:w0": "x"}, {"compute:w0": -1})],
    *[("seconds", value) for value in (-1, 0, float("inf"), float("nan"), 1e308, "1", None)],
    *[("step", value) for value in (1e400, -5, "seven", True, 0, 10**15, None, 9.5)],
    *[("time", value) for value in ("x", 1e300, float("nan"))],
    *[("host", value) for value in ([1], {}, {"span_s": 0}, {"span_s": 1, "cpu_s_by_thread": [1]})],
    *[("gpus", value) for value in ({"a": 1}, [3], [{"index": MARKUP}])],
    *[("fallbacks", value) for value in ([1], {MARKUP: 1}, {"a\ud800": 1})],
    *[("loss", value) for value in (1e308, "x", [])],
    *[("tokens", value) for value in (None, -1, 1e308)],
    *[("stall_s", {"x": None}), ("wire_bytes", 3), ("idle_s", {"w": "a"}), ("peak_rss_bytes", 2**70)],
    *[("mfu", 1e999), ("schema", 99), ("schema", None), ("skipped_steps", "a"), ("num_steps", "x")],
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: ascii(value)[:30])
def test_any_value_of_a_field_is_read_or_refused(field: str, value: Any, run: Path):
    path = run / "heartbeat.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1][field] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_by_all(run)) < 4  # the other lines are told


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 9, "seconds": 1, "schema": 4, "x": ' + DEEP + "}",
        '{"step": 9, "seconds": 1, "schema": 4, "x": ' + "1" * 5000 + "}",
        '{"step": ' + "9" * 4000 + ', "seconds": 1, "schema": 4}',
        "[1]",
        "null",
        "",
        '{"step": 4, "seco',
        '{"step": 1, "seconds": 1, "schema": 4, "x": "\udcff"}',
        "\0" * 300,
    ],
    ids=lambda line: ascii(line)[:30],
)
def test_a_line_that_is_none_is_left_out_and_counted(line: str, run: Path):
    path = run / "heartbeat.jsonl"
    told = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(told[0] + line.encode("utf-8", "surrogateescape") + b"\n" + b"".join(told[1:]))
    assert read_by_all(run) == []
    found = collect(run)
    assert found["fallbacks"]["broken_lines"] == 1
    assert found["status"]["done"] == 3


@pytest.mark.parametrize("content", ["[1]\n", "{\n", "\n", "null\n"])
def test_a_heartbeat_without_a_step_is_refused_by_file_and_line(content: str, run: Path):
    (run / "heartbeat.jsonl").write_text(content)
    refused = read_by_all(run)
    assert len(refused) == 2  # a page that is looked at waits, a result has no steps
    assert all("heartbeat.jsonl, line 1: not a step of a run" in error for error in refused)


def aliases(number: int = 9) -> str:
    lines = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, number)]
    return "\n".join(["a0: &a0 [x]", *lines])


CONFIGS = {
    "a bomb of aliases": aliases(),
    "a list": "[1]",
    "a list of itself": "a: &a [*a]",
    "a section of itself": "train: &a {steps: *a}",
    "a list for a section": "train: [1]",
    "text for steps": "train: {steps: x}",
    "a date": "train: {x: 2024-01-01}",
    "a set": "train: !!set {a, b}",
    "bytes": "train: {x: !!binary aGVsbG8=}",
    "a tag": "train: !!python/object/apply:os.system ['id']",
    "keys of other kinds": "1: 2\nnull: 3\n? [1, 2]\n: 3\n",
    "nothing": "",
    "deep": DEEP,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_configuration_is_read_or_refused(kind: str, run: Path):
    (run / "config.yaml").write_text(CONFIGS[kind])
    for error in read_by_all(run):
        assert "config.yaml" in error or str(run) in error


FILES = ("plan.json", "run.json", "prediction.json", "timeline.json", "machine.json")
WRONG = {
    "empty": "",
    "a list": "[1]",
    "no key": "{}",
    "deep": '{"x": ' + DEEP + "}",
    "a long number": '{"x": ' + "1" * 5000 + "}",
    "other kinds": json.dumps(
        {
            "units": [1, 2],
            "machine": [3],
            "traceEvents": [{"ph": "X", "tid": 1, "name": "a", "ts": "x", "dur": 1, "args": {}}],
            "memory_bytes": [1],
            "parts": 3,
            "started": "x",
            "steps": "y",
            "program": 5,
            "round_microbatches": "x",
        }
    ),
    "numbers that cannot be": json.dumps(
        {
            "traceEvents": [
                {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": MARKUP}},
                {
                    "ph": "X",
                    "tid": 1,
                    "name": "B 1.0@w0",
                    "ts": -5e300,
                    "dur": 1e308,
                    "args": {"waited_us": 1, "waited_for": 7},
                },
            ],
            "round_microbatches": -3,
            "units": [{"name": 3}],
            "started": 1e99,
            "device_names": 5,
            "num_parameters": "x",
        }
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", FILES)
def test_any_other_file_is_read_or_refused(name: str, kind: str, run: Path):
    (run / name).write_text(WRONG[kind])
    for error in read_by_all(run):
        assert str(run) in error


@pytest.mark.parametrize("name", [os.fsdecode(b"lat\xe9in"), "a\nb<_script><script>alert(1)<_script>"])
def test_a_directory_of_any_name_is_told(name: str, run: Path):
    assert read_by_all(run.rename(run.parent / name)) == []
