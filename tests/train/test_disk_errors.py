"""A disk that fails, whichever call it is that says so: an error of ours, and always the first one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import outsize
from outsize import files
from outsize.checkpoint.begun_adapters import servable
from outsize.checkpoint.checkpoint_state import CHECKPOINTS
from outsize.errors import CheckpointError, StorageError
from outsize.storage.prealloc import preallocate, storage_errors
from outsize.training.run import train
from tiny import tiny_run


def fail(path: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@pytest.mark.parametrize("name", [CHECKPOINTS, "home.bin", "config.yaml", "machine.json", "heartbeat.jsonl"])
@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_look_at_a_disk_that_fails_is_a_storage_error(
    name: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`Path.exists`, `is_dir` and `is_file` raise what is no sign of a file that is not there."""
    config = tiny_run(tmp_path, train={"resume": resume})
    stat = Path.stat

    def failing(self: Path, **how: bool) -> os.stat_result:
        if name in self.parts:
            fail(self)
        return stat(self, **how)

    monkeypatch.setattr(Path, "stat", failing)
    try:
        train(config)
    except StorageError as error:
        assert "Input/output error; the device reports a fault" in str(error)  # noqa: PT017 - or none is looked at


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EROFS])
def test_only_what_disks_say_is_a_storage_error(number: int):
    with pytest.raises(StorageError, match="cannot use /a/file"), storage_errors():
        raise OSError(number, os.strerror(number), "/a/file")
    with pytest.raises(FileNotFoundError), storage_errors():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/a/file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_write_that_fails_names_its_file():
    with pytest.raises(OSError, match="'/dev/full'"), files.open_text(Path("/dev/full"), "w") as file:
        file.write("a")


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "heartbeat.jsonl")
    with pytest.raises(OSError, match="heartbeat"):
        files.open_text(tmp_path / "heartbeat.jsonl", "a")


def test_loading_a_model_from_a_disk_that_fails_says_so_and_not_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = Path(tiny_run(tmp_path).model.path)

    class Failing(files.System):
        def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
            if Path(path).name == "config.json":
                fail(path)
            return super().open(path, flags, mode)

    with files.replaced(Failing()), pytest.raises(StorageError, match="use another disk") as refused:
        outsize.load(model, device="cpu")
    assert "download" not in str(refused.value)
    looks_like_a_file, looks_like_a_directory = os.path.isfile, os.path.isdir
    with monkeypatch.context() as patch:  # a library takes a look that fails for a file that is not there
        patch.setattr(
            os.path, "isfile", lambda path: "config.json" not in str(path) and looks_like_a_file(path)
        )
        with pytest.raises(StorageError, match="a moment later could not be"):
            outsize.load(model, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "isdir", lambda path: path != str(model) and looks_like_a_directory(path))
        with pytest.raises(StorageError, match="a moment later could not be"):
            outsize.load(model, device="cpu")


def test_microbatches_of_a_run_are_not_chosen_anew_because_its_disk_fails(tmp_path: Path):
    sections: dict[str, Any] = {"memory": {"home": "host"}}
    train(tiny_run(tmp_path, train={"microbatches": None}, **sections))
    (tmp_path / "run/config.yaml").unlink()

    class Failing(files.System):
        def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
            if Path(path).name == "plan.json":
                fail(path)
            return super().open(path, flags, mode)

    again = tiny_run(tmp_path, train={"steps": 4, "microbatches": None, "resume": "auto"}, **sections)
    with files.replaced(Failing()), pytest.raises(StorageError, match="the device reports a fault"):
        train(again)


def test_no_clean_up_hides_the_first_error(tmp_path: Path):
    class Failing(files.System):
        def truncate(self, descriptor: int, num_bytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def unlink(self, path: Path) -> None:
            fail(path)

        def close(self, descriptor: int) -> None:
            super().close(descriptor)
            fail(descriptor)

    with files.replaced(Failing()), pytest.raises(StorageError, match="No space left"):
        preallocate(tmp_path / "home.bin", 4096)


def test_a_run_that_has_not_saved_says_so(tmp_path: Path):
    (tmp_path / "heartbeat.jsonl").write_text("{}\n")
    with pytest.raises(
        CheckpointError, match="holds no checkpoint: a run has one once it has saved, as Ctrl-C does"
    ):
        servable(str(tmp_path))
