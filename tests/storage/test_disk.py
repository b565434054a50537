import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from contracts import pattern
from outsize.errors import BudgetExceededError, StorageError
from outsize.storage.disk_file import DirectFile
from outsize.storage.ledger import Ledger
from outsize.storage.prealloc import IOPool
from patience import PATIENCE_S

MIB = 2**20


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request, tmp_path, pool):
    with DirectFile(
        tmp_path / "f", 4 * MIB, pool=pool, request_bytes=64 * 1024, direct=request.param
    ) as file:
        yield file


def test_what_is_read_is_what_was_written(file, arena):
    source = pattern(3 * MIB + 4096, torch.uint8, 1, arena)
    file.write_from(source, 8192)
    into = arena.take(3 * MIB + 4096, "into")
    file.read_into(into, 8192)
    assert torch.equal(into, source)
    head = arena.take(8192, "head").fill_(1)
    file.read_into(head, 0)
    assert not head.any()
    statistics = file.statistics()
    assert (statistics.bytes_written, statistics.bytes_read) == (len(source), len(into) + 8192)
    assert statistics.read_s > 0
    assert statistics.write_s > 0
    assert not file.is_refused


def test_spans_move_together(file, arena):
    spans = [
        (pattern(MIB, torch.uint8, seed, arena), offset) for seed, offset in enumerate((3 * MIB, 0, MIB))
    ]
    file.write_spans(spans)
    into = [(arena.take(MIB, "into"), offset) for _, offset in spans]
    file.read_spans(into)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(spans, into, strict=True))


def test_a_buffer_of_several_dimensions_is_moved_whole(file, arena):
    source = pattern(16384, torch.uint8, 1, arena).view(4, 4096)
    file.write_from(source, 4096)
    into = arena.take(16384, "into").view(2, 8192)
    file.read_into(into, 4096)
    assert torch.equal(into.flatten(), source.flatten())
    assert file.statistics().bytes_read == 16384


def test_misaligned_or_outside_is_refused_before_anything_moves(file, arena):
    buffer = arena.take(16384, "x")
    for bad, offset in (
        (buffer[64 : 64 + 4096], 0),
        (buffer[:4097], 0),
        (buffer[:4096], 512),
        (buffer[:4096], -4096),
        (buffer[:8192], 4 * MIB - 4096),
        (buffer.view(torch.float32), 0),
        (buffer.view(2, 8192)[:, :4096], 0),
        (torch.empty(4096, dtype=torch.uint8, device="meta"), 0),
    ):
        for call in (file.read_into, file.write_from):
            with pytest.raises(ValueError, match=r"multiples of 4096|outside|contiguous uint8"):
                call(bad, offset)
    assert file.statistics().bytes_written == 0


def test_direct_io_is_on_where_the_file_system_has_it(tmp_path, pool):
    with DirectFile(tmp_path / "f", 4096, pool=pool) as file:
        if file.is_refused:
            pytest.skip("no direct I/O in the temporary directory")
        assert fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_buffered_io_flushes_what_it_wrote_and_drops_what_it_moved(tmp_path, pool, arena, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("flush"))
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, at, length, advice: calls.append((at, length, advice))
    )
    with DirectFile(tmp_path / "f", MIB, pool=pool, direct=False) as file:
        buffer = arena.take(8192, "x")
        file.write_from(buffer, 4096)
        file.read_into(buffer, 4096)
    drop = (4096, 8192, os.POSIX_FADV_DONTNEED)
    assert calls == ["flush", drop, drop]


def test_a_file_system_without_direct_io_falls_back_counted_and_logged(
    tmp_path, pool, arena, monkeypatch, caplog
):
    real = fcntl.fcntl

    def refuse(descriptor, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING), DirectFile(tmp_path / "f", MIB, pool=pool) as file:
        source = pattern(MIB, torch.uint8, 1, arena)
        file.write_from(source, 0)
        into = arena.take(MIB, "into")
        file.read_into(into, 0)
        assert torch.equal(into, source)
        assert file.is_refused
    assert "no direct I/O here" in caplog.text


def test_short_moves_are_continued_from_a_whole_sector(file, arena, monkeypatch):
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:8192]], at) - 100)
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:8192]], at) - 100)
    source = pattern(MIB, torch.uint8, 1, arena)
    with pytest.raises(StorageError, match=r"short write at offset \d+ of .*f"):
        file.write_from(source, 0)  # the last sector of each request always comes short
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:8192]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:12288]], at))
    file.write_from(source, 0)
    into = arena.take(MIB, "into")
    file.read_into(into, 0)
    assert torch.equal(into, source)


def test_a_truncated_file_is_a_storage_error(file, arena):
    os.truncate(file.path, MIB)
    with pytest.raises(StorageError, match=r"short read at offset 1048576 of .*truncated"):
        file.read_into(arena.take(4096, "x"), MIB)


