"""Kills and losses of power, by the benches that do many of them: here a few, and that these can fail at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from patience import PATIENCE_S

BENCH = Path(__file__).parent.parent / "bench"


def bench(*arguments: str) -> dict:
    """Run a bench in a process of its own: it forks, which this one must not."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=BENCH,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCH.parent / "src")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("home", ["disk", "host"])
def test_a_run_that_is_killed_again_and_again_ends_the_same(home: str):
    result = bench("bench_kill.py", "--kills", "3", "--steps", "6", "--home", home)
    assert result["failures"] == []
    assert result["kills"] == 3
    assert result["runs_equal"] == result["runs"] > 0
    assert result["most_steps_repeated"] <= (1 if home == "disk" else 3)


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_power

    return bench_power


@pytest.mark.parametrize(
    ("home", "optimizer"), [("disk", "adamw"), ("disk", "adafactor"), ("disk", "muon"), ("host", "adamw")]
)
def test_a_run_goes_on_bit_equal_after_a_loss_of_power(
    home: str, optimizer: str, power: ModuleType, tmp_path: Path
):
    config = power.config_of(tmp_path, home, 3, 2, optimizer)
    found = power.record(config, tmp_path)
    assert set(found.durable) == ({1, 2, 3} if home == "disk" else {2, 3})
    result = power.examine(tmp_path, config, found, 10, 0)
    assert result["failures"] == []
    assert len(result["went_on_from"]) > 1


@pytest.mark.parametrize("kind", ["fdatasync", "fsync"])
def test_a_run_that_does_not_sync_is_seen_to_lose_what_it_had(kind: str, power: ModuleType, tmp_path: Path):
    config = power.config_of(tmp_path, "disk", 3, 2)
    found = power.record(config, tmp_path)
    found.operations = [op for op in found.operations if op.kind != kind]
    assert power.examine(tmp_path, config, found, 10, 0)["corrupt"] > 0


def test_every_file_of_a_run_that_has_its_name_is_whole_after_a_loss_of_power(
    power: ModuleType, tmp_path: Path
):
    """What was renamed and not synced would have no bytes; the heartbeat alone is written as it comes."""
    config = power.config_of(tmp_path, "disk", 3, 2)
    found = power.record(config, tmp_path)
    calls, names = power.resolve(found.operations)
    top = names.directory(tmp_path / "run")
    crashed = tmp_path / "crashed"
    power.Disk(calls, max(op.ended for op in found.operations), power.keeping("none")).write_to(top, crashed)
    written = {path.name for path in crashed.iterdir()}
    assert {"config.yaml", "plan.json", "run.json", "timeline.json", "checkpoints"} <= written
    for path in crashed.glob("*.*"):
        if path.name != "heartbeat.jsonl":
            assert path.read_bytes() == (tmp_path / "run" / path.name).read_bytes()
