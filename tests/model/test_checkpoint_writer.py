import errno
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zoo
from outsize.checkpoint.files import checkpoint_format
from outsize.checkpoint.files.checkpoint_writer import write_checkpoint
from outsize.errors import StorageError
from outsize.model.build import build_skeleton
from outsize.model.sizes.model_spec import UnitSpec
from outsize.model.split import split


class Trained:
    """A model in memory that stands for one in a store: a skeleton, its units, and their weights."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = zoo.build(name, dtype=dtype)
        self.config = zoo.make_config(name)
        self.skeleton = build_skeleton(self.config)
        buffers = dict(self.skeleton.named_buffers())
        for buffer_name, buffer in self.model.named_buffers():
            buffers[buffer_name].copy_(buffer)
        self.units = split(self.skeleton).spec.units
        self._parameters = dict(self.model.named_parameters())

    def read(self, unit: UnitSpec) -> Mapping[str, Tensor]:
        return {tensor.name: self._parameters[tensor.name] for tensor in unit.tensors}

    def write(self, directory: Path, **options) -> Path:
        return write_checkpoint(directory, self.skeleton, self.config, self.units, self.read, **options)


def load(kind: type[nn.Module], directory: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    return model


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_what_is_written_from_pretrained_loads_bit_for_bit(name: str, tmp_path: Path):
    trained = Trained(name)
    loaded = load(type(trained.model), trained.write(tmp_path / "out"))
    theirs = loaded.state_dict()
    for key, value in trained.model.state_dict().items():
        assert torch.equal(theirs[key], value), key


@pytest.mark.parametrize(
    "name", ["llama_tied", "mixtral", "phimoe", "olmo_hybrid", "granitemoe", "mpt", "bert"]
)
def test_names_and_configs_are_those_of_save_pretrained(name: str, tmp_path: Path):
    trained = Trained(name)
    ours, theirs = trained.write(tmp_path / "ours"), tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.model.save_pretrained(theirs)
    with safe_open(theirs / "model.safetensors", "pt") as file:
        expected = sorted(file.keys())
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == expected
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in trained.model.parameters())
    for file_name in ("config.json", "generation_config.json"):
        assert (ours / file_name).exists() == (theirs / file_name).exists()
        if (ours / file_name).exists():
            assert json.loads((ours / file_name).read_text()) == json.loads((theirs / file_name).read_text())


def test_there_is_one_shard_per_unit(tmp_path: Path):
    trained = Trained("llama")
    out = trained.write(tmp_path / "out")
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for number, unit in enumerate(trained.units[:5], start=1):
        assert {weight_map[t.name] for t in unit.tensors} == {f"model-{number:05d}-of-00006.safetensors"}


def test_the_config_says_the_dtype_that_was_written(tmp_path: Path):
    trained = Trained("llama", torch.bfloat16)
    out = trained.write(tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(type(trained.model), out).dtype == torch.bfloat16
    assert trained.config.dtype is None  # the caller's own config is not touched


def test_tokenizer_and_generation_config_are_copied_and_weights_are_not(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    copied = ["tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "spiece.model"]
    for name in (*copied, "model.safetensors", "optimizer.pt", "modeling_own.py"):
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"temperature": 0.25}')
    out = Trained("llama").write(tmp_path / "out", tokenizer_source=source)
    assert all((out / name).read_text() == name for name in copied)
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.25}
    assert not {"model.safetensors", "optimizer.pt", "modeling_own.py"} & set(os.listdir(out))


def test_code_that_comes_with_a_model_is_copied(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "modeling_own.py").write_text("own = True\n")
    trained = Trained("llama")
    trained.config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    out = trained.write(tmp_path / "out", tokenizer_source=source)
    assert (out / "modeling_own.py").read_text() == "own = True\n"


def test_a_tokenizer_object_saves_itself(tmp_path: Path):
    class Tokenizer:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "tokenizer.json").write_text("{}")

    out = Trained("llama").write(tmp_path / "out", tokenizer_source=Tokenizer())
    assert (out / "tokenizer.json").read_text() == "{}"


def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    trained = Trained("llama")
    trained.write(out)  # an empty directory is a fine place
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="exists already; choose another directory"):
        trained.write(out)
    assert (out / "notes.txt").exists()
    trained.write(out, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert os.listdir(tmp_path) == ["out"]


def fail_on_write(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """Let the ``after``-th tensor that is written fail."""
    write, calls = checkpoint_format._write_all, []

    def failing(fd: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        if len(calls) == after:
            write(fd, data[: len(data) // 2], offset)
            raise error
        return write(fd, data, offset)

    monkeypatch.setattr(checkpoint_format, "_write_all", failing)


@pytest.mark.parametrize("after", [1, 2, 25])
def test_a_full_disk_leaves_nothing_behind_and_the_next_call_works(tmp_path, monkeypatch, after: int):
    trained = Trained("llama")
    with monkeypatch.context() as patch:
        fail_on_write(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), after)
        with pytest.raises(StorageError, match=r"the disk is full .* free some space"):
            trained.write(tmp_path / "deep" / "out")
    assert os.listdir(tmp_path / "deep") == []
    load(type(trained.model), trained.write(tmp_path / "deep" / "out"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug")])
def test_whatever_interrupts_what_was_there_stays(tmp_path, monkeypatch, error: BaseException):
    trained = Trained("llama")
    out = trained.write(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    fail_on_write(monkeypatch, error, 10)
    with pytest.raises(type(error)):
        trained.write(out, overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    assert (out / "notes.txt").read_text() == "mine"


def test_what_was_there_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    trained = Trained("llama")
    out = trained.write(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    rename = os.replace

    def failing(source: Path, target: Path) -> None:
        if ".partial-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(StorageError, match="cannot write"):
        trained.write(out, overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    assert (out / "notes.txt").exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write .*out: .*; choose a place you can write to"):
        Trained("llama").write(tmp_path / "file" / "out")


def test_a_unit_read_in_part_is_a_mistake_of_the_caller(tmp_path: Path):
    trained = Trained("llama")
    for wrong in ({}, {t.name: torch.zeros(1) for t in trained.units[0].tensors}):
        with pytest.raises(ValueError, match="read returned"):
            write_checkpoint(
                tmp_path / "out", trained.skeleton, trained.config, trained.units, lambda _, w=wrong: w
            )
    assert os.listdir(tmp_path) == []