def test_a_fault_of_the_device_names_path_and_offset(file, arena, monkeypatch):
    def fault(descriptor, views, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fault)
    with pytest.raises(StorageError, match=r"read 65536 bytes at offset \d+ of .*/f: .*dmesg") as caught:
        file.read_into(arena.take(MIB, "x"), 0)
    assert isinstance(caught.value.__cause__, OSError)
    assert file.statistics().bytes_read == 0
    monkeypatch.undo()
    file.read_into(arena.take(MIB, "x"), 0)


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EFBIG, "ulimit -f"), (errno.EROFS, "may write to")],
)
def test_a_failed_allocation_says_what_to_try_and_leaves_nothing(tmp_path, pool, monkeypatch, number, advice):
    def fail(descriptor, offset, length):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    ledger = Ledger({"disk": None})
    with pytest.raises(StorageError, match=advice):
        DirectFile(tmp_path / "f", MIB, pool=pool, ledger=ledger)
    assert list(tmp_path.iterdir()) == []
    assert ledger.used("disk") == 0


def test_a_file_larger_than_the_disk_is_refused_before_it_fills_it(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("allocated"))
    size = shutil.disk_usage(tmp_path).free + 2**30
    with pytest.raises(StorageError, match=r"are free; free some space"):
        DirectFile(tmp_path / "f", size, pool=pool)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_storage_errors(tmp_path, pool, monkeypatch):
    with pytest.raises(StorageError, match="create the directory first"):
        DirectFile(tmp_path / "missing" / "f", MIB, pool=pool)
    with pytest.raises(StorageError, match="not a directory"):
        DirectFile(tmp_path, MIB, pool=pool)
    assert tmp_path.is_dir()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="may write to"):
        DirectFile(tmp_path / "f", MIB, pool=pool)


def test_a_file_in_use_is_neither_emptied_nor_removed(tmp_path, pool):
    path = tmp_path / "f"
    holder = (
        f"import fcntl,sys; f = open({str(path)!r}, 'w'); f.write('theirs'); f.flush();"
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        with pytest.raises(StorageError, match="in use by another run"):
            DirectFile(path, MIB, pool=pool)
        assert path.read_text() == "theirs"
        process.stdin.close()
    DirectFile(path, MIB, pool=pool).close()
    assert path.stat().st_size == MIB


def test_a_temporary_file_has_no_name_and_holds_its_bytes(tmp_path, pool, arena):
    with DirectFile(tmp_path / "f", MIB, pool=pool, temporary=True) as file:
        assert list(tmp_path.iterdir()) == []
        file.write_from(arena.take(MIB, "x").fill_(9), 0)
        into = arena.take(MIB, "y")
        file.read_into(into, 0)
        assert (into == 9).all()


def test_the_ledger_holds_the_file_while_it_is_open(tmp_path, pool):
    ledger = Ledger({"disk": MIB})
    with DirectFile(tmp_path / "f", MIB - 1, pool=pool, ledger=ledger):
        assert ledger.used("disk") == MIB
        with pytest.raises(BudgetExceededError):
            DirectFile(tmp_path / "g", 1, pool=pool, ledger=ledger)
        assert not (tmp_path / "g").exists()
    assert ledger.used("disk") == 0


def test_close_waits_for_a_transfer_under_way(tmp_path, pool, arena, monkeypatch):
    """1. A read is in the kernel. 2. Another thread closes. 3. The read ends. 4. Only then it closes."""
    inside, closing, go_on, closed = (threading.Event() for _ in range(4))
    real, real_wait = os.preadv, threading.Condition.wait_for
    file = DirectFile(tmp_path / "f", MIB, pool=pool)

    def slow(descriptor, views, offset):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        assert not closed.is_set()
        return real(descriptor, views, offset)

    def wait_for(condition, predicate):
        closing.set()
        return real_wait(condition, predicate)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
    buffer = arena.take(4096, "x")
    reader = threading.Thread(target=file.read_into, args=(buffer, 0))
    closer = threading.Thread(target=lambda: (file.close(), closed.set()))
    reader.start()
    assert inside.wait(PATIENCE_S)
    closer.start()
    assert closing.wait(PATIENCE_S)
    with pytest.raises(ValueError, match="closed"):
        file.read_into(buffer, 0)
    go_on.set()
    reader.join()
    closer.join()
    assert closed.is_set()
    file.close()


def test_requests_of_one_call_are_in_flight_together(tmp_path, arena, monkeypatch):
    real = os.preadv
    with IOPool(4) as pool, DirectFile(tmp_path / "f", MIB, pool=pool, request_bytes=MIB // 4) as file:
        barrier = threading.Barrier(4, timeout=PATIENCE_S)
        monkeypatch.setattr(os, "preadv", lambda *args: (barrier.wait(), real(*args))[1])
        file.read_into(arena.take(MIB, "x"), 0)


@pytest.mark.parametrize("arguments", [{"num_bytes": 0}, {"num_bytes": 1, "request_bytes": 1000}])
def test_sizes_that_are_no_sectors_are_refused(tmp_path, pool, arguments):
    with pytest.raises(ValueError, match="whole sectors"):
        DirectFile(tmp_path / "f", pool=pool, **arguments)
