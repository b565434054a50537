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
    result = bench("bench_kill.py", "--kills", "6", "--steps", "6", "--home", home)
    assert result["failures"] == []
    assert result["kills"] == 6
    assert result["runs_equal"] == result["runs"] > 0
    assert result["most_steps_repeated"] <= (1 if home == "disk" else 3)


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_power

    return bench_power


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_loss_of_power_leaves_a_committed_step(optimizer: str, power: ModuleType, tmp_path: Path):
    power.write_model(tmp_path)
    config = power.config_of(tmp_path, "run", "disk", 3, optimizer)
    found = power.record(config, tmp_path)
    assert set(found.planes) == {1, 2, 3}
    result = power.examine(tmp_path, config, found, 60, 0)
    assert result["failures"] == []
    assert len(result["steps_found"]) > 2

    # Without the syncs of the home the same run is not safe, and this must be seen.
    found.operations = [op for op in found.operations if op.kind != "fdatasync"]
    assert power.examine(tmp_path, config, found, 60, 0)["corrupt"] > 0
