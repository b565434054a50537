"""Runs of several processes: as one process would train, and what becomes of them when one is lost.

All runs are forked from one script, since importing torch takes longer than they do.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outsize.config import dump_config
from outsize.testing.tiny import tiny_run
from outsize.train.run import train

STEPS, SAVED = 5, 2
SCRIPT = Path(__file__).parent / "ranks_script.py"


def write_run(root, name, **sections):
    """Write a configuration whose four sequences per step are two microbatches of each of two ranks."""
    train_section = {"steps": STEPS, "save_every": SAVED, "save_total_limit": None, "seed": 5}
    train_section |= {"microbatches": 1, "run_dir": str(root / name), **sections.pop("train", {})}
    sections.setdefault("parallel", {"mode": "ddp"})
    config = tiny_run(root, train=train_section, memory={"home": "host"}, **sections)
    path = root / f"{name}.yaml"
    path.write_text(dump_config(config))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run everything; returns the directory and the exit codes by name."""
    root = tmp_path_factory.mktemp("ranks")
    killed, streamed = write_run(root, "killed"), write_run(root, "streamed", parallel={"mode": "stream"})
    other = {"mode": "ddp", "ddp_compress": "fp16", "ddp_static_graph": True, "ddp_bucket_mib": 0.05}
    fp16 = write_run(root, "fp16", parallel=other, train={"microbatches": 2})
    lost = [1, SAVED + 1]
    scenarios = [
        {"name": "whole", "config": write_run(root, "whole"), "ranks": 2},
        {"name": "killed", "config": killed, "ranks": 2, "kill": lost},
        {"name": "again", "config": killed, "ranks": 2, "restarts": 1},
        {"name": "fp16", "config": fp16, "ranks": 2},
        {"name": "refused", "config": killed, "ranks": 2},
        # A checkpoint is written beside the steps that follow: by then that of the second is complete.
        {"name": "streamed", "config": streamed, "ranks": 2, "kill": [1, STEPS]},
        {"name": "streamed again", "config": streamed, "ranks": 2, "restarts": 1},
    ]
    (root / "scenarios.json").write_text(json.dumps(scenarios))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return root, {scenario["name"]: code for scenario, code in zip(scenarios, codes, strict=True)}


def losses(run_dir):
    """Return the loss of each step; of one that was trained twice, that of the second time."""
    beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
    return {beat["step"]: beat["loss"] for beat in beats}


def state(run_dir):
    """Return every tensor of the last checkpoint."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    return {
        f"{path.name}: {name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def told(root, name, rank):
    return (root / f"logs-{name}" / f"{rank}.txt").read_text()


def test_two_ranks_train_what_one_process_trains(runs, tmp_path):
    root, codes = runs
    assert codes["whole"] == [0, 0], told(root, "whole", 0)
    alone = tiny_run(
        root,
        train={"steps": STEPS, "seed": 5, "microbatches": 2, "run_dir": str(tmp_path / "alone")},
        memory={"home": "host"},
    )
    train(alone)
    found, expected = losses(root / "whole"), losses(tmp_path / "alone")
    assert found == pytest.approx(expected, rel=1e-6)
    ours, single = state(root / "whole"), state(tmp_path / "alone")
    assert ours.keys() == single.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_rank_0_speaks_and_each_has_a_heartbeat(runs):
    root, _ = runs
    result = json.loads(told(root, "whole", 0).splitlines()[-1])
    assert result["steps"] == STEPS
    assert "step 1" not in told(root, "whole", 1)
    assert "rank 1 of 2" in (root / "whole" / "rank-001" / "log.txt").read_text()
    assert losses(root / "whole") == losses(root / "whole" / "rank-001")


@pytest.mark.parametrize("name", ["killed", "streamed"])
def test_a_killed_rank_ends_the_others_by_name(name, runs):
    root, codes = runs
    assert codes[name] == [2, -9]
    assert "outsize (rank 0): LostRankError: rank 1 is lost" in told(root, name, 0)


def test_ranks_that_are_started_again_go_on_from_what_all_had_saved(runs):
    """Bit for bit as if nothing had been: the same number of ranks adds in the same order."""
    root, codes = runs
    assert codes["again"] == [0, 0], told(root, "again", 0)
    assert f"resumed from step-{SAVED:08}" in told(root, "again", 0)
    assert losses(root / "killed") == losses(root / "whole")
    ours, whole = state(root / "killed"), state(root / "whole")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_streaming_ranks_that_are_started_again_go_on(runs):
    root, codes = runs
    assert codes["streamed again"] == [0, 0], told(root, "streamed again", 0)
    assert "resumed from step-" in told(root, "streamed again", 0)
    assert losses(root / "streamed") == pytest.approx(losses(root / "whole"), rel=1e-6)
    assert losses(root / "streamed") == losses(root / "streamed" / "rank-001")
    ours, whole = state(root / "streamed"), state(root / "whole")
    for name, tensor in whole.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_one_process_goes_on_from_a_checkpoint_of_two(runs, tmp_path):
    root, _ = runs
    resumed = root / "whole" / "checkpoints" / f"step-{SAVED:08}"
    alone = tiny_run(
        root,
        train={
            "steps": STEPS,
            "seed": 5,
            "microbatches": 2,
            "run_dir": str(tmp_path),
            "resume": str(resumed),
        },
        memory={"home": "host"},
    )
    train(alone)
    expected = {step: loss for step, loss in losses(root / "whole").items() if step > SAVED}
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-6)


def test_other_settings_train_nearly_the_same(runs):
    """Gradients as fp16, in several buckets, of a static graph, over microbatches of which only the last sends."""
    root, codes = runs
    assert codes["fp16"] == [0, 0], told(root, "fp16", 0)
    compressed, exact = losses(root / "fp16"), losses(root / "whole")
    assert compressed != exact
    assert compressed == pytest.approx(exact, rel=1e-3)


def test_all_ranks_say_why_a_run_cannot_start(runs):
    """Rank 0 finds a run in the directory; the others do not wait for it."""
    root, codes = runs
    assert codes["refused"] == [2, 2]
    assert "holds a run already" in told(root, "refused", 0)
    assert "rank 0 has ended: ConfigError" in told(root, "refused", 1)
