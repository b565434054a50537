"""Temporary directories: gone with what needs them, and those of killed processes with the next start."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outsize.errors import StorageError
from outsize.storage.directory import directory_of_process, temporary_directory

_KILLED = """
import sys, pathlib
from outsize.storage.directory import directory_of_process, temporary_directory
with temporary_directory(pathlib.Path(sys.argv[1])) as path:
    (path / "state.bin").write_bytes(b"x" * 100)
    print(path, directory_of_process(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> "subprocess.Popen[str]":
    """A process with two temporary directories in ``tmp_path``."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        yield process
        process.kill()


def test_what_a_killed_process_left_is_removed_by_the_next(other: "subprocess.Popen[str]", tmp_path: Path):
    assert other.stdout is not None
    left = [Path(each) for each in other.stdout.readline().split()]
    with temporary_directory(tmp_path):
        assert all(path.is_dir() for path in left)  # they are in use
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert all(path.is_dir() for path in left)
    with temporary_directory(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_leaves_nothing(other: "subprocess.Popen[str]", tmp_path: Path):
    assert other.stdout is not None
    other.stdout.readline()
    other.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_others_is_removed(tmp_path: Path):
    strangers = tmp_path / "outsize-mine", tmp_path / "other"
    (tmp_path / "outsize-tmp-link").symlink_to(strangers[1])
    (tmp_path / "outsize-tmp-file").write_text("")
    for path in strangers:
        path.mkdir()
        (path / "file").write_text("")
    with temporary_directory(tmp_path):
        pass
    assert all((path / "file").exists() for path in strangers)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_forked_child_leaves_its_parents_alone():
    path = directory_of_process()
    child = os.fork()
    if child == 0:
        try:
            os._exit(directory_of_process() == path)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert path.is_dir()
    assert path == directory_of_process()


def test_no_room_for_it_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageError, match="make a directory for temporary files"):
        temporary_directory(tmp_path / "absent").__enter__()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(StorageError, match="No space left"):
        temporary_directory(tmp_path).__enter__()
