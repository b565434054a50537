from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outsize.checkpoint.checkpoint_dir import latest
from outsize.checkpoint.export import export
from outsize.checkpoint.files.joined_shards import join_shards
from outsize.errors import CheckpointError, StorageError
from outsize.training.run import train
from support import make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    train(make_run(directory, train={"steps": 2}))
    return directory / "run"


def test_an_export_is_a_model_directory_and_nothing_else(run_dir: Path, tmp_path: Path):
    out = export(run_dir, tmp_path / "out")
    assert out == tmp_path / "out"
    ours = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    theirs = dict(AutoModelForCausalLM.from_pretrained(latest(run_dir)).named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"]
    assert not {"optimizer", "trainer_state.json"} & {path.name for path in out.iterdir()}


def test_an_empty_directory_may_be_the_target(run_dir: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert (export(str(run_dir), str(tmp_path / "out")) / "config.json").is_file()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_is_overwritten(kind: str, run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").touch()
    with pytest.raises(StorageError, match="exists already"):
        export(run_dir, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outsize.files.copy", broken)
    with pytest.raises(StorageError, match="the disk is full"):
        export(run_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_are_in_one_file_or_as_few_as_are_asked_for(run_dir: Path, tmp_path: Path):
    """A run writes a file for each unit."""
    source = latest(run_dir)
    assert source is not None
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 2
    out = export(run_dir, tmp_path / "one")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    few = tmp_path / "few"
    few.mkdir()
    total = sum(shard.stat().st_size for shard in shards)
    join_shards(shards, few, total // 2)
    assert 2 <= len(list(few.glob("model-*.safetensors"))) < len(shards)
    for name in ("config.json", "generation_config.json"):
        (few / name).write_bytes((source / name).read_bytes())
    theirs = dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())
    ours = dict(AutoModelForCausalLM.from_pretrained(few).named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())
