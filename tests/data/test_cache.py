import errno
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from outsize.data.cache import new_entry
from outsize.data.tokens import ArrayFile, ArrayReader
from outsize.errors import DataError, StorageError


def test_an_entry_appears_whole_or_not_at_all(tmp_path):
    entry = tmp_path / "cache" / "abc"
    with new_entry(entry) as directory:
        (directory / "index.json").write_text("{}")
        assert not entry.exists()
    assert (entry / "index.json").read_text() == "{}"

    def write_half(error):
        with new_entry(tmp_path / "cache" / "other") as directory:
            (directory / "tokens.bin").write_text("half")
            raise error

    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error):
            write_half(error)
    assert os.listdir(tmp_path / "cache") == ["abc"]


def test_the_first_of_two_writers_wins(tmp_path):
    entry = tmp_path / "abc"
    with new_entry(entry) as directory:
        (directory / "index.json").write_text("second")
        entry.mkdir()
        (entry / "index.json").write_text("first")
    assert (entry / "index.json").read_text() == "first"
    assert os.listdir(tmp_path) == ["abc"]


def test_what_a_killed_run_left_is_removed_but_not_what_a_live_one_writes(tmp_path):
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    host = socket.gethostname()
    dead, alive = (tmp_path / f".writing-{host}-{pid}-abc" for pid in (finished.pid, os.getppid()))
    elsewhere = tmp_path / f".writing-elsewhere-{finished.pid}-abc"
    for directory in (dead, alive, elsewhere):
        directory.mkdir()
    with new_entry(tmp_path / "new"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"new", alive.name, elsewhere.name}


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another cache_dir"), new_entry(tmp_path / "file" / "abc"):
        pass
    with pytest.raises(StorageError, match="No space left"), new_entry(tmp_path / "abc"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == ["file"]


@pytest.fixture
def shards(tmp_path):
    files = []
    for i, values in enumerate(([0, 1, 2], [3], [4, 5, 6, 7])):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(b"head" + np.array(values, "<u2").tobytes())
        files.append(ArrayFile(path, np.dtype("<u2"), len(values), offset_bytes=4))
    return files


def test_ranges_continue_over_files(shards):
    reader = ArrayReader(shards)
    assert len(reader) == 8
    for start in range(9):
        for end in range(start, 9):
            assert reader.read(start, end - start).tolist() == list(range(start, end))
    for start, count in ((-1, 2), (7, 2), (9, 0), (0, -1)):
        with pytest.raises(IndexError):
            reader.read(start, count)


def test_a_file_cut_while_open_and_a_closed_reader_are_errors(shards):
    reader = ArrayReader(shards)
    os.truncate(shards[2].path, 6)
    with pytest.raises(DataError, match=r"2.bin: ends at byte 6"):
        reader.read(3, 3)
    reader.close()
    reader.close()
    with pytest.raises(DataError, match="closed"):
        reader.read(0, 1)


def test_descriptors_are_given_back(shards):
    before = len(os.listdir("/proc/self/fd"))
    reader = ArrayReader(shards)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del reader
    with pytest.raises(DataError, match="absent: cannot open: No such file"):
        ArrayReader([*shards, ArrayFile(shards[0].path.with_name("absent"), np.dtype("<u2"), 1)])
    assert len(os.listdir("/proc/self/fd")) == before
