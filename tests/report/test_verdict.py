"""What a recorded run is said to be limited by: one bottleneck each, as the bench plants them in real runs."""

import json

import pytest

from outsize.reporting.collect import collect
from report.recorded import make_run

# name -> (waits as shares of a step, other changes of every line, of the plan, of run.json, the rule that tells of it).
CASES = {
    "link": ({"weights": {"up:w0": 0.6}}, {}, {}, {}, "link-bound"),
    "gradients over the link": ({"gradients": {"down:w0": 0.5}}, {}, {}, {}, "link-bound"),
    "disk below the device": ({"weights": {"up:w0": 0.6}}, {}, {"below": "disk"}, {}, "disk-bound"),
    "disk": ({"disk": {"read": 0.3, "write": 0.2}}, {}, {}, {}, "disk-bound"),
    "commit": ({"commit": {"commit": 0.4}}, {}, {}, {}, "disk-bound"),
    "loader": ({"loader": {"none": 0.5}}, {"data_s": 0.6}, {}, {}, "loader-bound"),
    "optimizer": ({"optimizer": {"host": 0.5}, "weights": {"up:w0": 0.1}}, {}, {}, {}, "optimizer-bound"),
    "workers": ({"workers": {"compute:w1": 0.5}}, {}, {}, {}, "worker-bound"),
    "Python": ({"python": {"none": 0.45}}, {}, {}, {}, "host-bound"),
    "between steps": ({"between steps": {"none": 0.45}}, {}, {}, {}, "host-bound"),
    "checkpoint": ({"checkpoint": {"store": 0.45}}, {}, {}, {}, "checkpoint-bound"),
    "tiny microbatches": ({}, {"mfu": 0.02}, {}, {"tokens_per_microbatch": 4}, "microbatch-tiny"),
    "Python in the model": ({"weights": {"up:w0": 0.15}}, {"mfu": 0.02}, {}, {}, "compute-slow"),
    "a short wait": ({"weights": {"up:w0": 0.15}}, {}, {}, {}, "link-bound"),
    "nothing": ({"weights": {"up:w0": 0.03}}, {}, {}, {}, "compute-bound"),
}


def change(path, changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_is_named(name, tmp_path):
    waits, changes, plan, about, rule = CASES[name]
    run = make_run(tmp_path / "run", 10, seconds=1.2, waits=waits, **changes)
    change(run / "plan.json", plan)
    change(run / "run.json", about)
    found = collect(run)["verdict"]["bottleneck"]
    assert found["id"] == rule
    assert found["limits"]
