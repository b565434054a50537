"""Rates of a run's machine.json that no machine has: refused by `plan`, and measured anew by a run that goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from outsize.cli import main
from outsize.errors import ConfigError
from outsize.hardware.from_probe import read_machine
from outsize.training.run import train
from tiny import tiny_run


def with_all_floats(value: Any, number: float) -> Any:
    if isinstance(value, dict):
        return {key: with_all_floats(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [with_all_floats(each, number) for each in value]
    return number if isinstance(value, float) else value


@pytest.mark.parametrize("number", [1e308, float("inf"), float("nan")])
def test_rates_that_cannot_be_are_refused_and_measured_anew(
    number: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tiny_run(tmp_path, train={"steps": 4})
    train(config)
    path = tmp_path / "run/machine.json"
    path.write_text(json.dumps(with_all_floats(json.loads(path.read_text()), number)))
    with pytest.raises(ConfigError, match=r"no machine has .* of anything"):
        read_machine(path)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(config.model.path), "--machine", str(path)])
    assert f"{path}: no machine has" in capsys.readouterr().err
    assert train(tiny_run(tmp_path, train={"steps": 5, "resume": "auto"})).steps == 5
