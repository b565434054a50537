import errno
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize import files
from outsize.data import token_cache
from outsize.data.encode import Encoded
from outsize.data.token_cache import TokenWriter, new_entry
from outsize.data.tokens import ArrayFile, ArrayReader
from outsize.errors import DataError, StorageError
from outsize.files import System, replaced


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
    pids = (finished.pid, os.getppid(), f"{os.getpid()}-former")
    dead, alive, as_ours = (tmp_path / f".writing-{host}-{pid}-abc" for pid in pids)
    elsewhere = tmp_path / f".writing-elsewhere-{finished.pid}-abc"
    for directory in (dead, alive, as_ours, elsewhere):
        directory.mkdir()
    with new_entry(tmp_path / "new"), new_entry(tmp_path / "beside"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"beside", "new", alive.name, elsewhere.name}


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another cache_dir"), new_entry(tmp_path / "file" / "abc"):
        pass
    with pytest.raises(StorageError, match="No space left"), new_entry(tmp_path / "abc"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == ["file"]


def test_data_whose_rest_finds_no_room_are_refused_while_little_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_FIRST_LOOK_BYTES", 4096)
    monkeypatch.setattr(files, "free_bytes", lambda path: 7000)
    with ExitStack() as opened:
        writer = TokenWriter(tmp_path, masked=False, opened=opened)
        writer.append(Encoded(np.zeros(1000, np.int32), None, False))
        writer.check_room(1, 1000)  # of so little nothing follows
        writer.append(Encoded(np.zeros(1000, np.int32), None, False))
        writer.check_room(40, 100)  # 12 KB more
        writer.append(Encoded(np.zeros(2000, np.int32), None, False))
        with pytest.raises(StorageError, match=r"will take some 23.44 KiB more .*, and 6.84 KiB are free"):
            writer.check_room(40, 100)


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


@given(starts=st.lists(st.integers(0, 5), min_size=1, max_size=9), cached_rows=st.integers(1, 4))
def test_rows_are_ranges_widened_however_many_are_read_at_a_time(tmp_path_factory, starts, cached_rows):
    path = tmp_path_factory.mktemp("rows")
    (path / "a").write_bytes(np.array([9, 2**16 - 1, 8], "<u2").tobytes())
    (path / "b").write_bytes(np.array([7, 6, 5, 4, 3], "<u2").tobytes())
    reader = ArrayReader([ArrayFile(path / name, np.dtype("<u2"), n) for name, n in (("a", 3), ("b", 5))])
    ids, labels = (np.full((len(starts), 3), -1) for _ in range(2))
    with mock.patch("outsize.data.tokens._ROWS_BYTES", cached_rows * 3 * 2 + 1):
        reader.read_rows(starts, ids, labels)
    assert ids.tolist() == labels.tolist() == [reader.read(start, 3).tolist() for start in starts]
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            reader.read_rows([*starts, outside], np.empty((len(starts) + 1, 3), np.int64))
    reader.close()
    with pytest.raises(DataError, match="closed"):
        reader.read_rows(starts, ids)


def test_rows_cost_one_call_each(tmp_path):
    """What Python does beside them is what a loader cannot do beside training."""
    np.arange(64, dtype="<i4").tofile(tmp_path / "tokens")
    calls = []

    class Counting(System):
        def pread(self, descriptor, into, offset):
            calls.append((len(into), offset))
            return super().pread(descriptor, into, offset)

    reader = ArrayReader([ArrayFile(tmp_path / "tokens", np.dtype("<i4"), 64)])
    with replaced(Counting()):
        reader.read_rows([0, 32, 16], np.empty((3, 8), np.int64), np.empty((3, 8), np.int64))
    reader.close()
    assert calls == [(32, 0), (32, 128), (32, 64)]


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


@pytest.mark.parametrize("name", ["documents.bin", "trained.bin"])
def test_a_file_that_cannot_be_opened_leaves_no_other_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left open fails the test."""

    class Failing(System):
        def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
            if Path(path).name == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().open(path, flags, mode)

    entry = tmp_path / "entry"
    entry.mkdir()
    for each, num_bytes in (("tokens.bin", 12), ("trained.bin", 3), ("documents.bin", 8)):
        (entry / each).write_bytes(bytes(num_bytes))
    detected = SimpleNamespace(num_tokens=3, num_documents=1, mask_source="a template")
    monkeypatch.setattr(token_cache, "_read_index", lambda _: detected)
    held = os.listdir("/proc/self/fd")
    with replaced(Failing()), pytest.raises(DataError, match="cannot open: Input/output error"):
        token_cache.CachedTokens(entry)
    assert os.listdir("/proc/self/fd") == held

    class Unclosed(System):
        def close(self, descriptor: int) -> None:
            super().close(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    reading = token_cache.CachedTokens(entry)
    with replaced(Unclosed()):
        reading.close()
    assert os.listdir("/proc/self/fd") == held
