"""Budgets beyond the machine: refused before work starts, wherever they are kept; planned with where they are not."""

from pathlib import Path

import pytest

import outsize
import zoo
from cli.command_line import status_of
from outsize.config import dump_config
from outsize.errors import ConfigError
from tiny import tiny_model, tiny_run

KEYS = ("host_memory", "device_memory")
BEYOND = "900TiB"
REFUSED = "900.00 TiB are more than this machine has: "


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("verify",)])
def test_a_run_is_refused(
    command: tuple[str, ...], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "run.yaml"
    file.write_text(
        dump_config(tiny_run(tmp_path, train={"run_dir": str(tmp_path / "run")}, memory={"home": "host"}))
    )
    assert status_of(*command, file, "--device", "cpu", "--set", f"memory.{key}={BEYOND}") == 2
    assert f"outsize: ConfigError: {key}: {REFUSED}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_generating_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny_model(tmp_path)
    assert status_of("generate", model, "--prompt", "a", "--device", "cpu", "--device-memory", BEYOND) == 2
    assert f"outsize: ConfigError: device_memory: {REFUSED}" in capsys.readouterr().err


@pytest.mark.parametrize("key", KEYS)
def test_wrapping_is_refused(key: str):
    with pytest.raises(ConfigError, match=f"^{key}: {REFUSED}"):
        outsize.wrap(zoo.build("llama"), device="cpu", **{key: BEYOND})


def test_a_plan_is_for_any_machine(tmp_path: Path):
    asked = ("plan", tiny_model(tmp_path), "--gpus", "4090", "--host-memory", BEYOND)
    assert status_of(*asked, "--ram", BEYOND) == 0
    assert status_of(*asked) == 2  # the machine that is asked about has less
