"""A tokenizer that is loaded from a disk that fails: the same one, or an error, and never another one."""

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize import files
from outsize.checkpoint.tokenizer_files import load_tokenizer
from outsize.errors import StorageError
from support import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory with everything that a tokenizer may have."""
    directory = tmp_path / "model"
    tokenizer = make_tokenizer(bos_token="<s>")
    tokenizer.chat_template = {"default": TEMPLATE, "tools": "tools" + TEMPLATE}
    tokenizer.model_max_length = 77
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def said_of(tokenizer: Any) -> tuple[Any, ...]:
    return (
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.model_max_length,
        tokenizer.name_or_path,
    )


class FailingOnce(files.System):
    """Lets one look at the files below a directory fail, or one call of ours to read them."""

    def __init__(self, below: Path, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._below, self._which, self.num_looks = str(below), which, 0
        for name in ("stat", "scandir", "listdir"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        monkeypatch.setattr(io, "open", self._watched(io.open))
        monkeypatch.setattr("builtins.open", self._watched(open))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".", *how: Any, **more: Any) -> Any:
            self._count(path)
            return call(path, *how, **more)

        return look

    def _count(self, path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._below):
            self.num_looks += 1
            if self.num_looks == self._which:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """See `System.open`."""
        self._count(path)
        return super().open(path, flags, mode)


def test_a_look_that_fails_once_gives_no_other_tokenizer(directory: Path):
    expected, which, refused = said_of(load_tokenizer(directory, trust_remote_code=False)), 0, 0
    while True:
        which += 1
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing = FailingOnce(directory, which, monkeypatch)
            with files.replaced(failing), contextlib.suppress(StorageError):
                refused += 1
                assert said_of(load_tokenizer(directory, trust_remote_code=False)) == expected, which
                refused -= 1
        if failing.num_looks < which:
            break
    assert which > 15
    assert refused > 10


def test_a_copy_is_the_tokenizer_and_links_are_all_else(directory: Path):
    (directory / "nowhere").symlink_to("absent")
    (directory / "itself").symlink_to("itself")
    (directory / "checkpoints").mkdir()
    os.mkfifo(directory / "pipe")
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    assert tokenizer.chat_template == {"default": TEMPLATE, "tools": "tools" + TEMPLATE}
    assert tokenizer.name_or_path == str(directory)
    assert tokenizer.model_max_length == 77


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_directory_in_the_place_of_a_file_is_refused_by_name(directory: Path, name: str):
    (directory / name).unlink()
    (directory / name).mkdir()
    with pytest.raises(StorageError, match=f"{name} is a directory"):
        load_tokenizer(directory, trust_remote_code=False)


def test_what_transformers_says_names_the_model(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises((OSError, ValueError)) as raised:
        load_tokenizer(tmp_path / "model", trust_remote_code=False)
    assert "outsize-tmp-" not in str(raised.value)


def test_without_room_for_a_copy_it_is_read_in_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full() -> Path:
        raise StorageError("cannot make a directory for temporary files in /tmp: No space left on device")

    monkeypatch.setattr("outsize.checkpoint.tokenizer_files.directory_of_process", full)
    assert load_tokenizer(directory, trust_remote_code=False).model_max_length == 77
    assert "is read in place, not from a copy: cannot make a directory" in caplog.text
