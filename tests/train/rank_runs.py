"""What tests of runs of several processes look at: their configurations, losses, checkpoints, and what they said."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from outsize.config import dump_config
from patience import PATIENCE_S
from tiny import tiny_run

STEPS, SAVED = 5, 2
_SCRIPT = Path(__file__).parent / "ranks_script.py"


def config_of(root, run_dir, **sections):
    """Four sequences per step and a checkpoint after every second one; the home lies in host memory."""
    train = {"steps": STEPS, "save_every": SAVED, "save_total_limit": None, "seed": 5}
    train |= {"run_dir": str(run_dir), **sections.pop("train", {})}
    return tiny_run(root, train=train, **{"memory": {"home": "host"}, **sections})


def write_run(root, name, **sections):
    """Write a configuration and return its path."""
    path = root / f"{name}.yaml"
    path.write_text(dump_config(config_of(root, root / name, **sections)))
    return str(path)


def scenario(name, config, **what):
    """Two ranks that run ``config``; ``what`` says who is killed after which step, and so on, see `ranks_script`."""
    return {"name": name, "config": config, "ranks": 2, **what}


def run_all(root, *chains, lateness=()):
    """Run chains of scenarios beside one another; returns the exit codes of the ranks by name.

    With one word for ``lateness`` on a made-up accelerator that is late in this way.
    """
    (root / "scenarios.json").write_text(json.dumps(chains))
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(root), *lateness],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def losses(run_dir):
    """Return the loss of each step; of one that was trained twice, that of the second time."""
    return {beat["step"]: beat["loss"] for beat in beats(run_dir)}


def state(run_dir):
    """Return every tensor of the last checkpoint."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    return {
        f"{path.name}: {name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def beats(run_dir):
    """Return the last line of the heartbeat for each step, in order."""
    lines = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
    return list({beat["step"]: beat for beat in lines}.values())


def told(root, name, rank):
    return (root / f"logs-{name}" / f"{rank}.txt").read_text()
