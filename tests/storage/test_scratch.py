import errno
import itertools
import os
import threading

import pytest
import torch

from contracts import SCRATCH_CONTRACT
from outsize.errors import StorageError
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.scratch import DiskScratch, HostScratch


@pytest.fixture
def make_disk(tmp_path, pool, arena):
    count = itertools.count()

    def make(num_extents, extent_bytes, **options):
        return DiskScratch(num_extents, extent_bytes, tmp_path / f"{next(count)}", pool, arena, **options)

    return make


@pytest.fixture(params=["host", "disk", "disk-small-bounces"])
def make_scratch(request, make_disk, arena):
    if request.param == "host":
        return lambda num_extents, extent_bytes: HostScratch(num_extents, extent_bytes, arena)
    bounce_bytes = 4096 if request.param.endswith("small-bounces") else 2**20
    return lambda num_extents, extent_bytes: make_disk(num_extents, extent_bytes, bounce_bytes=bounce_bytes)


@pytest.mark.parametrize("check", SCRATCH_CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, make_scratch):
    check(make_scratch)


def test_the_host_takes_any_stride(arena):
    scratch = HostScratch(1, 4000, arena)
    tensor = torch.arange(1000.0).view(20, 50).t()
    scratch.put(0, tensor)
    into = torch.zeros(50, 20)
    scratch.take(0, into)
    assert torch.equal(into, tensor)


def test_the_disk_refuses_gaps(make_disk):
    scratch = make_disk(1, 4000)
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        scratch.put(0, torch.arange(1000.0).view(20, 50).t())
    assert scratch.num_held == 0
    scratch.close()


@pytest.mark.parametrize("size", [1000, 1024])
def test_the_memory_of_a_tensor_that_was_put_can_be_freed(make_scratch, size):
    scratch = make_scratch(1, 4096)
    tensor = torch.ones(size)
    scratch.put(0, tensor)
    tensor.untyped_storage().resize_(0)
    into = torch.zeros(size)
    scratch.take(0, into)
    assert (into == 1).all()
    scratch.close()


def test_aligned_tensors_do_not_bounce(make_disk, arena, monkeypatch):
    scratch = make_disk(2, 3 * 4096, bounce_bytes=4096)
    aligned, bounced = arena.take(3 * 4096, "x"), []
    bounce = scratch._bounce
    monkeypatch.setattr(
        scratch,
        "_bounce",
        lambda view, *place, written: bounced.append(len(view)) or bounce(view, *place, written=written),
    )
    scratch.put("aligned", aligned)
    scratch.take("aligned", aligned)
    assert not bounced
    scratch.put("tail", aligned[:5000])
    scratch.take("tail", aligned[:5000])
    assert sum(bounced) == 2 * 5000
    scratch.close()


def test_bounce_buffers_and_extents_are_all_the_memory_there_is(tmp_path, pool):
    ledger = Ledger({"host": pool.num_threads * 8192, "disk": 4 * 12288})
    with Arena(ledger=ledger) as arena:
        scratch = DiskScratch(4, 9000, tmp_path / "s", pool, arena, bounce_bytes=8192, ledger=ledger)
        assert (ledger.used("host"), ledger.used("disk")) == (pool.num_threads * 8192, 4 * 12288)
        assert list(tmp_path.iterdir()) == []
        scratch.close()
    assert ledger.used("host") == ledger.used("disk") == 0


def test_a_failed_put_frees_its_extent_and_a_failed_take_keeps_it(make_disk, monkeypatch):
    scratch = make_disk(1, 4000)

    def fault(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fault)
        with pytest.raises(StorageError):
            scratch.put("x", torch.ones(1000))
    scratch.put("y", torch.ones(1000))
    into = torch.zeros(1000)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fault)
        with pytest.raises(StorageError):
            scratch.take("y", into)
    scratch.take("y", into)
    assert (into == 1).all()
    scratch.close()


def test_threads_put_and_take_at_once(make_scratch):
    scratch = make_scratch(6, 20_000)
    barrier, failures = threading.Barrier(6), []

    def work(seed):
        tensor = torch.full((4999,), float(seed))
        into = torch.empty_like(tensor)
        barrier.wait()
        for index in range(10):
            scratch.put((seed, index), tensor)
            scratch.take((seed, index), into)
            if not torch.equal(into, tensor):
                failures.append((seed, index))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scratch.close()
    assert not failures


@pytest.mark.parametrize("sizes", [(0, 10), (10, 0)])
def test_a_scratch_that_holds_nothing_is_refused(arena, sizes):
    with pytest.raises(ValueError, match="holds nothing"):
        HostScratch(*sizes, arena)  # type: ignore[call-arg]
