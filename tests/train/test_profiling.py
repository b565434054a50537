import json
import re
from pathlib import Path

import pytest

from outsize.training.run import train
from support import make_run


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    said: list[str] = []
    config = make_run(directory, train={"profile_steps": 1, "steps": 4})
    train(config, announce=said.append)
    return Path(config.train.run_dir), said


def test_a_trace_names_the_ops_of_the_steps_that_were_asked_for(profiled):
    run_dir, said = profiled
    names = [e.get("name", "") for e in json.loads((run_dir / "profile.json").read_text())["traceEvents"]]
    assert any("profile of 1 steps" in line for line in said)
    # Of every lane, and once each: one step was recorded.
    forwards = [name for name in names if re.fullmatch(r"FK? 1\.0@w0", name)]
    assert len(forwards) == 1
    assert any(name.startswith("STEP ") for name in names)
    assert any(name.startswith("LOAD ") for name in names)
    assert any(name.startswith("aten::") for name in names)


def test_a_profile_changes_no_number(profiled, tmp_path):
    run_dir, _ = profiled
    config = make_run(tmp_path, train={"steps": 4})
    train(config)

    def losses(directory):
        return [json.loads(line)["loss"] for line in (directory / "heartbeat.jsonl").read_text().splitlines()]

    assert losses(run_dir) == losses(Path(config.train.run_dir))
    assert not (Path(config.train.run_dir) / "profile.json").exists()


def test_a_run_that_ends_meanwhile_leaves_what_was_recorded(tmp_path):
    config = make_run(tmp_path, train={"profile_steps": 50, "steps": 4})
    train(config)
    assert json.loads((Path(config.train.run_dir) / "profile.json").read_text())["traceEvents"]
