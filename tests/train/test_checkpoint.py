"""A run that stops and goes on ends bit for bit where an unbroken one ends."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outsize.checkpoint.checkpoint_state import STATE, latest, position_of
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.session.job.prepare import prepare
from outsize.session.run_state import Position
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from support import make_run, read_weights, save


def tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    found = {}
    for path in sorted(directory.rglob("*.safetensors")):
        found.update({f"{path.relative_to(directory)}:{name}": t for name, t in load_file(path).items()})
    return found


def state(directory: Path) -> dict:
    """What a checkpoint says of its run, besides which run that was."""
    found = json.loads((directory / STATE).read_text())
    return {key: value for key, value in found.items() if key not in ("run", "crc32")}


def assert_same_end(one: Path, other: Path) -> None:
    first, second = latest(one), latest(other)
    assert first.name == second.name
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer/") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert state(first) == state(second)


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def in_dir(config: Config, run_dir: Path, **train_changes) -> Config:
    changes = {"run_dir": str(run_dir), **train_changes}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


SETTINGS = {
    "fp32 on host": {},
    "fp32 on disk": {"memory": {"home": "disk"}},
    "bf16 on host": {"model": {"dtype": "bf16"}},
    "bf16 on disk": {"model": {"dtype": "bf16"}, "memory": {"home": "disk"}},
    "fp16": {"model": {"dtype": "fp16"}},
    "emulated over disk": {"memory": {"device": "emulated:1", "home": "disk"}},
    "frozen": {"model": {"freeze": ("model.layers.0.*", "lm_head.*")}, "memory": {"home": "disk"}},
}


@pytest.mark.parametrize("sections", SETTINGS.values(), ids=SETTINGS.keys())
def test_two_steps_and_two_more_are_four(sections: dict, tmp_path: Path):
    config = make_run(tmp_path, **sections)
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    said: list[str] = []
    train(in_dir(config, tmp_path / "parts", resume="auto"), announce=said.append)
    assert "resumed from step-00000002" in said
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("host", "disk"), ("disk", "host")])
def test_a_run_may_go_on_with_another_home(first: str, second: str, dtype: str, tmp_path: Path):
    config = make_run(tmp_path, model={"dtype": dtype}, memory={"home": first})
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    moved = make_run(
        tmp_path, model={"dtype": dtype}, memory={"home": second, "slots": 1, "tile_elements": 4096}
    )
    train(in_dir(moved, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "longcat_flash"])
def test_ties_experts_and_idle_parameters_go_on_as_well(name: str, tmp_path: Path):
    config = make_run(tmp_path, name)
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_goes_on(number: int, tmp_path: Path):
    """Also with a schedule that depends on the whole, which no run of fewer steps would have had."""
    config = make_run(tmp_path, optimizer={"schedule": "cosine", "warmup_steps": 1})
    train(in_dir(config, tmp_path / "whole"))
    result = train(
        in_dir(config, tmp_path / "parts"),
        progress=lambda record: signal.raise_signal(number) if record.step == 2 else None,
    )
    assert result.steps == 2
    assert train(in_dir(config, tmp_path / "parts", resume="auto")).steps == 4
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_checkpoints_on_the_way_change_nothing(tmp_path: Path):
    config = make_run(tmp_path, memory={"home": "disk"})
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "often", save_every=1, save_total_limit=None))
    names = names_in(tmp_path / "often")
    assert names == ["latest", *(f"step-{step:08d}" for step in (1, 2, 3, 4))]
    assert_same_end(tmp_path / "whole", tmp_path / "often")


def test_any_checkpoint_can_be_gone_on_from(tmp_path: Path):
    config = make_run(tmp_path, optimizer={"schedule": "linear"})
    train(in_dir(config, tmp_path / "whole", save_every=1, save_total_limit=None))
    for step in (1, 3):
        parts = tmp_path / f"from-{step}" / "checkpoints"
        name = f"step-{step:08d}"
        shutil.copytree(tmp_path / "whole" / "checkpoints" / name, parts / name)
        (parts / "latest").write_text(name + "\n")
        train(in_dir(config, parts.parent, resume="auto"))
        assert_same_end(tmp_path / "whole", parts.parent)


def test_a_run_at_its_end_has_nothing_left_to_do(tmp_path: Path):
    config = make_run(tmp_path)
    first = train(in_dir(config, tmp_path / "run"))
    again = train(in_dir(config, tmp_path / "run", resume="auto"))
    assert (again.steps, again.loss) == (4, first.loss)
    assert len((tmp_path / "run" / "heartbeat.jsonl").read_text().splitlines()) == 4


def trainer_of(config: Config, directory: Path) -> StreamedTrainer:
    return StreamedTrainer(prepare(RunSpec.of(config, directory), lambda _: None), directory / "store")


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_a_model_that_transformers_loads(dtype: str, home: str, tmp_path: Path):
    config = make_run(tmp_path, model={"dtype": dtype}, memory={"home": home})
    with trainer_of(config, tmp_path) as trainer:
        trainer.fill()
        saved = save(trainer, tmp_path / "run", Position(7, 70, 1, 2.5), config)
        weights = read_weights(trainer)
    assert saved.name == "step-00000007"
    assert latest(tmp_path / "run") == saved
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys()
    assert all(torch.equal(named[name], weight) for name, weight in weights.items())
    assert AutoTokenizer.from_pretrained(saved)("abc")["input_ids"]
    assert position_of(saved) == Position(7, 70, 1, 2.5)


@pytest.fixture
def run_of_two_steps(tmp_path: Path) -> Config:
    config = in_dir(make_run(tmp_path), tmp_path / "run", steps=2)
    train(config)
    return in_dir(config, tmp_path / "run", resume="auto", steps=4)


def test_a_missing_file_of_the_state_is_an_error_that_names_it(run_of_two_steps: Config, tmp_path: Path):
    lost = latest(tmp_path / "run") / "optimizer" / "model.layers.1.exp_avg.safetensors"
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.exp_avg\.safetensors is missing"):
        train(run_of_two_steps)


@pytest.mark.parametrize("damage", [b"", b"not json", b"[]", b"{}"])
def test_a_damaged_position_is_an_error(damage: bytes, run_of_two_steps: Config, tmp_path: Path):
    (latest(tmp_path / "run") / STATE).write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json cannot be read"):
        train(run_of_two_steps)


@pytest.mark.parametrize("name", ["step-00000009", "../elsewhere", "optimizer", ""])
def test_a_pointer_to_nothing_is_an_error(name: str, run_of_two_steps: Config, tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        train(run_of_two_steps)


def test_another_dtype_is_refused(run_of_two_steps: Config):
    model = run_of_two_steps.model.model_copy(update={"dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"model\.dtype=fp32, not bf16"):
        train(run_of_two_steps.model_copy(update={"model": model}))


def test_without_a_run_there_is_no_checkpoint(tmp_path: Path):
    assert latest(tmp_path) is None
