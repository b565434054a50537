"""Runs of two processes that share their steps, over gloo: as one process would train, whatever ends one of them.

All are forked from one script, as those of test_ranks.py.
"""

import json
import subprocess
import sys

import pytest
import torch

from outsize.config import dump_config
from outsize.testing.tiny import tiny_run
from outsize.train.run import train
from train.test_ranks import SCRIPT, losses, state, told

STEPS = 5


def write_run(root, name, home="host", **sections):
    """Four sequences per step, two for each rank, in two microbatches; the home on disk commits every step."""
    train_section = {"steps": STEPS, "save_every": 2, "save_total_limit": None, "seed": 5}
    train_section |= {"microbatches": 2, "run_dir": str(root / name), **sections.pop("train", {})}
    config = tiny_run(root, train=train_section, memory={"home": home}, **sections)
    path = root / f"{name}.yaml"
    path.write_text(dump_config(config))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    disk = write_run(root, "disk", home="disk")
    scenarios = [
        {"name": "host", "config": write_run(root, "host"), "ranks": 2},
        {"name": "disk", "config": disk, "ranks": 2, "kill": [1, 3]},
        {"name": "again", "config": disk, "ranks": 2, "restarts": 1},
        {"name": "coded", "config": write_run(root, "coded", parallel={"gradients": "int8-ef"}), "ranks": 2},
    ]
    (root / "scenarios.json").write_text(json.dumps(scenarios))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return root, {scenario["name"]: code for scenario, code in zip(scenarios, codes, strict=True)}


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """A single process with the same batches, in as many microbatches as the ranks have together."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    settings = {"steps": STEPS, "seed": 5, "microbatches": 4, "run_dir": str(run_dir)}
    train(tiny_run(runs[0], train=settings, memory={"home": "host"}))
    return run_dir


def test_two_ranks_train_what_one_process_trains(runs, alone):
    root, codes = runs
    assert codes["host"] == [0, 0], told(root, "host", 0) + told(root, "host", 1)
    assert losses(root / "host") == pytest.approx(losses(alone), rel=1e-5)
    assert losses(root / "host" / "rank-001") == losses(root / "host")
    ours, single = state(root / "host"), state(alone)
    assert ours.keys() == single.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def test_a_killed_rank_ends_the_other_and_both_go_on_from_the_last_step_that_both_committed(runs):
    root, codes = runs
    assert codes["disk"][1] == -9
    assert codes["disk"][0] == 2, told(root, "disk", 0)
    assert "rank 1" in told(root, "disk", 0)
    assert codes["again"] == [0, 0], told(root, "again", 0) + told(root, "again", 1)
    assert "resumed from step" in told(root, "again", 0)
    whole, again = state(root / "host"), state(root / "disk")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_fewer_bytes_on_the_wire_train_nearly_the_same(runs):
    root, codes = runs
    assert codes["coded"] == [0, 0], told(root, "coded", 0)
    assert losses(root / "coded") == pytest.approx(losses(root / "host"), rel=1e-3)
    beat = json.loads((root / "coded" / "heartbeat.jsonl").read_text().splitlines()[-1])
    assert beat["logical_bytes"]["net:reduce"] >= 3.5 * beat["wire_bytes"]["net:reduce"]
